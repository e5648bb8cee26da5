package healthcheck

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// edited is a stream of n targets that are checked at a port.
func edited(n int, port uint16) trench.Stream {
	check := testCheck
	check.TCP.Port = port
	return stream(n, check)
}

// Targets keep their verdicts until the new check has its own, and lose them only if enough of them
// pass it.
func TestEditOfCheck(t *testing.T) {
	withChecker := func(t *testing.T, f func(*testing.T, *ports, *Checker)) {
		inBubble(t, func(t *testing.T) {
			network := &ports{states: map[string]string{}}
			c, stop := start(t, Options{dial: network.DialContext})
			defer stop()
			c.Configure([]trench.Stream{edited(4, 1)})
			advance(time.Second)
			c.Evaluate(time.Now())
			f(t, network, c)
		})
	}
	want := func(t *testing.T, c *Checker, what string, state State, held bool, problem string) {
		t.Helper()
		c.Evaluate(time.Now())
		for _, health := range c.List() {
			if health.State != state || health.LastError != problem {
				t.Errorf("%s: %s is %v (%s), want %v (%s)", what, health.Name, health.State, health.LastError, state, problem)
			}
		}
		if got := len(c.Held()) > 0; got != held {
			t.Errorf("%s: held %v", what, c.Held())
		}
	}
	const refused = "port 2: refused"
	t.Run("right", func(t *testing.T) {
		withChecker(t, func(t *testing.T, _ *ports, c *Checker) {
			c.Configure([]trench.Stream{edited(4, 2)})
			want(t, c, "before the first check", Ready, false, "")
			advance(time.Second)
			want(t, c, "once it passes", Ready, false, "")
			if len(c.edits) > 0 || len(c.schedule) != 4 {
				t.Errorf("%d edits and %d checks are left", len(c.edits), len(c.schedule))
			}
		})
	})
	t.Run("wrong", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "refuses")
			c.Configure([]trench.Stream{edited(4, 2)})
			advance(time.Minute)
			want(t, c, "it fails", Ready, true, "new check: "+refused)
			network.set(1, "refuses")
			advance(5 * time.Second)
			want(t, c, "the old one, too", NotReady, false, refused)
		})
	})
	t.Run("corrected", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "refuses")
			c.Configure([]trench.Stream{edited(4, 2)})
			advance(time.Minute)
			network.set(2, "")
			advance(5 * time.Second)
			want(t, c, "it passes", Ready, false, "")
			network.set(1, "refuses")
			advance(5 * time.Second)
			want(t, c, "the old one ended", Ready, false, "")
		})
	})
	t.Run("undone", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "refuses")
			for _, port := range []uint16{2, 2, 3} { // an edit during an edit
				c.Configure([]trench.Stream{edited(4, port)})
				network.set(3, "refuses")
				advance(time.Minute)
				want(t, c, "it fails", Ready, true, fmt.Sprintf("new check: port %d: refused", port))
			}
			c.Configure([]trench.Stream{edited(4, 1)})
			want(t, c, "immediately", Ready, false, "")
			if len(c.edits) > 0 || len(c.schedule) != 4 {
				t.Errorf("%d edits and %d checks are left", len(c.edits), len(c.schedule))
			}
		})
	})
	t.Run("confirmed", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "refuses")
			c.Configure([]trench.Stream{edited(4, 2)})
			advance(time.Minute)
			c.Evaluate(time.Now())
			c.Release(map[string]trench.Check{"stream-a": edited(0, 3).Check, "none": edited(0, 2).Check})
			want(t, c, "another one is confirmed", Ready, true, "new check: "+refused)
			c.Release(c.Held())
			want(t, c, "immediately", NotReady, false, refused)
		})
	})
	t.Run("silent", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "hangs")
			slow := edited(4, 2)
			slow.Check.Interval, slow.Check.Timeout = time.Hour, time.Hour
			c.Configure([]trench.Stream{slow})
			advance(maxWait - time.Millisecond)
			want(t, c, "until then", Ready, false, "")
			advance(time.Millisecond)
			want(t, c, "without a verdict", Ready, true, "")
		})
	})
	t.Run("wrong, as in another stream", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "refuses")
			other := edited(4, 2)
			other.Name = "stream-b"
			c.Update([]trench.Stream{other}, nil)
			advance(5 * time.Second)
			c.Update([]trench.Stream{edited(4, 2)}, []string{other.Name})
			want(t, c, "it fails there", Ready, true, "new check: "+refused)
			c.Configure([]trench.Stream{edited(4, 1)})
			want(t, c, "undone", Ready, false, "")
		})
	})
	t.Run("undone as the old one fails", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "hangs")
			c.Configure([]trench.Stream{edited(4, 2)})
			network.set(1, "refuses")
			advance(5 * time.Second)
			c.Configure([]trench.Stream{edited(4, 1)})
			want(t, c, "immediately", NotReady, false, "port 1: refused")
			if len(c.edits) > 0 || len(c.schedule) != 4 || c.unjudged != 0 {
				t.Errorf("%d edits, %d checks, %d unjudged are left", len(c.edits), len(c.schedule), c.unjudged)
			}
		})
	})
	t.Run("wrong, and a rolling update", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "refuses")
			c.Configure([]trench.Stream{edited(4, 2)})
			advance(time.Minute)
			c.Evaluate(time.Now())
			for replaced := 1; replaced <= 4; replaced++ {
				next := edited(4+replaced, 2)
				next.Targets = next.Targets[replaced:]
				c.Configure([]trench.Stream{next})
				c.Evaluate(time.Now()) // before the first verdict
				advance(5 * time.Second)
				want(t, c, fmt.Sprintf("%d targets are new", replaced), Ready, true, "new check: "+refused)
			}
			network.set(2, "")
			advance(5 * time.Second)
			want(t, c, "it passes", Ready, false, "")
			if len(c.edits) > 0 || len(c.schedule) != 4 || c.unjudged != 0 {
				t.Errorf("%d edits, %d checks, %d unjudged are left", len(c.edits), len(c.schedule), c.unjudged)
			}
		})
	})
	t.Run("wrong, with other names", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			for _, port := range []uint16{2, 3} { // an edit during an edit
				network.set(int(port), "hangs") // the first check may begin at once
				next := edited(4, port)
				for i := range next.Targets {
					next.Targets[i].Name += fmt.Sprint(port)
				}
				c.Configure([]trench.Stream{next})
				want(t, c, "before the first verdict", Ready, false, "")
				network.set(int(port), "refuses")
				advance(time.Minute)
				want(t, c, "it fails", Ready, true, fmt.Sprintf("new check: port %d: refused", port))
				if check := c.Held()["stream-a"]; check != next.Check {
					t.Errorf("held %+v", check)
				}
			}
			c.Release(c.Held())
			want(t, c, "confirmed", NotReady, false, "port 3: refused")
		})
	})
	t.Run("stream removed", func(t *testing.T) {
		withChecker(t, func(t *testing.T, network *ports, c *Checker) {
			network.set(2, "refuses")
			c.Configure([]trench.Stream{edited(4, 2)})
			advance(time.Minute)
			c.Configure(nil)
			want(t, c, "removed", Ready, false, "")
			if len(c.edits)+len(c.schedule)+len(c.verdicts) > 0 || c.unjudged != 0 {
				t.Errorf("left: %d edits, %d checks, %d addresses, %d unjudged", len(c.edits), len(c.schedule),
					len(c.verdicts), c.unjudged)
			}
		})
	})
}

