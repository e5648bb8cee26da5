package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// timeFormat is the format of times of day.
const timeFormat = "15:04:05.000"

// rule limits how long a VIP may be held after a cause (docs/architecture.md#failure-table).
type rule struct {
	cause   string
	subject string // of the timeline; "" for the targets of the VIP
	state   state
	bound   time.Duration
	// needs returns the prefixes of the subjects that have to act. While one of them is disturbed,
	// and for its grace after that, this rule is suspended, and the bound starts again: a separate
	// rule covers the fault of that subject.
	needs func(gateway, family int) []string
}

// stallTime is how long BIRD before 2.14, of the pod or of a gateway, may sleep on the end of a
// session before it removes the routes: device { scan time 1 } wakes it up
// (docs/bird.md#sleeping-over-scheduled-work).
const stallTime = time.Second

// frrDelay is how long FRR's bgpd takes for a withdrawal: it waits 50 ms before each best path
// selection, and 10 ms after a lost session (docs/adr/0051-external-speakers.md).
const frrDelay = 75 * time.Millisecond

// chain returns the subjects between a cause and a gateway's table, beginning with from.
func chain(from string) func(gateway, family int) []string {
	return func(gateway, family int) []string {
		all := []string{"lb", "stream", "svid", "frontend", "announcer", "speaker"}
		return append(slices.Clone(all[slices.Index(all, from):]), last(gateway, family)...)
	}
}

// last returns the path to the gateway and the gateway.
func last(gateway, family int) []string {
	return []string{
		fmt.Sprintf("path/%d/*/", gateway), fmt.Sprintf("path/%d/%d/", gateway, family), gatewaySubject(gateway),
	}
}

// only returns the gateway.
func only(gateway, _ int) []string { return []string{gatewaySubject(gateway)} }

// grace is how long a subject, once it is healthy, may still act on earlier state. A process
// that ended needs none: its routes end with it, and a new process may raise only ready VIPs. A
// process that was stopped has to read its queued input. A session whose packets were lost keeps
// its routes: TCP retransmits after as long as the loss lasted, and the hold timer ends the
// session.
func grace(subject string, disturbed time.Duration) time.Duration {
	switch {
	case subject == "announcer", strings.HasPrefix(subject, "path/"):
		return min(holdTime+500*time.Millisecond+stallTime, 500*time.Millisecond+2*disturbed)
	case subject == "speaker", strings.HasPrefix(subject, "gateway/"):
		return 500*time.Millisecond + stallTime
	default:
		return 300 * time.Millisecond
	}
}

// forwardBound is how long a family may be advertised after a sysctl stopped its
// forwarding.
const forwardBound = time.Second

// rules returns the bounds of docs/architecture.md#failure-table with the numbers of this
// trench. external is true with an FRR as the speaker.
func rules(gateway, vip int, external bool) []rule {
	family := vips[vip].family
	speaker, delay, stall := "BIRD", time.Duration(0), stallTime
	if external {
		speaker, delay, stall = "FRR", frrDelay, 0
	}
	detect := checkFall*(checkInterval+checkTimeout) + checkInterval
	cut := holdTime + 500*time.Millisecond + stallTime
	all := []rule{
		{"no target accepts connections", "", down, detect + 50*time.Millisecond, chain("lb")},
		{"the kernel does not forward", kernelSubject(family), down, forwardBound, chain("lb")},
		{"the lb is dead", "lb", down, 10 * time.Millisecond, chain("stream")},
		{"the lb is stopped", "lb", stopped, lease + 50*time.Millisecond, chain("stream")},
		{"the lb was asked to end", "lb", terminating, drainTime + 2*time.Second, chain("stream")},
		{"the readiness socket is closed", "stream", down, 10 * time.Millisecond, chain("svid")},
		{"the readiness socket is silent", "stream", stopped, lease + 50*time.Millisecond, chain("svid")},
		{"an SVID expired", "svid", down, 10 * time.Millisecond, chain("frontend")},
		{"the frontend is dead", "frontend", down, 40*time.Millisecond + stall, chain("announcer")},
		{"the frontend is stopped", "frontend", stopped, holdTime + 500*time.Millisecond + stall, chain("announcer")},
		{"the frontend was asked to end", "frontend", terminating, drainTime + 2*time.Second, chain("announcer")},
		{"the announcer's packets are dropped", "announcer", stopped, holdTime + 500*time.Millisecond, chain("speaker")},
		{"it was removed", vipSubject(vip), down, drainTime + 200*time.Millisecond, chain("frontend")},
	}
	for i := range all {
		all[i].bound += delay
	}
	all = append(all,
		rule{speaker + " is dead", "speaker", down, 10*time.Millisecond + stallTime, last},
		rule{speaker + " is stopped", "speaker", stopped, cut, last})
	for _, path := range []string{pathSubject(gateway, "link"), familySubject(gateway, family, "blackhole")} {
		all = append(all,
			rule{"the wire is down", path, down, cut, only},
			rule{"packets are dropped", path, stopped, cut, only},
		)
	}
	return all
}

