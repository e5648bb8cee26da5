package speaker

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// fake is a speaker with one gateway.
type fake struct {
	mu sync.Mutex
	answers
	lists int
}

// answers are what a fake says next.
type answers struct {
	err      error
	session  Session
	exported vip.Set
	unknown  error         // of the list of routes, ErrUnknown or another
	stall    time.Duration // of the process while it reads the next answer
	slow     time.Duration // of the list of routes
}

func (speaker *fake) Sessions(context.Context) (string, []Session, error) {
	speaker.mu.Lock()
	stall := speaker.stall
	speaker.mu.Unlock()
	if stall > 0 {
		<-time.After(stall)
	}
	speaker.mu.Lock()
	defer speaker.mu.Unlock()
	return "fake 1", []Session{speaker.session}, speaker.err
}

func (speaker *fake) Exported(context.Context, netip.Addr, vip.Family) (vip.Set, error) {
	speaker.mu.Lock()
	slow := speaker.slow
	speaker.mu.Unlock()
	<-time.After(slow)
	speaker.mu.Lock()
	defer speaker.mu.Unlock()
	speaker.lists++
	return speaker.exported, speaker.unknown
}

// change changes the next answers.
func (speaker *fake) change(change func(*answers)) {
	speaker.mu.Lock()
	defer speaker.mu.Unlock()
	change(&speaker.answers)
}

// listed counts the calls of Exported.
func (speaker *fake) listed() int {
	speaker.mu.Lock()
	defer speaker.mu.Unlock()
	return speaker.lists
}

var (
	vipA, vipB = vip.Require("20.0.0.1/32"), vip.Require("20.0.0.2/32")
	other      = vip.Require("30.0.0.0/24")
	address    = netip.MustParseAddr("169.254.100.150")
)

// observed runs a test with an observer of a speaker that exports VIPs A and B and another prefix.
func observed(t *testing.T, test func(t *testing.T, speaker *fake, observer *Observer)) {
	synctest.Test(t, func(t *testing.T) {
		speaker := &fake{answers: answers{
			session:  Session{Peer: address, Name: "eth1", Up: true, State: "Established", Exported: 3},
			exported: vip.NewSet(vipA, vipB, other),
		}}
		observer := NewObserver(Options{View: speaker})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _ = observer.Run(ctx) }()
		observer.Expect(2, 0)
		observer.Configure(trench.Attractor{
			VIPs: []vip.VIP{vipA, vipB}, Gateways: []trench.Gateway{{Name: "a", Address: address, Protocol: trench.BGP}},
		})
		pass(pollInterval)
		test(t, speaker, observer)
		cancel()
		<-done
	})
}

// pass lets time pass, and what happens at its end.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func state(observer *Observer) bird.GatewayState { return observer.State().Load().Gateways[0] }

// Routes that are not VIPs do not count, and one list suffices.
func TestOtherRoutesDoNotCount(t *testing.T) {
	observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
		if is := state(observer); !is.Up || is.Exported != 2 || is.Short || speaker.listed() != 1 {
			t.Errorf("%d lists, %+v", speaker.listed(), is)
		}
		// A withdrawal is confirmed by the count alone.
		observer.Expect(1, 0)
		speaker.change(func(a *answers) { a.session.Exported = 2 })
		if err := observer.Confirm(t.Context()); err != nil || speaker.listed() != 1 {
			t.Errorf("%d lists, %v", speaker.listed(), err)
		}
		// Another program's route is learned from a second list.
		speaker.change(func(a *answers) {
			a.session.Exported, a.exported = 3, vip.NewSet(vipA, other, vip.Require("30.0.1.0/24"))
		})
		pass(5 * time.Second)
		if is := state(observer); is.Exported != 1 || is.Short || speaker.listed() != 2 {
			t.Errorf("%d lists, %+v", speaker.listed(), is)
		}
	})
}

