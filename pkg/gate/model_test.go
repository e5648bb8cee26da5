package gate

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"pgregory.net/rapid"
)

// world is the truth that the gate is told of, kept in the plainest way.
type world struct {
	now        time.Time
	options    Options
	g          *Gate
	solo       map[vip.VIP]*Gate // each knows one VIP only
	configured vip.Set
	routed     vip.Set
	up         [2]bool
	gatewaysAt time.Time
	gateways   doubt
	synced     bool // some synced word was heard
	open       bool // the instance of the words holds a stream
	leaseEnd   time.Time
	lb         doubt
	flaps      map[vip.VIP][]time.Time
	endedAt    time.Time // when the stream of the words ended
	lostAt     time.Time // end of the grace, while no lease holds
	grace      time.Duration
	instance   int
	words      map[vip.VIP]Word
	away       time.Time
	stop       time.Time
	drained    map[vip.VIP]time.Time
	before     map[vip.VIP]Advertisement
}

// doubt is the extension of a lease whose end was seen late: the process did not
// run, and a renewal may wait to be read.
type doubt struct {
	seen  bool // the lease was looked at after its end
	until time.Time
}

func (d *doubt) look(end, now time.Time) {
	if !d.seen && !now.Before(end) {
		if d.seen = true; now.Sub(end) > lateAfter {
			d.until = now.Add(lateAfter)
		}
	}
}

var modelVIPs = []vip.VIP{vipA, vipB, vip6, vip.Require("2000::2/128")}

func newWorld(o Options) *world {
	w := &world{
		now: time.Unix(1000, 0), options: o, g: New(o), solo: map[vip.VIP]*Gate{},
		words: map[vip.VIP]Word{}, drained: map[vip.VIP]time.Time{}, flaps: map[vip.VIP][]time.Time{}, before: map[vip.VIP]Advertisement{},
	}
	for _, v := range modelVIPs {
		w.solo[v] = New(o)
	}
	return w
}

// each gives an input to the gate and, cut down to their VIP, to the solo gates.
func (w *world) each(f func(g *Gate, mine func(vip.VIP) bool)) {
	f(w.g, func(vip.VIP) bool { return true })
	for v, g := range w.solo {
		f(g, func(x vip.VIP) bool { return x == v })
	}
}

func keep(vips []vip.VIP, mine func(vip.VIP) bool) []vip.VIP {
	return slices.DeleteFunc(slices.Clone(vips), func(v vip.VIP) bool { return !mine(v) })
}

func (w *world) hear(h Heard) {
	w.each(func(g *Gate, mine func(vip.VIP) bool) {
		part := h
		part.Words = slices.DeleteFunc(slices.Clone(h.Words), func(x Word) bool { return !mine(x.VIP) })
		part.Removed = keep(h.Removed, mine)
		g.Hear(w.now, part)
	})
}

func (w *world) live() bool { return w.synced && w.open && w.now.Before(w.leaseEnd) }
func (w *world) lost() bool {
	if w.live() {
		return false
	}
	if !w.synced {
		return true
	}
	end := w.lostAt
	if w.open {
		end = w.leaseEnd.Add(w.grace)
		if w.now.Before(w.lb.until) {
			return false
		}
	}
	return !w.now.Before(end)
}

func (w *world) familyUp(v vip.VIP) bool {
	return w.up[v.Family()] && (w.now.Before(w.gatewaysAt.Add(MaxSessionAge)) || w.now.Before(w.gateways.until))
}

