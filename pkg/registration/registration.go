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

// RejectedError is the status of a load balancer that rejects or ends the target's registration.
type RejectedError struct {
	Code    codes.Code
	Message string
}

// Error returns the message of the load balancer.
func (rejected *RejectedError) Error() string { return rejected.Message }

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
func (registration *Registration) State() State { return registration.state.Load() }

// Run keeps the target registered until leave is closed. It then deregisters the target and returns
// when the load balancer has removed it. Run returns immediately when ctx ends: a registered target
// stays for its grace period, and a draining target continues to drain.
//
// Run returns nil after the removal, also by another client, and if the target was not registered.
// It returns an error if the target could not be deregistered or its removal was not reported
// within its drain time, and a [RejectedError] if the load balancer rejects or supersedes it.
func (registration *Registration) Run(ctx context.Context, leave <-chan struct{}) error {
	registration.enter(Connecting, nil)
	following, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- registration.follow(following) }()
	select {
	case err := <-ended:
		return registration.end(ctx, err)
	case <-leave:
	}
	registration.Report("deregistering")
	// Set before the call: a lost connection must not register the target again.
	registration.leaving.Store(true)
	registration.enter(Leaving, nil)
	drainTime, err := registration.deregister(ctx)
	if err != nil {
		// follow owns registered and failure, so wait for its end before reading them.
		cancel()
		<-ended
		if !registration.registered || grpcstatus.Code(err) == codes.NotFound {
			return registration.end(ctx, nil) // not registered, so there is nothing to remove
		}
		reason := registration.reason(err)
		return registration.end(ctx, fmt.Errorf("the target could not be deregistered, its grace ends it: %s", reason))
	}
	select {
	case err = <-ended:
	case <-time.After(drainTime + removalMargin):
		cancel()
		<-ended
		err = fmt.Errorf("%s did not report the removal of the target within %v", registration.Conn,
			drainTime+removalMargin)
	}
	return registration.end(ctx, err)
}

// end enters the final phase.
func (registration *Registration) end(ctx context.Context, err error) error {
	switch rejected, is := errors.AsType[*RejectedError](err); {
	case is && rejected.Code == codes.Aborted:
		registration.enter(Superseded, err)
	case err != nil, ctx.Err() != nil:
		registration.enter(Interrupted, err)
	default:
		registration.enter(Removed, nil)
	}
	return err
}

func (registration *Registration) deregister(ctx context.Context) (drainTime time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	reply, err := targetv1.NewTargetServiceClient(registration.Conn).Deregister(ctx, &targetv1.DeregisterRequest{
		Stream: registration.Request.GetStream(), Names: []string{registration.Request.GetTargets()[0].GetName()},
	})
	return reply.GetDrainFor().AsDuration(), err
}

// follow registers the target, and retries while the load balancer is unavailable. It returns nil
// when the target is removed, and an error when it is rejected or taken over by another call.
func (registration *Registration) follow(ctx context.Context) error {
	unavailable := backoff.Backoff{Min: minBackoff, Max: maxBackoff, Jitter: 0.2}
	rejected := backoff.Backoff{Min: minRejected, Max: maxRejected, Jitter: 0.2}
	for {
		accepted, err := registration.session(ctx)
		retry, code := &unavailable, grpcstatus.Code(err)
		switch {
		case ctx.Err() != nil, errors.Is(err, io.EOF), code == codes.Unavailable && registration.leaving.Load():
			return nil
		case code == codes.Unavailable:
		case registration.Persistent && code != codes.Aborted:
			retry = &rejected
		default:
			return &RejectedError{code, grpcstatus.Convert(err).Message()}
		}
		// An accepted call shows that the load balancer works: its end is a new failure.
		if accepted {
			unavailable.Reset()
			rejected.Reset()
		}
		registration.fail(registration.reason(err))
		if retry.Wait(ctx) != nil || registration.leaving.Load() {
			return nil
		}
		registration.Conn.ResetConnectBackoff() // otherwise the next call waits for gRPC's own back-off
	}
}

// fail counts a failed attempt and reports its reason, unless that is unchanged.
func (registration *Registration) fail(reason string) {
	if reason != registration.failure {
		registration.failure = reason
		registration.Report("not registered, trying again: " + reason)
	}
	registration.update(func(state State) State {
		state.Failures++
		state.Err, state.Targets = errors.New(reason), nil
		return state.in(Connecting)
	})
}

// session runs one Register call, and returns whether it was accepted and the error that ended it.
func (registration *Registration) session(parent context.Context) (accepted bool, err error) {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	// The call has no deadline, because the stream lasts as long as the registration.
	first := time.AfterFunc(firstMessageTimeout, cancel)
	var message *targetv1.RegisterResponse
	stream, err := targetv1.NewTargetServiceClient(registration.Conn).Register(ctx, registration.Request)
	if err == nil {
		message, err = stream.Recv()
	}
	if !first.Stop() && parent.Err() == nil {
		err = grpcstatus.Errorf(codes.Unavailable, "no response within %v", firstMessageTimeout)
	}
	if err != nil {
		return false, err
	}
	registration.registered, registration.failure = true, ""
	registration.enter(Registered, nil)
	registration.Report(fmt.Sprintf("registered at %s; without this process the target stays for %v", registration.Conn,
		message.GetGrace().AsDuration()))
	states := map[string]targetv1.State{} // by address
	for {
		for _, info := range message.GetTargets() {
			if state, known := states[info.GetAddress()]; !known || state != info.GetState() {
				states[info.GetAddress()] = info.GetState()
				registration.Report(status.TargetLine(info))
			}
		}
		registration.update(func(state State) State { return state.with(message.GetTargets()) })
		if message, err = stream.Recv(); err != nil {
			return true, err
		}
	}
}

// reason returns the error of a call as a message for the user.
func (registration *Registration) reason(err error) string {
	err = registration.Conn.Explain(err)
	if call, ok := err.(interface{ GRPCStatus() *grpcstatus.Status }); ok {
		if call.GRPCStatus().Code() == codes.DeadlineExceeded {
			return fmt.Sprintf("%s did not answer within %v", registration.Conn, CallTimeout)
		}
		return call.GRPCStatus().Message()
	}
	return err.Error()
}

func (registration *Registration) enter(phase Phase, err error) {
	registration.update(func(state State) State {
		state.Err = err
		return state.in(phase)
	})
}

func (registration *Registration) update(change func(State) State) {
	registration.state.Update(change)
	if registration.Changed != nil {
		registration.Changed()
	}
}

// in returns the state with a new phase. From Leaving, only a final phase is entered.
func (state State) in(phase Phase) State {
	if state.Since.IsZero() || state.Phase != phase && (state.Phase != Leaving || phase > Leaving) {
		state.Phase, state.Since = phase, time.Now()
	}
	return state
}

// with returns the state with the addresses of a message added or replaced.
func (state State) with(changed []*targetv1.TargetInfo) State {
	// Readers of the previous state hold its slice.
	state.Targets = slices.Clone(state.Targets)
	for _, info := range changed {
		index := slices.IndexFunc(state.Targets, func(target *targetv1.TargetInfo) bool {
			return target.GetAddress() == info.GetAddress()
		})
		if index < 0 {
			state.Targets = append(state.Targets, info)
		} else {
			state.Targets[index] = info
		}
	}
	return state
}
