package turns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// simulation plays BIRD and the gateways for a Plan. It loads what a step returned, and a session
// comes up a second after its restart.
type simulation struct {
	t        *testing.T
	plan     Plan
	now      time.Time
	gateways []trench.Gateway
	dead     map[string]bool // addresses that do not answer
	drained  map[string]bool
	hung     bool
	down     bool // BIRD does not run
	entries  []Entry
	loaded   map[string]Session // by name
	since    map[string]time.Time
	now0     bool // Immediate
	// withoutBFD is true if no gateway answers BFD.
	withoutBFD bool
	incomplete bool // no session exports every VIP
	lacks      [len(vip.Families)]bool
	ordered    bool
	password   string
}

const (
	step      = 100 * time.Millisecond
	reconnect = time.Second
	lateBFD   = 2 * time.Second // after BGP
)

func newSimulation(t *testing.T, gateways ...trench.Gateway) *simulation {
	s := &simulation{
		t: t, now: time.Unix(1_000_000, 0), gateways: gateways, dead: map[string]bool{}, drained: map[string]bool{},
		loaded: map[string]Session{}, since: map[string]time.Time{},
		plan: Plan{Options: Options{Drain: time.Second, Confirm: 500 * time.Millisecond, Limit: 30 * time.Second}},
	}
	s.run(20)
	return s
}

func gateway(name, address string, edits ...func(*trench.Gateway)) trench.Gateway {
	g := trench.Gateway{
		Name: name, Address: netip.MustParseAddr(address), LocalASN: 1, RemoteASN: 2, LocalPort: 10179, RemotePort: 10179,
		HoldTime: 3 * time.Second,
	}
	for _, edit := range edits {
		edit(&g)
	}
	return g
}

func slower(g *trench.Gateway) { g.HoldTime = 6 * time.Second }

func (s *simulation) up(name string) bool {
	since, ok := s.since[name]
	return ok && !s.down && !s.now.Before(since.Add(reconnect)) && !s.dead[s.loaded[name].Address.String()]
}

// step makes one step, and loads the result.
func (s *simulation) step() {
	s.t.Helper()
	in := Input{
		Now: s.now, Gateways: s.gateways, Loaded: s.entries != nil && !s.down, Hung: s.hung, State: map[string]State{},
		Drained: func(name string) bool { return s.drained[name] }, Immediate: s.now0,
		Ordered: s.ordered,
	}
	for _, g := range s.gateways {
		local := netip.MustParseAddr("192.0.2.100")
		in.Sessions = append(in.Sessions, Session{Gateway: g, Path: Path{Local: local}, Password: s.password})
	}
	for name := range s.loaded {
		guarded := s.loaded[name].BFD != nil && !s.withoutBFD && !s.now.Before(s.since[name].Add(reconnect+lateBFD))
		in.State[name] = State{
			Up: s.up(name), Complete: s.up(name) && !s.incomplete, BFD: s.up(name) && guarded, Lacks: s.lacks,
		}
	}
	s.entries, _ = s.plan.Step(in)
	next, since := map[string]Session{}, map[string]time.Time{}
	for _, entry := range s.entries {
		for _, other := range s.entries {
			if other.Name != entry.Name && other.Address == entry.Address {
				s.t.Fatalf("BIRD cannot have both %s and %s", entry.Name, other.Name)
			}
		}
		if _, twice := next[entry.Name]; twice {
			s.t.Fatalf("two sessions are called %s", entry.Name)
		}
		next[entry.Name], since[entry.Name] = entry.Session, s.now
		if was, ok := s.loaded[entry.Name]; ok && was == entry.Session {
			since[entry.Name] = s.since[entry.Name]
		}
	}
	s.loaded, s.since = next, since
}

// run makes n steps and returns the descriptions of the sessions, without repetitions. It fails if
// no session of the family of IPv4 is up and preferred although one may be.
func (s *simulation) run(n int) (seen []string) {
	for range n {
		s.now = s.now.Add(step)
		s.step()
		if text := s.String(); len(seen) == 0 || seen[len(seen)-1] != text {
			seen = append(seen, text)
		}
	}
	return seen
}

