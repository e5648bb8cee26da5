package target

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// networkState is what a fake network says of a segment.
type networkState struct {
	dark, known bool
	// confirmed is when something on it was last reached.
	confirmed time.Time
}

// networks is a NetworkView: by segment, unknown unless said otherwise.
type networks map[netip.Prefix]networkState

// fakeView is what a test says of networks, for the seen-th time.
type fakeView struct {
	networks
	seen int
}

func (v fakeView) Seen() time.Time { return time.Unix(int64(v.seen), 0) }

func (n networks) Of(a netip.Addr, _, since time.Time) (dark, known bool, detail string) {
	s := n[segmentOf(a)]
	if !s.confirmed.IsZero() && !s.confirmed.Before(since) {
		return false, true, "somebody was reached"
	}
	return s.dark, s.known, "interface net has no carrier"
}

// mass is a set of targets under a Sudden, at a time that the test moves. Their
// check has an interval of 1 s, a timeout of 500 ms and a rise of 2.
type mass struct {
	*Sudden
	t       *testing.T
	now     time.Time
	net     networks
	seen    int          // how often net has changed
	touched map[Key]bool // what Held and Suspected said when last told
	marked  map[Key]bool
	last    Verdict
}

var massCheck = trench.Check{Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3}

const massWindow = 1500 * time.Millisecond

func newMass(t *testing.T, o SuddenOptions) *mass {
	return &mass{Sudden: NewSudden(o), t: t, now: time.Unix(1000, 0), net: networks{}, touched: map[Key]bool{}, marked: map[Key]bool{}}
}

// key is target i of segment 10.x.y.0/24.
func key(seg, i int) Key {
	return Key{Stream: "s", Name: fmt.Sprintf("t%d-%d", seg, i), Addr: netip.AddrFrom4([4]byte{10, byte(seg >> 8), byte(seg), byte(i)})}
}

func segmentNumber(seg int) netip.Prefix { return segmentOf(key(seg, 0).Addr) }

func checkOf(Key) trench.Check { return massCheck }

// eval evaluates and keeps what Touched promises.
func (m *mass) eval(changed ...Health) Verdict {
	m.t.Helper()
	m.last = m.Evaluate(m.now, changed, nil, checkOf, fakeView{m.net, m.seen})
	for _, k := range m.last.Touched {
		m.touched[k], m.marked[k] = m.Held(k), m.Suspected(k)
	}
	return m.last
}

func (m *mass) is(k Key, state State, silent bool, failure string) Health {
	return Health{Key: k, State: state, Since: m.now, LastCheck: m.now, LastError: failure, Silent: silent}
}

func (m *mass) up(k Key) Health       { return m.is(k, Ready, false, "") }
func (m *mass) silent(k Key) Health   { return m.is(k, NotReady, true, "no answer") }
func (m *mass) refused(k Key) Health  { return m.is(k, NotReady, false, "refused") }
func (m *mass) answered(k Key) Health { return m.is(k, NotReady, false, "") }

// start makes n targets of a segment ready.
func (m *mass) start(seg, n int) {
	m.t.Helper()
	for i := range n {
		m.eval(m.is(key(seg, i), Starting, false, ""))
		m.eval(m.up(key(seg, i)))
	}
	m.now = m.now.Add(10 * time.Second)
}

// fell lets targets from..to-1 of a segment fall silently, step apart.
func (m *mass) fell(seg, from, to int, step time.Duration) {
	m.t.Helper()
	for i := from; i < to; i++ {
		m.eval(m.silent(key(seg, i)))
		m.now = m.now.Add(step)
	}
}

// want checks how many of the targets of a segment are held, and the suspicion.
func (m *mass) want(what string, seg, held int, suspect bool) {
	m.t.Helper()
	var n int
	for i := range 256 {
		k := key(seg, i)
		if m.Held(k) {
			n++
		}
		if m.Held(k) != m.touched[k] || m.Suspected(k) != m.marked[k] {
			m.t.Errorf("%s: what is said of %v changed untold", what, k)
		}
	}
	if n != held || m.last.Suspect != suspect {
		m.t.Errorf("%s: held %d, suspect %v, want %d, %v; %+v", what, n, m.last.Suspect, held, suspect, m.last)
	}
}

func (m *mass) pass(d time.Duration) { m.now = m.now.Add(d) }

func (m *mass) say(seg int, n networkState) {
	m.net[segmentNumber(seg)] = n
	m.seen++
}

func (m *mass) dark(seg int)    { m.say(seg, networkState{dark: true, known: true}) }
func (m *mass) unknown(seg int) { m.say(seg, networkState{}) }

