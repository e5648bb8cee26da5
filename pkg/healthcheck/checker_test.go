package healthcheck

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

func TestReadyAfterRiseQuickChecks(t *testing.T) {
	withChecker(t, func(t *testing.T, _ *network, c *Checker) {
		c.Configure([]trench.Stream{stream(1, testCheck)})
		synctest.Wait()
		if e := c.Evaluate(time.Now()); e.Synced || len(e.Changed) != 1 || e.Changed[0].State != Starting {
			t.Fatalf("after one of two checks: %+v", e)
		}
		advance(startRecheck)
		e := c.Evaluate(time.Now())
		if !e.Synced || len(e.Changed) != 1 || e.Changed[0].State != Ready {
			t.Fatalf("after two of two checks: %+v", e)
		}
		if h := e.Changed[0]; h.Since != time.Now() || h.LastCheck != time.Now() || h.LastError != "" {
			t.Fatalf("got %+v at %v", h, time.Now())
		}
	})
}

func TestNotReadyAfterFallFailures(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		n.refuse("10.0.0.1", syscall.ECONNREFUSED)
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		c.Configure([]trench.Stream{stream(1, testCheck)})
		synctest.Wait()
		for i := range testCheck.Fall {
			if i > 0 {
				if e := c.Evaluate(time.Now()); e.Synced || c.List()[0].State != Starting {
					t.Fatalf("after %d failed checks: %+v", i, e)
				}
				advance(failedRecheck)
			}
		}
		e := c.Evaluate(time.Now())
		if !e.Synced || len(e.Changed) != 1 || e.Changed[0].State != NotReady {
			t.Fatalf("got %+v", e)
		}
		if got, want := e.Changed[0].LastError, "port 5000: connection refused"; got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	})
}

// addresses is a machine without a source address while problem is not empty.
type addresses struct {
	problem atomic.Value
	passing bool
}

func lacking(problem string, passing bool) *addresses {
	a := &addresses{passing: passing}
	a.problem.Store(problem)
	return a
}

func (a *addresses) Source(netip.Addr, netip.Addr) (string, bool) {
	return a.problem.Load().(string), a.passing
}

func TestNoVerdictWithoutSourceAddress(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n, own := newNetwork(), lacking("own address fd00::1 is tentative", true)
		c, stop := start(t, Options{dial: n.DialContext, Source: own.Source})
		defer stop()
		c.Configure([]trench.Stream{stream(1, testCheck)})
		advance(sourceWait - 2*failedRecheck)
		if e := c.Evaluate(time.Now()); e.Synced || len(e.Changed) != 1 || !e.Changed[0].Deferred ||
			e.Changed[0].State != Starting || e.Changed[0].LastError == "" {
			t.Fatalf("without a source address: %+v, %+v", e, c.List())
		}
		own.problem.Store("")
		advance(failedRecheck + startRecheck)
		if e := c.Evaluate(time.Now()); !e.Synced || c.List()[0].State != Ready || c.List()[0].Deferred {
			t.Fatalf("with a source address: %+v, %+v", e, c.List())
		}
	})
}

func TestMissingSourceAddressBecomesVerdict(t *testing.T) {
	for name, test := range map[string]struct {
		passing bool
		within  time.Duration
	}{
		"tentative for long": {true, sourceWait + time.Second},
		"duplicate":          {false, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				c, stop := start(t, Options{
					dial:   newNetwork().DialContext,
					Source: lacking("no IPv6 address", test.passing).Source,
				})
				defer stop()
				c.Configure([]trench.Stream{stream(1, testCheck)})
				advance(test.within)
				if e := c.Evaluate(time.Now()); !e.Synced || c.List()[0].State != NotReady ||
					c.List()[0].LastError != "no IPv6 address" {
					t.Fatalf("%+v, %+v", e, c.List())
				}
			})
		})
	}
}

