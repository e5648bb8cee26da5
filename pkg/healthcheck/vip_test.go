package healthcheck

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// vipStream is a stream with VIPs of both families, for targets with IPv4 addresses.
func vipStream(n int) trench.Stream {
	s := stream(n, testCheck)
	for _, v := range []string{"20.0.0.1/32", "20.0.1.0/24", "20.0.0.3/32", "2000::1/128"} {
		s.VIPs = append(s.VIPs, vip.Require(v))
	}
	return s
}

func routed(Key) (uint32, string) { return 7, "" }

// lately are the hosts that were dialed since n dials, in order, each once in a row.
func (n *network) lately(since int) (hosts []string) {
	for _, d := range n.dialed()[since:] {
		host, _, _ := net.SplitHostPort(d.address)
		hosts = append(hosts, host)
	}
	return slices.Compact(hosts)
}

func TestVIPsAreCheckedInTurn(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		c, stop := start(t, Options{dial: n.DialContext, FWMark: routed})
		defer stop()
		c.Configure([]trench.Stream{vipStream(1)})
		advance(10 * time.Second)
		got := strings.Join(n.lately(0), " ")
		if want := "20.0.0.1 20.0.1.0 20.0.0.3 20.0.0.1 20.0.1.0"; !strings.HasPrefix(got, want) {
			t.Errorf("checked %s, want %s", got, want)
		}

		// The check stays at the failing VIP until it passes, although the remaining VIPs pass.
		n.refuse("20.0.1.0", syscall.ECONNREFUSED)
		advance(8 * time.Second)
		h := c.List()[0]
		if want := "port 5000: connection refused: the application does not listen on 20.0.1.0"; h.State != NotReady ||
			h.LastError != want {
			t.Errorf("got %v: %q, want %q", h.State, h.LastError, want)
		}
		since := len(n.dialed())
		advance(5 * time.Second)
		if got := n.lately(since); !slices.Equal(got, []string{"20.0.1.0"}) {
			t.Errorf("checked %s while 20.0.1.0 fails", got)
		}
		n.refuse("20.0.1.0", nil)
		advance(5 * time.Second)
		if h := c.List()[0]; h.State != Ready || h.LastError != "" {
			t.Errorf("got %v: %q", h.State, h.LastError)
		}

		// Without VIPs of its family, and via address, its own address is checked.
		s := vipStream(1)
		s.VIPs = s.VIPs[3:]
		other := vipStream(1)
		other.Check.Via = trench.ViaAddress
		for _, next := range []trench.Stream{s, other} {
			c.Configure([]trench.Stream{next})
			advance(time.Second)
			c.Evaluate(time.Now()) // the new check passes, which ends the old one
			since = len(n.dialed())
			advance(3 * time.Second)
			if got := n.lately(since); !slices.Equal(got, []string{"10.0.0.1"}) {
				t.Errorf("checked %s", got)
			}
			c.Configure([]trench.Stream{vipStream(1)})
			advance(time.Second)
			c.Evaluate(time.Now())
		}
	})
}

// A check through VIPs passes its verdict on to streams whose VIPs it covers, in any number.
func TestVerdictsOfCoveredVIPs(t *testing.T) {
	of := func(name string, vips ...int) trench.Stream {
		s := named(name, 2, testCheck)
		for _, i := range vips {
			s.VIPs = append(s.VIPs, vipStream(0).VIPs[i])
		}
		return s
	}
	for name, tt := range map[string]struct {
		before, after []trench.Stream
		want          string
	}{
		"renamed":            {[]trench.Stream{of("a", 0, 1)}, []trench.Stream{of("b", 0, 1)}, "b=ready"},
		"in another order":   {[]trench.Stream{of("a", 0, 1)}, []trench.Stream{of("b", 1, 0)}, "b=ready"},
		"split":              {[]trench.Stream{of("a", 0, 1)}, []trench.Stream{of("b", 0), of("c", 1)}, "b=ready c=ready"},
		"a VIP less":         {[]trench.Stream{of("a", 0, 1, 2)}, []trench.Stream{of("b", 2, 0)}, "b=ready"},
		"a VIP more":         {[]trench.Stream{of("a", 0)}, []trench.Stream{of("b", 0, 1)}, "b=starting"},
		"another VIP":        {[]trench.Stream{of("a", 0)}, []trench.Stream{of("b", 1)}, "b=starting"},
		"united":             {[]trench.Stream{of("a", 0), of("b", 1)}, []trench.Stream{of("c", 0, 1)}, "c=starting"},
		"a VIP of its own":   {[]trench.Stream{of("a", 0, 1)}, []trench.Stream{of("a", 0), of("b", 2)}, "a=ready b=starting"},
		"the other family":   {[]trench.Stream{of("a", 3)}, []trench.Stream{of("b", 3, 0)}, "b=starting"},
		"none of the family": {[]trench.Stream{of("a", 3)}, []trench.Stream{of("b")}, "b=ready"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				c, stop := start(t, Options{dial: newNetwork().DialContext, FWMark: routed})
				defer stop()
				c.Configure(tt.before)
				advance(time.Second)
				c.Evaluate(time.Now())
				c.Configure(tt.after)
				var got []string
				for _, h := range c.List() {
					got = append(got, fmt.Sprintf("%s=%v", h.Stream, h.State))
				}
				if got := strings.Join(slices.Compact(got), " "); got != tt.want {
					t.Errorf("got %s, want %s", got, tt.want)
				}
				c.Configure(nil)
				if len(c.verdicts) > 0 {
					t.Errorf("%d verdicts are left: %v", len(c.verdicts), c.verdicts)
				}
			})
		})
	}
}

