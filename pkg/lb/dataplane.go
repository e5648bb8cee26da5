package lb

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// plane is the data plane as the loop sees it: a [dataplane.Plane], or a script.
type plane interface {
	Configure(*dataplane.Desired)
	State() *latest.Value[dataplane.State]
	Ready() <-chan struct{}
}

// frontend is what the frontend says it does: a [readiness.Server], or a script.
type frontend interface {
	Report() *latest.Value[readiness.Report]
	Reported(vip.VIP) (readiness.VIPReport, bool)
}

// forwarding tells the data plane what is wanted. It belongs to the loop and never
// waits.
//
// What leads a VIP nowhere is held back: a stream keeps the last targets that it has
// in the kernel, and its VIPs, until the frontend has reported that those VIPs are
// withdrawn, or cannot, or had the time to. They are not ready meanwhile.
type forwarding struct {
	plane    plane
	frontend frontend
	position func() readiness.Position // of the newest decision
	patience time.Duration             // how long the frontend may take
	patient  bool                      // only checks take targets out
	log      *slog.Logger
	applied  func(time.Duration) // takes how long the kernel took; must not block

	// desired is what should be, wanted what the data plane got; nil before the
	// first time.
	desired map[string]*dataplane.Stream
	wanted  *dataplane.Desired
	// pending are streams in which they differ, or may.
	pending map[string]struct{}
	holds   map[holdKey]*hold
	// owners are the streams that are to serve VIPs; nil until they are read.
	owners map[vip.VIP]string
	// assigned are those of the desired state that the data plane got.
	assigned map[vip.VIP]string
	// next is when a hold may end by itself; zero for never. reported is closed when
	// the frontend says something new; nil while nothing is held back.
	next     time.Time
	reported <-chan struct{}
	// sentAt is when Wanted that the kernel does not have yet was sent.
	sentAt map[uint64]time.Time

	shown atomic.Pointer[forwarded]
}

// forwarded is what people see of it.
type forwarded struct {
	wanted *dataplane.Desired
	held   []string
}

// holdKey is what is held back: a family of a stream. Before the first Wanted the
// stream is "", and all is.
type holdKey struct {
	stream string
	family vip.Family
}

// hold waits for VIPs to be withdrawn.
type hold struct {
	vips vip.Set
	// revision is that of the decision with which the VIPs were no longer ready.
	revision    uint64
	since, ends time.Time
}

func newForwarding(p plane, f frontend, position func() readiness.Position, drainTime time.Duration, log *slog.Logger) *forwarding {
	return &forwarding{
		plane: p, frontend: f, position: position, patience: drainTime + stopMargin, log: log, applied: func(time.Duration) {},
		desired: map[string]*dataplane.Stream{}, pending: map[string]struct{}{}, holds: map[holdKey]*hold{}, sentAt: map[uint64]time.Time{},
	}
}

// update tells the data plane what changed. It is called after the decision, which
// says of VIPs that are about to lead nowhere that they are not ready.
func (w *forwarding) update(now time.Time, a *aggregate) {
	state, kernel := &a.kernel.state, a.kernel
	for revision, at := range w.sentAt {
		if revision <= state.Revision {
			w.applied(max(0, state.At.Sub(at)))
			delete(w.sentAt, revision)
		}
	}
	w.reckon(a)
	if len(w.pending) == 0 && w.wanted != nil {
		return
	}
	report, changed := w.frontend.Report().Get()
	w.reported, w.next = nil, time.Time{}
	if w.wanted == nil {
		w.begin(now, kernel, report)
	} else {
		w.goOn(now, kernel, report)
	}
	if len(w.holds) > 0 {
		w.reported = changed
	}
	w.show()
}

// reckon works out what should be of the streams that were recounted.
func (w *forwarding) reckon(a *aggregate) {
	for name := range a.counted {
		before := w.desired[name]
		s, ok := a.streams[name]
		if !ok {
			delete(w.desired, name)
			w.owners = nil
		} else if now := a.forwardable(s, before); !sameStream(now, before) {
			w.desired[name] = now
			if before == nil || !slices.Equal(before.VIPs, now.VIPs) {
				w.owners = nil
				for _, v := range now.VIPs {
					if by := w.assigned[v]; by != "" && by != name {
						w.pending[by] = struct{}{} // it may have to give it up
					}
				}
			}
		}
		if w.wanted == nil || w.wanted.Streams[name] != w.desired[name] {
			w.pending[name] = struct{}{}
		}
	}
	clear(a.counted)
}

