package dataplane

import (
	"context"
	"fmt"

	"github.com/vipgate/vipgate/pkg/latest"
)

// Plane keeps the data plane in the kernel. It is a task.Task.
type Plane struct {
	o      Options
	wanted latest.Value[*Wanted]
	state  latest.Value[State]
	ready  chan struct{}
}

// New opens the records. Those that cannot be read are moved aside.
func New(o Options) (*Plane, error) {
	return &Plane{o: o, ready: make(chan struct{})}, nil
}

// Configure sets what the data plane is to do. It never blocks; the newest call
// wins. Before the first one what is in the kernel stays as it is.
func (p *Plane) Configure(w *Wanted) { p.wanted.Set(w) }

// State returns what is known to be in the kernel.
func (p *Plane) State() *latest.Value[State] { return &p.state }

// Reconcile puts everything back as it was recorded, also what somebody else
// removed or changed, and returns what it mended.
func (p *Plane) Reconcile(ctx context.Context) ([]Drift, error) {
	return nil, fmt.Errorf("reconcile: %w", ctx.Err())
}

// Slots returns the targets in the kernel for people, sorted by stream and name. It
// reads the kernel.
func (p *Plane) Slots(ctx context.Context) ([]SlotView, error) { return nil, nil }

// Ready is closed once what was recorded has been compared with the kernel.
func (p *Plane) Ready() <-chan struct{} { return p.ready }

// String implements task.Task.
func (p *Plane) String() string { return "data plane" }

// Run works until ctx ends; what is in the kernel then stays. It works in the
// network namespace of the calling thread.
func (p *Plane) Run(ctx context.Context) error {
	close(p.ready)
	<-ctx.Done()
	return nil
}

// Cleanup removes exactly what is ours from the kernel, and the records. It returns
// what it removed, one line each.
func Cleanup(ctx context.Context, o Options) ([]string, error) { return nil, nil }

// Preflight tells what the kernel lacks, each with the command that mends it.
func Preflight(o Options) []Problem { return nil }
