package serving

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Options configure an [Evaluator].
type Options struct {
	// Settle bounds the wait until each target of a new stream has a verdict. Until then none of its
	// VIPs rises: the first target with a verdict would get all flows.
	Settle time.Duration
	// RegistrySettle is the time without a new registration in a stream after which its VIPs first
	// rise. 0, or a target of the stream in the trench file, disables the wait. It lasts at most
	// maxRegistrySettles times RegistrySettle from the first target on.
	RegistrySettle time.Duration
	// Restored reports whether every target of a stream that was registered at the end of the previous
	// process is registered again, which ends the wait. nil if that process had no registrations.
	Restored     func(stream string) bool
	DataPlane    bool          // only confirmed kernel state counts
	WithdrawTime time.Duration // of the frontend, before the last target of a VIP leaves the data plane
}

// Evaluator derives the readiness of VIPs and the desired data plane. Create one with [New].
type Evaluator struct {
	options Options
	roster  roster
	streams map[string]*stream
	health  map[healthcheck.Key]healthcheck.Health
	warmups warmups

	// Work of the next Evaluate: streams to count, and waits to end.
	dirty     []*stream
	settling  []*stream // that wait for first verdicts
	gathering []*stream // that wait for more registrations
	// evaluation counts the calls of Evaluate.
	evaluation uint64
	// reconfigured reports whether Configure was called since the last Evaluate.
	reconfigured bool
	// changed is empty between two evaluations, and keeps its memory.
	changed []int

	views      views
	kernel     *kernel // nil: no data plane
	forwarding forwarding
}

// views is the input of Targets: streams with changed targets, their previous addresses, and
// addresses whose health changed.
type views struct {
	retargeted map[string]bool
	left       map[healthcheck.Key]bool
	checked    []healthcheck.Key
}

func newViews() views {
	return views{retargeted: map[string]bool{}, left: map[healthcheck.Key]bool{}}
}

// New returns an Evaluator without VIPs and streams.
func New(options Options) *Evaluator {
	evaluator := &Evaluator{
		options: options, health: map[healthcheck.Key]healthcheck.Health{}, views: newViews(),
		warmups: warmups{begun: map[healthcheck.Key]time.Time{}},
	}
	evaluator.forwarding.counted = map[string]bool{}
	if options.DataPlane {
		evaluator.kernel = &kernel{
			revoked: map[revocation]uint64{}, renamed: map[revocation]renaming{}, continuing: map[continuation]bool{},
		}
		evaluator.forwarding = forwarding{
			kernel: evaluator.kernel, roster: &evaluator.roster, withdrawTime: options.WithdrawTime,
			desired: map[string]*plan.Stream{}, sent: &plan.Desired{},
			counted: map[string]bool{}, differs: map[string]bool{}, holds: map[holdKey]*hold{},
		}
	}
	return evaluator
}

// Configure replaces the VIPs and streams. members returns the targets of a stream from all
// sources; those of the configuration are ignored.
func (evaluator *Evaluator) Configure(now time.Time, c *trench.Config, members func(string) []targetset.Member) {
	evaluator.reconfigured = true
	before := evaluator.streams
	for _, s := range before {
		evaluator.leave(s)
	}
	evaluator.roster.configure(c.Attractor.VIPs, evaluator.kernel)
	evaluator.streams, evaluator.dirty, evaluator.settling, evaluator.gathering = map[string]*stream{}, nil, nil, nil
	groups := map[extension]*group{}
	for _, config := range c.Streams {
		s := &stream{Stream: config}
		s.Targets = nil
		evaluator.streams[s.Name] = s
		evaluator.roster.assign(s, groups)
		// A stream that remains does not start its waits again.
		if old := before[s.Name]; old != nil {
			s.settleEnd, s.gathering, s.opened = old.settleEnd, old.gathering, old.opened
		} else {
			s.gathering = &gathering{over: evaluator.options.RegistrySettle <= 0}
			if evaluator.options.Settle > 0 {
				s.settleEnd = now.Add(evaluator.options.Settle)
			}
		}
		if !s.settleEnd.IsZero() {
			evaluator.settling = append(evaluator.settling, s)
		}
		evaluator.join(now, s, before[s.Name], members(s.Name))
	}
	evaluator.roster.keep(evaluator.streams)
}

