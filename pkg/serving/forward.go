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
	awake        time.Time     // end of the last stall of this process
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

// Applied reports whether the frontend had applied a position when it sent a report. A VIP that an
// older report lists as withdrawn may be advertised now: it became ready, or its gateway came up.
func Applied(report readiness.Report, position readiness.Position) bool {
	return report.Applied.InstanceID == position.InstanceID && report.Applied.Revision >= position.Revision
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
func (evaluator *Evaluator) Routes() *plan.Desired {
	desired := &plan.Desired{RoutesOnly: true, Streams: map[string]*plan.Stream{}}
	for name, s := range evaluator.streams {
		if d := evaluator.planStream(s, nil); d.RouteAll {
			desired.Streams[name] = d
		}
	}
	return desired
}

// Forward returns the next desired state of the data plane. It is called after each Evaluate, once
// the decision has a position: in that decision, VIPs that lose their last target are not ready.
func (evaluator *Evaluator) Forward(now time.Time, frontend Frontend) (out Forwarding) {
	forwarding := &evaluator.forwarding
	for name := range forwarding.counted {
		stream, ok := evaluator.streams[name]
		if !ok {
			// A removed stream differs from the sent state until its removal is sent.
			delete(forwarding.desired, name)
			forwarding.compare(name)
			continue
		}
		before, sent := forwarding.desired[name], forwarding.sent.Streams[name]
		forwarding.desired[name] = evaluator.planStream(stream, before)
		// An equal state keeps its pointer, since compare and send compare pointers.
		for _, same := range []*plan.Stream{before, sent} {
			if forwarding.desired[name].Equal(same) {
				forwarding.desired[name] = same
			}
		}
		forwarding.compare(name)
	}
	forwarding.counted = map[string]bool{}
	clear(forwarding.kernel.continuing)
	if forwarding.sent.Revision == 0 {
		forwarding.sendFirst(now, frontend, &out)
	} else {
		forwarding.sendChanged(now, frontend, &out)
	}
	for key, held := range forwarding.holds {
		what, vips := fmt.Sprintf("stream %s (%s)", key.stream, key.family), "1 VIP"
		if key.stream == "" {
			what = "every change"
		}
		if n := len(held.vips); n > 1 {
			vips = fmt.Sprintf("%d VIPs", n)
		}
		out.Held = append(out.Held, what+": until the frontend withdraws "+vips)
	}
	// The map has no order, and status must not change without a reason.
	slices.Sort(out.Held)
	return out
}

// compare updates differs for one stream.
func (forwarding *forwarding) compare(name string) {
	if forwarding.desired[name] == forwarding.sent.Streams[name] {
		delete(forwarding.differs, name)
	} else {
		forwarding.differs[name] = true
	}
}

// sendFirst replaces the kernel state of the previous process. As that is not known, all is held.
func (forwarding *forwarding) sendFirst(now time.Time, frontend Frontend, out *Forwarding) {
	var need []vip.VIP
	for v, name := range forwarding.kernel.state.VIPs {
		if forwarding.kernel.serving(name, v.Family()) &&
			!forwarding.ownerServes(forwarding.roster.owner(v, new(int)), v.Family()) {
			need = append(need, v)
		}
	}
	if !forwarding.holdBack(now, holdKey{}, need, frontend, out) {
		out.Desired = forwarding.send(maps.Clone(forwarding.desired))
		clear(forwarding.differs)
	}
}

// sendChanged sends the desired state of the streams that differ from the sent state.
func (forwarding *forwarding) sendChanged(now time.Time, frontend Frontend, out *Forwarding) {
	// Every stream is back in its sent state, so no change is left to hold back.
	if len(forwarding.differs) == 0 {
		clear(forwarding.holds)
		return
	}
	changed := map[string]bool{}
	for name := range forwarding.differs {
		changed[name] = true
		if stream := forwarding.desired[name]; stream != nil {
			last := ""
			for _, v := range stream.VIPs {
				if by := forwarding.sentOwners[v]; by != last {
					changed[by], last = true, by // it may lose the VIP
				}
			}
		}
	}
	delete(changed, "") // the owner of new VIPs
	// The change that a hold delayed may have been reverted.
	maps.DeleteFunc(forwarding.holds, func(key holdKey, _ *hold) bool { return !changed[key.stream] })
	kept := map[string][]remainder{}
	keepers := map[vip.VIP]string{} // streams that keep VIPs which their new owners do not serve yet
	for name := range changed {
		for _, family := range vip.Families {
			remainder := forwarding.remainder(name, family)
			if !forwarding.holdBack(now, holdKey{name, family}, remainder.need, frontend, out) {
				continue
			}
			kept[name] = append(kept[name], remainder)
			for _, v := range remainder.vips {
				keepers[v] = name
			}
		}
	}
	var next map[string]*plan.Stream // nil while equal to sent
	for name := range changed {
		is, sent := forwarding.interim(name, kept[name], keepers), forwarding.sent.Streams[name]
		if is.Equal(sent) {
			if is != nil && is == forwarding.desired[name] {
				forwarding.desired[name] = sent
			}
			continue
		}
		if next == nil {
			next = maps.Clone(forwarding.sent.Streams)
		}
		if next[name] = is; is == nil {
			delete(next, name)
		}
	}
	if next != nil {
		out.Desired = forwarding.send(next)
	}
	for name := range changed {
		forwarding.compare(name)
	}
	if len(forwarding.differs) == 0 {
		forwarding.differs = map[string]bool{} // iterating a map that was large stays slow
	}
}

// send returns the next desired state and records its revocations: until the kernel applied it, the
// confirmed state may still contain the removed targets and VIPs.
func (forwarding *forwarding) send(streams map[string]*plan.Stream) *plan.Desired {
	kernel := forwarding.kernel
	before := forwarding.sent.Streams
	forwarding.sent = &plan.Desired{Revision: forwarding.sent.Revision + 1, Streams: streams}
	for target, renaming := range kernel.renamed {
		if renaming.revision == 0 {
			renaming.revision = forwarding.sent.Revision
			kernel.renamed[target] = renaming
		}
	}
	sameVIPs := true
	for name := range differing(before, streams) {
		was, next := before[name], streams[name]
		if was == nil || next == nil || !slices.Equal(was.VIPs, next.VIPs) {
			sameVIPs = false
		}
		if was == nil {
			continue
		}
		// Without the revocation a target that returns within one revision would count as confirmed.
		targets := byName(next)
		for i := range was.Targets {
			target := &was.Targets[i]
			for _, family := range vip.Families {
				if keepsServing(target, family) && !keepsServing(targets[target.Name], family) {
					kernel.revoked[revocation{stream: name, target: target.Name, family: family}] = forwarding.sent.Revision
				}
			}
		}
	}
	// Nearly all changes concern targets only; the owners of all VIPs are expensive to compute.
	if sameVIPs {
		return forwarding.sent
	}
	owners := ownersOf(streams)
	clear(kernel.continuing) // by the revocations above
	for v, name := range forwarding.sentOwners {
		if by := owners[v]; by != name && !kernel.continues(streams[by], v.Family()) {
			kernel.revoked[revocation{vip: v}] = forwarding.sent.Revision
		}
	}
	forwarding.sentOwners = owners
	return forwarding.sent
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
func (forwarding *forwarding) remainder(stream string, family vip.Family) remainder {
	kernel := forwarding.kernel
	r := remainder{family: family}
	was := forwarding.sent.Streams[stream]
	if was == nil || !kernel.serving(stream, family) {
		return r
	}
	if !kernel.continues(forwarding.desired[stream], family) {
		for i := range was.Targets {
			if t := &was.Targets[i]; keepsServing(t, family) && kernel.serves(stream, family, t.Name) {
				r.targets = append(r.targets, t)
			}
		}
	}
	var near int
	for _, v := range was.VIPs {
		if v.Family() != family || kernel.state.VIPs[v] == "" || forwarding.sentOwners[v] != stream {
			continue // of another stream, or not installed
		}
		s := forwarding.roster.owner(v, &near)
		switch leaves := s == nil || s.Name != stream; {
		case leaves && forwarding.ownerServes(s, family):
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
func (forwarding *forwarding) ownerServes(s *stream, f vip.Family) bool {
	return s != nil && forwarding.kernel.continues(forwarding.desired[s.Name], f)
}

// holdBack reports whether a hold of VIPs continues, or begins.
func (forwarding *forwarding) holdBack(now time.Time, key holdKey, need []vip.VIP, frontend Frontend,
	out *Forwarding,
) bool {
	if len(need) == 0 {
		delete(forwarding.holds, key)
		return false
	}
	held := forwarding.holds[key]
	if held == nil {
		held = &hold{since: now}
		forwarding.holds[key] = held
	}
	if !slices.Equal(need, held.vips) { // nearly never
		// A VIP that joins the hold needs a later decision and the full time to withdraw.
		had := vip.NewSet(held.vips...)
		if slices.ContainsFunc(need, func(v vip.VIP) bool { return !had.Has(v) }) {
			held.revision, held.ends = frontend.Position.Revision, now.Add(forwarding.withdrawTime)
		}
	}
	held.vips = need
	// Without a frontend, wait for FrontendGone from its end and from the begin of the hold.
	gone := held.since
	if frontend.At.After(gone) {
		gone = frontend.At
	}
	if forwarding.awake.After(gone) { // a connection waits to be accepted
		gone = forwarding.awake
	}
	gone = gone.Add(FrontendGone)
	if key.stream == "" {
		gone = held.ends // a frontend connects to a restarted load balancer within seconds
	}
	release := Release{Stream: key.stream, VIPs: len(need), After: now.Sub(held.since)}
	position := readiness.Position{InstanceID: frontend.Position.InstanceID, Revision: held.revision}
	switch {
	case Applied(frontend.Report, position) && frontend.withdrew(need):
		release.Level, release.Cause = slog.LevelDebug, "the frontend withdrew the VIPs"
	case !frontend.Connected && !gone.After(now):
		release.Level, release.Cause = slog.LevelInfo, "no frontend is connected"
	case !held.ends.After(now):
		release.Level, release.Cause = slog.LevelWarn, "the frontend did not withdraw in time"
	default:
		out.Next = targetset.Soonest(out.Next, held.ends)
		if !frontend.Connected {
			out.Next = targetset.Soonest(out.Next, gone)
		}
		return true
	}
	out.Released = append(out.Released, release)
	delete(forwarding.holds, key)
	return false
}

// stalled moves the ends of holds by a stall of this process: reports wait to be read.
func (forwarding *forwarding) stalled(now time.Time, stall time.Duration) {
	if stall > 0 {
		forwarding.awake = now
		for _, held := range forwarding.holds {
			held.ends = held.ends.Add(stall)
		}
	}
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
func (forwarding *forwarding) interim(name string, kept []remainder, keepers map[vip.VIP]string) *plan.Stream {
	next := forwarding.desired[name]
	foreign := func(v vip.VIP) bool { by := keepers[v]; return by != "" && by != name }
	if len(kept) == 0 && (next == nil || !slices.ContainsFunc(next.VIPs, foreign)) {
		return next
	}
	var s plan.Stream
	if next != nil {
		s = *next
	} else {
		s = *forwarding.sent.Streams[name]
		s.VIPs, s.Targets = nil, nil
	}
	s.VIPs, s.Targets = slices.DeleteFunc(slices.Clone(s.VIPs), foreign), slices.Clone(s.Targets)
	var has vip.Set // of s.VIPs; nil until it is needed
	for _, remainder := range kept {
		if has == nil && len(remainder.vips) > 0 {
			has = vip.NewSet(s.VIPs...)
		}
		for _, v := range remainder.vips {
			if !has.Has(v) {
				s.VIPs = append(s.VIPs, v)
			}
		}
		if len(remainder.targets) == 0 {
			continue
		}
		at := make(map[string]int, len(s.Targets))
		for i := range s.Targets {
			at[s.Targets[i].Name] = i
		}
		for _, t := range remainder.targets {
			retain(&s, at, t, remainder.family)
		}
	}
	return &s
}

// retain restores the role of a target for a family in a stream. at has the indices of its targets;
// no target is restored twice for a family.
func retain(stream *plan.Stream, at map[string]int, was *plan.Target, family vip.Family) {
	i, listed := at[was.Name]
	switch {
	case !listed:
		target := plan.Target{Name: was.Name, IPs: was.IPs, Roles: [...]plan.Role{plan.Down, plan.Down}}
		target.Roles[family] = was.Roles[family]
		stream.Targets = append(stream.Targets, target)
	case !slices.Equal(stream.Targets[i].IPs, was.IPs):
		stream.Targets[i] = *was
	default:
		stream.Targets[i].Roles[family] = was.Roles[family]
	}
}
