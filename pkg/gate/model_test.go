package gate

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/vip"
)

// model is an independent, simple model of the inputs of a gate.
type model struct {
	now               time.Time
	options           Options
	g                 *Gate
	solo              map[vip.VIP]*Gate // each has one VIP only
	connected         *Gate             // its gateways are always up
	configured        vip.Set
	routed            vip.Set
	gateways          Gateways
	announcer         Announcer
	gatewaysAt        time.Time
	gatewaysEnd       time.Time // of their validity
	gatewaysExtension extension
	synced            bool // a synced state was sent
	streamOpen        bool // the instance of the states has an open stream
	leaseEnd          time.Time
	lbExtension       extension
	flaps             map[vip.VIP][]time.Time
	wasReady          vip.Set   // reported ready since they were configured
	endedAt           time.Time // when the stream of the states ended
	lostAt            time.Time // end of the grace period, while no lease is valid
	grace             time.Duration
	instance          int
	states            map[vip.VIP]VIPState
	lbDrainEnd        time.Time
	stopEnd           time.Time
	drainEnds         map[vip.VIP]time.Time
	operatorEnds      map[vip.VIP]time.Time
	before            map[vip.VIP]Advertisement
	connectedBefore   map[vip.VIP]Advertisement
}

// extension is the extension of a lease after a late check: the process was starved, and a
// renewal may be waiting to be read.
type extension struct {
	checked bool // the lease was checked after its end
	until   time.Time
}

func (d *extension) check(end, now time.Time) {
	if !d.checked && !now.Before(end) {
		if d.checked = true; now.Sub(end) > lateAfter {
			d.until = now.Add(min(now.Sub(end), maxExtension))
		}
	}
}

var modelVIPs = []vip.VIP{vipA, vipB, vip6, vip.Require("2000::2/128")}

func newModel(o Options) *model {
	w := &model{
		now: time.Unix(1000, 0), options: o, g: New(o), solo: map[vip.VIP]*Gate{},
		states: map[vip.VIP]VIPState{}, drainEnds: map[vip.VIP]time.Time{}, flaps: map[vip.VIP][]time.Time{},
		wasReady: vip.Set{}, before: map[vip.VIP]Advertisement{}, connectedBefore: map[vip.VIP]Advertisement{},
		connected: New(o),
	}
	for _, v := range modelVIPs {
		w.solo[v] = New(o)
	}
	return w
}

// each passes an input to the gate and, filtered by VIP, to the solo gates.
func (w *model) each(f func(g *Gate, mine func(vip.VIP) bool)) {
	f(w.g, func(vip.VIP) bool { return true })
	f(w.connected, func(vip.VIP) bool { return true })
	w.connect()
	for v, g := range w.solo {
		f(g, func(x vip.VIP) bool { return x == v })
	}
}

// connect sets up the path of connected.
func (w *model) connect() {
	w.connected.Announcer(Announcer{Up: true})
	w.connected.Gateways(Gateways{At: w.now, Up: [2]bool{true, true}})
}

// setGateways passes the gateways to the gates, as polled at a time.
func (w *model) setGateways(at time.Time) {
	w.gateways.At = at
	w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Gateways(w.gateways) })
}

func keep(vips []vip.VIP, mine func(vip.VIP) bool) []vip.VIP {
	return slices.DeleteFunc(slices.Clone(vips), func(v vip.VIP) bool { return !mine(v) })
}

func (w *model) updateLB(h LBUpdate) {
	w.each(func(g *Gate, mine func(vip.VIP) bool) {
		part := h
		part.VIPs = slices.DeleteFunc(slices.Clone(h.VIPs), func(x VIPState) bool { return !mine(x.VIP) })
		part.Removed = keep(h.Removed, mine)
		g.UpdateLB(w.now, part)
	})
}

func (w *model) live() bool { return w.synced && w.streamOpen && w.now.Before(w.leaseEnd) }
func (w *model) lost() bool {
	if w.live() {
		return false
	}
	if !w.synced {
		return true
	}
	end := w.lostAt
	if w.streamOpen {
		end = w.leaseEnd.Add(w.grace)
		if w.now.Before(w.lbExtension.until) {
			return false
		}
	}
	return !w.now.Before(end)
}

