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

	// Work of the next Evaluate: streams to count, and waits to end.
	dirty     []*stream
	settling  []*stream // that wait for first verdicts
	gathering []*stream // that wait for more registrations
	// evaluation counts the calls of Evaluate.
	evaluation uint64
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
func New(o Options) *Evaluator {
	e := &Evaluator{
		options: o, health: map[healthcheck.Key]healthcheck.Health{}, views: newViews(),
	}
	e.forwarding.counted = map[string]bool{}
	if o.DataPlane {
		e.kernel = &kernel{revoked: map[revocation]uint64{}}
		e.forwarding = forwarding{
			kernel: e.kernel, roster: &e.roster, withdrawTime: o.WithdrawTime,
			desired: map[string]*plan.Stream{}, sent: &plan.Desired{},
			counted: map[string]bool{}, differs: map[string]bool{}, holds: map[holdKey]*hold{},
		}
	}
	return e
}

// Configure replaces the VIPs and streams. members returns the targets of a stream from all
// sources; the Targets of c are ignored.
func (e *Evaluator) Configure(now time.Time, c *trench.Config, members func(string) []targetset.Member) {
	before := e.streams
	for _, s := range before {
		e.leave(s)
	}
	e.roster.configure(c.Attractor.VIPs, e.kernel)
	e.streams, e.dirty, e.settling, e.gathering = map[string]*stream{}, nil, nil, nil
	groups := map[extension]*group{}
	for _, config := range c.Streams {
		s := &stream{Stream: config}
		s.Targets = nil
		e.streams[s.Name] = s
		e.roster.assign(s, groups)
		if old := before[s.Name]; old != nil {
			s.settleEnd, s.gathering = old.settleEnd, old.gathering
		} else {
			s.gathering = &gathering{over: e.options.RegistrySettle <= 0}
			if e.options.Settle > 0 {
				s.settleEnd = now.Add(e.options.Settle)
			}
		}
		if !s.settleEnd.IsZero() {
			e.settling = append(e.settling, s)
		}
		e.join(now, s, members(s.Name))
	}
}

// Retarget replaces the targets of some streams.
func (e *Evaluator) Retarget(now time.Time, changed []trench.Stream, members func(string) []targetset.Member) {
	for _, c := range changed {
		if s, ok := e.streams[c.Name]; ok {
			e.leave(s)
			e.join(now, s, members(c.Name))
		}
	}
}

// leave records the previous targets of a stream, join the new ones.
func (e *Evaluator) leave(s *stream) {
	for k := range s.keys() {
		e.views.left[k] = true
	}
	e.forwarding.counted[s.Name] = true
}

func (e *Evaluator) join(now time.Time, s *stream, members []targetset.Member) {
	s.setMembers(members)
	s.gathering.add(now, members)
	if g := s.gathering; !g.over && e.options.Restored != nil {
		g.known = g.known || e.options.Restored(s.Name)
	}
	if !s.gathers && s.gathering.waits() {
		s.gathers = true
		e.gathering = append(e.gathering, s)
	}
	e.views.retargeted[s.Name] = true
	e.recount(s)
}

// Result lists the changes of an evaluation.
type Result struct {
	readiness.Decision           // without Synced and At
	StreamsChanged     bool      // a stream became ready in some family, or no longer is
	Settling           bool      // a new stream waits for first verdicts of checks that run
	Next               time.Time // when a wait ends; zero for never
}

// Evaluate applies changed health, and judges the VIPs that the inputs since the last call affect.
func (e *Evaluator) Evaluate(now time.Time, checks healthcheck.Evaluation) Result {
	for _, k := range checks.Removed {
		delete(e.health, k)
		e.mark(k)
	}
	for _, h := range checks.Changed {
		e.health[h.Key] = h
		e.mark(h.Key)
		e.views.checked = append(e.views.checked, h.Key)
	}
	var r Result
	for _, s := range e.dirty {
		before, wasReady := s.tallies, s.ready()
		e.count(s)
		s.dirty = false
		e.forwarding.counted[s.Name] = true
		r.StreamsChanged = r.StreamsChanged || s.ready() != wasReady
		for _, f := range vip.Families {
			if s.tallies[f] != before[f] {
				e.roster.touchFamily(s, f)
			}
		}
	}
	e.dirty = e.dirty[:0]
	settleEnd, settling := e.settle(now)
	gatherEnd, gathered := e.gather(now)
	r.StreamsChanged = r.StreamsChanged || gathered
	r.Settling = settling
	r.Next = targetset.Soonest(settleEnd, gatherEnd)
	r.Changed = e.judgeTouched()
	slices.SortFunc(e.roster.removed, vip.Compare)
	r.Removed, e.roster.removed = e.roster.removed, nil
	return r
}