func TestRiseAndFallCountOutcomesInARow(t *testing.T) {
	e := &entry{plan: newPlan(trench.Check{SingleCheck: trench.SingleCheck{Rise: 2, Fall: 3}})}
	// Each step is an outcome (+ or -) and the state after it.
	steps := []struct {
		outcome byte
		want    State
	}{
		{'+', Starting},
		{'+', Ready},
		{'-', Ready},
		{'-', Ready},
		{'+', Ready}, // a success forgives
		{'-', Ready},
		{'-', Ready},
		{'-', NotReady},
		{'+', NotReady},
		{'-', NotReady}, // a failure too
		{'+', NotReady},
		{'+', Ready},
	}
	for i, s := range steps {
		if e.count(s.outcome == '+'); e.State != s.want {
			t.Fatalf("step %d (%c): %v, want %v", i, s.outcome, e.State, s.want)
		}
	}
}

func TestFallAfterFallIntervals(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		c.Configure([]trench.Stream{stream(2, testCheck)})
		advance(2 * time.Second)
		if e := c.Evaluate(time.Now()); !e.Synced || states(e.Changed)["target-1"] != Ready {
			t.Fatalf("not ready: %+v", e)
		}
		drain(c)
		n.refuse("10.0.0.1", errRefused)
		failed := time.Now()
		for c.List()[0].State == Ready {
			if time.Since(failed) > 10*time.Second {
				t.Fatal("still ready after 10 s of failures")
			}
			advance(10 * time.Millisecond)
		}
		if took := time.Since(failed); took < 1800*time.Millisecond || took > 3*time.Second+10*time.Millisecond {
			t.Errorf("fell after %v, want between two and three intervals", took)
		}
		if !drain(c) {
			t.Error("the evaluation was not woken")
		}
		e := c.Evaluate(time.Now())
		if len(e.Changed) != 1 || e.Changed[0].Name != "target-1" || e.Changed[0].State != NotReady {
			t.Fatalf("got %+v", e)
		}
		if e := c.Evaluate(time.Now()); len(e.Changed)+len(e.Removed) != 0 {
			t.Fatalf("reported twice: %+v", e)
		}
	})
}

func TestThousandTargetsAreSpread(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		n.latency = time.Millisecond
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		c.Configure([]trench.Stream{stream(1000, testCheck)})
		advance(10 * time.Second)
		if e := c.Evaluate(time.Now()); !e.Synced || len(e.Changed) != 1000 || e.Changed[0].State != Ready {
			t.Fatalf("synced %v, %d changed", e.Synced, len(e.Changed))
		}
		// At most one pace of checks is open: first and second checks of new targets, and
		// checks of steady targets.
		if n.maxOpen > burst {
			t.Errorf("%d sockets were open at one instant", n.maxOpen)
		}
		perPace := make(map[time.Time]int)
		steady := make(map[time.Duration]int)
		last := make(map[string]time.Time)
		gaps := make(map[time.Duration]int)
		begin := n.dialed()[0].at
		for _, d := range n.dialed() {
			perPace[d.at.Truncate(pace)]++
			if d.at.Sub(begin) > 5*time.Second && d.at.Sub(begin) < 9900*time.Millisecond {
				steady[d.at.Sub(begin).Truncate(100*time.Millisecond)]++
				gaps[d.at.Sub(last[d.address])]++
			}
			last[d.address] = d.at
		}
		for at, count := range perPace {
			if since := at.Sub(begin); since < startRecheck && count > 2*int(pace/firstSpacing)+1 {
				t.Errorf("%d first and second checks in the %v at %v", count, pace, since)
			}
			if count > 2*burst {
				t.Errorf("%d checks started in the %v at %v", count, pace, at.Sub(begin))
			}
		}
		for at, count := range steady {
			if count < 30 || count > 300 {
				t.Errorf("%d checks in the 100 ms at %v, want about 105", count, at)
			}
		}
		for gap := range gaps {
			if gap < 900*time.Millisecond || gap > time.Second+pace {
				t.Errorf("checked again after %v, want 0.9 to 1 s", gap)
			}
		}
		if slots := 5; len(gaps) < slots { // that fit into 90 to 100 % of the interval
			t.Errorf("only %d different gaps: no jitter", len(gaps))
		}
	})
}