// String describes each session: name, new hold time, phase and whether it is up.
func (s *simulation) String() string {
	var words []string
	for _, entry := range s.entries {
		word := entry.Name
		if entry.HoldTime != 3*time.Second {
			word += "'"
		}
		word += map[Phase]string{Steady: "", Pending: "?", Draining: "~", Restarting: "!", Leaving: "-"}[entry.Phase]
		if !s.up(entry.Name) {
			word = strings.ToUpper(word)
		}
		if entry.Failed != nil {
			word += "(failed)"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

const addressA, addressB, addressC, addressD = "192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1"

// Upper case is a session that is down, ' the new hold time, ? pending, ~ draining, ! restarting,
// and - leaving.
func TestPlan(t *testing.T) {
	t.Parallel()
	a, b, c, d := gateway("a", addressA), gateway("b", addressB), gateway("c", addressC), gateway("d", addressD)
	slow := func(g trench.Gateway) trench.Gateway { slower(&g); return g }
	for name, test := range map[string]struct {
		old, next []trench.Gateway
		change    func(*simulation)
		want      []string
	}{
		"one after another": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), slow(b)},
			nil,
			[]string{"a~ b?", "A'! b?", "a'! b?", "a' b~", "a' B'!", "a' b'!", "a' b'"},
		},
		"families in parallel": {
			[]trench.Gateway{a, b, d, gateway("e", "2001:db8::2")},
			[]trench.Gateway{slow(a), b, slow(d), gateway("e", "2001:db8::2")},
			nil,
			[]string{"a~ b d~ e", "A'! b D'! e", "a'! b d'! e", "a' b d' e"},
		},
		"only gateway": {
			[]trench.Gateway{a}, []trench.Gateway{slow(a)}, nil, []string{"a~", "A'!", "a'!", "a'"},
		},
		"gateway down": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), slow(b)},
			func(s *simulation) { s.dead[addressA] = true },
			[]string{"A' b?", "A' b~", "A' B'!", "A' b'!", "A' b'"},
		},
		"does not come back": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), slow(b)},
			func(s *simulation) {
				s.run(15)
				s.dead[addressA] = true
			},
			[]string{"A'! b?", "A'(failed) b?"},
		},
		"comes back late": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), slow(b)},
			func(s *simulation) {
				s.run(15)
				s.dead[addressA] = true
				s.run(500)
				delete(s.dead, addressA)
			},
			[]string{"a' b~", "a' B'!", "a' b'!", "a' b'"},
		},
		"third gateway": {
			[]trench.Gateway{a, b, c},
			[]trench.Gateway{slow(a), slow(b), slow(c)},
			func(s *simulation) {
				s.run(15)
				s.dead[addressA] = true
			},
			[]string{
				"A'! b? c?", "A'(failed) b~ c?", "A'(failed) B'! c?", "A'(failed) b'! c?", "A'(failed) b' c~",
				"A'(failed) b' C'!", "A'(failed) b' c'!", "A'(failed) b' c'",
			},
		},
		"corrected": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), slow(b)},
			func(s *simulation) {
				s.run(15)
				s.dead[addressA] = true
				s.run(500)
				s.gateways = []trench.Gateway{a, b}
				s.run(1)
				delete(s.dead, addressA)
			},
			[]string{"A b", "a b"},
		},
		"removed": {[]trench.Gateway{a, b}, []trench.Gateway{b}, nil, []string{"b a-", "b"}},
		"last of a family removed": {
			[]trench.Gateway{a, d}, []trench.Gateway{a}, nil, []string{"a d-", "a"},
		},
		"replaced": {[]trench.Gateway{a}, []trench.Gateway{b}, nil, []string{"B a-", "b a-", "b"}},
		"replacement is dead": {
			[]trench.Gateway{a}, []trench.Gateway{b}, func(s *simulation) { s.dead[addressB] = true }, []string{"B a-", "B"},
		},
		"renamed": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{gateway("c", addressA), b},
			nil,
			[]string{"a~ b", "C! b", "c! b", "c b"},
		},
		"other address": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{gateway("a", addressC), b},
			nil,
			[]string{"a~ b", "A! b", "a! b", "a b"},
		},
		"names swapped": {
			[]trench.Gateway{a, b, c},
			[]trench.Gateway{gateway("b", addressA), gateway("a", addressB), c},
			nil,
			[]string{"b~ a~ c", "B! A c", "b! a c", "b a c"},
		},
		"addresses in a chain": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{gateway("a", addressB), gateway("b", addressC)},
			nil,
			[]string{"a? b~", "a? B!", "a? b!", "a~ b", "A! b", "a! b", "a b"},
		},
		"addresses in a reversed chain": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{gateway("b", addressC), gateway("a", addressB)},
			nil,
			[]string{"b~ a?", "B! a?", "b! a?", "b a~", "b A!", "b a!", "b a"},
		},
		"one leaves, one changes": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), c},
			nil,
			[]string{"a? C b-", "a~ c b-", "a~ c", "A'! c", "a'! c", "a' c"},
		},
		"drained by an operator": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), b},
			func(s *simulation) { s.drained["a"] = true },
			[]string{"A' b", "a' b"},
		},
		"immediate": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), c},
			func(s *simulation) { s.now0 = true },
			[]string{"A' C", "a' c"},
		},
		"BIRD does not run": {
			[]trench.Gateway{a, b}, []trench.Gateway{slow(a), c}, func(s *simulation) { s.down = true }, []string{"A' C"},
		},
		"BIRD hangs": {
			[]trench.Gateway{a, b}, []trench.Gateway{slow(a), c}, func(s *simulation) { s.hung = true }, []string{"a b"},
		},
		"other gateway dies during the drain": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), b},
			func(s *simulation) {
				s.run(3)
				s.dead[addressB] = true
			},
			[]string{"a? B", "a~ B", "A'! B", "a'! B", "a' B"},
		},
		"newer configuration": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{slow(a), slow(b)},
			func(s *simulation) {
				s.run(3)
				s.gateways = []trench.Gateway{a, slow(b)}
			},
			[]string{"a b~", "a B'!", "a b'!", "a b'"},
		},
		"gateway returns": {
			[]trench.Gateway{a, b},
			[]trench.Gateway{b},
			func(s *simulation) {
				s.run(3)
				s.gateways = []trench.Gateway{a, b}
			},
			[]string{"a b"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSimulation(t, test.old...)
			s.gateways = test.next
			if test.change != nil {
				test.change(s)
			}
			if got := s.run(800); !slices.Equal(got, test.want) {
				t.Errorf("got  %q\nwant %q", got, test.want)
			}
		})
	}
}

