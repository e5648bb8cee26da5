package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxDetail is the longest detail of a VIP, in bytes (readiness.proto).
const maxDetail = 256

// aggregate computes the readiness of VIPs from targets and their health. A VIP is ready when at
// least one stream that serves it has minReady ready targets of the VIP's family; it drains when
// targets that drain make up for what is missing. With a data plane only what the kernel is known
// to do counts. The cost of a change follows the streams that it touches. It is not safe for
// concurrent use.
type aggregate struct {
	configured vip.Set
	streams    map[string]*stream
	serving    map[vip.VIP][]*stream
	health     map[healthcheck.Key]healthcheck.Health
	current    map[vip.VIP]readiness.VIPReadiness
	// turned are streams that became ready (true) or no longer are, since the last
	// evaluation took note.
	turned map[string]bool

	// outages reports which failed targets still count, and which are part of a
	// suspected outage of their network; outage describes that.
	outages *outage.Detector
	outage  string
	// drained are the addresses of targets that an operator drained. What they do is
	// not passed to outages: an operator may drain them all.
	drained map[healthcheck.Key]struct{}

	// settle is how long a stream that is new may take until each of its targets has a
	// verdict: until then none of its VIPs rises, since one of many targets would take
	// the flows of all. settling are these streams, with the end of the wait.
	settle   time.Duration
	settling map[string]time.Time

	// kernel is what the data plane says; nil without one.
	kernel *kernelView
	// counted are streams that were recounted since the data plane last got
	// its desired state.
	counted map[string]struct{}
}

// ready reports whether the stream has enough ready targets in some family.
func (s *stream) ready() bool {
	for f := range s.tallies {
		if s.enough(s.tallies[f].ready) {
			return true
		}
	}
	return false
}

// stream is one stream with its tallies by family.
type stream struct {
	trench.Stream
	members []targetset.Member
	// shadowed are indices of members that leave while another one has taken over
	// their name: the data plane knows one target of a name.
	shadowed map[int]struct{}
	tallies  [len(vip.Families)]tally
}

// tally counts the targets of one family of one stream. A target counts once,
// however many addresses of the family it has.
type tally struct {
	total, ready, starting, overdue, draining, drained uint32
	// held are those of ready that only count because of --on-sudden-loss=hold.
	held uint32
	// suspected are those whose failure is part of a suspected outage.
	suspected uint32
	// drainEnd is until when targets that drain make up for those that are
	// missing; zero when they do not.
	drainEnd time.Time
	problem  string // what ails the first target that is not ready

	// alive would be ready if the kernel forwarded to them, as those that are do;
	// leaving drain and pass their checks. Without a data plane alive are ready.
	alive, leaving uint32
	// relieved says that those that drain make up for others that are alive and that
	// the kernel is about to forward to, so that nothing is about to end.
	relieved bool
}

func newAggregate(outages *outage.Detector) *aggregate {
	return &aggregate{
		outages: outages, drained: map[healthcheck.Key]struct{}{},
		health: map[healthcheck.Key]healthcheck.Health{}, current: map[vip.VIP]readiness.VIPReadiness{}, turned: map[string]bool{},
		counted: map[string]struct{}{}, settling: map[string]time.Time{},
	}
}

// configure replaces VIPs and streams and returns the VIPs that are no longer
// there. members are the targets of a stream.
func (a *aggregate) configure(now time.Time, c *trench.Config, members func(string) []targetset.Member) (touched vip.Set, removed []vip.VIP) {
	before, settling := a.streams, a.settling
	a.settling = map[string]time.Time{}
	if a.kernel != nil {
		for name := range a.streams {
			a.counted[name] = struct{}{} // also those that are gone
		}
	}
	a.streams, a.serving = map[string]*stream{}, map[vip.VIP][]*stream{}
	for _, s := range c.Streams {
		st := &stream{Stream: s}
		a.take(st, members(s.Name))
		st.Targets = nil // members, from all sources, are what counts
		a.streams[s.Name] = st
		for _, v := range s.VIPs {
			a.serving[v] = append(a.serving[v], st)
		}
		if end, settles := settling[s.Name]; settles {
			a.settling[s.Name] = end
		} else if _, known := before[s.Name]; !known && a.settle > 0 {
			a.settling[s.Name] = now.Add(a.settle)
		}
		a.count(st)
	}
	a.configured = vip.NewSet(c.Attractor.VIPs...)
	for v := range a.current {
		if !a.configured.Has(v) {
			removed = append(removed, v)
			delete(a.current, v)
		}
	}
	// All are touched. The set is shared and not copied, since there may be very
	// many.
	return a.configured, removed
}