// A new check decides once minReady targets, and half of the ready ones, pass it.
func TestEditAtSomeTargets(t *testing.T) {
	for _, tt := range []struct{ targets, minReady, pass, ready int }{
		{4, 1, 0, 4},
		{4, 1, 1, 4},
		{4, 1, 2, 2},
		{4, 1, 3, 3},
		{4, 1, 4, 4},
		{4, 3, 2, 4},
		{4, 3, 3, 3},
		{4, 3, 4, 4},
		{5, 1, 2, 5},
		{5, 1, 3, 3},
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			withChecker(t, func(t *testing.T, n *network, c *Checker) {
				c.Configure([]trench.Stream{edited(tt.targets, 1)})
				advance(time.Second)
				for i := tt.pass; i < tt.targets; i++ {
					n.refuse(fmt.Sprintf("10.0.0.%d:2", i+1), errRefused)
				}
				next := edited(tt.targets, 2)
				next.MinReady = tt.minReady
				c.Configure([]trench.Stream{next})
				advance(time.Minute)
				c.Evaluate(time.Now())
				ready := slices.DeleteFunc(c.List(), func(health Health) bool { return health.State != Ready })
				if len(ready) != tt.ready || len(c.Held()) > 0 != (tt.ready > tt.pass) {
					t.Errorf("%d are ready, want %d; held %v", len(ready), tt.ready, c.Held())
				}
			})
		})
	}
}