// usable reports whether a gateway can send traffic to v.
func (w *model) usable(v vip.VIP) bool {
	accepted := w.gateways.Static[v.Family()] || w.announcer.Up ||
		!w.announcer.Since.IsZero() && w.now.Sub(w.announcer.Since) < reconnectTime
	return w.gateways.Up[v.Family()] && accepted && (w.now.Before(w.gatewaysEnd) ||
		w.now.Before(w.gatewaysExtension.until))
}

// flapping reports whether a VIP flapped often enough to be damped.
func (w *model) flapping(v vip.VIP) bool {
	n := 0
	for _, at := range w.flaps[v] {
		if w.now.Sub(at) <= flapWindow+maxFlapWait {
			n++
		}
	}
	return n >= 2
}

func over(t, now time.Time) bool    { return !t.IsZero() && !now.Before(t) }
func running(t, now time.Time) bool { return !t.IsZero() && now.Before(t) }

// checkLeases is the model of the gate's lease checks.
func (w *model) checkLeases() {
	w.gatewaysExtension.check(w.gatewaysEnd, w.now)
	if w.synced && w.streamOpen {
		w.lbExtension.check(w.leaseEnd, w.now)
	}
}

// renew models the receipt of a message from a live load balancer.
func (w *model) renew() {
	w.leaseEnd, w.lbExtension = w.now.Add(time.Second), extension{}
}

// check evaluates all gates and compares their decisions with the model.
func (w *model) check(t *rapid.T) {
	w.checkLeases()
	w.connect()
	w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Evaluate(w.now) })
	if again := w.g.Evaluate(w.now); len(again) != 0 {
		t.Fatalf("a second Evaluate at the same time changed %v", again)
	}
	for _, v := range modelVIPs {
		got := w.g.Decision(v)
		if alone := w.solo[v].Decision(v); alone != got {
			t.Fatalf("%s: %v with other VIPs, %v alone", v, got, alone)
		}
		w.checkDecision(t, v, got, w.before[v], w.usable(v))
		exported := w.gateways.Exported[v.Family()]
		lacks := exported != nil && !exported.Has(v)
		if (got.Reason == NotExported) != (lacks && got.Advertisement != Withdrawn) {
			t.Fatalf("%s is %v, exported are %v", v, got, exported)
		}
		w.before[v] = got.Advertisement
		connected := w.connected.Decision(v)
		w.checkDecision(t, v, connected, w.connectedBefore[v], true)
		w.connectedBefore[v] = connected.Advertisement
		if got.Advertisement > connected.Advertisement {
			t.Fatalf("%s is %v, with gateways that are always up %v", v, got, connected)
		}
	}
	w.checkAttraction(t)
	if len(w.g.entries) != len(w.g.vips) || len(w.g.dirty) != 0 {
		t.Fatalf("%d entries, %d VIPs, %d dirty", len(w.g.entries), len(w.g.vips), len(w.g.dirty))
	}
	for i, e := range w.g.entries {
		if e.index != i || e.dirty || w.g.vips[e.vip] != e {
			t.Fatalf("entry %d of %s: index %d, dirty %v", i, e.vip, e.index, e.dirty)
		}
	}
}

// checkAttraction compares the attraction with the advertisements of a gate whose gateways are
// always up.
func (w *model) checkAttraction(t *rapid.T) {
	var want [len(vip.Families)]Attraction
	for v := range w.configured {
		a := &want[v.Family()]
		a.Configured++
		switch w.connected.Decision(v).Advertisement {
		case Announced:
			a.Announced++
		case Depreferred:
			a.Depreferred++
		case Withdrawn:
		}
	}
	if got := w.g.Attract(); got != want {
		t.Fatalf("attraction %+v, want %+v", got, want)
	}
}

