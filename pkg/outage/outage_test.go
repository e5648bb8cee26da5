package outage

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
)

var outageCheck = trench.Check{Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3}

const outageWindow = 1500 * time.Millisecond

func outageCheckOf(k healthcheck.Key) trench.Check {
	if k.Stream == "fast" {
		return trench.Check{Interval: 100 * time.Millisecond, Timeout: 50 * time.Millisecond, Rise: 3, Fall: 1}
	}
	return outageCheck
}

// fixture passes check results to a detector at a time that the test sets.
type fixture struct {
	*Detector
	t       *testing.T
	now     time.Time
	last    Verdict
	touched map[healthcheck.Key][2]bool // Held and Suspected when last reported as touched
}

func newFixture(t *testing.T, o Options, targets int) *fixture {
	f := &fixture{Detector: New(o), t: t, now: time.Unix(1000, 0), touched: map[healthcheck.Key][2]bool{}}
	for i := range targets {
		f.eval(f.is(outageKey(i), healthcheck.Starting, false, ""))
		f.eval(f.up(outageKey(i)))
	}
	f.now = f.now.Add(10 * time.Second)
	return f
}

func outageKey(i int) healthcheck.Key {
	return healthcheck.Key{
		Stream: "s", Name: fmt.Sprint("t", i),
		Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}),
	}
}

func (f *fixture) is(k healthcheck.Key, state healthcheck.State, silent bool, lastError string) healthcheck.Health {
	return healthcheck.Health{Key: k, State: state, Since: f.now, LastCheck: f.now, LastError: lastError, Silent: silent}
}

func (f *fixture) up(k healthcheck.Key) healthcheck.Health {
	return f.is(k, healthcheck.Ready, false, "")
}

func (f *fixture) silent(k healthcheck.Key) healthcheck.Health {
	return f.is(k, healthcheck.NotReady, true, "no answer")
}

func (f *fixture) refused(k healthcheck.Key) healthcheck.Health {
	return f.is(k, healthcheck.NotReady, false, "refused")
}

func (f *fixture) answered(k healthcheck.Key) healthcheck.Health {
	return f.is(k, healthcheck.NotReady, false, "")
}

func (f *fixture) eval(changed ...healthcheck.Health) {
	f.last = f.Evaluate(f.now, changed, nil, outageCheckOf)
	for _, k := range f.last.Touched {
		f.touched[k] = [2]bool{f.Held(k), f.Suspected(k)}
	}
}

// fail lets targets from to to-1 fail silently, step apart.
func (f *fixture) fail(from, to int, step time.Duration) {
	for i := from; i < to; i++ {
		f.eval(f.silent(outageKey(i)))
		f.now = f.now.Add(step)
	}
}

func (f *fixture) pass(d time.Duration) {
	f.now = f.now.Add(d)
	f.eval()
}

func (f *fixture) want(what string, held int, outage bool) {
	f.t.Helper()
	n := 0
	for i := range 256 {
		k := outageKey(i)
		if f.Held(k) {
			n++
		}
		if f.touched[k] != [2]bool{f.Held(k), f.Suspected(k)} {
			f.t.Errorf("%s: %v changed and was not reported as touched", what, k)
		}
	}
	if n != held || f.last.Outage != outage {
		f.t.Errorf("%s: %d held, outage %v; want %d, %v (%+v)", what, n, f.last.Outage, held, outage, f.last)
	}
}

var (
	holding     = Options{Threshold: 80, Hold: true}
	withdrawing = Options{Threshold: 80}
)

func TestHold(t *testing.T) {
	f := newFixture(t, holding, 10)
	f.fail(0, 7, 100*time.Millisecond)
	f.want("below the threshold", 7, false)
	f.fail(7, 8, 0)
	f.want("at the threshold", 8, true)
	if !strings.Contains(f.last.Detail, "8 of 10 targets") {
		t.Errorf("detail %q", f.last.Detail)
	}
	for range 3600 {
		f.pass(time.Second)
	}
	f.fail(8, 10, 0)
	f.want("an hour later, with the last targets", 10, true)
	f.eval(f.answered(outageKey(2)))
	f.want("one target answers", 10, false)
	f.eval(f.up(outageKey(0)), f.refused(outageKey(1)))
	f.want("next checks decide", 8, false)
	f.pass(outageWindow)
	f.want("all others were checked", 1, false)
	f.eval(f.up(outageKey(2)))
	f.want("the last target is ready", 0, false)
	if !f.last.Next.IsZero() {
		// Evaluate may request one more call, which changes nothing.
		f.pass(f.last.Next.Sub(f.now))
	}
	if !f.last.Next.IsZero() || len(f.failed) > 0 {
		t.Errorf("left over: %+v, %v", f.last, f.failed)
	}
}