// retarget takes over other targets of some streams.
func (a *aggregate) retarget(changed []trench.Stream, members func(string) []targetset.Member, touched vip.Set) {
	for _, c := range changed {
		if s, ok := a.streams[c.Name]; ok {
			a.take(s, members(c.Name))
			a.recount(s, touched)
		}
	}
}

// apply takes over changed health, and which targets are held and why.
func (a *aggregate) apply(e healthcheck.Evaluation, touched vip.Set) {
	streams := map[*stream]struct{}{}
	for _, k := range e.Removed {
		delete(a.health, k)
		if s, ok := a.streams[k.Stream]; ok {
			streams[s] = struct{}{}
		}
	}
	for _, h := range e.Changed {
		a.health[h.Key] = h
		if s, ok := a.streams[h.Stream]; ok {
			streams[s] = struct{}{}
		}
	}
	for s := range streams {
		a.recount(s, touched)
	}
}

// inService is an evaluation without the targets that an operator drained. One
// that has just been is removed there, one that returned has changed. It is called
// after apply, with the streams that changed and the keys that they had before.
func (a *aggregate) inService(e healthcheck.Evaluation, changes targetset.Changes, before map[healthcheck.Key]struct{}) (changed []healthcheck.Health, removed []healthcheck.Key) {
	now := map[healthcheck.Key]struct{}{}
	for _, c := range changes.Streams {
		s, ok := a.streams[c.Name]
		if !ok {
			continue
		}
		for _, m := range s.members {
			for _, ip := range m.IPs {
				if m.Draining == healthcheck.Drained {
					now[healthcheck.Key{Stream: s.Name, Name: m.Name, Addr: ip}] = struct{}{}
				}
			}
		}
	}
	removed = e.Removed
	for k := range before {
		_, was := a.drained[k]
		_, is := now[k]
		if h, known := a.health[k]; was && !is && known {
			changed = append(changed, h)
		}
		if was && !is {
			delete(a.drained, k)
		}
	}
	for k := range now {
		if _, was := a.drained[k]; !was {
			a.drained[k] = struct{}{}
			removed = append(removed, k)
		}
	}
	for _, h := range e.Changed {
		if _, out := a.drained[h.Key]; !out {
			changed = append(changed, h)
		}
	}
	return changed, removed
}

// takeOutage takes over what is suspected of targets that failed at once.
func (a *aggregate) takeOutage(v outage.Verdict, touched vip.Set) {
	// The detail changes while more targets fail. The first one stays, since each
	// other would be a decision of its own.
	if !v.Outage {
		a.outage = ""
	} else if a.outage == "" {
		a.outage = v.Detail
	}
	streams := map[*stream]struct{}{}
	for _, k := range v.Touched {
		if s, ok := a.streams[k.Stream]; ok {
			streams[s] = struct{}{}
		}
	}
	for s := range streams {
		a.recount(s, touched)
	}
}

// settled ends the wait for streams of which every target has a verdict, or whose
// time is over, and returns when that of the next one is.
func (a *aggregate) settled(now time.Time, touched vip.Set) (next time.Time) {
	for name, end := range a.settling {
		s := a.streams[name]
		if now.Before(end) && slices.ContainsFunc(s.tallies[:], func(t tally) bool { return t.starting > 0 }) {
			next = earlier(next, end)
			continue
		}
		delete(a.settling, name)
		for _, v := range s.VIPs {
			if a.configured.Has(v) {
				touched[v] = struct{}{}
			}
		}
	}
	return next
}