// lit: something was reached just now.
func (m *mass) lit(seg int) { m.say(seg, networkState{confirmed: m.now}) }

var (
	holding     = SuddenOptions{Share: 80, Hold: true}
	withdrawing = SuddenOptions{Share: 80}
)

func TestHoldLastsFromTheFirstFallToTheEndOfTheDarkness(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	m.fell(0, 0, 8, 100*time.Millisecond)
	m.want("at the share", 0, 8, false)
	m.fell(0, 8, 9, 0)
	m.want("beyond the share", 0, 9, true)
	if !strings.Contains(m.last.Detail, "9 of 10 targets") || !strings.Contains(m.last.Detail, "no carrier") {
		t.Errorf("detail %q", m.last.Detail)
	}
	for range 3600 {
		m.pass(time.Second)
		m.eval()
	}
	m.fell(0, 9, 10, 0)
	m.want("an hour later, with the last", 0, 10, true)
	m.lit(0)
	m.eval()
	m.want("light", 0, 10, false)
	// Each one's next check decides.
	m.eval(m.up(key(0, 0)), m.refused(key(0, 1)), m.answered(key(0, 2)))
	m.want("some answered", 0, 8, false)
	m.pass(massWindow)
	m.eval()
	m.want("all were checked", 0, 1, false)
	m.eval(m.up(key(0, 2)))
	m.want("the last rose", 0, 0, false)
	if !m.last.Next.IsZero() || m.last.Ask != nil {
		t.Errorf("still busy: %+v", m.last)
	}
}

func TestWithoutMassEachFallsWithinOneInterval(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	m.eval(m.silent(key(0, 0)))
	m.want("pending", 0, 1, false)
	if want := m.now.Add(massWindow); !m.last.Next.Equal(want) {
		t.Errorf("next %v, want %v", m.last.Next, want)
	}
	m.pass(massWindow - 1)
	m.eval()
	m.want("a moment before", 0, 1, false)
	m.pass(1)
	m.eval()
	m.want("one interval later", 0, 0, false)
	if m.last.Ask != nil {
		t.Errorf("asks %v", m.last.Ask)
	}
}

func TestFallsThatAreSpreadWiderAreNoMass(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	m.fell(0, 0, 10, 250*time.Millisecond)
	m.want("never nine in 1.5 s", 0, 6, false)
}

func TestUnknownNetworkIsWaitedForShortly(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 12)
	m.fell(0, 0, 10, 10*time.Millisecond)
	m.want("pending", 0, 10, false)
	end := time.Unix(1010, 0).Add(unknownWait)
	if !m.last.Next.Equal(end) {
		t.Errorf("next %v, want %v", m.last.Next, end)
	}
	m.now = end
	m.eval()
	m.want("nobody could say", 0, 0, false)
	m.eval(m.silent(key(0, 11)))
	m.want("one more", 0, 0, false)
	// Now it is known, too late to hold, early enough to say so.
	m.dark(0)
	m.eval()
	m.want("dark", 0, 0, true)
	if !m.Suspected(key(0, 3)) {
		t.Error("not suspected")
	}
}

func TestWitnessEndsPendingAtOnce(t *testing.T) {
	for name, witness := range map[string]func(m *mass) []Health{
		"the network": func(m *mass) []Health { m.lit(0); return nil },
		"another target's refusal": func(m *mass) []Health {
			return []Health{m.refused(key(0, 9))}
		},
		"a fallen target's refusal": func(m *mass) []Health {
			return []Health{m.refused(key(0, 0))}
		},
		"a target that never was ready": func(m *mass) []Health { return []Health{m.up(key(0, 99))} },
	} {
		m := newMass(t, holding)
		m.start(0, 10)
		m.dark(0)
		m.fell(0, 0, 7, time.Millisecond)
		m.want(name+": before", 0, 7, false)
		m.eval(witness(m)...)
		m.want(name, 0, 0, false)
	}
}

func TestAnswerEndsTheSuspicion(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(m *mass) Health
		held   int // at once
	}{
		"rises":          {func(m *mass) Health { return m.up(key(0, 0)) }, 9},
		"refuses":        {func(m *mass) Health { return m.refused(key(0, 0)) }, 9},
		"begins to rise": {func(m *mass) Health { return m.answered(key(0, 0)) }, 10},
	} {
		m := newMass(t, holding)
		m.start(0, 10)
		m.dark(0)
		m.fell(0, 0, 10, time.Millisecond)
		m.want(name+": before", 0, 10, true)
		m.eval(c.answer(m))
		m.want(name, 0, c.held, false)
		m.pass(massWindow)
		m.eval()
		m.want(name+": an interval later", 0, c.held-9, false)
		m.pass(massWindow)
		m.eval()
		m.want(name+": at last", 0, 0, false)
	}
}

