package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// recoveryBound is how long a ready VIP may be missing once everything is healed.
const recoveryBound = 10 * time.Second

// frrStart is how much longer it may take behind an FRR: after its start bgpd refuses sessions for
// 4 s, and each that BFD ends comes back after 2 s.
const frrStart = 5 * time.Second

// restTime is how long no update may be received once everything is healed and every
// VIP is back.
const restTime = 300 * time.Millisecond

// observer compares the updates that gateways receive with the timeline.
type observer struct {
	fixture   *fixture
	processes *processWatcher

	mu       sync.Mutex
	reported []violation // found while a group ran

	read      [gateways]int // so much of a gateway's trace was collected
	events    []event       // collected, not yet evaluated
	collected time.Time     // when the trace was read last
	since     time.Time     // the last calm point
	faults    []injection

	measures   []measure
	excused    int
	recovered  []time.Duration // of each group
	recent     []event         // of the last window, as evidence
	recently   []change
	recentFrom time.Time
	byName     map[netip.Prefix]int
}

func newObserver(fx *fixture) *observer {
	o := &observer{fixture: fx, processes: startProcessWatcher(fx), byName: map[netip.Prefix]int{}}
	fx.late = o.processes.lateness
	for i, v := range vips {
		o.byName[v.prefix] = i
	}
	return o
}

func (o *observer) close() { o.processes.close() }

// report records a violation that was found while a group ran.
func (o *observer) report(v violation) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reported = append(o.reported, v)
}

// injected records a fault at its begin.
func (o *observer) injected(h injection) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.faults = append(o.faults, h)
}

// settle waits until every gateway holds every VIP, and reports how long that took
// from the moment when every fault was healed. A difference after the bound is a
// violation.
func (o *observer) settle(ctx context.Context, healed time.Time, bound time.Duration) (time.Duration, []violation,
	error,
) {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	var missing [gateways][]string
	for {
		all := true
		for g := range gateways {
			missing[g] = o.missing(ctx, g)
			all = all && len(missing[g]) == 0
		}
		took := time.Since(healed)
		if all {
			return took, nil, nil
		}
		if took > bound+lateSlack*o.processes.lateness(healed, time.Now()) {
			var violations []violation
			for g, names := range missing {
				if len(names) > 0 {
					violations = append(violations,
						violation{fmt.Sprintf("%s after everything was healed %s misses %s", short(took),
							gatewayName(g), strings.Join(names, ", ")), -1, g})
				}
			}
			return took, violations, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return took, nil, context.Cause(ctx)
		}
	}
}

// holdsAll reports whether every gateway holds every VIP at this moment, by its table and by the
// collected updates.
func (o *observer) holdsAll(ctx context.Context) bool {
	if len(endsUnheld(o.events)) > 0 {
		return false
	}
	for g := range gateways {
		if len(o.missing(ctx, g)) > 0 {
			return false
		}
	}
	return true
}

// receivedSince reports whether a collected update is newer than a time.
func (o *observer) receivedSince(t time.Time) bool {
	return slices.ContainsFunc(o.events, func(e event) bool { return e.at.After(t) })
}

// missing returns the VIPs that a gateway does not hold as expected.
func (o *observer) missing(ctx context.Context, g int) []string {
	bound, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	routes, err := o.fixture.routers[g].Routes(bound)
	if err != nil {
		return []string{fmt.Sprintf("everything: it does not answer (%v)", err)}
	}
	var names []string
	for _, v := range vips {
		switch r, ok := routes[v.prefix]; {
		case !ok:
			names = append(names, v.prefix.String())
		case r.GracefulShutdown():
			names = append(names, v.prefix.String()+" without 65535:0")
		}
	}
	for p := range routes {
		if _, known := o.byName[p]; !known {
			names = append(names, fmt.Sprintf("nothing, but holds the unknown prefix %s", p))
		}
	}
	if frr, ok := o.fixture.routers[g].Router.(*lab.FRR); ok && len(names) == 0 {
		return append(append(bfdDown(bound, frr), o.podBFDDown(bound)...), o.fixture.changing(bound)...)
	}
	return names
}

// podBFDDown returns the BFD sessions with gateway B that are not up at the pod's BIRD. FRR
// reports its session with a BIRD that was replaced as up until it receives packets of the new
// one, after a second or two, and then takes the BGP session down once more.
func (o *observer) podBFDDown(ctx context.Context) []string {
	if o.fixture.external {
		return bfdDown(ctx, o.fixture.speaker.frr())
	}
	out, err := o.fixture.Pod.Run(ctx, "birdc", "-s", o.fixture.pod.BirdSocket(), "-r", "show bfd sessions")
	if err != nil {
		return []string{fmt.Sprintf("BFD: the pod's BIRD does not answer (%v)", err)}
	}
	var names []string
	for _, a := range []netip.Addr{lab.GatewayB4, lab.GatewayB6} {
		up := false
		for line := range strings.Lines(out) {
			words := strings.Fields(line)
			up = up || slices.Contains(words, a.String()) && slices.Contains(words, "Up")
		}
		if !up {
			names = append(names, fmt.Sprintf("BFD of the pod with %s", a))
		}
	}
	return names
}

// bfdDown returns the neighbors of an FRR whose BFD session is not up. While it comes up, it
// may take its BGP session down once more.
func bfdDown(ctx context.Context, frr *lab.FRR) []string {
	out, err := frr.Command(ctx, "show bgp neighbors json")
	if err != nil {
		return []string{fmt.Sprintf("BFD: it does not answer (%v)", err)}
	}
	var neighbors map[string]struct {
		BFD *struct {
			Status string `json:"status"`
		} `json:"peerBfdInfo"`
	}
	if err := json.Unmarshal([]byte(out), &neighbors); err != nil {
		return []string{fmt.Sprintf("BFD: %v", err)}
	}
	var names []string
	for name, n := range neighbors {
		if n.BFD != nil && n.BFD.Status != "Up" {
			names = append(names, fmt.Sprintf("BFD with %s, which is %q", name, n.BFD.Status))
		}
	}
	return names
}

