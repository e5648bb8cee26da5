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
	install = 100 * time.Millisecond
)

// outcome is a request for a VIP through a gateway.
type outcome struct {
	sent    time.Time
	vip     netip.Addr
	gateway int
	err     error // nil if the application answered
	noRoute bool  // failed with ENETUNREACH
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
	updates    []update // also those before begin, in order
	requests   []outcome
	interval   time.Duration
}

// numbers are the result for a VIP.
type numbers struct {
	BlackHole time.Duration `json:"blackHole"`
	Dark      time.Duration `json:"dark"`
}

// measure computes the numbers of a VIP whose targets serve, or not.
func (r *record) measure(vip netip.Addr, served bool) numbers {
	var held [gateways][]bool
	failed := r.steps()
	for g := range gateways {
		held[g] = r.held(vip, g)
		r.markFailed(failed, vip, g, held[g])
	}
	var n numbers
	for i := range r.index(r.end) {
		advertised := slices.ContainsFunc(held[:], func(h []bool) bool { return h[i] })
		switch {
		case failed[i]:
			n.BlackHole += step
		case !advertised && served:
			n.Dark += step
		}
	}
	return n
}

// steps returns a value for each step of the record, and one for the incomplete last one.
func (r *record) steps() []bool { return make([]bool, r.index(r.end)+1) }

// index returns the step of a moment, within the record.
func (r *record) index(at time.Time) int {
	return int(min(max(0, at.Sub(r.begin)), r.end.Sub(r.begin)) / step)
}

// fill sets the steps between two moments.
func (r *record) fill(steps []bool, from, to time.Time) {
	for i := r.index(from); i < r.index(to); i++ {
		steps[i] = true
	}
}

// held returns the steps in which a gateway holds a route to a VIP from any session.
func (r *record) held(vip netip.Addr, gateway int) []bool {
	steps, sessions, since := r.steps(), map[string]bool{}, r.begin
	for _, u := range append(slices.Clone(r.updates), update{at: r.end, gateway: gateway}) {
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
	return steps
}

// markFailed sets the steps in which a gateway holds a VIP and requests through it fail.
func (r *record) markFailed(steps []bool, vip netip.Addr, gateway int, held []bool) {
	slices.SortFunc(r.requests, func(a, b outcome) int { return a.sent.Compare(b.sent) })
	var last time.Time
	for _, o := range r.requests {
		if o.vip != vip || o.gateway != gateway || o.err == nil || o.sent.Before(r.begin) || !o.sent.Before(r.end) ||
			!held[r.index(o.sent)] || o.noRoute && !held[r.index(o.sent.Add(-install))] {
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

// withdrawers counts the pods that withdrew a VIP. The sessions of pod 2 are the later ones.
func (r *record) withdrawers() int {
	pods := map[bool]bool{}
	for _, u := range r.updates {
		if u.withdrawn && !u.at.Before(r.begin) {
			pods[u.session < "trench2"] = true
		}
	}
	return len(pods)
}

// evidence returns the updates and failed requests since the begin as lines, in order.
func (r *record) evidence() string {
	const format = "15:04:05.000"
	lines := []string{r.begin.Format(format) + " begin"}
	for _, u := range r.updates {
		if !u.at.Before(r.begin) {
			lines = append(lines, fmt.Sprintf("%s gateway %d, %s: %s withdrawn=%t", u.at.Format(format), u.gateway+1,
				u.session, u.vip, u.withdrawn))
		}
	}
	for _, o := range r.requests {
		if o.err != nil && !o.sent.Before(r.begin) {
			lines = append(lines, fmt.Sprintf("%s request through gateway %d: %v", o.sent.Format(format), o.gateway+1, o.err))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}