func TestWithdraw(t *testing.T) {
	f := newFixture(t, withdrawing, 10)
	f.fail(0, 10, 10*time.Millisecond)
	f.want("outage", 0, true)
	if !f.Suspected(outageKey(0)) {
		t.Error("target is not suspected")
	}
	f.eval(f.refused(outageKey(3)))
	f.want("answer", 0, false)
	if f.Suspected(outageKey(0)) {
		t.Error("target is still suspected")
	}
}

func TestNeedsThresholdInOneInterval(t *testing.T) {
	f := newFixture(t, holding, 10)
	f.eval(f.silent(outageKey(0)))
	f.want("one failure", 1, false)
	if want := f.now.Add(outageWindow); !f.last.Next.Equal(want) {
		t.Errorf("next %v, want %v", f.last.Next, want)
	}
	f.pass(outageWindow - 1)
	f.want("a moment before", 1, false)
	f.pass(1)
	f.want("one interval later", 0, false)

	f = newFixture(t, holding, 10)
	f.fail(0, 10, 250*time.Millisecond)
	f.want("never eight in 1.5 s", 6, false)
}

func TestNeedsTenAddresses(t *testing.T) {
	f := newFixture(t, holding, 9)
	f.fail(0, 9, time.Millisecond)
	f.want("nine targets", 9, false)
	f.pass(outageWindow)
	f.want("nine targets, later", 0, false)

	f = newFixture(t, holding, 0)
	var keys []healthcheck.Key
	for i := range 20 {
		keys = append(keys, healthcheck.Key{Stream: fmt.Sprint("s", i), Name: "t", Addr: outageKey(0).Addr})
	}
	for _, k := range keys {
		f.eval(f.up(k))
	}
	f.now = f.now.Add(time.Second)
	for _, k := range keys {
		f.eval(f.silent(k))
	}
	if f.last.Outage {
		t.Errorf("one host in 20 streams is an outage: %+v", f.last)
	}
}

func TestCountsSilentFailuresOnly(t *testing.T) {
	for name, failed := range map[string]func(f *fixture, k healthcheck.Key) healthcheck.Health{
		"overdue": func(f *fixture, k healthcheck.Key) healthcheck.Health {
			return f.is(k, healthcheck.Overdue, true, "late")
		},
		"drained": func(f *fixture, k healthcheck.Key) healthcheck.Health {
			return f.is(k, healthcheck.Drained, true, "")
		},
		"starting": func(f *fixture, k healthcheck.Key) healthcheck.Health {
			return f.is(k, healthcheck.Starting, true, "no answer")
		},
		"refused": func(f *fixture, k healthcheck.Key) healthcheck.Health { return f.refused(k) },
	} {
		for _, o := range []Options{holding, withdrawing} {
			f := newFixture(t, o, 10)
			for i := range 10 {
				f.eval(failed(f, outageKey(i)))
			}
			f.want(name, 0, false)
		}
	}
}

func TestPopulation(t *testing.T) {
	f := newFixture(t, holding, 0)
	for i := range 100 {
		f.eval(f.is(outageKey(i), healthcheck.Starting, false, ""))
		f.eval(f.silent(outageKey(i)))
	}
	f.want("never ready", 0, false)

	f = newFixture(t, holding, 20)
	for i := 12; i < 16; i++ {
		f.eval(f.is(outageKey(i), healthcheck.Drained, false, ""))
	}
	for i := 16; i < 20; i++ {
		f.eval(f.is(outageKey(i), healthcheck.Starting, false, ""))
	}
	f.now = f.now.Add(time.Second)
	f.fail(0, 10, time.Millisecond)
	f.want("ten of the twelve that are left", 10, true)

	var keys []healthcheck.Key
	for i := range 20 {
		keys = append(keys, outageKey(i))
	}
	v := f.Evaluate(f.now, nil, keys, outageCheckOf)
	if v.Outage || f.Held(keys[0]) || len(v.Touched) != 10 || len(f.failed)+len(f.seen) > 0 {
		t.Errorf("after the removal: %+v, %v", v, f.failed)
	}
}

