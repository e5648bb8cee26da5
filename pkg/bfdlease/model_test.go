package bfdlease

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// ruleset models the kernel's ruleset with transactions of a Lease and of other processes.
type ruleset struct {
	generation uint32
	damaged    bool  // another process changed the table
	during     bool  // another process changes the table while it is written
	unread     error // error of reading the generation
	unlisted   error // error of reading the table
	refused    error // error of a refresh
	writes     []content
	refreshed  []content
}

func (r *ruleset) lease() *Lease {
	l := New(slog.New(slog.DiscardHandler))
	l.gateways = []netip.Addr{gateway4}
	l.version = func() (uint32, error) { return r.generation, r.unread }
	l.write = func(c content) error {
		r.writes = append(r.writes, c)
		r.generation, r.damaged = r.generation+1, r.during
		return nil
	}
	l.intact = func(content) (bool, error) { return !r.damaged, r.unlisted }
	l.refresh = func(c content) error {
		if r.refused == nil {
			r.refreshed = append(r.refreshed, c)
		}
		return r.refused
	}
	l.remove = func() error { r.generation++; return nil }
	return l
}

// The table is written again if another process changed it, not after each transaction of another
// process.
func TestForeignChangesAreNoticed(t *testing.T) {
	k := &ruleset{generation: 7}
	l := k.lease()
	now := time.Now()
	l.Attract(now, Families{true})
	for _, step := range []struct {
		name   string
		change func()
		writes []int // after each of several calls
	}{
		{"the first", func() {}, []int{1, 1, 1}},
		{"a change of another table", func() { k.generation++ }, []int{1, 1}},
		{"a change", func() { k.generation++; k.damaged = true }, []int{2, 2}},
		{"a change, and one while it is written", func() { k.generation++; k.damaged, k.during = true, true }, []int{3, 4}},
		{"no change since", func() { k.during = false }, []int{5, 5}},
		{"unknown generation", func() { k.unread = errors.New("no buffer space") }, []int{6, 7}},
		{"known again", func() { k.unread = nil }, []int{7, 7}},
		{"unknown content", func() { k.generation++; k.unlisted = errors.New("no answer") }, []int{8, 9}},
		{"known content", func() { k.unlisted = nil }, []int{9, 9}},
		{"a generation that wraps", func() { k.generation = 1<<32 - 1 }, []int{9, 9}},
	} {
		step.change()
		for i, want := range step.writes {
			harness.Must(t, l.apply(now, Families{true}))
			if len(k.writes) != want {
				t.Fatalf("%s, call %d: %d writes, want %d", step.name, i, len(k.writes), want)
			}
		}
	}
	if len(k.refreshed) > 0 {
		t.Errorf("refreshed %d times at one moment", len(k.refreshed))
	}
}

// A failed removal of the table is retried until it succeeds, and not repeated afterwards.
func TestRemovalIsRetried(t *testing.T) {
	k := &ruleset{generation: 7}
	l := k.lease()
	now := time.Now()
	l.Attract(now, Families{true, true})
	harness.Must(t, l.apply(now, Families{true, true}))
	l.written, l.gateways = false, nil // as Run does
	busy, removals := errors.New("device or resource busy"), 0
	l.remove = func() error { removals++; return busy }
	for want := 1; want <= 2; want++ {
		if err := l.apply(now, Families{true, true}); !errors.Is(err, busy) || removals != want {
			t.Fatalf("%v after %d removals, want %d", err, removals, want)
		}
	}
	if s := l.State().Load(); !errors.Is(s.Err, busy) || s.Attract != (Families{true, true}) {
		t.Errorf("state %+v while the table is there", s)
	}
	busy = nil
	for range 2 {
		if err := l.apply(now, Families{true, true}); err != nil || removals != 3 {
			t.Fatalf("%v after %d removals, want 3", err, removals)
		}
	}
	if s := l.State().Load(); s.Err != nil || s.Attract != (Families{}) {
		t.Errorf("state %+v without gateways", s)
	}
}

// An order is refreshed once a second for as long as it is repeated. Without it the elements
// expire after Timeout, and elements written before that have only the remaining time.
func TestOrderExpires(t *testing.T) {
	k := &ruleset{generation: 7}
	l := k.lease()
	begin := l.began.Add(time.Second)
	apply := func(at time.Duration) {
		t.Helper()
		harness.Must(t, l.apply(begin.Add(at), Families{true}))
	}
	expect := func(attract bool, writes, refreshed int) {
		t.Helper()
		if l.State().Load().Attract[0] != attract || len(k.writes) != writes || len(k.refreshed) != refreshed {
			t.Fatalf("attracts: %v, %d writes, %d refreshed; want %v, %d, %d",
				l.State().Load().Attract[0], len(k.writes), len(k.refreshed), attract, writes, refreshed)
		}
	}
	apply(0)
	expect(false, 1, 0) // no order yet
	l.Attract(begin, Families{true})
	apply(0)
	expect(true, 2, 0)
	apply(Interval / 2)
	expect(true, 2, 0)
	l.Attract(begin.Add(Interval), Families{true})
	apply(Interval)
	expect(true, 2, 1)
	apply(Interval + freshness) // the order is just fresh
	expect(true, 2, 2)
	last := Interval + freshness
	apply(last + 1) // the order is stale
	apply(last + Interval)
	expect(true, 2, 2)
	k.generation, k.damaged = k.generation+1, true // another process changed the table
	apply(last + 2*Interval)
	expect(true, 3, 2)
	if c := k.writes[2]; c.rest != Timeout-2*Interval || !c.attract[0] {
		t.Errorf("written again with a rest of %v", c.rest)
	}
	apply(last + Timeout - time.Millisecond)
	expect(true, 3, 2)
	apply(last + Timeout - time.Millisecond + 1) // the kernel would keep an element of 0 ms
	expect(false, 4, 2)
	l.Attract(begin.Add(last+Timeout), Families{true})
	k.refused = errors.New("the element is gone")
	apply(last + Timeout)
	expect(true, 5, 2)
	if c := k.writes[4]; c.rest != Timeout {
		t.Errorf("a new order has a rest of %v", c.rest)
	}
	l.Attract(begin.Add(last+Timeout+Interval), Families{true})
	apply(last + Timeout + Interval)
	expect(true, 6, 2) // a failed refresh is followed by a write
}