// event is an update of a VIP that a gateway received.
type event struct {
	at        time.Time
	vip       int
	gateway   int
	withdrawn bool
	// deferred is true for an announcement with 65535:0 (RFC 8326).
	deferred bool
	// died is true if the gateway lost the route because it ended itself.
	died bool
}

func (e event) String() string {
	what := "announced"
	switch {
	case e.died:
		what = "forgotten: the gateway ended"
	case e.withdrawn:
		what = "withdrawn"
	case e.deferred:
		what = "announced with 65535:0"
	}
	return fmt.Sprintf("%s %s %s: %s", e.at.Format(timeFormat), gatewayName(e.gateway), vips[e.vip].prefix, what)
}

// injection is a fault that was injected.
type injection struct {
	fault fault
	from  time.Time
}

// window holds the records between two calm points. Before it, everything was healthy and every
// gateway held every VIP.
type window struct {
	from, to time.Time
	events   []event
	changes  []change
	faults   []injection
	// late is how late timers were at most between two moments.
	late     func(from, to time.Time) time.Duration
	external bool // the speaker is an FRR
}

// Slack of every bound on a busy machine: a constant part, and a
// multiple of the measured delay, since a decision passes through several
// processes that each have to be scheduled.
const (
	alwaysSlack = 300 * time.Millisecond
	lateSlack   = 3
)

// slack returns the tolerance of a bound for the interval.
func (w *window) slack(from, to time.Time) time.Duration {
	return alwaysSlack + lateSlack*w.late(from.Add(-time.Second), to)
}

// excuse is the delay of timers from which an UPDATE without a reason is attributed to the
// machine: it may have caused a missed check of a target, or a missed lease.
const excuse = 300 * time.Millisecond

// excuseAftermath is how long a session, or a VIP, that was lost for lack of a CPU may take to
// come back, or to be lost once more: for BFD the session is new.
const excuseAftermath = 5 * time.Second

// violation is something that must not happen.
type violation struct {
	what         string
	vip, gateway int // -1: not a particular one
}

// measure is how long a VIP was held after a cause, where it was withdrawn.
type measure struct {
	cause string
	held  time.Duration
	bound time.Duration // without slack
}

// evaluation is the result for a window.
type evaluation struct {
	violations []violation
	measures   []measure
	excused    int // UPDATEs without a reason on a machine that was too busy
}

// evaluate compares the updates of the gateways with the timeline. It is a pure function.
func evaluate(w *window) evaluation {
	var ev evaluation
	h := newHistory(w.changes, w.to)
	for g := range gateways {
		for v := range vips {
			received := slices.DeleteFunc(slices.Clone(w.events),
				func(e event) bool { return e.vip != v || e.gateway != g })
			ev.holds(w, h, g, v, received)
			ev.raises(w, h, g, v, received)
			ev.reasons(w, g, v, received)
		}
	}
	for v := range vips {
		ev.dark(w, v)
	}
	return ev
}

// held returns the intervals in which the gateway held the VIP, and whether each ended by a
// withdrawal.
func held(w *window, received []event) (holds []interval) {
	open := w.from
	for _, e := range received {
		switch {
		case e.withdrawn && !open.IsZero():
			holds = append(holds, interval{open, e.at})
			open = time.Time{}
		case !e.withdrawn && open.IsZero():
			open = e.at
		}
	}
	if !open.IsZero() {
		holds = append(holds, interval{open, w.to})
	}
	return holds
}