func TestStallCausesNoBurst(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		n.latency = 10 * time.Millisecond
		c := New(Options{dial: n.DialContext, Log: discard})
		c.Configure([]trench.Stream{stream(1000, testCheck)})
		// No check runs: all become due.
		advance(time.Minute)
		stop := run(t, c)
		defer stop()
		advance(9 * time.Millisecond)
		if got := len(n.dialed()); got == 0 || got > burst {
			t.Errorf("%d checks started in 9 ms, want at most %d", got, burst)
		}
		advance(time.Second)
		if got := len(n.dialed()); got < 1000 {
			t.Errorf("only %d checks after a second", got)
		}
	})
}

func TestConcurrencyIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		n.latency = time.Hour // swallowed packets
		c, stop := start(t, Options{dial: n.DialContext, maxConcurrent: 7})
		defer stop()
		c.Configure([]trench.Stream{stream(100, testCheck)})
		advance(20 * time.Second)
		if n.maxOpen != 7 {
			t.Errorf("%d checks ran at once, want 7", n.maxOpen)
		}
		if got := len(n.dialed()); got < 7*39 {
			t.Errorf("only %d checks in 20 s: places stayed empty", got)
		}
		for _, h := range c.List() {
			if h.LastError != "" && h.LastError != "port 5000: no answer in 500ms" {
				t.Fatalf("%s: %q", h.Name, h.LastError)
			}
		}
	})
}

func TestHungCheckIsOverdue(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		c.Configure([]trench.Stream{stream(3, testCheck)})
		advance(3 * time.Second)
		c.Evaluate(time.Now())
		release := n.hang("10.0.0.2")
		hung := time.Now()
		var e Evaluation
		for len(e.Changed) == 0 {
			if time.Since(hung) > 10*time.Second {
				t.Fatal("a hung check was never overdue")
			}
			advance(10 * time.Millisecond)
			e = c.Evaluate(time.Now())
		}
		if h := e.Changed[0]; len(e.Changed) != 1 || h.Name != "target-2" || h.State != Overdue ||
			h.Since != time.Now() {
			t.Fatalf("got %+v", e)
		}
		// The last check ended up to one interval before it hung.
		if took := time.Since(hung); took < 1500*time.Millisecond || took > 2510*time.Millisecond {
			t.Errorf("overdue after %v", took)
		}
		if got := states(c.List()); got["target-1"] != Ready || got["target-2"] != Overdue {
			t.Errorf("list is %v", got)
		}
		// The hung check ends as a failure, so the target is not ready.
		release()
		synctest.Wait()
		e = c.Evaluate(time.Now())
		if len(e.Changed) != 1 || e.Changed[0].State != NotReady {
			t.Fatalf("a late failure changed it to %+v", e)
		}
		advance(3 * time.Second)
		if got := states(c.List())["target-2"]; got != Ready {
			t.Fatalf("then it is %v", got)
		}
	})
}

func TestOverdueEndsWithSuccess(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := New(Options{dial: newNetwork().DialContext, Log: discard})
		c.Configure([]trench.Stream{stream(1, testCheck)})
		stop := run(t, c)
		advance(time.Second)
		stop()
		c.Evaluate(time.Now())
		advance(2501 * time.Millisecond)
		if e := c.Evaluate(time.Now()); len(e.Changed) != 1 || e.Changed[0].State != Overdue {
			t.Fatalf("without checks: %+v", e)
		}
		stop = rerun(t, c)
		advance(time.Second)
		stop()
		if e := c.Evaluate(time.Now()); len(e.Changed) != 1 || e.Changed[0].State != Ready {
			t.Fatalf("with checks again: %+v", e)
		}
		advance(2501 * time.Millisecond)
		if e := c.Evaluate(time.Now()); len(e.Changed) != 1 || e.Changed[0].State != Overdue {
			t.Fatalf("without checks again: %+v", e)
		}
	})
}