// checkDecision compares the decision on one VIP with the model.
func (w *model) checkDecision(t *rapid.T, v vip.VIP, got Decision, before Advertisement, gatewayUp bool) {
	state := w.states[v]
	lastResort := !w.options.Ungated && state.State == vip.NotReady && state.LastResort && w.wasReady.Has(v)
	suspected := !w.options.Ungated && state.Suspected
	drains := []time.Time{w.stopEnd, w.drainEnds[v], w.operatorEnds[v]}
	live, ready := true, true // without a load balancer
	lost, known := false, true
	if !w.options.Ungated {
		drains = append(drains, w.lbDrainEnd)
		if state.State == vip.Draining {
			drains = append(drains, state.DrainEnd)
		}
		live, ready, known = w.live(), state.State == vip.Ready, state.State != vip.NotReady || lastResort
		lost = w.lost() && w.options.OnLoss == WithdrawOnLoss
	}
	down := !w.configured.Has(v) || !w.routed.Has(v) || !gatewayUp || !known || lost ||
		slices.ContainsFunc(drains, func(d time.Time) bool { return over(d, w.now) })
	draining := slices.ContainsFunc(drains, func(d time.Time) bool { return running(d, w.now) })
	switch {
	case down && got.Advertisement != Withdrawn:
		t.Fatalf("%s must be withdrawn at once, is %v", v, got)
	case draining && got.Advertisement > Depreferred:
		t.Fatalf("%s drains, is %v", v, got)
	case (draining || !live) && got.Advertisement > before:
		t.Fatalf("%s rose from %s to %v while stale or draining", v, before, got)
	case got.Reason == Flapping && !w.flapping(v):
		t.Fatalf("%s is damped after flaps at %v", v, w.flaps[v])
	case got.Advertisement == Announced && (!ready || suspected):
		t.Fatalf("%s is announced in state %v", v, state.State)
	case !down && !draining && live && lastResort && (got.Advertisement != Depreferred ||
		got.Reason != LastResort && got.Reason != NotExported):
		t.Fatalf("%s is kept as a last resort, is %v", v, got)
	case got.Reason == LastResort && !lastResort:
		t.Fatalf("%s is in state %+v, is %v", v, state, got)
	case got.Reason == Suspected && !suspected:
		t.Fatalf("%s is in state %+v, is %v", v, state, got)
	case suspected && !down && !draining && live && got.Reason != Flapping && (got.Advertisement != Depreferred ||
		got.Reason != Suspected && got.Reason != NotExported):
		t.Fatalf("%s is suspected, is %v", v, got)
	case !down && !draining && live && ready && !suspected && got.Advertisement != Announced &&
		got.Reason != Flapping:
		t.Fatalf("%s should be announced, is %v", v, got)
	}
}

// advance simulates a loop that is never late: it evaluates at each deadline of the gate. Between
// two deadlines no decision may change.
func (w *model) advance(t *rapid.T, d time.Duration) {
	for end := w.now.Add(d); ; {
		next := w.g.Deadline(w.now)
		if next.IsZero() || next.After(end) {
			next = end
		}
		if gap := next.Sub(w.now); gap > time.Microsecond {
			w.now = w.now.Add(gap / 2)
			before := w.g.Attract()
			if early := w.g.Evaluate(w.now); len(early) != 0 || w.g.Attract() != before {
				t.Fatalf("%v changed %v before the deadline of the gate, attraction %v to %v", early, gap/2, before,
					w.g.Attract())
			}
			w.check(t)
		}
		w.now = next
		w.check(t)
		if !w.now.Before(end) {
			return
		}
	}
}

func vipSet(t *rapid.T, label string) []vip.VIP {
	return rapid.SliceOfDistinct(rapid.SampledFrom(modelVIPs), func(v vip.VIP) vip.VIP { return v }).Draw(t, label)
}

// sendRandomStates sends random states of an instance of the load balancer.
func (w *model) sendRandomStates(t *rapid.T, complete, newInstance bool) {
	var states []VIPState
	for _, v := range vipSet(t, "sent") {
		x := VIPState{VIP: v, State: rapid.SampledFrom([]vip.State{
			vip.NotReady, vip.Ready, vip.Ready,
			vip.Draining,
		}).Draw(t, "state")}
		x.LastResort = x.State == vip.NotReady && rapid.Bool().Draw(t, "last resort")
		x.Suspected = x.State == vip.Ready && rapid.Bool().Draw(t, "suspected")
		if x.State == vip.Draining {
			x.DrainEnd = w.now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "drain ms")) * time.Millisecond)
		}
		states = append(states, x)
	}
	w.sendStates(states, complete, newInstance)
}

