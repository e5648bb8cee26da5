package healthcheck

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// ports is a network whose ports refuse connections, or do not answer.
type ports struct {
	mu     sync.Mutex
	states map[string]string // "refuses" or "hangs"; otherwise the port accepts
}

func (p *ports) set(port int, state string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.states[fmt.Sprint(port)] = state
}

func (p *ports) DialContext(ctx context.Context, _, address string) (net.Conn, error) {
	_, port, _ := net.SplitHostPort(address)
	p.mu.Lock()
	state := p.states[port]
	p.mu.Unlock()
	switch state {
	case "refuses":
		return nil, errRefused
	case "hangs":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	near, far := net.Pipe()
	_ = far.Close()
	return near, nil
}

// member is a TCP check of a port that one outcome decides.
func member(port uint16, interval time.Duration) trench.SingleCheck {
	return trench.SingleCheck{
		TCP: trench.TCPCheck{Port: port}, Interval: interval, Timeout: interval / 2, Rise: 1, Fall: 1,
	}
}

// All members must pass, or any; those without a verdict do not matter once the others decide.
func TestMembersDecide(t *testing.T) {
	states := []State{NotReady, Overdue, Starting, Ready}
	for i, first := range states {
		for j, second := range states {
			for _, anyPasses := range []bool{false, true} {
				joined := target{anyPasses: anyPasses}
				for _, state := range []State{first, second} {
					joined.members = append(joined.members, &entry{Health: Health{State: state}, overdue: state == Overdue})
				}
				want := states[min(i, j)]
				if anyPasses {
					want = states[max(i, j)]
				}
				if joined.join(time.Now()); joined.state != want {
					t.Errorf("%v and %v, any: %v: %v, want %v", first, second, anyPasses, joined.state, want)
				}
			}
		}
	}
}

// Each member has its own interval, rise, fall and verdict, and the error names each that fails.
func TestMembersOfTarget(t *testing.T) {
	for _, anyPasses := range []bool{false, true} {
		t.Run(fmt.Sprintf("any %v", anyPasses), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				network := &ports{states: map[string]string{"2": "hangs"}}
				c, stop := start(t, Options{dial: network.DialContext})
				defer stop()
				slow := member(2, 4*time.Second)
				slow.Fall = 2
				members := trench.MembersOf(member(1, time.Second), slow)
				check := trench.Check{All: members}
				kind := "all"
				if anyPasses {
					check, kind = trench.Check{Any: members}, "any"
				}
				want := func(what string, ifAll, ifAny State, problems ...string) {
					t.Helper()
					c.Evaluate(time.Now())
					wanted := ifAll
					if anyPasses {
						wanted = ifAny
					}
					got := c.List()[0]
					if got.State != wanted || got.LastError != strings.ReplaceAll(strings.Join(problems, "; "), "KIND", kind) {
						t.Errorf("%s: %v (%s), want %v (%s)", what, got.State, got.LastError, wanted, problems)
					}
				}
				c.Configure([]trench.Stream{stream(1, check)})
				advance(time.Second)
				want("the second one has no verdict", Starting, Ready)
				if synced := c.Evaluate(time.Now()).Synced; synced != anyPasses {
					t.Errorf("synced: %v", synced)
				}
				network.set(2, "")
				advance(8 * time.Second)
				want("both pass", Ready, Ready)

				network.set(1, "refuses")
				advance(2 * time.Second)
				want("the first fails", NotReady, Ready, "KIND[0].tcp: port 1: refused")
				since := c.List()[0].Since
				network.set(2, "hangs")
				advance(13 * time.Second)
				want("both fail", NotReady, NotReady, "KIND[0].tcp: port 1: refused", "KIND[1].tcp: port 2: no answer in 2s")
				if got := c.List()[0].Since; got.Equal(since) == anyPasses {
					t.Errorf("not ready since %v, was so since %v", got, since)
				}
				network.set(1, "")
				advance(2 * time.Second)
				want("the first is back", NotReady, Ready, "KIND[1].tcp: port 2: no answer in 2s")

				// The members that stay keep their verdicts.
				list := &check.All
				if anyPasses {
					list = &check.Any
				}
				first := members.List()[0]
				*list = trench.MembersOf(first)
				c.Configure([]trench.Stream{stream(1, check)})
				want("the second is gone", Ready, Ready)
				*list = trench.MembersOf(first, member(3, time.Second))
				c.Configure([]trench.Stream{stream(1, check)})
				want("a new one", Ready, Ready)
				advance(time.Second)
				want("the new one passes", Ready, Ready)
			})
		})
	}
}

// A member whose checks hang is overdue by itself.
func TestMemberIsOverdue(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		hang := make(chan struct{})
		var mu sync.Mutex
		hangs := false
		c, stop := start(t, Options{dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			mu.Lock()
			hung := hangs && strings.HasSuffix(address, ":2")
			mu.Unlock()
			if hung {
				<-hang
			}
			return (&ports{}).DialContext(ctx, network, address)
		}})
		defer stop()
		defer close(hang)
		members := trench.MembersOf(member(1, time.Second), member(2, time.Second))
		c.Configure([]trench.Stream{
			named("any", 1, trench.Check{Any: members}), named("all", 1, trench.Check{All: members}),
		})
		advance(3 * time.Second)
		mu.Lock()
		hangs = true
		mu.Unlock()
		advance(5 * time.Second)
		c.Evaluate(time.Now())
		if got := c.List(); got[0].State != Overdue || got[1].State != Ready {
			t.Errorf("got %v", got)
		}
	})
}

// A single check asks its members until one decides.
func TestMembersOfSingle(t *testing.T) {
	network := &ports{states: map[string]string{"1": "refuses"}}
	members := trench.MembersOf
	good, bad := member(2, time.Second), member(1, time.Second)
	for name, tt := range map[string]struct {
		check  trench.Check
		reason string
	}{
		"any, the second passes":  {trench.Check{Any: members(bad, good)}, ""},
		"any, none passes":        {trench.Check{Any: members(bad)}, "any[0].tcp: port 1: refused"},
		"all, the second fails":   {trench.Check{All: members(good, bad)}, "all[1].tcp: port 1: refused"},
		"all, the first fails":    {trench.Check{All: members(bad, good)}, "all[0].tcp: port 1: refused"},
		"all, all pass":           {trench.Check{All: members(good)}, ""},
		"one kind, without names": {trench.Check{SingleCheck: bad}, "port 1: refused"},
	} {
		got := NewSingle(tt.check, time.Second).Run(t.Context(), network.DialContext, loopback4)
		if got.Passed != (tt.reason == "") || got.Reason != tt.reason || got.NotRun {
			t.Errorf("%s: %+v, want %q", name, got, tt.reason)
		}
	}
}