// flapping reports whether a VIP fell often enough for its rise to wait.
func (w *world) flapping(v vip.VIP) bool {
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

// look is what every look of the gate at its leases does.
func (w *world) look() {
	w.gateways.look(w.gatewaysAt.Add(MaxSessionAge), w.now)
	if w.synced && w.open {
		w.lb.look(w.leaseEnd, w.now)
	}
}

// renew is a message of a live load balancer.
func (w *world) renew() {
	w.leaseEnd, w.lb = w.now.Add(time.Second), doubt{}
}

// check evaluates all gates and compares their decisions with the truth.
func (w *world) check(t *rapid.T) {
	w.look()
	w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Evaluate(w.now) })
	if again := w.g.Evaluate(w.now); len(again) != 0 {
		t.Fatalf("a second look at the same instant changed %v", again)
	}
	for _, v := range modelVIPs {
		got, was := w.g.Decision(v), w.before[v]
		if alone := w.solo[v].Decision(v); alone != got {
			t.Fatalf("%s: %v among others, %v alone", v, got, alone)
		}
		word := w.words[v]
		vipDrain := time.Time{}
		if word.Said == SaidDraining {
			vipDrain = word.DrainEnd
		}
		drains := []time.Time{w.stop, w.drained[v], w.away, vipDrain}
		down := !w.configured.Has(v) || !w.routed.Has(v) || !w.familyUp(v) ||
			word.Said == SaidNever || word.Said == SaidNotReady ||
			(w.lost() && w.options.OnLoss == WithdrawOnLoss) ||
			slices.ContainsFunc(drains, func(d time.Time) bool { return over(d, w.now) })
		draining := slices.ContainsFunc(drains, func(d time.Time) bool { return running(d, w.now) })
		switch {
		case down && got.Advertisement != Withdrawn:
			t.Fatalf("%s must be withdrawn at once, is %v", v, got)
		case draining && got.Advertisement > Depreferred:
			t.Fatalf("%s drains, is %v", v, got)
		case (draining || !w.live()) && got.Advertisement > was:
			t.Fatalf("%s rose from %s to %v while stale or draining", v, was, got)
		case got.Reason == Flapping && !w.flapping(v):
			t.Fatalf("%s waits as flapping, after it fell at %v", v, w.flaps[v])
		case got.Advertisement == Announced && word.Said != SaidReady:
			t.Fatalf("%s is announced though the last word is %v", v, word.Said)
		case !down && !draining && w.live() && word.Said == SaidReady && got.Advertisement != Announced && got.Reason != Flapping:
			t.Fatalf("%s should be announced, is %v", v, got)
		}
		w.before[v] = got.Advertisement
	}
}

