package lb

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxQueued bounds the VIPs of queued decisions; beyond that, decisions are merged and counted.
const maxQueued = 200_000

// decisions logs the decisions of the readiness loop, and keeps them for health, metrics and
// events. The loop only queues them, because it must renew the lease in time. The zero value needs
// log, event and count.
type decisions struct {
	log   *slog.Logger
	event func(...*lbv1.Event)          // must not block
	count func(metrics.Transition, int) // counts the VIPs of a decision with the same transition

	mu     sync.Mutex
	queue  []decided
	queued int // VIPs in queue
	merged int // VIPs whose decision was replaced by a later one in queue
	wake   chan struct{}

	shown sync.RWMutex // held by readers for as long as a copy takes
	vips  vip.Table[vipState]
}

// decided is a decision. It must not be modified.
type decided struct {
	changed  []readiness.VIPReadiness
	removed  []vip.VIP
	revision uint64
}

func (d decided) count() int { return len(d.changed) + len(d.removed) }

// at returns a VIP of the decision and its detail: the changed ones first, then the removed ones.
func (d decided) at(i int) (vip.VIP, string) {
	if i < len(d.changed) {
		return d.changed[i].VIP, d.changed[i].Detail
	}
	return d.removed[i-len(d.changed)], ""
}

// vipState is the state of one VIP.
type vipState struct {
	known        bool // false until its first decision is applied
	state        vip.State
	reason       readinessv1.VipReason
	ready, total uint32
}

// transition is a state change that several VIPs of one decision share.
type transition struct {
	family   vip.Family
	isNew    bool
	removed  bool
	from, to vip.State // from without a meaning for a new VIP, to for a removed one
	reason   readinessv1.VipReason
}

// notable reports whether the transition is an event: more than a changed reason or number of
// targets.
func (t transition) notable() bool { return t.isNew || t.removed || t.from != t.to }

func (t transition) words() (from, to, reason string) {
	from, to, reason = t.from.String(), t.to.String(), reasonWord(t.reason)
	if t.isNew {
		from = "unknown"
	}
	if t.removed {
		to, reason = "removed", ""
	}
	return from, to, reason
}

// decided queues a decision. It does not block.
func (d *decisions) decided(x readiness.Decision, revision uint64) {
	d.mu.Lock()
	if d.queued > maxQueued {
		d.compact()
	}
	d.queue = append(d.queue, decided{x.Changed, x.Removed, revision})
	d.queued += d.queue[len(d.queue)-1].count()
	d.mu.Unlock()
	latest.Wake(d.wake)
}

// compact merges the queue into the newest state of each VIP: events are lost, not state.
func (d *decisions) compact() {
	newest := map[vip.VIP]*readiness.VIPReadiness{} // nil: removed
	for _, x := range d.queue {
		for i := range x.changed {
			newest[x.changed[i].VIP] = &x.changed[i]
		}
		for _, v := range x.removed {
			newest[v] = nil
		}
	}
	merged := decided{revision: d.queue[len(d.queue)-1].revision}
	for v, r := range newest {
		if r == nil {
			merged.removed = append(merged.removed, v)
		} else {
			merged.changed = append(merged.changed, *r)
		}
	}
	d.merged += d.queued - len(newest)
	d.queue, d.queued = []decided{merged}, len(newest)
}

// runTasks runs the tasks of the process, and then logs the decisions that the loop queued after
// the end of the observer: these lines explain the end of a process that failed.
func (d *decisions) runTasks(ctx context.Context, tasks ...task.Task) error {
	defer d.drain()
	return task.Run(ctx, tasks...)
}

// drain applies and logs the queued decisions, and reports whether there were any.
func (d *decisions) drain() bool {
	d.mu.Lock()
	queue, merged := d.queue, d.merged
	d.queue, d.queued, d.merged = nil, 0, 0
	d.mu.Unlock()
	if merged > 0 {
		d.log.Warn("decisions merged: rate exceeds logging", "count", merged)
	}
	for _, x := range queue {
		d.apply(x)
	}
	return len(queue) > 0
}

// apply applies a decision. Up to status.MaxSingle VIPs that change their state get a log line and
// an event each; more share one.
func (d *decisions) apply(x decided) {
	tally, transitions := d.update(x)
	notable := 0
	for _, t := range tally.List() {
		if t.Transition.notable() {
			notable += t.Count
		}
		if !t.Transition.removed {
			d.count(metrics.Transition{
				Family: t.Transition.family, To: t.Transition.to.String(), Reason: reasonWord(t.Transition.reason),
				Changed: t.Transition.notable() && !t.Transition.isNew,
			}, t.Count)
		}
	}
	level := slog.LevelInfo
	if notable > status.MaxSingle {
		level = slog.LevelDebug
		d.bulk(x, tally.List(), transitions, notable)
		if !d.log.Enabled(context.Background(), level) {
			return
		}
	}
	if notable > 0 {
		d.each(x, tally.List(), transitions, level)
	}
}

// update changes the state of the VIPs, and returns the transition of each.
func (d *decisions) update(x decided) (tally status.Tally[transition], transitions []uint16) {
	transitions = make([]uint16, 0, x.count())
	d.shown.Lock()
	defer d.shown.Unlock()
	d.vips.Add(func(yield func(vip.VIP) bool) {
		for i := range x.changed {
			if !yield(x.changed[i].VIP) {
				return
			}
		}
	})
	for i := range x.changed {
		r := &x.changed[i]
		st := d.vips.Next(r.VIP)
		transitions = append(transitions, uint16(tally.Add(transition{
			family: r.VIP.Family(), isNew: !st.known, from: st.state, to: r.State, reason: r.Reason,
		})))
		*st = vipState{true, r.State, r.Reason, r.ReadyTargets, r.TotalTargets}
	}
	for _, v := range x.removed {
		t := transition{family: v.Family(), removed: true}
		if st := d.vips.Next(v); st != nil {
			t.from, st.known = st.state, false
		}
		transitions = append(transitions, uint16(tally.Add(t)))
	}
	if len(x.removed) > 0 {
		d.vips.DeleteFunc(func(_ vip.VIP, st *vipState) bool { return !st.known })
	}
	return tally, transitions
}