// Many verdicts in a row visit the targets of an edit a few times only.
func TestManyVerdictsOfEdit(t *testing.T) {
	const n = 1000
	rest := n * settleRest
	c := New(Options{Log: discard})
	now := time.Now()
	verdict := func(key Key) {
		member := c.streams["stream-a"][key].members[0]
		member.State = Ready
		c.judge(member, now)
	}
	c.Configure([]trench.Stream{edited(n, 1)})
	for key := range c.streams["stream-a"] {
		verdict(key)
	}
	c.Configure([]trench.Stream{edited(n, 2)})
	c.Evaluate(now)
	verdict(c.List()[0].Key)
	for _, tt := range []struct {
		after time.Duration
		left  int
	}{{0, n}, {rest - 1, n}, {rest, n - 1}, {rest + 1, n - 1}} {
		c.Evaluate(now.Add(tt.after))
		left := 0
		for _, target := range c.streams["stream-a"] {
			if target.before != nil {
				left++
			}
		}
		if left != tt.left {
			t.Errorf("after %v: %d old checks, want %d", tt.after, left, tt.left)
		}
	}
}

// An edit before the first verdict does not delay the first configuration.
func TestEditBeforeFirstVerdict(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		release := n.hang("10.0.0.1:1")
		defer release()
		c.Configure([]trench.Stream{edited(2, 1)})
		advance(10 * time.Millisecond)
		c.Configure([]trench.Stream{edited(2, 2)})
		advance(100 * time.Millisecond)
		c.Evaluate(time.Now())
		if synced := c.Evaluate(time.Now()).Synced; !synced || c.unjudged != 0 {
			t.Errorf("synced %v, %d targets without a verdict", synced, c.unjudged)
		}
	})
}

// While an edit waits, both checks follow the VIPs of the stream. Without VIPs of the family before
// or after an edit, its targets attract nothing, and no check waits.
func TestEditFollowsVIPs(t *testing.T) {
	one, two, other := vip.Require("20.0.0.1/32"), vip.Require("20.0.0.2/32"), vip.Require("2000::1/128")
	for name, tt := range map[string]struct {
		before, wrong, after []vip.VIP // wrong: with an edit that no target passes; nil: without
		refuses              vip.VIP
		state                State
		held                 bool
	}{
		"a VIP leaves":         {[]vip.VIP{one, two}, []vip.VIP{one, two}, []vip.VIP{one}, two, Ready, true},
		"a VIP is added":       {[]vip.VIP{one}, []vip.VIP{one}, []vip.VIP{one, two}, two, NotReady, false},
		"the last VIP leaves":  {[]vip.VIP{one, other}, nil, []vip.VIP{other}, vip.Require("10.0.0.1/32"), NotReady, false},
		"the first VIP":        {[]vip.VIP{other}, nil, []vip.VIP{other, one}, one, NotReady, false},
		"the first VIP passes": {[]vip.VIP{other}, nil, []vip.VIP{other, one}, two, Ready, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				n := newNetwork()
				c, stop := start(t, Options{dial: n.DialContext, FWMark: routed})
				defer stop()
				of := func(port uint16, vips []vip.VIP) []trench.Stream {
					s := edited(1, port)
					s.VIPs = vips
					return []trench.Stream{s}
				}
				c.Configure(of(1, tt.before))
				advance(5 * time.Second)
				port := uint16(1)
				if tt.wrong != nil {
					port = 2
					for _, v := range append(tt.wrong, tt.after...) {
						n.refuse(v.Prefix().Addr().String()+":2", errRefused)
					}
					c.Configure(of(port, tt.wrong))
					advance(5 * time.Second)
					c.Evaluate(time.Now())
				}
				n.refuse(tt.refuses.Prefix().Addr().String()+":1", errRefused)
				c.Configure(of(port, tt.after))
				advance(time.Minute)
				c.Evaluate(time.Now())
				if h := c.List()[0]; h.State != tt.state || len(c.Held()) > 0 != tt.held {
					t.Errorf("got %v (%s), held %v", h.State, h.LastError, c.Held())
				}
			})
		})
	}
}