// begin is the first time: what the kernel has was put there by a load balancer
// before us, and we cannot name all of it.
func (w *forwarding) begin(now time.Time, kernel *kernelView, report readiness.Report) {
	need := vip.Set{}
	byStream := map[string][]vip.VIP{}
	for v, name := range kernel.state.VIPs {
		byStream[name] = append(byStream[name], v)
	}
	for name, vips := range byStream {
		for _, v := range vips {
			f := v.Family()
			switch leaves := w.owner(v) != name; {
			case !kernel.serving(name, f):
			case leaves && w.received(kernel, v):
			case !leaves && stays(kernel, w.desired[name], f):
			default:
				need[v] = struct{}{}
			}
		}
	}
	if w.holdBack(now, holdKey{}, need, report) {
		return
	}
	w.send(now, kernel, maps.Clone(w.desired))
}

// goOn brings streams from the desired state that the data plane got to the new one.
func (w *forwarding) goOn(now time.Time, kernel *kernelView, report readiness.Report) {
	elsewhere := map[vip.VIP]string{} // VIPs that a stream keeps
	keep := map[holdKey]keeping{}
	for name := range w.pending {
		for _, f := range vip.Families {
			key := holdKey{name, f}
			k := w.loss(kernel, key)
			if !w.holdBack(now, key, k.need, report) {
				continue
			}
			keep[key] = k
			for _, v := range k.vips {
				elsewhere[v] = name
			}
		}
	}
	var next map[string]*dataplane.Stream
	for name := range w.pending {
		was, is := w.wanted.Streams[name], w.effective(name, keep, elsewhere)
		if sameStream(was, is) {
			is = was
		}
		if !w.keeps(keep, name) && sameStream(is, w.desired[name]) {
			delete(w.pending, name)
		}
		if is == was {
			continue
		}
		if next == nil {
			next = maps.Clone(w.wanted.Streams)
		}
		if next[name] = is; is == nil {
			delete(next, name)
		}
	}
	if next != nil {
		w.send(now, kernel, next)
	}
}

func (*forwarding) keeps(keep map[holdKey]keeping, name string) bool {
	return slices.ContainsFunc(vip.Families[:], func(f vip.Family) bool { _, ok := keep[holdKey{name, f}]; return ok })
}

func (w *forwarding) send(now time.Time, kernel *kernelView, streams map[string]*dataplane.Stream) {
	before, revision := map[string]*dataplane.Stream{}, uint64(1)
	if w.wanted != nil {
		before, revision = w.wanted.Streams, w.wanted.Revision+1
	} else {
		clear(w.pending)
	}
	w.wanted = &dataplane.Desired{Revision: revision, Streams: streams}
	w.doubt(kernel, before)
	w.sentAt[revision] = now
	w.plane.Configure(w.wanted)
}

// doubt notes what is undone by what is wanted now: until that was applied, the
// state that is known may still have it.
func (w *forwarding) doubt(kernel *kernelView, before map[string]*dataplane.Stream) {
	if kernel.doubts == nil {
		kernel.doubts = map[doubt]uint64{}
	}
	vips := len(before) == 0
	for name, was := range before {
		is := w.wanted.Streams[name]
		if is == was {
			continue
		}
		vips = vips || is == nil || !slices.Equal(was.VIPs, is.VIPs)
		stay := map[string]*dataplane.Target{}
		if is != nil {
			for i := range is.Targets {
				stay[is.Targets[i].Name] = &is.Targets[i]
			}
		}
		for i := range was.Targets {
			t, now := &was.Targets[i], stay[was.Targets[i].Name]
			for _, f := range vip.Families {
				if goesOn(t, f) && (now == nil || !goesOn(now, f)) {
					kernel.doubts[doubt{stream: name, target: t.Name, family: f}] = w.wanted.Revision
				}
			}
		}
	}
	for name := range w.wanted.Streams {
		vips = vips || before[name] == nil
	}
	if !vips {
		return
	}
	told := owners(w.wanted.Streams)
	for v, name := range w.assigned {
		if by := told[v]; by != name && (by == "" || !stays(kernel, w.wanted.Streams[by], v.Family())) {
			kernel.doubts[doubt{vip: v}] = w.wanted.Revision
		}
	}
	w.assigned = told
}