// Retarget replaces the targets of some streams.
func (evaluator *Evaluator) Retarget(now time.Time, changed []trench.Stream, members func(string) []targetset.Member) {
	for _, config := range changed {
		if stream, ok := evaluator.streams[config.Name]; ok {
			evaluator.leave(stream)
			old := *stream
			evaluator.join(now, stream, &old, members(config.Name))
		}
	}
}

// leave records the previous targets of a stream, join the new ones.
func (evaluator *Evaluator) leave(stream *stream) {
	for k := range stream.keys() {
		evaluator.views.left[k] = true
	}
	evaluator.forwarding.counted[stream.Name] = true
}

func (evaluator *Evaluator) join(now time.Time, stream, old *stream, members []targetset.Member) {
	stream.setMembers(members)
	evaluator.kernel.rename(stream.Name, old, stream)
	stream.gathering.add(now, members)
	if g := stream.gathering; !g.over && evaluator.options.Restored != nil {
		g.known = g.known || evaluator.options.Restored(stream.Name)
	}
	if !stream.gathers && stream.gathering.waits() {
		stream.gathers = true
		evaluator.gathering = append(evaluator.gathering, stream)
	}
	evaluator.views.retargeted[stream.Name] = true
	evaluator.recount(stream)
}

// Result lists the changes of an evaluation.
type Result struct {
	readiness.Decision           // without Synced and At
	StreamsChanged     bool      // a stream became ready in some family, or no longer is
	Settling           bool      // a new stream waits for first verdicts of checks that run
	Next               time.Time // when a wait ends; zero for never
}

// Evaluate applies changed health, and judges the VIPs that the inputs since the last call affect.
func (evaluator *Evaluator) Evaluate(now time.Time, checks healthcheck.Evaluation) Result {
	for _, key := range checks.Removed {
		delete(evaluator.health, key)
		delete(evaluator.warmups.begun, key)
		evaluator.mark(key)
	}
	for _, health := range checks.Changed {
		evaluator.observe(now, health)
		evaluator.health[health.Key] = health
		evaluator.mark(health.Key)
		evaluator.views.checked = append(evaluator.views.checked, health.Key)
	}
	evaluator.warm(now)
	evaluator.forwarding.stalled(now, checks.Stalled)
	var result Result
	// Count only the affected streams, and judge only the VIPs whose counts changed.
	for _, stream := range evaluator.dirty {
		before, wasReady := stream.tallies, stream.ready()
		evaluator.count(now, stream)
		stream.dirty = false
		evaluator.forwarding.counted[stream.Name] = true
		result.StreamsChanged = result.StreamsChanged || stream.ready() != wasReady
		for _, family := range vip.Families {
			if stream.tallies[family] != before[family] {
				evaluator.roster.touchFamily(stream, family)
			}
		}
	}
	evaluator.dirty = evaluator.dirty[:0]
	// After the counts: a verdict that just arrived may end a wait.
	settleEnd, settling := evaluator.settle(now)
	gatherEnd, gathered := evaluator.gather(now)
	result.StreamsChanged = result.StreamsChanged || gathered
	result.Settling = settling
	result.Next = targetset.Soonest(targetset.Soonest(settleEnd, gatherEnd), evaluator.warmups.next)
	result.Changed = evaluator.judgeTouched()
	evaluator.reconfigured = false
	slices.SortFunc(evaluator.roster.removed, vip.Compare)
	result.Removed, evaluator.roster.removed = evaluator.roster.removed, nil
	return result
}

