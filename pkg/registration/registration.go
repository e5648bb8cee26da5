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
	// removalMargin is how much longer than its drain time the removal of a target may take.
	removalMargin = 2 * time.Second
	// firstMessageTimeout bounds the first message of a registration: a handshake, and an answer.
	firstMessageTimeout = 2 * CallTimeout
)

// Back-off of the attempts after a rejection, which another attempt alone does not resolve.
const (
	minRejected = time.Second
	maxRejected = 10 * time.Second
)

// Phase is how far a registration is.
type Phase uint8

// The phases.
const (
	Connecting  Phase = iota // not registered: it is tried again
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
	// Failures counts the attempts to register that failed since the start.
	Failures uint64
	// Err is why the target is not registered, or was not removed; nil otherwise.
	Err error
	// Targets has the addresses of the target, as the load balancer last reported them.
	Targets []*targetv1.TargetInfo
}

// RejectedError is the answer of a load balancer that does not keep the target registered.
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
	// Persistent retries after a rejection, unless another caller registered the target.
	Persistent bool
	// Report is called with a line of text for each change, also at the same time.
	Report func(line string)
	// Changed is called after each change of State, also at the same time; nil: it is not.
	Changed func()

	state latest.Value[State]
	// leaving is set when the target is deregistered: registering it once more would undo that.
	leaving atomic.Bool

	// Owned by the goroutine of follow; read once it has ended.
	registered bool
	failure    string // that was reported
}

// State returns the current state.
func (r *Registration) State() State { return r.state.Load() }

// Run keeps the target registered until leave is closed: it deregisters the target then, and ends
// with its removal. The end of ctx ends Run at once: a target that is registered stays for its
// grace, and one that drains continues to drain.
//
// Run returns nil after the removal, also by another client, and without a registration to remove.
// It returns an error when the target could not be deregistered, when its removal was not reported
// within its drain time, and a [RejectedError].
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
		cancel()
		<-ended
		if !r.registered || grpcstatus.Code(err) == codes.NotFound {
			return r.end(ctx, nil) // there is no registration to remove
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

// end enters the last phase.
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

// follow registers the target, again while the load balancer is unavailable, until it is removed
// (no error), rejected, or taken over by another call.
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
		r.Conn.ResetConnectBackoff() // else gRPC would continue to wait
	}
}

// fail counts a failed attempt, and reports its reason once.
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

// session is one Register. It reports whether it was accepted, and returns why it ended.
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

// reason returns the error of a call in the words of the user.
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

// in returns the state in a phase. A registration that leaves only ends.
func (s State) in(p Phase) State {
	if s.Since.IsZero() || s.Phase != p && (s.Phase != Leaving || p > Leaving) {
		s.Phase, s.Since = p, time.Now()
	}
	return s
}

// with returns the state with the addresses that a message has.
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