// keeping is what a family of a stream keeps for the time being.
type keeping struct {
	// need are the VIPs that must be withdrawn first.
	need vip.Set
	// vips are those that the stream no longer has.
	vips []vip.VIP
	// targets are those that serve and no longer should.
	targets []*dataplane.Target
}

// loss finds the VIPs that would lead nowhere if a family of a stream became what it
// should be, and what they need.
func (w *forwarding) loss(kernel *kernelView, key holdKey) (k keeping) {
	was, is := w.wanted.Streams[key.stream], w.desired[key.stream]
	if was == nil || !kernel.serving(key.stream, key.family) {
		return k
	}
	k.need = vip.Set{}
	if is == nil || !stays(kernel, is, key.family) {
		for i := range was.Targets {
			t := &was.Targets[i]
			if goesOn(t, key.family) && kernel.serves(key.stream, key.family, t.Name) {
				k.targets = append(k.targets, t)
			}
		}
	}
	for _, v := range was.VIPs {
		if v.Family() != key.family || w.assigned[v] != key.stream {
			continue
		}
		if _, forwarded := kernel.state.VIPs[v]; !forwarded {
			continue // so that it never was ready
		}
		leaves := w.owner(v) != key.stream
		switch {
		case leaves && w.received(kernel, v):
		case leaves:
			k.vips = append(k.vips, v)
			k.need[v] = struct{}{}
		case len(k.targets) > 0:
			k.need[v] = struct{}{}
		}
	}
	return k
}

// stays reports whether a target that serves continues to serve.
func stays(kernel *kernelView, s *dataplane.Stream, f vip.Family) bool {
	for i := range s.Targets {
		if t := &s.Targets[i]; goesOn(t, f) && kernel.serves(s.Name, f, t.Name) {
			return true
		}
	}
	return false
}

// goesOn reports whether a target that serves would go on with its role.
func goesOn(t *dataplane.Target, f vip.Family) bool {
	return t.Roles[f] == dataplane.Serving || t.Roles[f] == dataplane.Unknown
}

// owner is the stream that is to serve a VIP; "" for none.
func (w *forwarding) owner(v vip.VIP) string {
	if w.owners == nil {
		w.owners = owners(w.desired)
	}
	return w.owners[v]
}

// owners are the streams that serve VIPs: of those that have one that whose name
// sorts first.
func owners(streams map[string]*dataplane.Stream) map[vip.VIP]string {
	all := map[vip.VIP]string{}
	for name, s := range streams {
		for _, v := range s.VIPs {
			if by, known := all[v]; !known || name < by {
				all[v] = name
			}
		}
	}
	return all
}

// received reports whether the stream that is to have a VIP serves already.
func (w *forwarding) received(kernel *kernelView, v vip.VIP) bool {
	by := w.owner(v)
	return by != "" && stays(kernel, w.desired[by], v.Family())
}

// holdBack reports whether a hold continues, or begins.
func (w *forwarding) holdBack(now time.Time, key holdKey, need vip.Set, report readiness.Report) bool {
	h := w.holds[key]
	if len(need) == 0 {
		delete(w.holds, key)
		return false
	}
	if h == nil {
		h = &hold{since: now}
		w.holds[key] = h
	}
	for v := range need {
		if !h.vips.Has(v) {
			h.revision, h.ends = w.position().Revision, now.Add(w.patience)
			break
		}
	}
	h.vips = need
	p := w.position()
	p.Revision = h.revision
	log := w.log.With("stream", key.stream, "vips", len(need), "after", now.Sub(h.since).Round(time.Millisecond))
	alone := h.since
	if report.At.After(alone) {
		alone = report.At
	}
	alone = alone.Add(reporterGone)
	if key.stream == "" {
		alone = h.ends // a frontend comes back to a restarted load balancer within seconds
	}
	switch {
	case heardOut(report, p) && w.withdrawn(report, need):
		log.Debug("the frontend withdrew the VIPs; their last targets leave the data plane")
	case !report.Connected && !alone.After(now):
		log.Info("no frontend is connected; the last targets of VIPs leave the data plane")
	case !h.ends.After(now):
		log.Warn("the frontend did not withdraw in time; the last targets of VIPs leave the data plane")
	default:
		w.next = earlier(w.next, h.ends)
		if !report.Connected {
			w.next = earlier(w.next, alone)
		}
		return true
	}
	delete(w.holds, key)
	return false
}

