package serving

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/vip"
)

// FrontendGone is the time without a connected frontend after which no withdrawal is awaited.
const FrontendGone = 500 * time.Millisecond

// forwarding holds the desired state of the data plane. A change that would leave a VIP without a
// target is held back: a stream keeps its last targets in the kernel, and its VIPs, until the
// frontend has withdrawn those VIPs. During the hold they are not ready.
type forwarding struct {
	kernel       *kernel
	roster       *roster
	withdrawTime time.Duration // of the frontend
	// desired maps each stream to its desired state, and sent is the state that the data plane
	// received; its revision is 0 before the first one. Equal streams share one pointer. counted
	// lists the streams that were counted again since desired was computed.
	desired map[string]*plan.Stream
	sent    *plan.Desired
	counted map[string]bool
	// differs lists the streams whose sent state differs from the desired state.
	differs map[string]bool
	// sentOwners maps each VIP to the stream in sent that serves it.
	sentOwners map[vip.VIP]string
	holds      map[holdKey]*hold
}

// holdKey names a family of a stream. An empty stream means the whole data plane, until the first
// desired state is sent.
type holdKey struct {
	stream string
	family vip.Family
}

// hold waits until VIPs are withdrawn.
type hold struct {
	vips        []vip.VIP
	revision    uint64 // of the decision in which the VIPs became not ready
	since, ends time.Time
}

// Frontend is the newest report of the frontend.
type Frontend struct {
	readiness.Report
	Reported func(vip.VIP) (readiness.VIPReport, bool)
	Position readiness.Position // of the newest decision, which the frontend may not have applied yet
}

// Applied reports whether the frontend had applied position p when it sent report r. A VIP that an
// older report lists as withdrawn may be advertised now: it just became ready, or its gateway just
// came up.
func Applied(r readiness.Report, p readiness.Position) bool {
	return r.Applied.InstanceID == p.InstanceID && r.Applied.Revision >= p.Revision
}

// Forwarding is the next desired state, with the holds that delay changes.
type Forwarding struct {
	Desired  *plan.Desired // nil if it is unchanged
	Held     []string      // descriptions of the holds that wait for the frontend
	Released []Release     // holds that ended
	Next     time.Time     // when a hold expires; zero for never
}

// Release is the end of a hold.
type Release struct {
	Level  slog.Level // of the log line
	Cause  string
	Stream string
	VIPs   int
	After  time.Duration
}

// Routes returns the desired state until the first call of Forward: routes to the targets that are
// checked through their VIPs.
func (e *Evaluator) Routes() *plan.Desired {
	w := &plan.Desired{RoutesOnly: true, Streams: map[string]*plan.Stream{}}
	for name, s := range e.streams {
		if d := e.planStream(s, nil); d.RouteAll {
			w.Streams[name] = d
		}
	}
	return w
}

// Forward returns the next desired state of the data plane. It is called after each Evaluate, once
// the decision has a position: in that decision, VIPs that lose their last target are not ready.
func (e *Evaluator) Forward(now time.Time, frontend Frontend) (out Forwarding) {
	w := &e.forwarding
	for name := range w.counted {
		s, ok := e.streams[name]
		if !ok {
			delete(w.desired, name)
			w.compare(name)
			continue
		}
		before, sent := w.desired[name], w.sent.Streams[name]
		w.desired[name] = e.planStream(s, before)
		// An equal state keeps its pointer, since compare and send compare pointers.
		for _, same := range []*plan.Stream{before, sent} {
			if w.desired[name].Equal(same) {
				w.desired[name] = same
			}
		}
		w.compare(name)
	}
	w.counted = map[string]bool{}
	if w.sent.Revision == 0 {
		w.sendFirst(now, frontend, &out)
	} else {
		w.sendChanged(now, frontend, &out)
	}
	for key, h := range w.holds {
		what, vips := fmt.Sprintf("stream %s (%s)", key.stream, key.family), "1 VIP"
		if key.stream == "" {
			what = "every change"
		}
		if n := len(h.vips); n > 1 {
			vips = fmt.Sprintf("%d VIPs", n)
		}
		out.Held = append(out.Held, what+": until the frontend withdraws "+vips)
	}
	slices.Sort(out.Held)
	return out
}

// compare updates differs for one stream.
func (w *forwarding) compare(name string) {
	if w.desired[name] == w.sent.Streams[name] {
		delete(w.differs, name)
	} else {
		w.differs[name] = true
	}
}

// sendFirst replaces the kernel state of the previous process. Its streams are not fully known, so
// a hold covers the whole state.
func (w *forwarding) sendFirst(now time.Time, frontend Frontend, out *Forwarding) {
	var need []vip.VIP
	for v, name := range w.kernel.state.VIPs {
		if w.kernel.serving(name, v.Family()) && !w.ownerServes(w.roster.owner(v, new(int)), v.Family()) {
			need = append(need, v)
		}
	}
	if !w.holdBack(now, holdKey{}, need, frontend, out) {
		out.Desired = w.send(maps.Clone(w.desired))
		clear(w.differs)
	}
}