// pass lets time go by as a punctual loop does: it looks whenever the gate asks
// for it. Between two such looks nothing may change.
func (w *world) pass(t *rapid.T, d time.Duration) {
	for end := w.now.Add(d); ; {
		next := w.g.Deadline(w.now)
		if next.IsZero() || next.After(end) {
			next = end
		}
		if gap := next.Sub(w.now); gap > time.Microsecond {
			w.now = w.now.Add(gap / 2)
			if early := w.g.Evaluate(w.now); len(early) != 0 {
				t.Fatalf("%v changed %v before the deadline that the gate gave", early, gap/2)
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

// speak has an instance of the load balancer say something.
func (w *world) speak(t *rapid.T, complete, newInstance bool) {
	var words []Word
	for _, v := range vipSet(t, "spoken of") {
		x := Word{VIP: v, Said: rapid.SampledFrom([]Said{SaidNotReady, SaidReady, SaidReady, SaidDraining}).Draw(t, "said")}
		if x.Said == SaidDraining {
			x.DrainEnd = w.now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "drain ms")) * time.Millisecond)
		}
		words = append(words, x)
	}
	w.say(words, complete, newInstance)
}

// say has an instance say these words. A VIP that falls by its own word has
// flapped if its lease still holds.
func (w *world) say(words []Word, complete, newInstance bool) {
	counts := !newInstance && w.live()
	if newInstance {
		w.instance++
		w.away = time.Time{}
	}
	before := w.words
	w.words = maps.Clone(before)
	if complete {
		w.words = map[vip.VIP]Word{}
		for _, v := range modelVIPs {
			w.words[v] = Word{VIP: v, Said: SaidNotReady}
		}
	}
	for _, x := range words {
		w.words[x.VIP] = x
	}
	for v, was := range before {
		if counts && was.Said == SaidReady && w.words[v].Said == SaidNotReady {
			w.flaps[v] = append(w.flaps[v], w.now)
		}
	}
	w.open, w.synced = true, true
	w.renew()
	w.hear(w.heard(words, complete))
}

func (w *world) heard(words []Word, complete bool) Heard {
	return Heard{
		Instance: fmt.Sprint(w.instance), Live: true, LeaseEnd: w.leaseEnd, Grace: w.grace,
		GoingAway: !w.away.IsZero(), DrainEnd: w.away, Complete: complete, Words: words,
	}
}

func TestGateAgainstTheTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(Options{
			OnLoss:        rapid.SampledFrom([]LossPolicy{WithdrawOnLoss, WithdrawOnLoss, KeepOnLoss}).Draw(t, "on loss"),
			NoFlapBackoff: rapid.Bool().Draw(t, "no back-off"),
			DrainTime:     time.Second,
		})
		w.grace = time.Duration(rapid.SampledFrom([]int{0, 500, 3000}).Draw(t, "grace ms")) * time.Millisecond
		steps := map[string]func(*rapid.T){
			"configure": func(t *rapid.T) {
				vips := vipSet(t, "configured")
				w.configured = vip.NewSet(vips...)
				for v := range w.drained {
					if !w.configured.Has(v) {
						delete(w.drained, v)
					}
				}
				w.each(func(g *Gate, mine func(vip.VIP) bool) { g.Configure(keep(vips, mine)) })
			},
			"configure all": func(*rapid.T) {
				w.configured, w.routed = vip.NewSet(modelVIPs...), vip.NewSet(modelVIPs...)
				w.each(func(g *Gate, mine func(vip.VIP) bool) { g.Configure(keep(modelVIPs, mine)); g.Route(w.routed) })
			},
			"route": func(t *rapid.T) {
				w.routed = vip.NewSet(vipSet(t, "routed")...)
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Route(w.routed) })
			},
			"gateways": func(t *rapid.T) {
				w.up = [2]bool{rapid.Bool().Draw(t, "v4 up"), rapid.Bool().Draw(t, "v6 up")}
				w.gatewaysAt, w.gateways = w.now, doubt{}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Gateways(Gateways{At: w.now, Up: w.up}) })
			},
			"both gateways": func(*rapid.T) {
				w.up, w.gatewaysAt, w.gateways = [2]bool{true, true}, w.now, doubt{}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Gateways(Gateways{At: w.now, Up: w.up}) })
			},
			"the same gateways again": func(*rapid.T) {
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Gateways(Gateways{At: w.gatewaysAt, Up: w.up}) })
			},
			"speak": func(t *rapid.T) {
				if !w.open || !w.synced {
					w.speak(t, true, true)
					return
				}
				w.speak(t, rapid.Bool().Draw(t, "complete"), false)
			},
			"all fall and rise": func(*rapid.T) {
				for _, said := range []Said{SaidNotReady, SaidReady} {
					var words []Word
					for _, v := range modelVIPs {
						words = append(words, Word{VIP: v, Said: said})
					}
					w.say(words, !w.synced, !w.open || !w.synced)
				}
			},
			"heartbeat": func(*rapid.T) {
				if w.open && w.synced {
					w.renew()
					w.hear(w.heard(nil, false))
				}
			},
			"go away": func(*rapid.T) {
				if w.open && w.synced {
					w.away = w.now.Add(2 * time.Second)
					w.renew()
					w.hear(w.heard(nil, false))
				}
			},
			"stream ends": func(*rapid.T) {
				if w.open {
					w.lostAt = earlier(w.leaseEnd, w.now).Add(w.grace)
					w.open = false
					h := w.heard(nil, false)
					h.Live, h.EndedAt = false, w.now
					w.endedAt = w.now
					w.hear(h)
				}
			},
			"restart, unsynced": func(*rapid.T) {
				if !w.synced {
					return
				}
				if w.open {
					w.lostAt = earlier(w.leaseEnd, w.now).Add(w.grace)
					w.endedAt = w.now
				}
				w.open = false
				h := w.heard(nil, false)
				h.Live, h.EndedAt = false, w.endedAt
				w.hear(h)
			},
			"restart, synced": func(t *rapid.T) { w.speak(t, true, true) },
			"drain": func(t *rapid.T) {
				vips := vipSet(t, "to drain")
				for _, v := range vips {
					if w.configured.Has(v) && w.drained[v].IsZero() {
						w.drained[v] = w.now.Add(w.options.DrainTime)
					}
				}
				w.each(func(g *Gate, mine func(vip.VIP) bool) { g.Drain(w.now, keep(vips, mine)...) })
			},
			"undrain": func(t *rapid.T) {
				vips := vipSet(t, "to undrain")
				for _, v := range vips {
					delete(w.drained, v)
				}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Undrain(vips...) })
			},
			"time passes": func(t *rapid.T) {
				w.pass(t, time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms"))*time.Millisecond)
			},
			// The process does not run, and looks once it does.
			"starves": func(t *rapid.T) {
				w.now = w.now.Add(time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms")) * time.Millisecond)
			},
			"": func(t *rapid.T) { w.check(t) },
		}
		if rapid.IntRange(0, 9).Draw(t, "stops") == 0 {
			steps["stop"] = func(*rapid.T) {
				if w.stop.IsZero() {
					w.stop = w.now.Add(w.options.DrainTime)
				}
				w.each(func(g *Gate, _ func(vip.VIP) bool) { g.Stop(w.now) })
			}
		}
		t.Repeat(steps)
	})
}