// settles reports whether a VIP waits for first verdicts on targets of its family.
func (a *aggregate) settles(v vip.VIP) bool {
	return len(a.settling) > 0 && slices.ContainsFunc(a.serving[v], func(s *stream) bool {
		_, waits := a.settling[s.Name]
		return waits && s.tallies[v.Family()].starting > 0
	})
}

// recount counts a stream again and notes the VIPs that this may change.
func (a *aggregate) recount(s *stream, touched vip.Set) {
	before, was := s.tallies, s.ready()
	a.count(s)
	if is := s.ready(); is != was {
		a.turned[s.Name] = is
	}
	for _, v := range s.VIPs {
		if s.tallies[v.Family()] != before[v.Family()] && a.configured.Has(v) {
			touched[v] = struct{}{}
		}
	}
}

func (a *aggregate) count(s *stream) {
	s.tallies = [len(vip.Families)]tally{}
	var ends [len(vip.Families)][]time.Time // of drains of targets that live and are forwarded to
	if a.kernel != nil {
		a.counted[s.Name] = struct{}{}
	}
	for i := range s.members {
		m := &s.members[i]
		_, shadowed := s.shadowed[i]
		for _, ip := range m.IPs {
			f := vip.FamilyOf(ip)
			t := &s.tallies[f]
			h, known := a.healthOf(s, m, ip)
			t.total++
			gone := a.kernel.unreachable(ip)
			why := gone
			if why == "" && known && h.State != healthcheck.Ready {
				why = h.LastError
			}
			if why != "" && m.Draining == healthcheck.Ready && t.problem == "" {
				t.problem = fmt.Sprintf("%s (%s): %s", m.Name, ip, why)
			}
			held := a.outages.Held(h.Key)
			if a.outages.Suspected(h.Key) {
				t.suspected++
			}
			passes := known && (h.State == healthcheck.Ready || held) && gone == ""
			forwarded := passes && !shadowed && (a.kernel == nil || a.kernel.serves(s.Name, f, m.Name))
			switch {
			case m.Draining == healthcheck.Drained:
				t.drained++
			case m.Draining == healthcheck.Draining:
				t.draining++
				if passes && !shadowed {
					t.leaving++
				}
				if forwarded {
					ends[f] = append(ends[f], m.DrainEnd)
				}
			case gone != "":
			case !known || h.State == healthcheck.Starting:
				t.starting++
			case passes:
				t.alive++
				if forwarded {
					t.ready++
				}
				if forwarded && h.State != healthcheck.Ready {
					t.held++
				}
			case h.State == healthcheck.Overdue:
				t.overdue++
			}
		}
	}
	for f := range s.tallies {
		t := &s.tallies[f]
		missing := s.MinReady - int(t.ready)
		if missing > 0 && missing <= len(ends[f]) {
			slices.SortFunc(ends[f], func(x, y time.Time) int { return y.Compare(x) })
			t.drainEnd = ends[f][missing-1]
			t.relieved = s.enough(t.alive) && a.kernel.able(s.Name, vip.Family(f))
		}
	}
}

// enough reports whether n targets are enough.
func (s *stream) enough(n uint32) bool { return n > 0 && n >= uint32(s.MinReady) }

// healthOf is the health of one address of a target. One whose family is not
// checked is as the other one.
func (a *aggregate) healthOf(s *stream, m *targetset.Member, ip netip.Addr) (healthcheck.Health, bool) {
	if !s.Check.Families.Has(vip.FamilyOf(ip)) {
		for _, other := range m.IPs {
			if s.Check.Families.Has(vip.FamilyOf(other)) {
				ip = other
			}
		}
	}
	h, known := a.health[healthcheck.Key{Stream: s.Name, Name: m.Name, Addr: ip}]
	return h, known
}

