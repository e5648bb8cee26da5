package registration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/status"
)

const (
	// removalMargin is added to the drain time in the deadline for the removal of a target.
	removalMargin = 2 * time.Second
	// firstMessageTimeout bounds the wait for the first message: a handshake and a response.
	firstMessageTimeout = 2 * CallTimeout
)

// Back-off after a rejection. It is longer, because a retry alone does not resolve a rejection.
const (
	minRejected = time.Second
	maxRejected = 10 * time.Second
)

// Phase is the phase of a registration.
type Phase uint8

// The phases.
const (
	Connecting  Phase = iota // not registered, retrying
	Registered               // a call keeps the target
	Leaving                  // deregistered: the target drains
	Removed                  // the load balancer removed the target
	Superseded               // another caller registered the target
	Interrupted              // ended before the load balancer reported the removal
)

// State is the state of a registration.
type State struct {
	Phase Phase
	// Since is when the phase began.
	Since time.Time
	// Failures counts the failed attempts to register since the start.
	Failures uint64
	// Err is the reason why the target is not registered or was not removed; nil otherwise.
	Err error
	// Targets holds the last report of the load balancer for each address of the target.
	Targets []*targetv1.TargetInfo
}

// RejectedError is the status of a load balancer that rejects the registration of the target or
// ends it.
type RejectedError struct {
	Code    codes.Code
	Message string
}

// Error returns the message of the load balancer.
func (e *RejectedError) Error() string { return e.Message }

// Registration keeps one target registered at one load balancer. Its fields are set before Run.
type Registration struct {
	Conn *Conn
	// Request announces one target.
	Request *targetv1.RegisterRequest
	// Persistent enables retries after a rejection, unless another caller registered the target.
	Persistent bool
	// Report is called with a line of text for each change. Calls may be concurrent.
	Report func(line string)
	// Changed, if set, is called after each change of State. Calls may be concurrent.
	Changed func()

	state latest.Value[State]
	// leaving is set before the target is deregistered. follow then stops retrying, because another
	// Register call would undo the deregistration.
	leaving atomic.Bool

	// Owned by the goroutine of follow; read after it has ended.
	registered bool
	failure    string // last reported reason
}

// State returns the current state.
func (r *Registration) State() State { return r.state.Load() }

// Run keeps the target registered until leave is closed. It then deregisters the target and returns
// when the load balancer has removed it. Run returns immediately when ctx ends: a registered target
// stays for its grace period, and a draining target continues to drain.
//
// Run returns nil after the removal, also by another client, and if the target was not registered.
// It returns an error if the target could not be deregistered or its removal was not reported
// within its drain time, and a [RejectedError] if the load balancer rejects or supersedes it.
func (r *Registration) Run(ctx context.Context, leave <-chan struct{}) error {
	r.enter(Connecting, nil)
	following, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.follow(following) }()
	select {
	case err := <-ended:
		return r.end(ctx, err)
	case <-leave:
	}
	r.Report("deregistering")
	r.leaving.Store(true)
	r.enter(Leaving, nil)
	drainTime, err := r.deregister(ctx)
	if err != nil {
		// follow owns registered and failure, so wait for its end before reading them.
		cancel()
		<-ended
		if !r.registered || grpcstatus.Code(err) == codes.NotFound {
			return r.end(ctx, nil) // not registered, so there is nothing to remove
		}
		return r.end(ctx, fmt.Errorf("the target could not be deregistered, its grace ends it: %s", r.reason(err)))
	}
	removal := time.NewTimer(drainTime + removalMargin)
	defer removal.Stop()
	select {
	case err = <-ended:
	case <-removal.C:
		cancel()
		<-ended
		err = fmt.Errorf("%s did not report the removal of the target within %v", r.Conn, drainTime+removalMargin)
	}
	return r.end(ctx, err)
}

// end enters the final phase.
func (r *Registration) end(ctx context.Context, err error) error {
	var rejected *RejectedError
	switch {
	case errors.As(err, &rejected) && rejected.Code == codes.Aborted:
		r.enter(Superseded, err)
	case err != nil, ctx.Err() != nil:
		r.enter(Interrupted, err)
	default:
		r.enter(Removed, nil)
	}
	return err
}

func (r *Registration) deregister(ctx context.Context) (drainTime time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	reply, err := targetv1.NewTargetServiceClient(r.Conn).Deregister(ctx, &targetv1.DeregisterRequest{
		Stream: r.Request.GetStream(), Names: []string{r.Request.GetTargets()[0].GetName()},
	})
	return reply.GetDrainFor().AsDuration(), err
}

