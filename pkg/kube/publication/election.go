package publication

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/vipgate/vipgate/pkg/backoff"
)

type timing struct {
	// lease, renew and retry configure the Lease. A leader that cannot renew it stops writing
	// lease-renew before the next leader starts.
	lease, renew, retry time.Duration
	// report is the minimum time between two writes of the report, renewal the interval at which an
	// unchanged report is written again, and restore the minimum time between two writes of a status
	// that another writer changed.
	report, renewal, restore time.Duration
}

func defaultTiming() timing {
	return timing{
		lease: 15 * time.Second, renew: 10 * time.Second, retry: 2 * time.Second,
		report: 5 * time.Second, renewal: renewInterval, restore: time.Minute,
	}
}

// LeaseName returns the name of the Lease of a Trench, in its namespace.
func LeaseName(trench string) string { return fieldManager + "-" + trench }

// campaign runs terms of leadership until ctx ends.
func (publisher *Publisher) campaign(ctx context.Context) error {
	retry := backoff.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2}
	for {
		start := time.Now()
		if err := publisher.term(ctx); err != nil {
			publisher.options.Log.Warn("leader election failed, retrying", "error", err)
		}
		// Only a term longer than the Lease proves that the election works.
		if time.Since(start) > publisher.timing.lease {
			retry.Reset()
		}
		if err := retry.Wait(ctx); err != nil {
			return err
		}
	}
}

// term waits for the Lease, leads while it holds it, and releases it after the last write.
func (publisher *Publisher) term(ctx context.Context) error {
	leading, lost := context.WithCancel(ctx)
	defer lost()
	lock := &lease{
		Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: publisher.options.Namespace, Name: publisher.lease},
			Client:     publisher.leases,
			LockConfig: resourcelock.ResourceLockConfig{Identity: publisher.options.Pod},
		},
		valid: publisher.timing.renew, lost: lost,
	}
	// Capacity 1: the callback must not block the elector if the process stops at that moment.
	started := make(chan context.Context, 1)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:            lock,
		Name:            publisher.lease,
		LeaseDuration:   publisher.timing.lease,
		RenewDeadline:   publisher.timing.renew,
		RetryPeriod:     publisher.timing.retry,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { started <- ctx },
			OnStoppedLeading: func() {},
			OnNewLeader:      func(identity string) { publisher.update(func(state *State) { state.Leader = identity }) },
		},
	})
	if err != nil {
		return fmt.Errorf("leader election of Trench %s/%s: %w", publisher.options.Namespace, publisher.options.Trench, err)
	}
	// The elector releases the Lease when its context ends. Do not cancel it with ctx, but after
	// lead has returned, when no write is in flight.
	electing, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		elector.Run(electing)
	}()
	defer func() {
		stop()
		<-ended
	}()
	select {
	case <-ctx.Done():
	case <-ended:
	case holding := <-started:
		publisher.lead(leading, holding, lock.holds)
	}
	return nil
}

// lead writes status until ctx ends, or holding ends with the loss of the Lease.
func (publisher *Publisher) lead(ctx, holding context.Context, holds func() bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The loss of the Lease ends the term.
	defer context.AfterFunc(holding, cancel)()
	publisher.options.Log.Info("leader of the trench", "lease", publisher.lease)
	publisher.set(true)
	defer func() {
		publisher.set(false)
		publisher.options.Log.Info("no longer leader of the trench")
	}()
	leader := newLeader(publisher.watch, publisher.write, publisher.options, publisher.timing.restore)
	leader.holds = holds
	leader.failed = func(err error) { publisher.update(func(state *State) { state.WriteError = err }) }
	leader.run(ctx, publisher.input)
}

func (publisher *Publisher) set(leading bool) {
	publisher.options.Metrics.Leader(leading)
	publisher.update(func(state *State) {
		state.Leading = leading
		if leading {
			state.WriteError = nil // clear the error of an earlier term
		}
	})
}

// update changes the state. It clears the write error while another process leads, which reports
// errors of status writes in its own state.
func (publisher *Publisher) update(change func(*State)) {
	publisher.state.Update(func(state State) State {
		change(&state)
		if !state.Leading && state.Leader != "" && state.Leader != publisher.options.Pod {
			state.WriteError = nil
		}
		return state
	})
}