// sendChanged sends the desired state of the streams that differ from the sent state.
func (w *forwarding) sendChanged(now time.Time, frontend Frontend, out *Forwarding) {
	// Every stream is back in its sent state, so no change is left to hold back.
	if len(w.differs) == 0 {
		clear(w.holds)
		return
	}
	changed := map[string]bool{}
	for name := range w.differs {
		changed[name] = true
		if s := w.desired[name]; s != nil {
			last := ""
			for _, v := range s.VIPs {
				if by := w.sentOwners[v]; by != last {
					changed[by], last = true, by // it may lose the VIP
				}
			}
		}
	}
	delete(changed, "") // the owner of new VIPs
	// The change that a hold delayed may have been reverted.
	maps.DeleteFunc(w.holds, func(key holdKey, _ *hold) bool { return !changed[key.stream] })
	kept := map[string][]remainder{}
	keepers := map[vip.VIP]string{} // streams that keep VIPs which their new owners do not serve yet
	for name := range changed {
		for _, f := range vip.Families {
			r := w.remainder(name, f)
			if !w.holdBack(now, holdKey{name, f}, r.need, frontend, out) {
				continue
			}
			kept[name] = append(kept[name], r)
			for _, v := range r.vips {
				keepers[v] = name
			}
		}
	}
	var next map[string]*plan.Stream // nil while equal to sent
	for name := range changed {
		is, sent := w.interim(name, kept[name], keepers), w.sent.Streams[name]
		if is.Equal(sent) {
			if is != nil && is == w.desired[name] {
				w.desired[name] = sent
			}
			continue
		}
		if next == nil {
			next = maps.Clone(w.sent.Streams)
		}
		if next[name] = is; is == nil {
			delete(next, name)
		}
	}
	if next != nil {
		out.Desired = w.send(next)
	}
	for name := range changed {
		w.compare(name)
	}
	if len(w.differs) == 0 {
		w.differs = map[string]bool{} // iterating a map that was large stays slow
	}
}

// send returns the next desired state and records its revocations: until the kernel applied it, the
// confirmed state may still contain the removed targets and VIPs.
func (w *forwarding) send(streams map[string]*plan.Stream) *plan.Desired {
	k := w.kernel
	before := w.sent.Streams
	w.sent = &plan.Desired{Revision: w.sent.Revision + 1, Streams: streams}
	sameVIPs := true
	for name := range differing(before, streams) {
		was, is := before[name], streams[name]
		if was == nil || is == nil || !slices.Equal(was.VIPs, is.VIPs) {
			sameVIPs = false
		}
		if was == nil {
			continue
		}
		targets := byName(is)
		for i := range was.Targets {
			t := &was.Targets[i]
			for _, f := range vip.Families {
				if keepsServing(t, f) && !keepsServing(targets[t.Name], f) {
					k.revoked[revocation{stream: name, target: t.Name, family: f}] = w.sent.Revision
				}
			}
		}
	}
	if sameVIPs {
		return w.sent
	}
	owners := ownersOf(streams)
	for v, name := range w.sentOwners {
		if by := owners[v]; by != name && !k.continues(streams[by], v.Family()) {
			k.revoked[revocation{vip: v}] = w.sent.Revision
		}
	}
	w.sentOwners = owners
	return w.sent
}

// remainder is the part of a family of a stream that stays until VIPs are withdrawn.
type remainder struct {
	family  vip.Family
	need    []vip.VIP      // must be withdrawn first
	vips    []vip.VIP      // that the stream no longer lists
	targets []*plan.Target // that serve and are to stop
}

// remainder returns the VIPs that would lose their last target if a family of a stream reached its
// desired state, with the targets that keep them forwarded.
func (w *forwarding) remainder(stream string, f vip.Family) remainder {
	k := w.kernel
	r := remainder{family: f}
	was := w.sent.Streams[stream]
	if was == nil || !k.serving(stream, f) {
		return r
	}
	if !k.continues(w.desired[stream], f) {
		for i := range was.Targets {
			if t := &was.Targets[i]; keepsServing(t, f) && k.serves(stream, f, t.Name) {
				r.targets = append(r.targets, t)
			}
		}
	}
	var near int
	for _, v := range was.VIPs {
		if v.Family() != f || k.state.VIPs[v] == "" || w.sentOwners[v] != stream {
			continue // of another stream, or not installed
		}
		s := w.roster.owner(v, &near)
		switch leaves := s == nil || s.Name != stream; {
		case leaves && w.ownerServes(s, f):
		case leaves:
			r.vips = append(r.vips, v)
			r.need = append(r.need, v)
		case len(r.targets) > 0:
			r.need = append(r.need, v)
		}
	}
	return r
}