// probeBound is how long it may take until a VIP that is advertised can be
// reached: the route back to a client may come a little later.
const probeBound = 3 * time.Second

// probe connects to every target directly from the pod, and to every VIP from the clients of
// each gateway: the data plane forwards in both directions.
func (o *observer) probe(ctx context.Context) []violation {
	var violations []violation
	bound, cancel := context.WithTimeout(ctx, probeBound)
	defer cancel()
	for _, v := range vips {
		for g := range gateways {
			err := lab.Eventually(bound, 100*time.Millisecond, func() error {
				return o.fixture.gatewayNS(g).Do(func() error {
					return dialFrom(bound, clientAddr(g, v.family), netip.AddrPortFrom(v.prefix.Addr(), checkPort))
				})
			})
			if err != nil {
				violations = append(
					violations, violation{
						fmt.Sprintf("%s cannot be reached from behind %s: %v", v.prefix, gatewayName(g), err), -1, g,
					},
				)
			}
		}
	}
	for t := range targetCount {
		for f := range families {
			err := o.fixture.Pod.Do(func() error { return dial(ctx, netip.AddrPortFrom(targetAddr(t, f), checkPort)) })
			if err != nil {
				violations = append(violations,
					violation{fmt.Sprintf("target %d of %s should accept connections: %v", t%targetsPerStream+1,
						streams[t/targetsPerStream].name, err), -1, -1})
			}
		}
	}
	return violations
}

// evaluate checks the updates since the last calm point.
func (o *observer) evaluate() []violation {
	changes := o.fixture.timeline.take()
	events := withDeaths(o.events, changes)
	o.mu.Lock()
	w := &window{
		from: o.since, to: o.collected, events: events, changes: changes, faults: o.faults, late: o.processes.lateness,
		external: o.fixture.external,
	}
	violations := o.reported
	o.faults, o.reported, o.events = nil, nil, nil
	o.mu.Unlock()
	ev := evaluate(w)
	o.recentFrom, o.since, o.recent, o.recently = o.since, w.to, events, changes
	o.measures = append(o.measures, ev.measures...)
	o.excused += ev.excused
	violations = append(violations, ev.violations...)
	return append(violations, endsUnheld(events)...)
}

// collect reads the updates that gateways received since its last call.
func (o *observer) collect() error {
	o.collected = time.Now()
	for g, r := range o.fixture.routers {
		trace, err := r.Trace()
		if err != nil {
			return err
		}
		for _, h := range trace[min(o.read[g], len(trace)):] {
			v, known := o.byName[h.Prefix]
			if !known {
				o.report(violation{fmt.Sprintf("%s received an unknown prefix: %s", gatewayName(g), h), -1, g})
				continue
			}
			o.events = append(
				o.events, event{at: h.At, vip: v, gateway: g, withdrawn: h.Withdrawn, deferred: h.GracefulShutdown()},
			)
		}
		o.read[g] = len(trace)
	}
	return nil
}

// withDeaths returns the events, in order, with a withdrawal of every VIP for each gateway that
// ended.
func withDeaths(events []event, changes []change) []event {
	all := slices.Clone(events)
	for g := range gateways {
		for _, c := range changes {
			if c.Subject != gatewaySubject(g) || c.State != down {
				continue
			}
			for v := range vips {
				all = append(all, event{at: c.At, vip: v, gateway: g, withdrawn: true, died: true})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b event) int { return a.at.Compare(b.at) })
	return all
}

// endsUnheld checks, at a calm point, that the last update that a gateway received for
// each VIP fits its table, which holds all of them.
func endsUnheld(events []event) []violation {
	last := map[[2]int]event{}
	for _, e := range events {
		last[[2]int{e.gateway, e.vip}] = e
	}
	var violations []violation
	for _, key := range slices.SortedFunc(maps.Keys(last),
		func(a, b [2]int) int { return slices.Compare(a[:], b[:]) }) {
		if e := last[key]; e.withdrawn || e.deferred {
			violations = append(
				violations, violation{
					fmt.Sprintf("at a calm point %s received last: %s", gatewayName(e.gateway), e), e.vip, e.gateway,
				},
			)
		}
	}
	return violations
}

// evidence returns the records that explain a violation.
func (o *observer) evidence(v violation) []string {
	var lines []string
	for _, c := range o.recently {
		lines = append(lines, c.String())
	}
	for _, e := range o.recent {
		if (v.vip < 0 || v.vip == e.vip) && (v.gateway < 0 || v.gateway == e.gateway) {
			lines = append(lines, e.String())
		}
	}
	from := o.recentFrom
	if from.IsZero() { // before the first calm point
		from = o.since.Add(-firstBound)
	}
	for at := from.Truncate(time.Second); at.Before(o.since); at = at.Add(time.Second) {
		if late := o.processes.lateness(at, at.Add(time.Second-1)); late > excuse/3 {
			lines = append(lines, fmt.Sprintf("%s a thread waited %s for a CPU", at.Format(timeFormat), short(late)))
		}
	}
	slices.Sort(lines) // each begins with a time of day
	return lines
}

// logs returns the processes whose last log lines are evidence.
func (fx *fixture) logs() []*lab.Process {
	all := []*lab.Process{fx.lb.process(), fx.frontend.process()}
	for _, r := range append(fx.routers[:], fx.speaker) {
		if r != nil {
			all = append(all, r.processes()...)
		}
	}
	return all
}