// withdrawn reports whether a complete report advertises none of the VIPs.
func (w *forwarding) withdrawn(r readiness.Report, vips vip.Set) bool {
	if !r.Complete {
		return false
	}
	if r.Advertised == 0 {
		return true
	}
	for v := range vips {
		if rep, known := w.frontend.Reported(v); known && rep.Advertisement != readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN {
			return false
		}
	}
	return true
}

// effective is what a stream is to be for the time being: what it should be, and
// what is kept. VIPs that another stream keeps stay there.
func (w *forwarding) effective(name string, keep map[holdKey]keeping, elsewhere map[vip.VIP]string) *dataplane.Stream {
	is := w.desired[name]
	var kept [len(vip.Families)]keeping
	holds := false
	for _, f := range vip.Families {
		k, ok := keep[holdKey{name, f}]
		kept[f], holds = k, holds || ok
	}
	foreign := is != nil && len(elsewhere) > 0 && slices.ContainsFunc(is.VIPs, func(v vip.VIP) bool { by, ok := elsewhere[v]; return ok && by != name })
	if !holds && !foreign {
		return is
	}
	e := &dataplane.Stream{}
	if is != nil {
		*e = *is
		e.Targets = slices.Clone(is.Targets)
	} else {
		*e = *w.wanted.Streams[name]
		e.VIPs, e.Targets = nil, nil
	}
	var vips []vip.VIP
	for _, v := range e.VIPs {
		if by, ok := elsewhere[v]; !ok || by == name {
			vips = append(vips, v)
		}
	}
	e.VIPs = vips
	for _, f := range vip.Families {
		for _, v := range kept[f].vips {
			if !slices.Contains(e.VIPs, v) {
				e.VIPs = append(e.VIPs, v)
			}
		}
		for _, t := range kept[f].targets {
			retain(e, t, f)
		}
	}
	return e
}

// retain has a stream keep what a target did for a family.
func retain(s *dataplane.Stream, was *dataplane.Target, f vip.Family) {
	i := slices.IndexFunc(s.Targets, func(t dataplane.Target) bool { return t.Name == was.Name })
	switch {
	case i < 0:
		t := dataplane.Target{Name: was.Name, IPs: was.IPs}
		for other := range t.Roles {
			t.Roles[other] = dataplane.Down
		}
		t.Roles[f] = was.Roles[f]
		s.Targets = append(s.Targets, t)
	case !slices.Equal(s.Targets[i].IPs, was.IPs):
		s.Targets[i] = *was
	default:
		s.Targets[i].Roles[f] = was.Roles[f]
	}
}

func sameStream(a, b *dataplane.Stream) bool {
	if a == nil || b == nil || a == b {
		return a == b
	}
	return a.Size == b.Size && a.Seed == b.Seed && a.DrainTime == b.DrainTime && slices.Equal(a.VIPs, b.VIPs) &&
		slices.EqualFunc(a.Targets, b.Targets, func(x, y dataplane.Target) bool {
			return x.Name == y.Name && x.Roles == y.Roles && slices.Equal(x.IPs, y.IPs)
		})
}

// show shows people what is wanted and what is held back.
func (w *forwarding) show() {
	s := &forwarded{wanted: w.wanted}
	for key, h := range w.holds {
		what := fmt.Sprintf("stream %s (%s)", key.stream, key.family)
		if key.stream == "" {
			what = "every change"
		}
		vips := "1 VIP"
		if n := len(h.vips); n > 1 {
			vips = fmt.Sprintf("%d VIPs", n)
		}
		s.held = append(s.held, what+": until the frontend withdraws "+vips)
	}
	slices.Sort(s.held)
	w.shown.Store(s)
}