func TestCheckWaitsForItsFWMark(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		var mark atomic.Bool
		const problem = "the data plane has no route to the target yet"
		c, stop := start(t, Options{dial: n.DialContext, FWMark: func(Key) (uint32, string) {
			if mark.Load() {
				return 7, ""
			}
			return 0, problem
		}})
		defer stop()
		c.Configure([]trench.Stream{vipStream(20)})
		advance(5 * time.Second)
		h := c.List()[0]
		if e := c.Evaluate(time.Now()); e.Synced || h.State != Starting || h.LastError != "check not run: "+problem {
			t.Fatalf("synced %t, %v: %q", e.Synced, h.State, h.LastError)
		}
		mark.Store(true)
		c.Routed()
		advance(20 * time.Millisecond) // far less than an interval
		for _, h := range c.List() {
			if h.State != Ready {
				t.Fatalf("%v: %q", h.State, h.LastError)
			}
		}

		// That the data plane lost a route, it reports itself.
		mark.Store(false)
		advance(20 * time.Second)
		if h := c.List()[0]; h.State != Ready {
			t.Errorf("ready before, %v without a route: %q", h.State, h.LastError)
		}
		s := vipStream(21)
		c.Configure([]trench.Stream{s})
		advance(20 * time.Second)
		fresh := c.List()[slices.IndexFunc(c.List(), func(h Health) bool { return h.Name == "target-21" })]
		if fresh.State != NotReady || fresh.LastError != problem {
			t.Errorf("new without a route: %v: %q", fresh.State, fresh.LastError)
		}
	})
}

// A fwmark that comes between the question for it and the wait is not missed.
func TestFWMarkComesMeanwhile(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var c *Checker
		var asked atomic.Bool
		var stop func()
		c, stop = start(t, Options{dial: newNetwork().DialContext, FWMark: func(Key) (uint32, string) {
			if asked.Swap(true) {
				return 7, ""
			}
			c.Routed()
			return 0, "not yet"
		}})
		defer stop()
		c.Configure([]trench.Stream{vipStream(1)})
		advance(20 * time.Millisecond)
		if h := c.List()[0]; h.State != Ready {
			t.Errorf("%v: %q", h.State, h.LastError)
		}
	})
}

func TestViaVIPNeedsADataPlane(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		s := vipStream(1)
		c.Configure([]trench.Stream{s})
		advance(3 * time.Second)
		if got := n.lately(0); !slices.Equal(got, []string{"10.0.0.1"}) {
			t.Errorf("checked %s without a data plane", got)
		}
		s.Check.Via = trench.ViaVIP
		c.Configure([]trench.Stream{s})
		advance(5 * time.Second)
		if h := c.List()[0]; h.State != Ready ||
			h.LastError != "new check: check.via is vip, which needs a data plane" {
			t.Errorf("%v: %q", h.State, h.LastError)
		}
	})
}

// A socket that is used again has the fwmark of its check, and packets to a VIP are not forwarded.
func TestConnectionsHaveTheFWMarkOfTheirTarget(t *testing.T) {
	for _, a := range []netip.Addr{loopback4, loopback6} {
		l, port := listen(t, a)
		defer l.Close()
		k := connecting(t)
		level, name := unix.IPPROTO_IP, unix.IP_TTL
		if a.Is6() {
			level, name = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		}
		for _, fwmark := range []uint32{7, 8} {
			p := probing(a, port, nil)
			p.vip, p.fwmark = true, fwmark
			if o := conclude(t, k, p); strings.Contains(o.reason, unix.EPERM.Error()) {
				lab.Skip(t, "missing: the capability NET_ADMIN")
			} else if o != (outcome{}) {
				t.Fatalf("%+v", o)
			}
			if len(k.idle) != 1 {
				t.Fatalf("%d sockets are idle", len(k.idle))
			}
			mark, errMark := unix.GetsockoptInt(k.idle[0].fd, unix.SOL_SOCKET, unix.SO_MARK)
			hops, errHops := unix.GetsockoptInt(k.idle[0].fd, level, name)
			if err := errors.Join(errMark, errHops); err != nil || mark != int(fwmark) || hops != 1 {
				t.Errorf("%s: fwmark %d, hop limit %d, %v", fmt.Sprint(a), mark, hops, err)
			}
		}
		// Checks of the target's own address do not reuse the sockets of VIP checks.
		if o := conclude(t, k, probing(a, port, nil)); o != (outcome{}) || len(k.idle) != 2 {
			t.Errorf("%+v, %d sockets are idle", o, len(k.idle))
		}
	}
}

// The data plane identifies sockets of checks by their priority, of all kinds and addresses.
func TestSocketsHaveThePriorityOfChecks(t *testing.T) {
	priority := func(fd int) {
		t.Helper()
		got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY)
		if errSet := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY, trench.CheckPriority); errSet != nil {
			lab.Skip(t, "missing: the capability NET_ADMIN")
		} else if err != nil || got != trench.CheckPriority {
			t.Errorf("priority %#x, %v", got, err)
		}
	}
	for _, a := range []netip.Addr{loopback4, loopback6} {
		l, port := listen(t, a)
		defer l.Close()
		k := connecting(t)
		for _, datagrams := range []bool{false, true} {
			s, err := k.open(origin{family: vip.FamilyOf(a), datagrams: datagrams})
			harness.Must(t, err)
			priority(s.fd)
		}
		for _, network := range []string{"tcp", "udp"} {
			conn, err := path{to: a}.dial(t.Context(), network, netip.AddrPortFrom(a, port).String())
			harness.Must(t, err)
			defer conn.Close()
			raw, err := conn.(syscall.Conn).SyscallConn()
			harness.Must(t, err)
			harness.Must(t, raw.Control(func(fd uintptr) { priority(int(fd)) }))
		}
	}
}