// A speaker may report the session before its routes, as BMP does.
func TestRoutesReportedLater(t *testing.T) {
	for name, others := range map[string]int{"VIPs": 0, "and another prefix": 1} {
		observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
			restart := func(session Session, unknown error) {
				speaker.change(func(a *answers) { a.session, a.unknown = session, unknown })
				pass(pollInterval)
			}
			up := speaker.session
			restart(Session{Peer: address}, nil)
			up.Exported = -1
			restart(up, ErrUnknown)
			if is := state(observer); is.Warning == "" || is.Exported != 2 {
				t.Errorf("%s: without routes %+v", name, is)
			}
			up.Exported = 2 + others
			restart(up, nil)
			pass(pollInterval)
			if is := state(observer); is.Warning != "" || is.Exported != 2 {
				t.Errorf("%s: with routes %+v", name, is)
			}
		})
	}
}

// Lists of many gateways delay no poll: the gate counts a state for 3 s.
func TestSlowLists(t *testing.T) {
	observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
		attractor := observer.desired.Load()
		attractor.Gateways = slices.Clone(attractor.Gateways)
		for i := range 8 {
			// The session is found by the name of its interface.
			attractor.Gateways = append(attractor.Gateways, trench.Gateway{
				Name: fmt.Sprint("g", i), Interface: "eth1",
				Families: trench.SessionIPv4,
			})
		}
		observer.Configure(attractor)
		speaker.change(func(a *answers) {
			a.stall, a.slow = 50*time.Millisecond, pollLimit
			a.session.Exported, a.exported = 4, vip.NewSet(vipA, vipB, other, vip.Require("30.0.1.0/24"))
		})
		lists := speaker.listed()
		for range 3000 {
			pass(10 * time.Millisecond)
			if age := time.Since(observer.State().Load().At); age >= 3*time.Second {
				t.Errorf("the state is %v old", age)
				break
			}
		}
		if got := speaker.listed() - lists; got != len(attractor.Gateways) {
			t.Errorf("%d lists, want one for each of %d gateways", got, len(attractor.Gateways))
		}
		for _, is := range observer.State().Load().Gateways {
			if is.Exported != 2 {
				t.Errorf("%+v", is)
			}
		}
	})
}

// FRR computes the start of a session from two clocks, so it differs by a second between polls.
func TestStartOfSession(t *testing.T) {
	observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
		start := state(observer).Since
		for _, tt := range []struct{ since, want time.Duration }{
			{0, 0},
			{time.Second, 0},
			{-sinceJitter, 0},
			{sinceJitter, 0},
			{sinceJitter + time.Second, sinceJitter + time.Second},
		} {
			speaker.change(func(a *answers) { a.session.Since = start.Add(tt.since) })
			pass(pollInterval)
			if got := state(observer).Since.Sub(start); got != tt.want {
				t.Errorf("the session began at %v, observed %v, want %v", tt.since, got, tt.want)
			}
		}
	})
}

func TestShortExports(t *testing.T) {
	observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
		speaker.change(func(a *answers) { a.session.Exported, a.exported = 2, vip.NewSet(vipA, other) })
		pass(exportTime + 2*pollInterval)
		if is := state(observer); !is.Short || len(is.Exports) != 1 || !is.Exports.Has(vipA) {
			t.Errorf("%+v", is)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if err := observer.Confirm(ctx); err == nil {
			t.Error("missing exports are confirmed")
		}
		speaker.change(func(a *answers) { a.session.Exported, a.exported = 3, vip.NewSet(vipA, vipB, other) })
		pass(2 * pollInterval)
		if is := state(observer); is.Short {
			t.Errorf("%+v", is)
		}
	})
}

