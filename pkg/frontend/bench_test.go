package frontend

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// afterDecision returns the parts of a frontend that process a decision outside of the path to
// BIRD.
func afterDecision() *process {
	p := &process{
		metrics: metrics.NewFrontend("1"), applied: latest.New(readiness.Position{}),
		bird:    bird.NewSupervisor(bird.Options{}),
		watcher: readiness.NewWatcher(readiness.WatcherOptions{Target: "/nowhere"}),
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	p.served.Store(&[]vip.Family{vip.IPv4})
	p.health = health.New(log, func(string, bool, bool) {})
	p.observer = newObserver(log, "", p.count, nil)
	p.metrics.VIPs(p.observer.metrics)
	p.health.ServeVIPs(p.observer.state.serves)
	p.reporter = newReporter(latest.New(announce.State{Written: 1 << 62, Established: true}), p.bird, 0, p.report)
	p.reporter.confirm = func(context.Context) error { return nil }
	p.observer.onDecisions = func(d decisions) {
		p.reporter.decided(d)
		p.health.VIPsChanged()
	}
	return p
}

// BenchmarkAfterDecision measures a decision that announces the VIPs, one that withdraws them, and
// its confirmation.
func BenchmarkAfterDecision(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := afterDecision()
			flip := func(revision uint64, state vip.State, reason readinessv1.VipReason, from, to gate.Decision) {
				u := readiness.Update{Changed: make([]readiness.VIPReadiness, n)}
				var changes []gate.Change
				for i := range n {
					v := vip.Require(fmt.Sprintf("20.0.%d.%d/32", i>>8, i&255))
					u.Changed[i] = readiness.VIPReadiness{VIP: v, State: state, Reason: reason, Detail: "0 of 1 targets ready"}
					changes = append(changes, gate.Change{VIP: v, From: from, To: to})
				}
				b.StartTimer()
				p.observer.updated(u)
				p.observer.decided(decisions{At: time.Now(), Revision: revision, Changes: changes})
				p.observer.drain()
				for p.reporter.confirmPending(b.Context()); len(p.reporter.rounds) > 0; {
					p.reporter.reportSettled()
				}
				b.StopTimer()
			}
			up := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}
			down := gate.Decision{Advertisement: gate.Withdrawn, Reason: gate.LBNotReady}
			b.ReportAllocs()
			b.StopTimer()
			revision := uint64(0)
			for range b.N {
				revision += 2
				flip(revision, vip.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, down, up)
				flip(revision+1, vip.NotReady, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY, up, down)
			}
		})
	}
}