func TestHungFirstCheckEndsAsOverdue(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		release := n.hang("10.0.0.1")
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		defer release()
		c.Configure([]trench.Stream{stream(2, testCheck)})
		advance(2500 * time.Millisecond)
		if e := c.Evaluate(time.Now()); e.Synced {
			t.Fatal("synced while the first check runs")
		}
		advance(time.Millisecond)
		if e := c.Evaluate(time.Now()); !e.Synced || states(e.Changed)["target-1"] != Overdue {
			t.Fatalf("got %+v", e)
		}
	})
}

func TestSyncedAfterConfiguration(t *testing.T) {
	withChecker(t, func(t *testing.T, _ *network, c *Checker) {
		if c.Evaluate(time.Now()).Synced {
			t.Fatal("synced before anything was configured")
		}
		c.Configure(nil)
		if !c.Evaluate(time.Now()).Synced {
			t.Fatal("not synced without targets")
		}
		c.Configure([]trench.Stream{stream(1, testCheck)})
		if e := c.Evaluate(time.Now()); !e.Synced || len(e.Changed) != 1 {
			t.Fatalf("got %+v", e)
		}
	})
}

func TestRemovedTargetDelaysNoSync(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		release := n.hang("10.0.0.2")
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		defer release()
		c.Configure([]trench.Stream{stream(2, testCheck)})
		advance(time.Second)
		if c.Evaluate(time.Now()).Synced {
			t.Fatal("synced while a first check runs")
		}
		drain(c)
		c.Configure([]trench.Stream{stream(1, testCheck)})
		if !drain(c) || !c.Evaluate(time.Now()).Synced {
			t.Fatal("not synced after the reload")
		}
	})
}

func TestStopWaitsForChecks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		c := New(Options{dial: n.DialContext, Log: discard})
		strict := testCheck
		strict.Fall = 1
		c.Configure([]trench.Stream{stream(1, strict)})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		advance(3 * time.Second)
		release := n.hang("10.0.0.1")
		advance(time.Second)
		cancel()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("ended with %v while a check runs", err)
		default:
		}
		release() // the check fails
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if h := c.List()[0]; h.State != Ready {
			t.Errorf("the end changed it to %v", h.State)
		}
	})
}

func TestReloadKeepsState(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		c.Configure([]trench.Stream{stream(3, testCheck)})
		advance(2 * time.Second)
		c.Evaluate(time.Now())
		since := c.List()[1].Since

		next := stream(4, testCheck)
		next.Targets = next.Targets[1:]
		c.Configure([]trench.Stream{next})
		e := c.Evaluate(time.Now())
		if len(e.Removed) != 1 || e.Removed[0].Name != "target-1" {
			t.Errorf("removed: %v", e.Removed)
		}
		if len(e.Changed) != 1 || e.Changed[0].Name != "target-4" || e.Changed[0].State != Starting {
			t.Errorf("changed: %v", e.Changed)
		}
		if list := c.List(); list[0].State != Ready || list[0].Since != since {
			t.Errorf("target-2 is %+v", list[0])
		}

		// Another timing keeps the state as well and takes effect; a shorter
		// interval makes no target overdue.
		faster := testCheck
		faster.Interval, faster.Timeout = 20*time.Millisecond, 20*time.Millisecond
		slower := testCheck
		slower.Interval = 10 * time.Minute
		next.Check = slower
		c.Configure([]trench.Stream{next})
		advance(5 * time.Minute)
		c.Evaluate(time.Now())
		next.Check = faster
		c.Configure([]trench.Stream{next})
		before := len(n.dialed())
		for range 100 {
			advance(10 * time.Millisecond)
			if e := c.Evaluate(time.Now()); len(e.Changed)+len(e.Removed) != 0 {
				t.Fatalf("another interval changed %+v", e)
			}
		}
		if got := len(n.dialed()) - before; got < 3*45 || got > 3*60 {
			t.Errorf("%d checks of 3 targets in 1 s at 20 ms", got)
		}

		// Another port is another check, which changes no state if it passes.
		next.Check.TCP.Port = 5001
		c.Configure([]trench.Stream{next})
		advance(200 * time.Millisecond)
		c.Evaluate(time.Now())
		advance(200 * time.Millisecond)
		if last := n.dialed()[len(n.dialed())-1]; last.address[len(last.address)-5:] != ":5001" {
			t.Errorf("still checks %s", last.address)
		}
	})
}