// holds finds the VIPs that a gateway held for longer than a bound after its cause.
func (ev *evaluation) holds(w *window, h *history, g, v int, received []event) {
	holds := held(w, received)
	for _, r := range rules(g, v, w.external) {
		causes := h.unserved(vips[v])
		if r.subject != "" {
			causes = h.while(r.subject, func(s state) bool { return s == r.state })
		}
		if len(causes) == 0 {
			continue
		}
		unhealthy := h.disturbed(func(s state) bool { return s != healthy }, r.needs(g, vips[v].family)...)
		// The clock of the rule restarts in each of these intervals.
		for _, counted := range without(causes, unhealthy) {
			// Polls detect its end with a delay, and its effects may be received before that.
			seen := counted.to
			counted.to = seen.Add(-2*pollInterval - w.late(seen.Add(-time.Second), seen))
			for _, hold := range intersect([]interval{counted}, holds) {
				late := hold.to.Sub(counted.from)
				slack := w.slack(counted.from, hold.to)
				if late > r.bound+slack {
					ev.violations = append(ev.violations, violation{fmt.Sprintf(
						"%s held %s from %s to %s, %s after it counted from (%s) that %s: bound %s and slack %s", gatewayName(g),
						vips[v].prefix,
						hold.from.Format(timeFormat), hold.to.Format(timeFormat), short(late), counted.from.Format(timeFormat), r.cause,
						short(r.bound), short(slack)), v, g})
				}
				if hold.from.Equal(counted.from) && hold.to.Before(counted.to) {
					ev.measures = append(ev.measures, measure{r.cause, late, r.bound})
				}
			}
		}
	}
}

// raises finds announcements of a VIP that no process could have reported ready. A process that
// restarts must not raise it; one that was stopped may repeat its last report until it observes the
// change.
func (ev *evaluation) raises(w *window, h *history, g, v int, received []event) {
	needs := chain("lb")(g, vips[v].family)
	halted := h.disturbed(func(s state) bool { return s == stopped || s == disturbed }, needs...)
	detect := checkFall*(checkInterval+checkTimeout) + checkInterval
	has := true
	for _, e := range received {
		rises := !e.withdrawn && !has
		has = !e.withdrawn
		if !rises {
			continue
		}
		for _, cause := range without(h.unserved(vips[v]), halted) {
			after := e.at.Sub(cause.from)
			if !e.at.After(cause.to) && after > detect+w.slack(cause.from, e.at) {
				ev.violations = append(ev.violations, violation{fmt.Sprintf(
					"%s received %s at %s, although no target accepted connections since %s", gatewayName(g), vips[v].prefix,
					e.at.Format(timeFormat), cause.from.Format(timeFormat)), v, g})
			}
		}
	}
}

// reasons finds UPDATEs that no injected fault explains.
func (ev *evaluation) reasons(w *window, g, v int, received []event) {
	var aftermath time.Time
	for _, e := range received {
		if slices.ContainsFunc(w.faults, func(f injection) bool { return f.explains(e) }) {
			continue
		}
		if w.late(e.at.Add(-3*time.Second), e.at) > excuse || e.at.Before(aftermath) {
			ev.excused++
			aftermath = e.at.Add(excuseAftermath)
			continue
		}
		ev.violations = append(ev.violations, violation{fmt.Sprintf("an UPDATE for an untouched VIP: %s", e), v, g})
	}
}

// dark finds the intervals in which no gateway held a VIP, although nothing but edits that take
// turns may have caused it.
func (ev *evaluation) dark(w *window, v int) {
	if slices.ContainsFunc(w.faults, func(f injection) bool {
		k := f.fault.Kind
		return !k.TakesTurns && k.touches(f.fault.Arg).vips&(1<<v) != 0
	}) {
		return
	}
	absent := []interval{{w.from, w.to}}
	for g := range gateways {
		absent = without(absent, held(w, slices.DeleteFunc(slices.Clone(w.events),
			func(e event) bool { return e.vip != v || e.gateway != g })))
	}
	for _, i := range absent {
		// The gateways write their own times.
		if i.length() > clockError && w.late(i.from.Add(-3*time.Second), i.to) <= excuse {
			ev.violations = append(ev.violations, violation{fmt.Sprintf("no gateway held %s from %s to %s",
				vips[v].prefix, i.from.Format(timeFormat), i.to.Format(timeFormat)), v, -1})
		}
	}
}

// clockError allows for a gateway's clock that is slightly early.
const clockError = 100 * time.Millisecond

// explains reports whether a fault may have caused an event. Its effects may come
// until the next calm point.
func (f injection) explains(e event) bool {
	return f.fault.Kind.touches(f.fault.Arg).has(e.vip, e.gateway) && !e.at.Before(f.from.Add(-clockError))
}

// short formats a duration.
func short(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	default:
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
}
