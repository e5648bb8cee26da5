package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	// step is the resolution of the evaluation; the interval between requests is coarser.
	step = time.Millisecond
	// together is the distance of two failures below which the time between them counts as failed:
	// gateways hash flows over the pods, so requests through a healthy pod succeed meanwhile.
	together = 100 * time.Millisecond
	// install is how long a gateway's kernel may lack a route that its BIRD has logged.
	install = 20 * time.Millisecond
)

// outcome is a request for a VIP, through a gateway or directly to a pod.
type outcome struct {
	sent    time.Time
	vip     netip.Addr
	from    int  // index of the gateway, or of the pod
	failed  bool // no answer of the application
	noRoute bool // failed with ENETUNREACH
	reason  string
}

// update is the begin or the end of a route to a VIP that a gateway holds from a session.
type update struct {
	at        time.Time
	gateway   int
	session   string
	vip       netip.Addr // not set when the gateway lost everything
	withdrawn bool
}

// record is everything that was observed, from begin to end.
type record struct {
	begin, end time.Time
	updates    []update  // also those before begin, in order
	requests   []outcome // through gateways
	direct     []outcome // to pods
	interval   time.Duration
}

// numbers are the result for a VIP.
type numbers struct {
	BlackHole time.Duration `json:"blackHole"`
	Dark      time.Duration `json:"dark"`
}

// measure computes the numbers of a VIP.
func (r *record) measure(vip netip.Addr, gateways int) numbers {
	var held [][]bool
	failed := r.steps()
	for g := range gateways {
		held = append(held, r.held(vip, g))
		r.markFailed(failed, vip, g, held[g])
	}
	served := r.served(vip)
	var n numbers
	for i := range failed {
		advertised := slices.ContainsFunc(held, func(h []bool) bool { return h[i] })
		switch {
		case failed[i]:
			n.BlackHole += step
		case !advertised && served[i]:
			n.Dark += step
		}
	}
	return n
}

// steps returns a value for each step of the record.
func (r *record) steps() []bool { return make([]bool, r.index(r.end)+1) }

// index returns the step of a moment, within the record.
func (r *record) index(at time.Time) int {
	return int(min(max(0, at.Sub(r.begin)), r.end.Sub(r.begin)-1) / step)
}

// fill sets the steps between two moments.
func (r *record) fill(steps []bool, from, to time.Time) {
	for i := r.index(from); i < r.index(to); i++ {
		steps[i] = true
	}
}

// held returns the steps in which a gateway holds a route to a VIP from any session.
func (r *record) held(vip netip.Addr, gateway int) []bool {
	steps, sessions := r.steps(), map[string]bool{}
	since := r.begin
	for _, u := range r.updates {
		if u.gateway != gateway || u.vip.IsValid() && u.vip != vip {
			continue
		}
		if len(sessions) > 0 {
			r.fill(steps, since, u.at)
		}
		since = u.at
		switch {
		case !u.vip.IsValid():
			clear(sessions)
		case u.withdrawn:
			delete(sessions, u.session)
		default:
			sessions[u.session] = true
		}
	}
	if len(sessions) > 0 {
		r.fill(steps, since, r.end)
	}
	return steps
}

// markFailed sets the steps in which a gateway holds a VIP and requests through it fail.
func (r *record) markFailed(steps []bool, vip netip.Addr, gateway int, held []bool) {
	var last time.Time
	for _, o := range sorted(r.requests, vip, gateway) {
		if !o.failed || o.sent.Before(r.begin) || !o.sent.Before(r.end) || !held[r.index(o.sent)] {
			continue
		}
		// The route may not be in the gateway's kernel yet.
		if o.noRoute && !held[r.index(o.sent.Add(-install))] {
			continue
		}
		from := o.sent
		if from.Sub(last) <= together {
			from = last
		}
		r.fill(steps, from, o.sent.Add(r.interval))
		last = o.sent
	}
}

// served returns the steps in which a pod answers direct requests for a VIP, by its latest outcome.
func (r *record) served(vip netip.Addr) []bool {
	steps := r.steps()
	for pod := range pods {
		since, serves := r.begin, false
		for _, o := range sorted(r.direct, vip, pod) {
			if serves {
				r.fill(steps, since, o.sent)
			}
			since, serves = o.sent, !o.failed
		}
		if serves {
			r.fill(steps, since, r.end)
		}
	}
	return steps
}

// sorted returns the outcomes of a VIP from one place, in the order of sending.
func sorted(all []outcome, vip netip.Addr, from int) []outcome {
	some := slices.DeleteFunc(slices.Clone(all), func(o outcome) bool { return o.vip != vip || o.from != from })
	slices.SortFunc(some, func(a, b outcome) int { return a.sent.Compare(b.sent) })
	return some
}

// evidence returns the updates and failed requests since the begin as lines, in order.
func (r *record) evidence() string {
	lines := []string{r.begin.Format(evidenceTime) + " begin"}
	for _, u := range r.updates {
		if !u.at.Before(r.begin) {
			lines = append(lines, fmt.Sprintf("%s gateway %d, %s: %s withdrawn=%t", u.at.Format(evidenceTime), u.gateway+1,
				u.session, u.vip, u.withdrawn))
		}
	}
	for where, all := range map[string][]outcome{"gateway": r.requests, "pod": r.direct} {
		for _, o := range all {
			if o.failed && !o.sent.Before(r.begin) {
				lines = append(lines, fmt.Sprintf("%s request for %s through %s %d: %s", o.sent.Format(evidenceTime), o.vip,
					where, o.from+1, o.reason))
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

// evidenceTime is the format of times in evidence.
const evidenceTime = "15:04:05.000"