func TestAnswerFromBeforeTheFallProvesNothing(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	late := m.up(key(0, 99))
	m.pass(time.Millisecond)
	m.fell(0, 0, 10, time.Millisecond)
	m.eval(late)
	m.want("after", 0, 10, true)
}

func TestOnlySilentFallsOfReadyTargetsCount(t *testing.T) {
	for name, fall := range map[string]func(m *mass, k Key) Health{
		"overdue":  func(m *mass, k Key) Health { return m.is(k, Overdue, true, "late") },
		"drained":  func(m *mass, k Key) Health { return m.is(k, Drained, true, "") },
		"starting": func(m *mass, k Key) Health { return m.is(k, Starting, true, "no answer") },
		"refused":  func(m *mass, k Key) Health { return m.refused(k) },
	} {
		for _, o := range []SuddenOptions{holding, withdrawing} {
			m := newMass(t, o)
			m.start(0, 10)
			m.dark(0)
			for i := range 10 {
				m.eval(fall(m, key(0, i)))
			}
			m.want(name, 0, 0, false)
		}
	}
}

func TestTargetsThatNeverWereReadyCountForNothing(t *testing.T) {
	m := newMass(t, holding)
	for i := range 100 {
		m.eval(m.is(key(0, i), Starting, false, ""))
		m.eval(m.silent(key(0, i)))
	}
	m.want("restart", 0, 0, false)
	m.start(1, 10)
	m.dark(1)
	m.fell(1, 0, 9, time.Millisecond)
	m.want("90 % of those that were ready", 1, 9, true)
}

func TestRemovedTargetsLeaveTheHold(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	m.fell(0, 0, 10, time.Millisecond)
	var keys []Key
	for i := range 10 {
		keys = append(keys, key(0, i))
	}
	v := m.Evaluate(m.now, nil, keys, checkOf, fakeView{m.net, m.seen})
	if v.Suspect || v.Ask != nil || m.Held(keys[0]) || len(v.Touched) != 10 {
		t.Errorf("after the removal: %+v", v)
	}
	if len(m.Sudden.fallen)+len(m.segments)+len(m.asked)+len(m.ends)+len(m.whole) != 0 {
		t.Errorf("something is left: %+v", m.Sudden)
	}
}

func TestOneHostIsNoMass(t *testing.T) {
	m := newMass(t, holding)
	// One name with two addresses, and in another stream another name for one.
	one := netip.MustParseAddr("10.0.0.1")
	keys := []Key{{"s", "t", one}, {"s", "t", netip.MustParseAddr("fd00::1")}, {"r", "t", one}}
	for _, k := range keys {
		m.eval(m.up(k))
	}
	m.pass(time.Second)
	m.net[segmentOf(keys[0].Addr)] = networkState{dark: true, known: true}
	m.net[segmentOf(keys[1].Addr)] = networkState{dark: true, known: true}
	for _, k := range keys {
		m.eval(m.silent(k))
	}
	if m.last.Suspect {
		t.Errorf("suspects %+v", m.last)
	}
	m.pass(massWindow)
	m.eval()
	for _, k := range keys {
		if m.Held(k) {
			t.Errorf("%v is held", k)
		}
	}
}

func TestNetworksAreJudgedEachForItself(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 18)
	m.start(1, 2)
	m.dark(0)
	m.fell(0, 0, 18, time.Millisecond)
	m.want("dark", 0, 18, true)
	// One of the other network dies: that network is there.
	m.eval(m.silent(key(1, 0)))
	m.want("other pending", 1, 1, true)
	m.lit(1)
	m.eval()
	m.want("other light", 1, 0, true)
	m.want("dark still", 0, 18, true)
	// The other network goes dark, too: it is part of the same loss.
	m.dark(1)
	m.pass(time.Second)
	m.eval(m.silent(key(1, 1)))
	m.want("other dark", 1, 1, true)
}

func TestDarknessThatNobodyConfirmsEnds(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	m.fell(0, 0, 10, time.Millisecond)
	m.unknown(0)
	m.pass(darkGrace - time.Second)
	m.eval()
	m.want("for a while", 0, 10, true)
	m.pass(time.Second)
	m.eval()
	m.want("over", 0, 10, false)
	m.pass(massWindow)
	m.eval()
	m.want("fallen", 0, 0, false)
}