// follow registers the target, and retries while the load balancer is unavailable. It returns nil
// when the target is removed, and an error when it is rejected or taken over by another call.
func (r *Registration) follow(ctx context.Context) error {
	unavailable := backoff.Backoff{Min: minBackoff, Max: maxBackoff, Jitter: 0.2}
	rejected := backoff.Backoff{Min: minRejected, Max: maxRejected, Jitter: 0.2}
	for {
		accepted, err := r.session(ctx)
		retry, code := &unavailable, grpcstatus.Code(err)
		switch {
		case ctx.Err() != nil, errors.Is(err, io.EOF), code == codes.Unavailable && r.leaving.Load():
			return nil
		case code == codes.Unavailable:
		case r.Persistent && code != codes.Aborted:
			retry = &rejected
		default:
			return &RejectedError{code, grpcstatus.Convert(err).Message()}
		}
		if accepted {
			unavailable.Reset()
			rejected.Reset()
		}
		r.fail(r.reason(err))
		if retry.Wait(ctx) != nil || r.leaving.Load() {
			return nil
		}
		r.Conn.ResetConnectBackoff() // otherwise the next call waits for gRPC's own back-off
	}
}

// fail counts a failed attempt and reports its reason, unless that is unchanged.
func (r *Registration) fail(reason string) {
	if reason != r.failure {
		r.failure = reason
		r.Report("not registered, trying again: " + reason)
	}
	r.update(func(s State) State {
		s.Failures++
		s.Err, s.Targets = errors.New(reason), nil
		return s.in(Connecting)
	})
}

// session runs one Register call. It reports whether the call was accepted, and returns the error
// that ended it.
func (r *Registration) session(parent context.Context) (accepted bool, err error) {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	first := time.AfterFunc(firstMessageTimeout, cancel)
	var m *targetv1.RegisterResponse
	stream, err := targetv1.NewTargetServiceClient(r.Conn).Register(ctx, r.Request)
	if err == nil {
		m, err = stream.Recv()
	}
	if !first.Stop() && parent.Err() == nil {
		err = grpcstatus.Errorf(codes.Unavailable, "no response within %v", firstMessageTimeout)
	}
	if err != nil {
		return false, err
	}
	r.registered, r.failure = true, ""
	r.enter(Registered, nil)
	r.Report(fmt.Sprintf("registered at %s; without this process the target stays for %v", r.Conn,
		m.GetGrace().AsDuration()))
	states := map[string]targetv1.State{} // by address
	for {
		for _, i := range m.GetTargets() {
			if s, known := states[i.GetAddress()]; !known || s != i.GetState() {
				states[i.GetAddress()] = i.GetState()
				r.Report(status.TargetLine(i))
			}
		}
		r.update(func(s State) State { return s.with(m.GetTargets()) })
		if m, err = stream.Recv(); err != nil {
			return true, err
		}
	}
}

// reason returns the error of a call as a message for the user.
func (r *Registration) reason(err error) string {
	err = r.Conn.Explain(err)
	if call, ok := err.(interface{ GRPCStatus() *grpcstatus.Status }); ok {
		if call.GRPCStatus().Code() == codes.DeadlineExceeded {
			return fmt.Sprintf("%s did not answer within %v", r.Conn, CallTimeout)
		}
		return call.GRPCStatus().Message()
	}
	return err.Error()
}

func (r *Registration) enter(p Phase, err error) {
	r.update(func(s State) State {
		s.Err = err
		return s.in(p)
	})
}

func (r *Registration) update(f func(State) State) {
	r.state.Update(f)
	if r.Changed != nil {
		r.Changed()
	}
}

// in returns the state with a new phase. From Leaving, only a final phase is entered.
func (s State) in(p Phase) State {
	if s.Since.IsZero() || s.Phase != p && (s.Phase != Leaving || p > Leaving) {
		s.Phase, s.Since = p, time.Now()
	}
	return s
}

// with returns the state with the addresses of a message added or replaced.
func (s State) with(changed []*targetv1.TargetInfo) State {
	s.Targets = slices.Clone(s.Targets)
	for _, i := range changed {
		k := slices.IndexFunc(s.Targets, func(t *targetv1.TargetInfo) bool { return t.GetAddress() == i.GetAddress() })
		if k < 0 {
			s.Targets = append(s.Targets, i)
		} else {
			s.Targets[k] = i
		}
	}
	return s
}