func (a *aggregate) judge(now time.Time, vips vip.Set) []readiness.VIPReadiness {
	var changed []readiness.VIPReadiness
	for v := range vips {
		r := a.readiness(v)
		was, known := a.current[v]
		r.Since = was.Since
		if !known || was.State != r.State {
			r.Since = now
		}
		// The times of one VIP are copies of each other, so that all fields compare.
		if !known || r != was {
			a.current[v] = r
			changed = append(changed, r)
		}
	}
	return changed
}

func (a *aggregate) readiness(v vip.VIP) readiness.VIPReadiness {
	r := readiness.VIPReadiness{VIP: v, State: readiness.NotReady}
	var starting, overdue, suspected uint32
	var enough, held, idle bool
	way := a.kernel.way(v, a.serving[v])
	for _, s := range a.serving[v] {
		t := s.tallies[v.Family()]
		idle = idle || s.enough(t.alive) || s.enough(t.alive+t.leaving)
		if !way.leadsTo(s) {
			continue
		}
		r.ReadyTargets += t.ready
		r.TotalTargets += t.total
		starting += t.starting
		overdue += t.overdue
		suspected += t.suspected
		switch {
		case way.open && (s.enough(t.ready) || t.relieved):
			held = (!enough || held) && t.ready-t.held < uint32(s.MinReady) && !t.relieved
			enough = true
		case way.open && t.drainEnd.After(r.DrainEnd):
			// This one explains the drain.
			r.DrainEnd, r.Detail = t.drainEnd, describe(s, t)
		default:
			if r.Detail == "" && t.total > 0 {
				r.Detail = describe(s, t)
			}
		}
	}
	waits := enough && a.current[v].State == readiness.NotReady && a.settles(v)
	enough = enough && !waits
	switch {
	case held && enough && a.outage != "": // while it is only pending nothing is suspected
		r.State, r.Reason, r.Detail = readiness.Ready, readinessv1.VipReason_VIP_REASON_SUSPECT, a.outage
	case enough:
		r.State, r.Reason, r.Detail = readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, ""
	case !r.DrainEnd.IsZero():
		r.State, r.Reason = readiness.Draining, readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING
	case a.kernel != nil && idle && !waits:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_DATA_PLANE, a.unforwarded(v)
	case len(a.serving[v]) == 0:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_NO_STREAM, "no stream of the trench file lists this VIP"
	case r.TotalTargets == 0:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_NO_TARGETS, fmt.Sprintf("no target has an %s address", v.Family())
	case suspected > 0:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_SUSPECT, a.outage
	case overdue > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE
	case starting > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_NOT_CHECKED
	default:
		r.Reason = readinessv1.VipReason_VIP_REASON_TOO_FEW_READY
	}
	if r.State != readiness.Draining {
		r.DrainEnd = time.Time{}
	}
	return r
}

// describe says why a stream does not serve.
func describe(s *stream, t tally) string {
	d := fmt.Sprintf("stream %s: %d of %d targets ready", s.Name, t.ready, t.total)
	if t.draining > 0 {
		d += fmt.Sprintf(", %d draining", t.draining)
	}
	if t.drained > 0 {
		d += fmt.Sprintf(", %d drained by an operator", t.drained)
	}
	d += fmt.Sprintf(", needs %d", s.MinReady)
	if t.problem != "" {
		d += "; " + t.problem
	}
	if len(d) > maxDetail {
		d = d[:maxDetail-3] + "..."
	}
	return d
}

// check is the check of a target's stream.
func (a *aggregate) check(k healthcheck.Key) trench.Check {
	if s, ok := a.streams[k.Stream]; ok {
		return s.Check
	}
	return trench.Check{}
}

// readyNames are the streams with enough ready targets in some family, and the
// first addresses of the VIPs that are ready.
func (a *aggregate) readyNames() (streams []string, vips []netip.Addr) {
	for name, s := range a.streams {
		if s.ready() {
			streams = append(streams, name)
		}
	}
	for v, r := range a.current {
		if r.State == readiness.Ready {
			vips = append(vips, v.Prefix().Addr())
		}
	}
	return streams, vips
}
