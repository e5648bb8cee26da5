package target

import (
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/trench"
)

// lossWorld is what a property test knows of the targets under a Sudden.
type lossWorld struct {
	t       *rapid.T
	s       *Sudden
	o       SuddenOptions
	now     time.Time
	net     networks
	seen    int
	state   map[Key]State
	keys    []Key
	told    map[Key][2]bool
	history map[Key]*history
	// dark is when a segment was last evaluated as dark.
	dark map[netip.Prefix]time.Time
	last Verdict
}

// history is what happened to a target that fell silently and is still down.
type history struct {
	fell time.Time
	// suspectEnd is when it was first seen no longer suspected after it was.
	wasSuspected bool
	suspectEnd   time.Time
	// answered is when a check first succeeded again.
	answered time.Time
	// darkAt is when its network was last evaluated as dark, if lately.
	darkAt time.Time
}

func lossCheck(k Key) trench.Check {
	if k.Stream == "fast" {
		return trench.Check{Interval: 100 * time.Millisecond, Timeout: 50 * time.Millisecond, Rise: 3, Fall: 1}
	}
	return massCheck
}

func (w *lossWorld) evaluate(changed []Health, removed []Key) {
	w.last = w.s.Evaluate(w.now, changed, removed, lossCheck, fakeView{w.net, w.seen})
	for _, k := range w.last.Touched {
		w.told[k] = [2]bool{w.s.Held(k), w.s.Suspected(k)}
	}
	w.check()
}

// pass lets time pass, with the evaluations that were asked for.
func (w *lossWorld) pass(d time.Duration) {
	end := w.now.Add(d)
	for range 10_000 {
		if w.last.Next.IsZero() || w.last.Next.After(end) {
			w.now = end
			w.evaluate(nil, nil)
			return
		}
		if !w.last.Next.After(w.now) {
			w.t.Fatalf("wants to be called at %v, which is not after %v", w.last.Next, w.now)
		}
		w.now = w.last.Next
		w.evaluate(nil, nil)
	}
	w.t.Fatalf("wants to be called without end: %+v", w.last)
}

func (w *lossWorld) check() {
	var anySuspected bool
	for segment, n := range w.net {
		if n.known && n.dark {
			w.dark[segment] = w.now
		}
	}
	for _, k := range w.keys {
		held, suspected := w.s.Held(k), w.s.Suspected(k)
		anySuspected = anySuspected || suspected
		if w.told[k] != [2]bool{held, suspected} {
			w.t.Fatalf("%v: held %v, suspected %v were not told", k, held, suspected)
		}
		if held && !w.o.Hold {
			w.t.Fatalf("%v is held, which nobody asked for", k)
		}
		h := w.history[k]
		if (held || suspected) && (h == nil || w.state[k] != NotReady) {
			w.t.Fatalf("%v is held %v, suspected %v, but did not fall silently: %v", k, held, suspected, w.state[k])
		}
		if h == nil {
			continue
		}
		if n := w.net[segmentOf(k.Addr)]; n.known && n.dark {
			h.darkAt = w.now
		}
		if suspected && (h.darkAt.IsZero() || w.now.Sub(h.darkAt) >= darkGrace) {
			w.t.Fatalf("%v is suspected, but its network is not dark", k)
		}
		if h.wasSuspected && !suspected && h.suspectEnd.IsZero() {
			h.suspectEnd = w.now
		}
		h.wasSuspected = h.wasSuspected || suspected
		if !held {
			continue
		}
		one := window(lossCheck(k))
		rise := one * time.Duration(lossCheck(k).Rise)
		switch {
		case suspected:
		case !h.suspectEnd.IsZero():
			if w.now.Sub(h.suspectEnd) >= one && (h.answered.IsZero() || w.now.Sub(h.answered) >= rise) {
				w.t.Fatalf("%v is held %v after the suspicion", k, w.now.Sub(h.suspectEnd))
			}
		case w.now.Sub(h.fell) >= one:
			w.t.Fatalf("%v is held %v after its fall without suspicion", k, w.now.Sub(h.fell))
		case h.darkAt.IsZero() && w.now.Sub(h.fell) >= unknownWait:
			w.t.Fatalf("%v is held %v after its fall without darkness", k, w.now.Sub(h.fell))
		}
	}
	if w.last.Suspect != anySuspected || w.last.Suspect != (w.last.Detail != "") {
		w.t.Fatalf("says %+v, some are suspected: %v", w.last, anySuspected)
	}
	if len(w.last.Ask) > maxAsked {
		w.t.Fatalf("asks %d", len(w.last.Ask))
	}
}