func TestWithdrawNeverHolds(t *testing.T) {
	m := newMass(t, withdrawing)
	m.start(0, 10)
	m.fell(0, 0, 10, 10*time.Millisecond)
	m.want("fallen", 0, 0, false)
	if len(m.last.Ask) != 1 {
		t.Errorf("asks %v", m.last.Ask)
	}
	m.dark(0)
	m.eval()
	m.want("dark", 0, 0, true)
	if !m.Suspected(key(0, 0)) {
		t.Error("not suspected")
	}
	m.lit(0)
	m.eval()
	m.want("light", 0, 0, false)
	if m.Suspected(key(0, 0)) {
		t.Error("suspected")
	}
}

func TestOffIsNothing(t *testing.T) {
	m := newMass(t, SuddenOptions{Hold: true})
	m.start(0, 10)
	m.dark(0)
	m.fell(0, 0, 10, 0)
	m.want("off", 0, 0, false)
	if len(m.whole) != 0 || m.last.Ask != nil {
		t.Errorf("knows %+v", m.Sudden)
	}
}

func TestWhoBeginsToRiseIsHeldUntilItShouldHaveRisen(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	m.fell(0, 0, 10, time.Millisecond)
	m.eval(m.answered(key(0, 0)), m.answered(key(0, 1)), m.answered(key(0, 2)))
	m.pass(massWindow)
	m.eval(m.silent(key(0, 1)), m.refused(key(0, 2)))
	m.want("one failed again, one refused", 0, 1, false)
	m.eval(m.answered(key(0, 0)))
	m.pass(massWindow)
	m.eval()
	m.want("another success buys no time", 0, 0, false)
}

func TestDrainedAndNewTargetsAreNotAmongAll(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 20)
	for i := 10; i < 15; i++ {
		m.eval(m.is(key(0, i), Drained, false, ""))
	}
	for i := 15; i < 20; i++ {
		m.eval(m.is(key(0, i), Starting, false, ""))
	}
	m.pass(time.Second)
	m.dark(0)
	m.fell(0, 0, 9, time.Millisecond)
	m.want("nine of the ten that are left", 0, 9, true)
}

func TestTargetWithoutCheckIsNotHeld(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	m.fell(0, 0, 9, time.Millisecond)
	m.Evaluate(m.now, []Health{m.silent(key(0, 9))}, nil, func(Key) trench.Check { return trench.Check{} }, fakeView{m.net, m.seen})
	m.want("no check", 0, 9, true)
}

func TestLateFallIsNotHeld(t *testing.T) {
	m := newMass(t, holding)
	m.start(0, 10)
	m.dark(0)
	h := m.silent(key(0, 0))
	m.pass(massWindow)
	m.eval(h)
	m.want("late", 0, 0, false)
	// During a suspicion no fall is too late.
	m.eval(m.up(key(0, 0)))
	m.pass(time.Second)
	m.fell(0, 0, 9, time.Millisecond)
	h = m.silent(key(0, 9))
	m.pass(massWindow)
	m.eval(h)
	m.want("late, but suspected", 0, 10, true)
}

func TestAskedAreAtMost256Segments(t *testing.T) {
	m := newMass(t, holding)
	const segments = 320
	for seg := range segments {
		m.start(seg, 1)
	}
	for seg := range segments {
		m.eval(m.silent(key(seg, 0)))
	}
	if len(m.last.Ask) != maxAsked {
		t.Errorf("asks %d", len(m.last.Ask))
	}
	m.want("asked", maxAsked-1, 1, false)
	m.want("not asked", maxAsked, 0, false)
	// 256 of 320 are no more than 80 %.
	for seg := range segments {
		m.dark(seg)
	}
	m.eval()
	m.want("the share counts all", 0, 1, false)
}

func TestShares(t *testing.T) {
	for text, want := range map[string]Share{"": 0, "off": 0, "1%": 1, "80%": 80, "100%": 100} {
		if s, err := ParseShare(text); err != nil || s != want {
			t.Errorf("%q: %v, %v", text, s, err)
		}
	}
	for _, text := range []string{"0%", "101%", "80", "%", "-1%", "+5%", "0.5%", "80 %", "300%", "Off"} {
		var s Share
		if err := s.UnmarshalText([]byte(text)); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v, %v", text, s, err)
		}
	}
	for _, c := range []struct {
		s           Share
		part, whole int
		want        bool
	}{
		{80, 8, 10, false}, {80, 9, 10, true}, {100, 10, 10, true}, {100, 9, 10, false}, {1, 0, 0, false}, {0, 10, 10, false}, {80, 1, 1, true},
	} {
		if got := c.s.exceeded(c.part, c.whole); got != c.want {
			t.Errorf("%v of %d/%d: %v", c.s, c.part, c.whole, got)
		}
	}
}