// judgeTouched judges the touched VIPs, and returns those that changed.
func (evaluator *Evaluator) judgeTouched() []readiness.VIPReadiness {
	evaluator.evaluation++
	evaluator.roster.touched.take(func(i int) {
		entry := &evaluator.roster.vips[i]
		was, is := entry.verdict, evaluator.judge(entry)
		if is != was && (was == nil || *is != *was) {
			evaluator.changed = append(evaluator.changed, i)
		}
		entry.verdict = is
	})
	if len(evaluator.changed) == 0 {
		return nil
	}
	changed := make([]readiness.VIPReadiness, len(evaluator.changed))
	for n, i := range evaluator.changed {
		changed[n] = *evaluator.roster.vips[i].verdict
		changed[n].VIP = evaluator.roster.vips[i].VIP
	}
	evaluator.changed = evaluator.changed[:0]
	return changed
}

// mark schedules the stream of a target for counting.
func (evaluator *Evaluator) mark(k healthcheck.Key) {
	if s, ok := evaluator.streams[k.Stream]; ok {
		evaluator.recount(s)
	}
}

// recount schedules a stream for counting.
func (evaluator *Evaluator) recount(stream *stream) {
	if !stream.dirty {
		stream.dirty = true
		evaluator.dirty = append(evaluator.dirty, stream)
	}
}

// settle ends the wait for first verdicts where every target has one, or the time is over. It
// returns the next end, and whether one of the awaited checks runs: the VIPs of IPv4 do not wait for
// an IPv6 source address.
func (evaluator *Evaluator) settle(now time.Time) (next time.Time, running bool) {
	evaluator.settling = slices.DeleteFunc(evaluator.settling, func(stream *stream) bool {
		starting := slices.ContainsFunc(stream.tallies[:], func(t tally) bool { return t.starting > 0 })
		if starting && now.Before(stream.settleEnd) {
			next = targetset.Soonest(next, stream.settleEnd)
			running = running || slices.ContainsFunc(stream.tallies[:], func(t tally) bool { return t.starting > t.deferred })
			return false
		}
		stream.settleEnd = time.Time{}
		evaluator.roster.touchStream(stream)
		evaluator.forwarding.counted[stream.Name] = true
		return true
	})
	return next, running
}

// Ready returns the streams with enough ready targets in some family, and the first addresses of
// the ready VIPs, both in ascending order.
func (evaluator *Evaluator) Ready() (streams []string, vips []netip.Addr) {
	for name, s := range evaluator.streams {
		if s.ready() {
			streams = append(streams, name)
		}
	}
	slices.Sort(streams)
	vips = make([]netip.Addr, 0, len(evaluator.roster.vips))
	for i := range evaluator.roster.vips {
		if j := &evaluator.roster.vips[i]; j.verdict != nil && j.verdict.State == vip.Ready {
			vips = append(vips, j.Prefix().Addr())
		}
	}
	return streams, vips
}

// Targets returns the targets that changed since the last call, as operators see them, and the
// addresses that no stream has any more.
func (evaluator *Evaluator) Targets() (changed []targetset.View, gone []healthcheck.Key) {
	names := map[string]map[string]bool{} // by stream; nil for all
	for _, key := range evaluator.views.checked {
		if names[key.Stream] == nil {
			names[key.Stream] = map[string]bool{}
		}
		// The address of a target that is not checked itself changes with the other one.
		names[key.Stream][key.Name] = true
	}
	for name := range evaluator.views.retargeted {
		names[name] = nil
	}
	for name, only := range names {
		stream := evaluator.streams[name]
		for key, member := range stream.keys() {
			if only == nil || only[member.Name] {
				changed = append(changed, evaluator.view(stream, member, key))
				delete(evaluator.views.left, key)
			}
		}
	}
	gone = slices.Collect(maps.Keys(evaluator.views.left))
	evaluator.views = newViews()
	return changed, gone
}
