package nsp

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
)

// stopTimeout is the timeout of the call that unregisters the frontend when it stops. It can be
// short: the NSP removes an entry that is not refreshed.
const stopTimeout = time.Second

// answerTimeout bounds the wait for the answer of a call that became wrong. The NSP may apply a
// canceled call after the next one, which would keep the entry of a frontend without connectivity
// for a minute.
const answerTimeout = 500 * time.Millisecond

// RegistrationState is the state of the registration.
type RegistrationState struct {
	// Registered reports whether the last call registered the frontend.
	Registered bool
	// Failures counts failed calls since the start.
	Failures uint64
	// Err is the error of the last call; nil if it succeeded.
	Err error
}

// Registration is a task that keeps the frontend registered while it has external connectivity.
type Registration struct {
	options Options
	up      func() (bool, <-chan struct{})
	state   latest.Value[RegistrationState]
}

// NewRegistration returns a registration. up reports whether the frontend has external
// connectivity, and returns a channel that is closed when that may have changed.
func NewRegistration(options Options, up func() (bool, <-chan struct{})) *Registration {
	options.Log = options.Log.With("component", "nsp", "nsp", options.Target)
	return &Registration{options: options, up: up}
}

// State returns the state of the registration.
func (r *Registration) State() *latest.Value[RegistrationState] { return &r.state }

// String names the task.
func (r *Registration) String() string { return "nsp-registration" }

// Run keeps the registration until ctx ends, and then unregisters the frontend within a second.
func (r *Registration) Run(ctx context.Context) error {
	conn, err := r.options.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	retry := backoff.Backoff{Min: minBackoff, Max: r.options.MaxBackoff, Jitter: 0.2}
	var timer <-chan time.Time // nil without a call that is due later
	// entry reports whether the NSP may have an entry. Initially it is true: an entry of an earlier
	// run is removed unless the frontend has connectivity.
	entry, due, last := true, true, false
	stored := false // whether the last call registered the frontend
	for {
		up, changed := r.up()
		if due || up != last {
			due, last = false, up
			err := r.callWhile(ctx, conn, up)
			entry = up || entry && err != nil
			if ctx.Err() != nil {
				return r.end(conn, entry)
			}
			if errors.Is(err, errChanged) {
				due = true // the call was canceled: repeat it even if the connectivity has changed back
				continue
			}
			r.show(up, err)
			// The NSP stores a new entry as disabled, and the next registration enables it.
			due = up && err == nil && !stored
			stored = up && err == nil
			timer = nil
			switch {
			case due:
				continue
			case err != nil:
				conn.ResetConnectBackoff()
				timer = time.After(retry.Next())
			case up:
				timer = time.After(r.options.EntryTimeout)
			}
			if err == nil {
				retry.Reset()
			}
		}
		select {
		case <-ctx.Done():
			return r.end(conn, entry)
		case <-changed:
		case <-timer:
			due = true
		}
	}
}

// end unregisters the frontend if the NSP may have an entry. Run's ctx has ended: it has its own.
func (r *Registration) end(conn *grpc.ClientConn, entry bool) error {
	if !entry {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	conn.ResetConnectBackoff() // the NSP may be reachable again
	if err := r.call(ctx, conn, false, grpc.WaitForReady(true)); err != nil {
		r.options.Log.Warn("failed to unregister at the NSP, which removes the entry after a minute", "error", reason(err))
	}
	r.state.Update(func(state RegistrationState) RegistrationState { state.Registered = false; return state })
	return nil
}

// errChanged is the result of a call that was canceled because the connectivity changed.
var errChanged = errors.New("the external connectivity changed")

// callWhile registers or unregisters the frontend. Once the connectivity changes or ctx ends, the
// call has answerTimeout left, so that a slow NSP does not delay the correction of a wrong entry.
func (r *Registration) callWhile(ctx context.Context, conn *grpc.ClientConn, register bool) error {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), CallTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- r.call(call, conn, register) }()
	for {
		up, changed := r.up()
		if up != register {
			_ = answer(done, cancel) // the opposite call follows in any case
			return errChanged
		}
		select {
		case err := <-done:
			return err
		case <-changed:
		case <-ctx.Done():
			return answer(done, cancel)
		}
	}
}

// answer returns the result of a call, which it cancels after answerTimeout.
func answer(done <-chan error, cancel context.CancelFunc) error {
	timer := time.AfterFunc(answerTimeout, cancel)
	defer timer.Stop()
	return <-done
}

func (r *Registration) call(
	ctx context.Context, conn *grpc.ClientConn, register bool, options ...grpc.CallOption,
) error {
	client, host := nspv1.NewTargetRegistryClient(conn), r.options.Host
	method := client.Unregister
	if register {
		method = client.Register
	}
	_, err := method(ctx, &nspv1.Target{
		Ips: []string{host}, Type: nspv1.Target_FRONTEND, Context: map[string]string{"identifier": host},
	}, options...)
	return err
}

// show publishes the result of a call. It does not log refreshes and repeated failures.
func (r *Registration) show(register bool, err error) {
	before := r.state.Load()
	after := RegistrationState{Registered: register, Failures: before.Failures}
	if err != nil {
		// The NSP may have the entry of before.
		after = RegistrationState{before.Registered, before.Failures + 1, errors.New(reason(err))}
	}
	r.state.Set(after)
	switch {
	case err != nil && logs.Text(before.Err) != after.Err.Error():
		r.options.Log.Warn("registration at the NSP failed, retrying", "register", register, "error", after.Err)
	case err == nil && (after.Registered != before.Registered || before.Err != nil):
		message := "unregistered at the NSP"
		if register {
			message = "registered at the NSP"
		}
		r.options.Log.Info(message, "host", r.options.Host)
	}
}
