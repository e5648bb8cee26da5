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

// timing are the times of a publisher.
type timing struct {
	// Of the Lease. A leader that cannot renew it stops writing lease-renew before another one begins.
	lease, renew, retry time.Duration
	// report is the least time between two writes of the report, renewal that after which it is
	// written without a change, restore that between two writes of a status that another writer
	// changed.
	report, renewal, restore time.Duration
}

func defaultTiming() timing {
	return timing{
		lease: 15 * time.Second, renew: 10 * time.Second, retry: 2 * time.Second,
		report: 5 * time.Second, renewal: renewInterval, restore: time.Minute,
	}
}

// LeaseName returns the name of the Lease of a Trench, in its namespace.
func LeaseName(trench string) string { return FieldManager + "-" + trench }

// campaign leads whenever it holds the Lease, until ctx ends.
func (p *Publisher) campaign(ctx context.Context) error {
	retry := backoff.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2}
	for {
		start := time.Now()
		if err := p.term(ctx); err != nil {
			p.options.Log.Warn("leader election failed, retrying", "error", err)
		}
		if time.Since(start) > p.timing.lease {
			retry.Reset()
		}
		if err := retry.Wait(ctx); err != nil {
			return err
		}
	}
}

// term waits for the Lease, leads while it holds it, and releases it. All writes have ended before
// the release.
func (p *Publisher) term(ctx context.Context) error {
	started := make(chan context.Context, 1)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: p.options.Namespace, Name: p.lease},
			Client:     p.leases,
			LockConfig: resourcelock.ResourceLockConfig{Identity: p.options.Pod},
		},
		Name:            p.lease,
		LeaseDuration:   p.timing.lease,
		RenewDeadline:   p.timing.renew,
		RetryPeriod:     p.timing.retry,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { started <- ctx },
			OnStoppedLeading: func() {},
			OnNewLeader:      func(identity string) { p.state.Update(func(s State) State { s.Leader = identity; return s }) },
		},
	})
	if err != nil {
		return fmt.Errorf("leader election of Trench %s/%s: %w", p.options.Namespace, p.options.Trench, err)
	}
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
		// client-go leads on until its deadline also when it reads another holder, or after the process
		// was stopped for longer than the Lease is valid.
		p.lead(ctx, holding, func() bool {
			return elector.IsLeader() && elector.Check(p.timing.renew-p.timing.lease) == nil
		})
	}
	return nil
}

// lead writes status until ctx or holding, which is the time with the Lease, ends, or holds reports
// that another one may have it.
func (p *Publisher) lead(ctx, holding context.Context, holds func() bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(holding, cancel)()
	p.options.Log.Info("leader of the trench", "lease", p.lease)
	p.set(true)
	defer func() {
		p.set(false)
		p.options.Log.Info("no longer leader of the trench")
	}()
	failed := func(err error) { p.state.Update(func(s State) State { s.WriteError = err; return s }) }
	l := newLeader(p.watch, p.write, p.options, p.timing.restore, failed)
	l.holds, l.holdInterval = holds, p.timing.retry
	l.run(ctx, p.input)
}

func (p *Publisher) set(leading bool) {
	p.options.Metrics.Leader(leading)
	p.state.Update(func(s State) State { s.Leading = leading; return s })
}