// A list that cannot be read changes no number of other routes, and names no VIP.
func TestFailedListKeepsOthers(t *testing.T) {
	observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
		speaker.change(func(a *answers) {
			a.session.Exported, a.exported, a.unknown = 2, nil, errors.New("no answer within 2s")
		})
		for range 3 {
			lists := speaker.listed()
			pass(maxListAge + pollInterval)
			if is := state(observer); is.Exported != 1 || !is.Short || is.Exports != nil || speaker.listed() == lists {
				t.Errorf("%d lists, %+v", speaker.listed(), is)
			}
		}
		speaker.change(func(a *answers) { a.session.Exported = 3 })
		ctx, cancel := context.WithTimeout(t.Context(), pollLimit)
		defer cancel()
		if err := observer.Confirm(ctx); err != nil {
			t.Error(err)
		}
		// The number of other routes may have changed, too.
		lists := speaker.listed()
		if pass(maxListAge + pollInterval); speaker.listed() == lists {
			t.Error("the list is not read again")
		}
	})
}

// An answer that is missing after a stall of this process does not count against the speaker, but
// the next ones do.
func TestOwnStallIsNotSilence(t *testing.T) {
	observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
		const stall = 10 * time.Second
		speaker.change(func(a *answers) { a.err, a.stall = context.DeadlineExceeded, stall })
		pass(pollInterval + stall/2)
		speaker.change(func(a *answers) { a.stall = 0 })
		pass(stall / 2)
		if is := observer.State().Load(); !is.Alive || is.Err == nil {
			t.Errorf("after a stall: %+v", is)
		}
		pass(unansweredLimit + 2*pollInterval)
		if is := observer.State().Load(); is.Alive {
			t.Errorf("%+v", is)
		}
	})
}

// A speaker that does not answer has no sessions after a while, and confirms nothing.
func TestUnanswered(t *testing.T) {
	observed(t, func(t *testing.T, speaker *fake, observer *Observer) {
		speaker.change(func(a *answers) { a.err = errors.New("refused") })
		pass(pollInterval)
		if is := observer.State().Load(); !is.Alive || is.Err == nil {
			t.Errorf("after one poll: %+v", is)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := observer.Confirm(ctx); err == nil {
			t.Error("an old state confirms")
		}
		pass(unansweredLimit + pollInterval)
		if is := observer.State().Load(); is.Alive {
			t.Errorf("%+v", is)
		}
		speaker.change(func(a *answers) { a.err = nil })
		pass(pollInterval)
		if is := observer.State().Load(); !is.Alive || is.Err != nil || !is.Gateways[0].Up {
			t.Errorf("after the return: %+v", is)
		}
	})
}

func TestSessionOfGateway(t *testing.T) {
	sessions := []Session{
		{Name: "eth1", Family: vip.IPv4},
		{Name: "b", Family: vip.IPv4},
		{Peer: address, Family: vip.IPv6},
		{Peer: address, Name: "b", Family: vip.IPv4, Imported: 1},
	}
	for _, tt := range []struct {
		gateway trench.Gateway
		want    int // index of sessions; -1 for none
	}{
		{trench.Gateway{Name: "b", Address: address}, 3},
		{trench.Gateway{Name: "b", Address: netip.MustParseAddr("10.0.0.1")}, 3},
		{trench.Gateway{Name: "c", Interface: "eth1"}, 0},
		{trench.Gateway{Name: "c", Interface: "eth2"}, -1},
	} {
		got, ok := find(sessions, tt.gateway, vip.IPv4)
		if ok != (tt.want >= 0) || ok && got != sessions[tt.want] {
			t.Errorf("%+v has the session %+v", tt.gateway, got)
		}
	}
}

func TestUnobserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		observer := NewObserver(Options{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _ = observer.Run(ctx) }()
		observer.Configure(trench.Attractor{Gateways: []trench.Gateway{
			{Name: "a", Address: address, Protocol: trench.BGP}, {Name: "s", Address: address, Protocol: trench.Static},
		}})
		pass(pollInterval)
		is := observer.State().Load()
		if !is.Gateways[0].Up || is.Gateways[0].Warning == "" || is.Gateways[1].Up || is.Gateways[1].Problem == "" {
			t.Errorf("%+v", is)
		}
		if err := observer.Confirm(t.Context()); err != nil {
			t.Error(err)
		}
		cancel()
		<-done
	})
}