func TestReturnedTargetIsNotReported(t *testing.T) {
	withChecker(t, func(t *testing.T, _ *network, c *Checker) {
		config := []trench.Stream{stream(1, testCheck)}
		c.Configure(config)
		advance(time.Second)
		c.Evaluate(time.Now())
		c.Configure(nil)
		c.Configure(config)
		if e := c.Evaluate(time.Now()); len(e.Removed) != 0 || len(e.Changed) != 1 || e.Changed[0].State != Starting {
			t.Fatalf("got %+v", e)
		}
		// Removed before it was ever reported: nothing to report.
		c.Configure([]trench.Stream{stream(2, testCheck)})
		c.Configure(config)
		if e := c.Evaluate(time.Now()); len(e.Removed)+len(e.Changed) != 0 {
			t.Fatalf("got %+v", e)
		}
	})
}

func TestLateResultOfRemovedTarget(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		release := n.hang("10.0.0.1")
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		c.Configure([]trench.Stream{stream(1, testCheck)})
		synctest.Wait()
		c.Configure(nil)
		c.Evaluate(time.Now())
		release()
		advance(time.Minute)
		if e := c.Evaluate(time.Now()); len(e.Changed)+len(e.Removed)+len(c.List()) != 0 {
			t.Fatalf("got %+v", e)
		}
		if got := len(n.dialed()); got != 1 {
			t.Fatalf("a removed target was checked %d times", got)
		}
	})
}

func TestLocalLackOfResourcesIsNoVerdict(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		c.Configure([]trench.Stream{stream(1, testCheck)})
		advance(time.Second)
		c.Evaluate(time.Now())
		last := c.List()[0].LastCheck
		n.refuse("10.0.0.1", fmt.Errorf("socket: %w", syscall.EMFILE))
		advance(time.Second)
		c.Evaluate(time.Now())
		if h := c.List()[0]; h.State != Ready || h.LastError != "check not run: socket: too many open files" {
			t.Fatalf("one check could not run: %+v", h)
		}
		advance(5 * time.Second)
		c.Evaluate(time.Now())
		if h := c.List()[0]; h.State != Overdue || h.LastCheck.Before(last) || time.Since(h.LastCheck) < 5*time.Second {
			t.Fatalf("no check could run for long: %+v", h)
		}
	})
}

func TestListIsSorted(t *testing.T) {
	c := New(Options{Log: discard})
	b := stream(12, testCheck)
	b.Name = "stream-b"
	c.Configure([]trench.Stream{b, stream(12, testCheck)})
	list := c.List()
	if !slices.IsSortedFunc(list, func(a, b Health) int { return a.Compare(b.Key) }) || len(list) != 24 {
		t.Fatalf("got %v", list)
	}
}

// The checker is overdue once a call of its loop blocks, and not while it waits.
func TestHungCheckerIsOverdue(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		hang := make(chan struct{})
		c, stop := start(t, Options{
			dial: newNetwork().DialContext, Source: func(netip.Addr, netip.Addr) (string, bool) { <-hang; return "", false },
		})
		advance(10 * time.Minute)
		if got := c.Overdue(); got != 0 {
			t.Errorf("overdue by %v without a target", got)
		}
		c.Configure([]trench.Stream{stream(1, testCheck)})
		advance(2 * time.Minute)
		if got := c.Overdue(); got < time.Minute {
			t.Errorf("overdue by %v after it has been blocked for two minutes", got)
		}
		close(hang)
		stop()
	})
}
