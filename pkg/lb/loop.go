package lb

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/target"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// beatsPerLease is how many heartbeats go into one lease (design section 4).
const beatsPerLease = 5

// loop evaluates readiness: it is the only one that renews the lease, so that a
// load balancer that can no longer evaluate stops vouching.
type loop struct {
	config  *latest.Value[trench.Loaded]
	checker *target.Checker
	table   *readiness.Table
	lease   time.Duration
	log     *slog.Logger
	observe func(readiness.Decision) // must not block
	ready   chan struct{}

	lastRun atomic.Int64 // when it last evaluated, as time since started

	started   time.Time
	aggregate *aggregate
	before    map[vip.VIP]readiness.State
	synced    bool
}

func (l *loop) String() string         { return "readiness loop" }
func (l *loop) Ready() <-chan struct{} { return l.ready }

// idle is how long ago the loop last evaluated. Only after Ready.
func (l *loop) idle() time.Duration { return time.Since(l.started) - time.Duration(l.lastRun.Load()) }

// Run evaluates until ctx ends.
func (l *loop) Run(ctx context.Context) error {
	l.aggregate, l.before, l.started = newAggregate(), map[vip.VIP]readiness.State{}, time.Now()
	beat := time.NewTicker(l.lease / beatsPerLease)
	defer beat.Stop()
	loaded, reloaded := l.config.Get()
	l.configure(loaded)
	l.evaluate()
	close(l.ready)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-reloaded:
			loaded, reloaded = l.config.Get()
			l.configure(loaded)
		case <-l.checker.Changed():
		case <-beat.C:
		}
		if !l.evaluate() {
			l.table.Heartbeat()
		}
	}
}

func (l *loop) configure(loaded trench.Loaded) {
	l.checker.Configure(loaded.Config.Streams)
	now := time.Now()
	changed, removed := l.aggregate.configure(now, loaded.Config)
	l.commit(readiness.Decision{Changed: changed, Removed: removed, At: now})
}

// evaluate looks at the targets and commits what changed. It tells whether it
// committed anything.
func (l *loop) evaluate() bool {
	now := time.Now()
	l.lastRun.Store(int64(now.Sub(l.started)))
	e := l.checker.Evaluate(now)
	return l.commit(readiness.Decision{Changed: l.aggregate.apply(now, e.Changed, e.Removed), Synced: e.Synced, At: now})
}

func (l *loop) commit(d readiness.Decision) bool {
	first := d.Synced && !l.synced
	l.synced = l.synced || d.Synced
	d.Synced = l.synced
	if len(d.Changed) == 0 && len(d.Removed) == 0 && !first {
		return false
	}
	revision := l.table.Commit(d)
	l.tell(d, revision, first)
	l.observe(d)
	return true
}

// tell logs each VIP that changed its state, one line each.
func (l *loop) tell(d readiness.Decision, revision uint64, first bool) {
	if first {
		l.log.Info("every target was checked; readiness is synced", "revision", revision)
	}
	for _, r := range d.Changed {
		was, known := l.before[r.VIP]
		if known && was == r.State {
			continue
		}
		l.before[r.VIP] = r.State
		from := "unknown"
		if known {
			from = was.String()
		}
		l.log.Info("VIP changed", "vip", r.VIP, "from", from, "to", r.State, "reason", reasonWord(r.Reason), "detail", r.Detail,
			"ready_targets", r.ReadyTargets, "total_targets", r.TotalTargets, "revision", revision)
	}
	for _, v := range d.Removed {
		delete(l.before, v)
		l.log.Info("VIP removed", "vip", v, "revision", revision)
	}
}

// reasonWord is a reason as logs and metric labels show it: "too_few_ready".
func reasonWord(r readinessv1.VipReason) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "VIP_REASON_"))
}
