package lb

import (
	"log/slog"
	"strings"
	"sync"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// decisions records the decisions of the readiness loop, and keeps them for health and metrics. The
// loop only queues them, because it must renew the lease in time.
type decisions struct {
	log     *slog.Logger
	journal *journal.Journal
	queue   *journal.Queue[decided]

	mu   sync.RWMutex // held by readers for as long as a copy takes
	vips vip.Table[vipState]
}

// decided is a decision in the queue.
type decided struct {
	journal.Delta
	revision uint64
	at       time.Time
}

type vipState struct {
	known        bool // false until its first decision is applied
	state        vip.State
	reason       readinessv1.VipReason
	ready, total uint32
}

// newDecisions returns decisions without VIPs. count adds the VIPs of a transition to the metrics.
func newDecisions(log *slog.Logger, instance string, count func(metrics.Transition, int)) *decisions {
	d := &decisions{log: log, queue: journal.NewQueue(func(b decided) int { return b.Len() }, merge)}
	d.journal = journal.New(journal.Options{
		Log: log, Instance: instance, Attributes: d.attributes,
		Known: func(v vip.VIP) bool {
			_, known := d.serves(v)
			return known
		},
		Count: func(t journal.Transition, vips int) {
			if t.To != journal.Removed {
				count(metrics.Transition{Family: t.Family, To: t.To, Reason: t.Reason, Changed: t.Changed() && !t.New}, vips)
			}
		},
	})
	return d
}

// merge returns one decision with the newest state of each VIP: events are lost, not state.
func merge(queue []decided) (merged decided, lost int) {
	deltas := make([]journal.Delta, len(queue))
	for i, d := range queue {
		deltas[i] = d.Delta
		lost += d.Len()
	}
	last := queue[len(queue)-1]
	merged = decided{journal.MergeDeltas(deltas), last.revision, last.at}
	return merged, lost - merged.Len()
}

// decided queues a decision. It does not block.
func (d *decisions) decided(decision readiness.Decision, revision uint64) {
	at := decision.At
	if at.IsZero() {
		at = time.Now()
	}
	d.queue.Add(decided{journal.Delta{Changed: decision.Changed, Removed: decision.Removed}, revision, at})
}

// runTasks runs the tasks of the process with run, and then records the decisions that the loop
// queued after the end of the observer: these lines explain the end of a process that failed.
func (d *decisions) runTasks(run func() error) error {
	defer d.drain()
	return run()
}

// drain applies and records the queued decisions, and reports whether there were any.
func (d *decisions) drain() bool {
	return d.queue.Drain(func(queue []decided, lost int) {
		if lost > 0 {
			d.log.Warn("decisions merged: rate exceeds logging", "count", lost)
		}
		for _, decision := range queue {
			d.journal.Record(decision.at, readiness.Position{Revision: decision.revision}, d.apply(decision.Delta))
		}
	})
}

// apply changes the state of the VIPs, and returns the changes.
func (d *decisions) apply(delta journal.Delta) *journal.Changes {
	changes := d.journal.Begin(delta.Len())
	d.mu.Lock()
	defer d.mu.Unlock()
	// Add all new VIPs in one batch: each growth of the table sorts it.
	d.vips.Add(vip.Of(delta.Changed, func(r *readiness.VIPReadiness) vip.VIP { return r.VIP }))
	for i := range delta.Changed {
		is := &delta.Changed[i]
		was := d.vips.Next(is.VIP)
		transition := journal.Transition{
			Family: is.VIP.Family(), From: was.state.String(), To: is.State.String(), Reason: reasonWord(is.Reason),
		}
		// The zero state is NotReady, which is also a valid first decision.
		if !was.known {
			transition.From, transition.New = journal.Unknown, true
		}
		changes.Add(is.VIP, transition, is.Detail)
		*was = vipState{true, is.State, is.Reason, is.ReadyTargets, is.TotalTargets}
	}
	for _, v := range delta.Removed {
		transition := journal.Transition{Family: v.Family(), From: journal.Unknown, To: journal.Removed}
		if was := d.vips.Next(v); was != nil {
			transition.From, was.known = was.state.String(), false
		}
		changes.Add(v, transition, "")
	}
	// Delete in one pass at the end, because a deletion moves the entries that Next expects.
	if len(delta.Removed) > 0 {
		d.vips.DeleteFunc(func(_ vip.VIP, state *vipState) bool { return !state.known })
	}
	return changes
}

// attributes returns the numbers of targets for a log line.
func (d *decisions) attributes(v vip.VIP) []any {
	d.mu.RLock()
	defer d.mu.RUnlock()
	state := d.vips.Get(v)
	if state == nil {
		return nil
	}
	return []any{"ready_targets", state.ready, "total_targets", state.total}
}

// serves reports whether a VIP is ready, and whether it has a decision.
func (d *decisions) serves(v vip.VIP) (ready, known bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	state := d.vips.Get(v)
	return state != nil && state.state == vip.Ready, state != nil
}

// states returns all VIPs at a scrape.
func (d *decisions) states() []metrics.VIP {
	d.mu.RLock()
	defer d.mu.RUnlock()
	list := make([]metrics.VIP, 0, d.vips.Len())
	for v, state := range d.vips.All() {
		list = append(list, metrics.VIP{
			VIP: v, State: state.state.String(), Reason: reasonWord(state.reason), Ready: state.ready, Total: state.total,
		})
	}
	return list
}

// reasonWords holds the reasons as logs and metric labels show them: "too_few_ready".
var reasonWords = func() (words []string) {
	for number := range len(readinessv1.VipReason_name) {
		name := readinessv1.VipReason(number).String()
		words = append(words, strings.ToLower(strings.TrimPrefix(name, "VIP_REASON_")))
	}
	return words
}()

func reasonWord(reason readinessv1.VipReason) string { return reasonWords[reason] }