// After a stall of the process the lease may awake before the sender of its orders. It refreshes
// the elements with the next order, or writes them again if they have expired.
func TestOrderAfterStall(t *testing.T) {
	for _, stall := range []time.Duration{Interval, Timeout - 1, Timeout, 10 * Timeout} {
		synctest.Test(t, func(t *testing.T) {
			k := &ruleset{generation: 7}
			l := k.lease()
			l.Attract(time.Now().Add(-freshness/2), Families{true})
			stop := harness.Run(t, l.Run)
			defer stop()
			<-time.After(stall) // until Run has found the order too old
			synctest.Wait()
			if attracts := l.State().Load().Attract[0]; attracts != (stall < Timeout) {
				t.Errorf("after %v without an order: attracts %v", stall, attracts)
			}
			l.Attract(time.Now(), Families{true})
			synctest.Wait()
			if kept := len(k.refreshed) + len(k.writes); kept < 2 || !l.State().Load().Attract[0] {
				t.Errorf("after %v: refreshed %d times, state %+v", stall, len(k.refreshed), l.State().Load())
			}
		})
	}
}

// A family attracts only with a fresh order, even while another family is refreshed.
func TestOldOrderRaisesNoFamily(t *testing.T) {
	k := &ruleset{generation: 7}
	l := k.lease()
	begin := l.began.Add(time.Second)
	l.Attract(begin, Families{true, false})
	for _, step := range []struct {
		at, ordered time.Duration // of the call and of its order
		order, want Families
	}{
		{0, 0, Families{true, false}, Families{true, false}},
		{freshness + 1, 0, Families{true, true}, Families{true, false}},
		{freshness + 2, 0, Families{false, true}, Families{}},
		{freshness + 3, 0, Families{true, true}, Families{}}, // a withdrawn family needs a fresh order
		{freshness + 4, freshness + 4, Families{true, true}, Families{true, true}},
	} {
		l.Attract(begin.Add(step.ordered), step.order)
		harness.Must(t, l.apply(begin.Add(step.at), step.order))
		if is := l.State().Load().Attract; is != step.want || k.writes[len(k.writes)-1].attract != is {
			t.Errorf("after %v: %v attract, want %v; written %v", step.at, is, step.want, k.writes[len(k.writes)-1].attract)
		}
	}
}

// An order that arrives while the kernel is written is obeyed at once.
func TestOrderDuringWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &ruleset{generation: 7}
		l := k.lease()
		write := l.write
		var written time.Time
		l.write = func(c content) error {
			if written = time.Now(); len(k.writes) == 0 {
				l.Attract(time.Now(), Families{})
			}
			return write(c)
		}
		l.Attract(time.Now(), Families{true})
		began := time.Now()
		stop := harness.Run(t, l.Run)
		defer stop()
		time.Sleep(Interval / 2)
		synctest.Wait()
		if last := k.writes[len(k.writes)-1]; last.attract[0] || written != began {
			t.Errorf("%v after the order: %+v", written.Sub(began), last)
		}
	})
}

// A failed write may have been applied, so the table is written again even if the previous order
// returns.
func TestFailedWriteIsRepeated(t *testing.T) {
	k := &ruleset{generation: 7}
	l := k.lease()
	begin, write := l.began.Add(time.Second), l.write
	l.Attract(begin, Families{true})
	for i, step := range []struct {
		fails  error
		order  Families
		writes int
	}{
		{nil, Families{true}, 1},
		{errors.New("no answer"), Families{}, 1},
		{nil, Families{true}, 2},
		{nil, Families{true}, 2},
	} {
		l.write = write
		if step.fails != nil {
			l.write = func(content) error { return step.fails }
		}
		if err := l.apply(begin, step.order); !errors.Is(err, step.fails) || len(k.writes) != step.writes {
			t.Errorf("%d: %v, %d writes, want %d", i, err, len(k.writes), step.writes)
		}
	}
}

// New gateways are in the table before Gateways returns, even if their number is unchanged.
func TestGatewaysAreReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &ruleset{generation: 7}
		l := k.lease()
		l.gateways = nil
		stop := harness.Run(t, l.Run)
		for _, gateways := range [][]netip.Addr{{gateway4}, {other4}, {other4, gateway6}, {gateway4, gateway6}} {
			l.Attract(time.Now(), Families{true, true})
			harness.Must(t, l.Gateways(t.Context(), gateways))
			if c := k.writes[len(k.writes)-1]; !slices.Equal(c.gateways, gateways) {
				t.Errorf("gateways %v are written as %v", gateways, c.gateways)
			}
		}
		stop()
	})
}