// sendStates sends states of an instance. A VIP has flapped if the lease of the same instance was
// valid when it became not ready.
func (w *model) sendStates(states []VIPState, complete, newInstance bool) {
	counts := !newInstance && w.live()
	if newInstance {
		w.instance++
		w.lbDrainEnd = time.Time{}
	}
	before := w.states
	w.states = maps.Clone(before)
	if complete {
		w.states = map[vip.VIP]VIPState{}
		for _, v := range modelVIPs {
			w.states[v] = VIPState{VIP: v, State: vip.NotReady}
		}
	}
	for _, x := range states {
		w.states[x.VIP] = x
	}
	for v, old := range before {
		if counts && old.State == vip.Ready && w.states[v].State == vip.NotReady && !w.states[v].LastResort {
			w.flaps[v] = append(w.flaps[v], w.now)
		}
	}
	w.noteReady()
	w.streamOpen, w.synced = true, true
	w.renew()
	w.updateLB(w.lbUpdate(states, complete))
}

// noteReady notes which configured VIPs were ready.
func (w *model) noteReady() {
	for _, v := range modelVIPs {
		switch {
		case !w.configured.Has(v):
			delete(w.wasReady, v)
		case w.states[v].State == vip.Ready:
			w.wasReady[v] = struct{}{}
		}
	}
}

func (w *model) lbUpdate(states []VIPState, complete bool) LBUpdate {
	return LBUpdate{
		Instance: fmt.Sprint(w.instance), Live: true, LeaseEnd: w.leaseEnd, Grace: w.grace,
		GoingAway: !w.lbDrainEnd.IsZero(), DrainEnd: w.lbDrainEnd, Complete: complete, VIPs: states,
	}
}

func TestGateAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModel(Options{
			OnLoss: rapid.SampledFrom([]LossPolicy{WithdrawOnLoss, WithdrawOnLoss, KeepOnLoss}).Draw(t,
				"on loss"),
			NoFlapBackoff: rapid.Bool().Draw(t, "no back-off"),
			DrainTime:     time.Second,
			Ungated:       rapid.IntRange(0, 5).Draw(t, "ungated") == 0,
		})
		w.grace = time.Duration(rapid.SampledFrom([]int{0, 500, 3000}).Draw(t, "grace ms")) * time.Millisecond
		steps := map[string]func(*rapid.T){
			"configure": func(t *rapid.T) {
				vips := vipSet(t, "configured")
				w.configured = vip.NewSet(vips...)
				w.noteReady()
				for v := range w.drainEnds {
					if !w.configured.Has(v) {
						delete(w.drainEnds, v)
					}
				}
				w.each(func(g *Gate, mine func(vip.VIP) bool) { g.Configure(keep(vips, mine)) })
			},
			"configure all": func(*rapid.T) {
				w.configured, w.routed = vip.NewSet(modelVIPs...), vip.NewSet(modelVIPs...)
				w.noteReady()
				w.each(func(g *Gate, mine func(vip.VIP) bool) { g.Configure(keep(modelVIPs, mine)); g.Route(w.routed) })
			},
			"route": func(t *rapid.T) {
				w.routed = vip.NewSet(vipSet(t, "routed")...)
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Route(w.routed) })
			},
			"gateways": func(t *rapid.T) {
				bools := func(label string) [2]bool {
					return [2]bool{rapid.Bool().Draw(t, "v4 "+label), rapid.Bool().Draw(t, "v6 "+label)}
				}
				w.gateways = Gateways{Up: bools("up"), Static: bools("static")}
				for f, lacks := range bools("lacks VIPs") {
					if lacks {
						w.gateways.Exported[f] = vip.NewSet(vipSet(t, "exported")...)
					}
				}
				w.gatewaysAt, w.gatewaysEnd, w.gatewaysExtension = w.now, w.now.Add(maxSessionAge), extension{}
				w.setGateways(w.now)
			},
			"announcer": func(t *rapid.T) {
				if up := rapid.Bool().Draw(t, "established"); up != w.announcer.Up {
					w.announcer = Announcer{Up: up, Since: w.now}
				}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Announcer(w.announcer) })
			},
			"both gateways": func(*rapid.T) {
				w.gateways = Gateways{Up: [2]bool{true, true}}
				w.gatewaysAt, w.gatewaysEnd, w.gatewaysExtension = w.now, w.now.Add(maxSessionAge), extension{}
				w.setGateways(w.now)
				if !w.announcer.Up {
					w.announcer = Announcer{Up: true, Since: w.now}
				}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Announcer(w.announcer) })
			},
			"repeated gateway state": func(*rapid.T) {
				w.setGateways(w.gatewaysAt)
			},
			"change states": func(t *rapid.T) {
				if !w.streamOpen || !w.synced {
					w.sendRandomStates(t, true, true)
					return
				}
				w.sendRandomStates(t, rapid.Bool().Draw(t, "complete"), false)
			},
			"all flap": func(*rapid.T) {
				for _, state := range []vip.State{vip.NotReady, vip.Ready} {
					var states []VIPState
					for _, v := range modelVIPs {
						states = append(states, VIPState{VIP: v, State: state})
					}
					w.sendStates(states, !w.synced, !w.streamOpen || !w.synced)
				}
			},
			"heartbeat": func(*rapid.T) {
				if w.streamOpen && w.synced {
					w.renew()
					w.updateLB(w.lbUpdate(nil, false))
				}
			},
			"load balancer stops": func(*rapid.T) {
				if w.streamOpen && w.synced {
					w.lbDrainEnd = w.now.Add(2 * time.Second)
					w.renew()
					w.updateLB(w.lbUpdate(nil, false))
				}
			},
			"stream ends": func(*rapid.T) {
				if w.streamOpen {
					w.lostAt = earlier(w.leaseEnd, w.now).Add(w.grace)
					w.streamOpen = false
					h := w.lbUpdate(nil, false)
					h.Live, h.EndedAt = false, w.now
					w.endedAt = w.now
					w.updateLB(h)
				}
			},
			"restart, unsynced": func(*rapid.T) {
				if !w.synced {
					return
				}
				if w.streamOpen {
					w.lostAt = earlier(w.leaseEnd, w.now).Add(w.grace)
					w.endedAt = w.now
				}
				w.streamOpen = false
				h := w.lbUpdate(nil, false)
				h.Live, h.EndedAt = false, w.endedAt
				w.updateLB(h)
			},
			"restart, synced": func(t *rapid.T) { w.sendRandomStates(t, true, true) },
			"drain": func(t *rapid.T) {
				vips := vipSet(t, "to drain")
				for _, v := range vips {
					if w.configured.Has(v) && w.drainEnds[v].IsZero() {
						w.drainEnds[v] = w.now.Add(w.options.DrainTime)
					}
				}
				w.each(func(g *Gate, mine func(vip.VIP) bool) { g.Drain(w.now, keep(vips, mine)...) })
			},
			"undrain": func(t *rapid.T) {
				vips := vipSet(t, "to undrain")
				for _, v := range vips {
					delete(w.drainEnds, v)
				}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Undrain(vips...) })
			},
			"operator drains": func(t *rapid.T) {
				ends := map[vip.VIP]time.Time{}
				for _, v := range vipSet(t, "drained by an operator") {
					ends[v] = w.now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "drain ms")) * time.Millisecond)
				}
				w.operatorEnds = ends
				w.each(func(g *Gate, _ func(vip.VIP) bool) {
					g.OperatorDrains(func(v vip.VIP) time.Time { return ends[v] })
				})
			},
			"advance": func(t *rapid.T) {
				w.advance(t, time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms"))*time.Millisecond)
			},
			// The process is starved and does not check the leases.
			"starve": func(t *rapid.T) {
				stall := time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms")) * time.Millisecond
				w.now = w.now.Add(stall)
				if rapid.Bool().Draw(t, "noticed") {
					if !w.gatewaysExtension.checked {
						w.gatewaysEnd = w.gatewaysEnd.Add(stall)
					}
					w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Stalled(w.now, stall) })
				}
			},
			"": func(t *rapid.T) { w.check(t) },
		}
		if rapid.IntRange(0, 9).Draw(t, "stops") == 0 {
			steps["stop"] = func(*rapid.T) {
				if w.stopEnd.IsZero() {
					w.stopEnd = w.now.Add(w.options.DrainTime)
				}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Stop(w.now) })
			}
		}
		t.Repeat(steps)
	})
}