// ownerServes reports whether the future owner of VIPs has a target that the kernel forwards to and
// that continues to serve; a nil stream has none.
func (w *forwarding) ownerServes(s *stream, f vip.Family) bool {
	return s != nil && w.kernel.continues(w.desired[s.Name], f)
}

// holdBack reports whether a hold of VIPs continues, or begins.
func (w *forwarding) holdBack(now time.Time, key holdKey, need []vip.VIP, frontend Frontend, out *Forwarding) bool {
	if len(need) == 0 {
		delete(w.holds, key)
		return false
	}
	h := w.holds[key]
	if h == nil {
		h = &hold{since: now}
		w.holds[key] = h
	}
	if !slices.Equal(need, h.vips) { // nearly never
		// A VIP that joins the hold needs a later decision and the full time to withdraw.
		had := vip.NewSet(h.vips...)
		if slices.ContainsFunc(need, func(v vip.VIP) bool { return !had.Has(v) }) {
			h.revision, h.ends = frontend.Position.Revision, now.Add(w.withdrawTime)
		}
	}
	h.vips = need
	// Without a frontend, wait for FrontendGone since the disconnection or the begin of the hold,
	// whichever is later.
	gone := h.since
	if frontend.At.After(gone) {
		gone = frontend.At
	}
	gone = gone.Add(FrontendGone)
	if key.stream == "" {
		gone = h.ends // a frontend connects to a restarted load balancer within seconds
	}
	release := Release{Stream: key.stream, VIPs: len(need), After: now.Sub(h.since)}
	p := readiness.Position{InstanceID: frontend.Position.InstanceID, Revision: h.revision}
	switch {
	case Applied(frontend.Report, p) && frontend.withdrew(need):
		release.Level, release.Cause = slog.LevelDebug, "the frontend withdrew the VIPs"
	case !frontend.Connected && !gone.After(now):
		release.Level, release.Cause = slog.LevelInfo, "no frontend is connected"
	case !h.ends.After(now):
		release.Level, release.Cause = slog.LevelWarn, "the frontend did not withdraw in time"
	default:
		out.Next = targetset.Soonest(out.Next, h.ends)
		if !frontend.Connected {
			out.Next = targetset.Soonest(out.Next, gone)
		}
		return true
	}
	out.Released = append(out.Released, release)
	delete(w.holds, key)
	return false
}

// withdrew reports whether a complete report advertises none of the VIPs.
func (f *Frontend) withdrew(vips []vip.VIP) bool {
	if !f.Complete || f.Advertised == 0 {
		return f.Complete
	}
	for _, v := range vips {
		r, known := f.Reported(v)
		if known && r.Advertisement != readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN {
			return false
		}
	}
	return true
}

// interim returns the state to send for a stream during holds: its desired state with the kept
// remainder, and without the VIPs that another stream keeps.
func (w *forwarding) interim(name string, kept []remainder, keepers map[vip.VIP]string) *plan.Stream {
	is := w.desired[name]
	foreign := func(v vip.VIP) bool { by := keepers[v]; return by != "" && by != name }
	if len(kept) == 0 && (is == nil || !slices.ContainsFunc(is.VIPs, foreign)) {
		return is
	}
	var s plan.Stream
	if is != nil {
		s = *is
	} else {
		s = *w.sent.Streams[name]
		s.VIPs, s.Targets = nil, nil
	}
	s.VIPs, s.Targets = slices.DeleteFunc(slices.Clone(s.VIPs), foreign), slices.Clone(s.Targets)
	var has vip.Set // of s.VIPs; nil until it is needed
	for _, r := range kept {
		if has == nil && len(r.vips) > 0 {
			has = vip.NewSet(s.VIPs...)
		}
		for _, v := range r.vips {
			if !has.Has(v) {
				s.VIPs = append(s.VIPs, v)
			}
		}
		for _, t := range r.targets {
			retain(&s, t, r.family)
		}
	}
	return &s
}

// retain restores the role of a target for a family in a stream.
func retain(s *plan.Stream, was *plan.Target, f vip.Family) {
	i := slices.IndexFunc(s.Targets, func(t plan.Target) bool { return t.Name == was.Name })
	switch {
	case i < 0:
		t := plan.Target{Name: was.Name, IPs: was.IPs, Roles: [...]plan.Role{plan.Down, plan.Down}}
		t.Roles[f] = was.Roles[f]
		s.Targets = append(s.Targets, t)
	case !slices.Equal(s.Targets[i].IPs, was.IPs):
		s.Targets[i] = *was
	default:
		s.Targets[i].Roles[f] = was.Roles[f]
	}
}