// judgeTouched judges the touched VIPs, and returns those that changed.
func (e *Evaluator) judgeTouched() []readiness.VIPReadiness {
	e.evaluation++
	e.roster.touched.take(func(i int) {
		j := &e.roster.vips[i]
		was, is := j.verdict, e.judge(j)
		if is != was && (was == nil || *is != *was) {
			e.changed = append(e.changed, i)
		}
		j.verdict = is
	})
	if len(e.changed) == 0 {
		return nil
	}
	changed := make([]readiness.VIPReadiness, len(e.changed))
	for n, i := range e.changed {
		changed[n] = *e.roster.vips[i].verdict
		changed[n].VIP = e.roster.vips[i].VIP
	}
	e.changed = e.changed[:0]
	return changed
}

// mark schedules the stream of a target for counting.
func (e *Evaluator) mark(k healthcheck.Key) {
	if s, ok := e.streams[k.Stream]; ok {
		e.recount(s)
	}
}

// recount schedules a stream for counting.
func (e *Evaluator) recount(s *stream) {
	if !s.dirty {
		s.dirty = true
		e.dirty = append(e.dirty, s)
	}
}

// settle ends the wait for first verdicts where every target has one, or the time is over. It
// returns the next end, and whether one of the awaited checks runs: the VIPs of IPv4 do not wait for
// an IPv6 source address.
func (e *Evaluator) settle(now time.Time) (next time.Time, running bool) {
	e.settling = slices.DeleteFunc(e.settling, func(s *stream) bool {
		starting := slices.ContainsFunc(s.tallies[:], func(t tally) bool { return t.starting > 0 })
		if starting && now.Before(s.settleEnd) {
			next = targetset.Soonest(next, s.settleEnd)
			running = running || slices.ContainsFunc(s.tallies[:], func(t tally) bool { return t.starting > t.deferred })
			return false
		}
		s.settleEnd = time.Time{}
		e.roster.touchStream(s)
		e.forwarding.counted[s.Name] = true
		return true
	})
	return next, running
}

// Ready returns the streams with enough ready targets in some family, and the first addresses of
// the ready VIPs, both in ascending order.
func (e *Evaluator) Ready() (streams []string, vips []netip.Addr) {
	for name, s := range e.streams {
		if s.ready() {
			streams = append(streams, name)
		}
	}
	slices.Sort(streams)
	vips = make([]netip.Addr, 0, len(e.roster.vips))
	for i := range e.roster.vips {
		if j := &e.roster.vips[i]; j.verdict != nil && j.verdict.State == vip.Ready {
			vips = append(vips, j.Prefix().Addr())
		}
	}
	return streams, vips
}

// Targets returns the targets that changed since the last call, as operators see them, and the
// addresses that no stream has any more.
func (e *Evaluator) Targets() (changed []targetset.View, gone []healthcheck.Key) {
	names := map[string]map[string]bool{} // by stream; nil for all
	for _, k := range e.views.checked {
		if names[k.Stream] == nil {
			names[k.Stream] = map[string]bool{}
		}
		// The address of a target that is not checked itself changes with the other one.
		names[k.Stream][k.Name] = true
	}
	for name := range e.views.retargeted {
		names[name] = nil
	}
	for name, only := range names {
		s := e.streams[name]
		for k, m := range s.keys() {
			if only == nil || only[m.Name] {
				changed = append(changed, e.view(s, m, k))
				delete(e.views.left, k)
			}
		}
	}
	gone = slices.Collect(maps.Keys(e.views.left))
	e.views = newViews()
	return changed, gone
}