// become is the next report of a target, by what its last check found.
func (w *lossWorld) become(k Key, state State, silent bool, failure string) Health {
	was := w.state[k]
	w.state[k] = state
	switch {
	case was == Ready && state == NotReady && silent:
		w.history[k] = &history{fell: w.now}
		if at := w.dark[segmentOf(k.Addr)]; w.now.Sub(at) < darkGrace {
			w.history[k].darkAt = at
		}
	case state != NotReady:
		delete(w.history, k)
	case w.history[k] != nil && !silent && failure == "" && w.history[k].answered.IsZero():
		w.history[k].answered = w.now
	}
	return Health{Key: k, State: state, Since: w.now, LastCheck: w.now, LastError: failure, Silent: silent}
}

func TestHoldIsBoundedWhateverHappens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &lossWorld{
			t: t, now: time.Unix(1000, 0), net: networks{}, state: map[Key]State{}, told: map[Key][2]bool{}, history: map[Key]*history{}, dark: map[netip.Prefix]time.Time{},
			o: SuddenOptions{Share: Share(rapid.SampledFrom([]int{1, 50, 80, 100}).Draw(t, "share")), Hold: rapid.Bool().Draw(t, "hold")},
		}
		w.s = NewSudden(w.o)
		for i := range 12 {
			k := key(i%3, i)
			if i%4 == 3 {
				k.Stream = "fast"
			}
			if i == 11 {
				k.Addr = netip.MustParseAddr("fd00::11")
			}
			w.keys = append(w.keys, k)
		}
		some := func(label string) []Key {
			return rapid.SliceOfNDistinct(rapid.SampledFrom(w.keys), 1, len(w.keys), func(k Key) Key { return k }).Draw(t, label)
		}
		all := func(state State, silent bool, failure string, keys []Key) {
			var changed []Health
			for _, k := range keys {
				if _, there := w.state[k]; there || state == Ready || state == Starting {
					changed = append(changed, w.become(k, state, silent, failure))
				}
			}
			w.evaluate(changed, nil)
		}
		all(Ready, false, "", w.keys)
		t.Repeat(map[string]func(*rapid.T){
			"pass":    func(t *rapid.T) { w.pass(time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms")) * time.Millisecond) },
			"rise":    func(*rapid.T) { all(Ready, false, "", some("who")) },
			"return":  func(*rapid.T) { all(Ready, false, "", w.keys) },
			"go dark": func(*rapid.T) { all(NotReady, true, "no answer", w.keys) },
			"fall":    func(*rapid.T) { all(NotReady, true, "no answer", some("who")) },
			"refuse":  func(*rapid.T) { all(NotReady, false, "refused", some("who")) },
			"answer": func(*rapid.T) {
				var changed []Health
				for _, k := range some("who") {
					if w.state[k] == NotReady {
						changed = append(changed, w.become(k, NotReady, false, ""))
					}
				}
				w.evaluate(changed, nil)
			},
			"overdue": func(*rapid.T) { all(Overdue, true, "late", some("who")) },
			"restart": func(*rapid.T) { all(Starting, false, "", some("who")) },
			"remove": func(*rapid.T) {
				var removed []Key
				for _, k := range some("who") {
					if _, there := w.state[k]; there {
						removed = append(removed, k)
						delete(w.state, k)
						delete(w.history, k)
					}
				}
				w.evaluate(nil, removed)
			},
			"network": func(t *rapid.T) {
				n := rapid.SampledFrom([]networkState{{}, {dark: true, known: true}, {dark: true, known: true}, {confirmed: w.now}}).Draw(t, "state")
				for _, k := range some("of") {
					w.net[segmentOf(k.Addr)] = n
				}
				w.seen++
				w.evaluate(nil, nil)
			},
		})
		// Everything ends: the networks are there, and nobody rises.
		for _, k := range w.keys {
			w.net[segmentOf(k.Addr)] = networkState{confirmed: w.now}
		}
		w.seen++
		w.pass(10 * massWindow)
		for _, k := range w.keys {
			if w.s.Held(k) || w.s.Suspected(k) {
				t.Fatalf("%v is held for good", k)
			}
		}
		if !w.last.Next.IsZero() || len(w.last.Ask)+len(w.s.fallen)+len(w.s.segments)+len(w.s.asked)+len(w.s.ends) > 0 {
			t.Fatalf("something is left: %+v", w.last)
		}
	})
}