// Two gateways that swap their addresses have no session for a moment, so pods take turns.
func TestSwapTakesSlot(t *testing.T) {
	t.Parallel()
	s := newSimulation(t, gateway("a", addressA), gateway("b", addressB))
	s.plan.SlotTime, s.plan.Slot = time.Minute, 30
	s.gateways = []trench.Gateway{gateway("a", addressB), gateway("b", addressA)}
	want := []string{"a? b?"}
	if got := s.run(500); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A VIP that rises now and then does not end the drain, unless it stays away.
func TestDrainWhileVIPsRise(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		every int // steps
		want  []string
	}{
		{8, []string{"a~ b", "A'! b", "a'! b", "a' b"}},
		{1, []string{"a? b"}},
	} {
		s := newSimulation(t, gateway("a", addressA), gateway("b", addressB))
		s.gateways = []trench.Gateway{gateway("a", addressA, slower), gateway("b", addressB)}
		var seen []string
		for n := range 100 {
			s.incomplete = n%tt.every == tt.every-1
			seen = append(seen, s.run(1)...)
		}
		if seen = slices.Compact(seen); tt.every == 1 {
			seen = seen[len(seen)-1:]
		}
		if !slices.Equal(seen, tt.want) {
			t.Errorf("incomplete every %d steps: %q, want %q", tt.every, seen, tt.want)
		}
	}
}