func TestLateFailure(t *testing.T) {
	f := newFixture(t, holding, 10)
	h := f.silent(outageKey(0))
	f.now = f.now.Add(outageWindow)
	f.eval(h)
	f.want("reported late", 0, false)

	f = newFixture(t, holding, 10)
	f.fail(0, 9, time.Millisecond)
	f.Evaluate(f.now, []healthcheck.Health{f.silent(outageKey(9))}, nil,
		func(healthcheck.Key) trench.Check { return trench.Check{} })
	f.want("without a check", 9, true)
}

func TestRisingTarget(t *testing.T) {
	f := newFixture(t, holding, 10)
	f.fail(0, 10, time.Millisecond)
	f.eval(f.answered(outageKey(0)), f.answered(outageKey(1)), f.answered(outageKey(2)))
	f.now = f.now.Add(outageWindow)
	f.eval(f.silent(outageKey(1)), f.refused(outageKey(2)))
	f.want("one failed again, one refused", 1, false)
	f.eval(f.answered(outageKey(0)))
	f.pass(outageWindow)
	f.want("a further success does not extend the time", 0, false)
}

func TestOff(t *testing.T) {
	f := newFixture(t, Options{Hold: true}, 10)
	f.fail(0, 10, 0)
	f.want("off", 0, false)
}

// outageModel computes how long a target may be held.
type outageModel struct {
	since, outageEnd, answered time.Time
	suspected                  bool
}

func TestHoldIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := Options{
			Threshold: Percent(rapid.SampledFrom([]int{1, 50, 80, 100}).Draw(t, "threshold")),
			Hold:      rapid.Bool().Draw(t, "hold"),
		}
		d, now := New(o), time.Unix(1000, 0)
		var keys []healthcheck.Key
		for i := range 14 {
			k := outageKey(i)
			if i%4 == 3 {
				k.Stream = "fast"
			}
			keys = append(keys, k)
		}
		var last Verdict
		states, models, reported := map[healthcheck.Key]healthcheck.State{}, map[healthcheck.Key]*outageModel{},
			map[healthcheck.Key][2]bool{}
		evaluate := func(changed []healthcheck.Health, removed []healthcheck.Key) {
			last = d.Evaluate(now, changed, removed, outageCheckOf)
			for _, k := range last.Touched {
				reported[k] = [2]bool{d.Held(k), d.Suspected(k)}
			}
			if !last.Next.IsZero() && !last.Next.After(now) {
				t.Fatalf("asks to be called at %v, which is not after %v", last.Next, now)
			}
			outage := false
			for _, k := range keys {
				held, suspected, m := d.Held(k), d.Suspected(k), models[k]
				outage = outage || suspected
				switch {
				case reported[k] != [2]bool{held, suspected}:
					t.Fatalf("%v: held %v, suspected %v were not reported as touched", k, held, suspected)
				case held && !o.Hold:
					t.Fatalf("%v is held without Hold", k)
				case (held || suspected) && (m == nil || states[k] != healthcheck.NotReady):
					t.Fatalf("%v is held %v, suspected %v and did not fail silently", k, held, suspected)
				case m == nil:
					continue
				}
				if m.suspected && !suspected && m.outageEnd.IsZero() {
					m.outageEnd = now
				}
				m.suspected = m.suspected || suspected
				window := checkInterval(outageCheckOf(k))
				switch {
				case !held || suspected:
				case m.outageEnd.IsZero() && now.Sub(m.since) >= window:
					t.Fatalf("%v is held %v after its failure without an outage", k, now.Sub(m.since))
				case !m.outageEnd.IsZero() && now.Sub(m.outageEnd) >= window &&
					(m.answered.IsZero() || now.Sub(m.answered) >= window*time.Duration(outageCheckOf(k).Rise)):
					t.Fatalf("%v is held %v after the outage", k, now.Sub(m.outageEnd))
				}
			}
			if last.Outage != outage || outage != (last.Detail != "") {
				t.Fatalf("verdict %+v, some target is suspected: %v", last, outage)
			}
		}
		report := func(of []healthcheck.Key, state healthcheck.State, silent bool, lastError string) {
			var changed []healthcheck.Health
			for _, k := range of {
				was, known := states[k]
				if !known && state != healthcheck.Ready && state != healthcheck.Starting {
					continue
				}
				states[k] = state
				switch {
				case was == healthcheck.Ready && state == healthcheck.NotReady && silent:
					models[k] = &outageModel{since: now}
				case state != healthcheck.NotReady:
					delete(models, k)
				case models[k] != nil && !silent && lastError == "" && models[k].answered.IsZero():
					models[k].answered = now
				}
				changed = append(changed, healthcheck.Health{
					Key: k, State: state, Since: now, LastCheck: now,
					LastError: lastError, Silent: silent,
				})
			}
			evaluate(changed, nil)
		}
		pass := func(d time.Duration) {
			for end := now.Add(d); ; evaluate(nil, nil) {
				if last.Next.IsZero() || last.Next.After(end) {
					now = end
					evaluate(nil, nil)
					return
				}
				now = last.Next
			}
		}
		some := func(t *rapid.T) []healthcheck.Key {
			return rapid.SliceOfNDistinct(rapid.SampledFrom(keys), 1, len(keys),
				func(k healthcheck.Key) healthcheck.Key { return k }).Draw(t, "of")
		}
		report(keys, healthcheck.Ready, false, "")
		t.Repeat(map[string]func(*rapid.T){
			"pass":     func(t *rapid.T) { pass(time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms")) * time.Millisecond) },
			"ready":    func(t *rapid.T) { report(some(t), healthcheck.Ready, false, "") },
			"recover":  func(*rapid.T) { report(keys, healthcheck.Ready, false, "") },
			"outage":   func(*rapid.T) { report(keys, healthcheck.NotReady, true, "no answer") },
			"fail":     func(t *rapid.T) { report(some(t), healthcheck.NotReady, true, "no answer") },
			"refuse":   func(t *rapid.T) { report(some(t), healthcheck.NotReady, false, "refused") },
			"overdue":  func(t *rapid.T) { report(some(t), healthcheck.Overdue, true, "late") },
			"starting": func(t *rapid.T) { report(some(t), healthcheck.Starting, false, "") },
			"answer": func(t *rapid.T) {
				var failed []healthcheck.Key
				for _, k := range some(t) {
					if states[k] == healthcheck.NotReady {
						failed = append(failed, k)
					}
				}
				report(failed, healthcheck.NotReady, false, "")
			},
			"remove": func(t *rapid.T) {
				removed := some(t)
				for _, k := range removed {
					delete(states, k)
					delete(models, k)
				}
				evaluate(nil, removed)
			},
		})
		// The outage ends when the targets respond.
		report(keys, healthcheck.NotReady, false, "refused")
		pass(10 * outageWindow)
		if last.Outage || !last.Next.IsZero() || len(d.failed) > 0 {
			t.Fatalf("left over: %+v, %v", last, d.failed)
		}
	})
}

func TestPercent(t *testing.T) {
	for text, want := range map[string]Percent{"": 0, "off": 0, "1%": 1, "80%": 80, "100%": 100} {
		var s Percent
		if err := s.UnmarshalText([]byte(text)); err != nil || s != want {
			t.Errorf("%q: %v, %v", text, s, err)
		}
	}
	for _, text := range []string{"0%", "101%", "80", "%", "-1%", "+5%", "0.5%", "80 %", "300%", "Off"} {
		var s Percent
		if err := s.UnmarshalText([]byte(text)); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v, %v", text, s, err)
		}
	}
	for _, c := range []struct {
		s           Percent
		part, whole int
		want        bool
	}{
		{80, 7, 10, false},
		{80, 8, 10, true},
		{33, 1, 3, true},
		{34, 1, 3, false},
		{100, 10, 10, true},
		{100, 9, 10, false},
		{1, 0, 0, false},
		{0, 10, 10, false},
		{80, 1, 1, true},
	} {
		if got := c.s.reached(c.part, c.whole); got != c.want {
			t.Errorf("%v of %d/%d: %v", c.s, c.part, c.whole, got)
		}
	}
}