// each writes one log line per VIP that changed its state, and at level info one event, too.
func (d *decisions) each(x decided, tally []status.Tallied[transition], transitions []uint16, level slog.Level) {
	ctx := context.Background()
	var events []*lbv1.Event
	for i := range x.changed {
		r, t := &x.changed[i], tally[transitions[i]].Transition
		if !t.notable() {
			continue
		}
		from, to, reason := t.words()
		d.log.Log(ctx, level, "VIP changed", "vip", r.VIP, "from", from, "to", to, "reason", reason, "detail", r.Detail,
			"ready_targets", r.ReadyTargets, "total_targets", r.TotalTargets, "revision", x.revision)
		if level == slog.LevelInfo {
			why := status.Explain(r.Reason).Short
			if r.Detail != "" {
				why += ": " + r.Detail
			}
			events = append(events, &lbv1.Event{Object: r.VIP.String(), What: to, Detail: why})
		}
	}
	for _, v := range x.removed {
		d.log.Log(ctx, level, "VIP removed", "vip", v, "revision", x.revision)
		if level == slog.LevelInfo {
			events = append(events, &lbv1.Event{Object: v.String(), What: "removed"})
		}
	}
	d.event(events...)
}

// bulk reports n VIPs that changed their state with one log line and one event.
func (d *decisions) bulk(x decided, tally []status.Tallied[transition], transitions []uint16, n int) {
	e := &lbv1.Event{Object: fmt.Sprint(n, " VIPs"), VipCount: uint32(n)}
	details := make([]string, len(tally))
	explained := make([]bool, len(tally))
	for i, g := range transitions {
		if !tally[g].Transition.notable() {
			continue
		}
		v, detail := x.at(i)
		if len(e.GetFirstVips()) < status.MaxFirstVIPs {
			e.FirstVips = append(e.FirstVips, v.String())
		}
		if !explained[g] {
			explained[g], details[g] = true, detail
		}
	}
	var words []status.Transitions
	for g, t := range tally {
		if !t.Transition.notable() {
			continue
		}
		from, to, reason := t.Transition.words()
		words = append(words, status.Transitions{
			Count: t.Count, Family: t.Transition.family.String(), From: from, To: to, Reason: reason, Detail: details[g],
		})
		e.Transitions = append(e.Transitions, t.Transition.proto(t.Count, details[g]))
	}
	slices.SortStableFunc(words, status.LargestFirst)
	slices.SortStableFunc(e.GetTransitions(), func(a, b *lbv1.VipTransitions) int {
		return int(b.GetCount()) - int(a.GetCount())
	})
	e.Detail = status.DescribeVIPs(words, e.GetFirstVips(), n)
	_, to, _ := status.Common(words)
	e.What = cmp.Or(to, "changed")
	d.log.With(status.LogAttributes(n, words, e.GetFirstVips())...).Info("VIPs changed", "revision", x.revision)
	d.event(e)
}

// proto returns the transition with its number of VIPs.
func (t transition) proto(vips int, detail string) *lbv1.VipTransitions {
	p := &lbv1.VipTransitions{
		Count: uint32(vips), Family: familyProto(t.family), Detail: detail,
	}
	if !t.isNew {
		p.From = stateProto(t.from)
	}
	if !t.removed {
		p.To, p.Reason = stateProto(t.to), t.reason
	}
	return p
}

func familyProto(f vip.Family) readinessv1.IpFamily {
	return [...]readinessv1.IpFamily{
		vip.IPv4: readinessv1.IpFamily_IP_FAMILY_IPV4, vip.IPv6: readinessv1.IpFamily_IP_FAMILY_IPV6,
	}[f]
}

func stateProto(s vip.State) readinessv1.VipState {
	return [...]readinessv1.VipState{
		vip.NotReady: readinessv1.VipState_VIP_STATE_NOT_READY, vip.Ready: readinessv1.VipState_VIP_STATE_READY,
		vip.Draining: readinessv1.VipState_VIP_STATE_DRAINING,
	}[s]
}

// serves reports whether a VIP is ready, and whether it has a decision.
func (d *decisions) serves(v vip.VIP) (ready, known bool) {
	d.shown.RLock()
	defer d.shown.RUnlock()
	st := d.vips.Get(v)
	return st != nil && st.state == vip.Ready, st != nil
}

// metrics returns all VIPs at a scrape.
func (d *decisions) metrics() []metrics.VIP {
	d.shown.RLock()
	defer d.shown.RUnlock()
	list := make([]metrics.VIP, 0, d.vips.Len())
	words := map[readinessv1.VipReason]string{}
	for v, st := range d.vips.All() {
		word, known := words[st.reason]
		if !known {
			word = reasonWord(st.reason)
			words[st.reason] = word
		}
		list = append(list, metrics.VIP{
			VIP: v, State: st.state.String(), Reason: word, Ready: st.ready, Total: st.total,
		})
	}
	return list
}

// reasonWord returns a reason as logs and metric labels show it: "too_few_ready".
func reasonWord(r readinessv1.VipReason) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "VIP_REASON_"))
}