// Families that no gateway has activated delay no turn.
func TestTurnsWithoutFamily(t *testing.T) {
	t.Parallel()
	dual := func(g *trench.Gateway) { g.Families = trench.SessionBoth }
	s := newSimulation(t, gateway("a", addressA, dual), gateway("b", addressB, dual))
	s.lacks[vip.IPv6] = true
	s.gateways = []trench.Gateway{gateway("a", addressA, dual, slower), gateway("b", addressB, dual, slower)}
	want := []string{"a~ b?", "A'! b?", "a'! b?", "a' b~", "a' B'!", "a' b'!", "a' b'"}
	if got := s.run(800); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// The drain time counts from the time at which BIRD has loaded the de-preference.
func TestDrainCountsFromLoad(t *testing.T) {
	t.Parallel()
	s := newSimulation(t, gateway("a", addressA), gateway("b", addressB))
	s.gateways = []trench.Gateway{gateway("b", addressB)}
	s.run(1)
	began := s.now
	for len(s.entries) > 1 {
		s.run(1)
	}
	if took := s.now.Sub(began); took < 1500*time.Millisecond || took > 2*time.Second {
		t.Errorf("the gateway left after %v", took)
	}
}

// The next gateway waits for the BFD session too, because FRR resets a BGP session when the old BFD
// session ends; it does not wait for one that was not up before.
func TestTurnWaitsForBFD(t *testing.T) {
	t.Parallel()
	guarded := func(g *trench.Gateway) { g.BFD = &trench.BFD{} }
	for _, withoutBFD := range []bool{false, true} {
		s := newSimulation(t, gateway("a", addressA, guarded), gateway("b", addressB, guarded))
		s.withoutBFD = withoutBFD
		s.run(30)
		s.gateways = []trench.Gateway{gateway("a", addressA, guarded, slower), gateway("b", addressB, guarded, slower)}
		for !s.up("a") || s.entries[0].Phase != Restarting {
			s.run(1)
		}
		began := s.now
		for s.entries[1].Phase != Draining {
			s.run(1)
		}
		if waited := s.now.Sub(began) >= lateBFD; waited == withoutBFD {
			t.Errorf("without BFD %v: b waited %v", withoutBFD, s.now.Sub(began))
		}
		// The same after a restart that another change interrupts.
		for !s.up("b") || s.entries[1].Phase != Restarting {
			s.run(1)
		}
		began = s.now
		s.gateways = []trench.Gateway{gateway("a", addressA, guarded), gateway("b", addressB, guarded)}
		for s.run(1); s.entries[0].Phase != Draining; {
			s.run(1)
		}
		if waited := s.now.Sub(began) >= lateBFD-step; waited == withoutBFD {
			t.Errorf("without BFD %v: a waited %v for an interrupted b", withoutBFD, s.now.Sub(began))
		}
		// And after a restart without a turn, because the session was down.
		s.run(200)
		s.dead[addressA] = true
		s.run(1)
		s.gateways = []trench.Gateway{gateway("a", addressA, guarded, slower), gateway("b", addressB, guarded, slower)}
		s.run(1)
		delete(s.dead, addressA)
		began = s.now
		for s.entries[1].Phase != Draining {
			s.run(1)
		}
		if waited := s.now.Sub(began) >= reconnect+lateBFD-step; waited == withoutBFD {
			t.Errorf("without BFD %v: b waited %v for an a that was down", withoutBFD, s.now.Sub(began))
		}
	}
}

// The order of pods does not cover the content of a password file: the slot does.
func TestPasswordTakesSlot(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		s := newSimulation(t, gateway("a", addressA))
		s.plan.SlotTime, s.plan.Slot, s.ordered = time.Minute, 1, ordered
		s.password = "new"
		if s.run(1); s.entries[0].Phase != Pending {
			t.Errorf("ordered %v: the session is in phase %d", ordered, s.entries[0].Phase)
		}
	}
}

// Pods with different slots never restart their only session in the same slot; the wait is at
// most one cycle.
func TestSlots(t *testing.T) {
	t.Parallel()
	const length = 2 * time.Second
	restarted := map[int]time.Time{}
	for slot := range Slots {
		s := newSimulation(t, gateway("a", addressA))
		s.plan.SlotTime, s.plan.Slot = length, slot
		s.gateways = []trench.Gateway{gateway("a", addressA, slower)}
		began := s.now
		for s.entries[0].Phase != Restarting {
			s.run(1)
		}
		if took := s.now.Sub(began); took > Slots*length+2*time.Second {
			t.Errorf("slot %d: waited %v", slot, took)
		}
		restarted[slot] = s.now
		for other, at := range restarted {
			if other != slot && at.Sub(s.now).Abs()%(Slots*length) < length-step {
				t.Errorf("slots %d and %d restart at %v and %v", other, slot, at, s.now)
			}
		}
	}
	counts := map[int]int{}
	for pod := range 6000 {
		counts[Slot(fmt.Sprintf("10.1.%d.%d", pod/256, pod%256))]++
	}
	for slot := range Slots {
		if n := counts[slot]; n < 50 || n > 150 {
			t.Errorf("slot %d has %d of 6000 pods", slot, n)
		}
	}
}

// A session with both families restarts while sessions of both carry its traffic, and blocks the
// turns of both.
func TestTurnWithBothFamilies(t *testing.T) {
	dual := func(g *trench.Gateway) { g.Families = trench.SessionBoth }
	four, six := gateway("b", "192.0.2.2"), gateway("c", "2001:db8::3")
	for name, test := range map[string]struct {
		others []trench.Gateway
		want   Phase
	}{
		"both carried":      {[]trench.Gateway{four, six}, Draining},
		"IPv6 not carried":  {[]trench.Gateway{four}, Pending},
		"carried by a dual": {[]trench.Gateway{gateway("d", "192.0.2.4", dual)}, Draining},
	} {
		s := newSimulation(t, append([]trench.Gateway{gateway("a", "192.0.2.1", dual)}, test.others...)...)
		s.gateways[0] = gateway("a", "192.0.2.1", dual, slower)
		s.now = s.now.Add(step)
		s.step()
		if got := s.entries[0].Phase; got != test.want {
			t.Errorf("%s: phase %d, want %d", name, got, test.want)
		}
	}
}
