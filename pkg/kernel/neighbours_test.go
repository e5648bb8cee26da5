package kernel

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/test/lab"
)

var _ task.Task = (*Neighbours)(nil)

// wire is a host with one interface, and the network at its other end with three
// hosts: 10.9.0.2 and fd09::2, 10.9.0.3 and fd09::3, and the gateway 10.9.0.254.
type wire struct {
	*Neighbours
	t          *testing.T
	here, peer *lab.NetNS
}

func newWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{t: t, here: lab.NewNetNS(t), peer: lab.NewNetNS(t)}
	must(t, lab.Veth(w.here, "net", w.peer, "far"))
	must(t, w.here.Addr("net", "10.9.0.1/24", "fd09::1/64"))
	must(t, w.peer.Addr("far", "10.9.0.2/24", "10.9.0.3/24", "10.9.0.254/24", "fd09::2/64", "fd09::3/64"))
	return w
}

// run runs a Neighbours until the test ends, on a thread that prepare prepared.
func (w *wire) run(prepare func() error) {
	w.t.Helper()
	w.Neighbours = NewNeighbours(slog.New(slog.NewTextHandler(logWriter{w.t}, nil)))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- w.here.Do(func() error {
			if prepare != nil {
				if err := prepare(); err != nil {
					return err
				}
			}
			return w.Run(ctx)
		})
	}()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
}

// know has the kernel know these neighbours.
func (w *wire) know(addrs ...string) {
	w.t.Helper()
	for _, a := range addrs {
		must(w.t, w.here.Do(func() error {
			k, err := newKnock(neighbour{addr: netip.MustParseAddr(a)}, "net")
			if err == nil {
				k.close()
			}
			return err
		}))
		eventually(w.t, a+" is a neighbour", func() bool {
			return strings.Contains(run(w.t, w.here, "ip neigh show "+a), "REACHABLE")
		})
	}
}

// filter replaces what the far end drops.
func (w *wire) filter(rules ...string) {
	w.t.Helper()
	run(w.t, w.peer, "nft delete table netdev cut 2>/dev/null; true")
	if len(rules) > 0 {
		run(w.t, w.peer, fmt.Sprintf(`nft 'table netdev cut { chain in { type filter hook ingress device "far" priority 0; %s; }; }'`, strings.Join(rules, "; ")))
	}
}

type finding struct {
	dark, known bool
	detail      string
}

// waitFor waits until something is found about the network of addr.
func (w *wire) waitFor(addr string, since time.Time, ok func(finding) bool) (finding, Network) {
	w.t.Helper()
	deadline := time.After(patience)
	for {
		n, changed := w.Network().Get()
		var f finding
		f.dark, f.known, f.detail = n.Of(netip.MustParseAddr(addr), time.Now(), since)
		if ok(f) {
			return f, n
		}
		select {
		case <-changed:
		case <-deadline:
			w.t.Fatalf("waited in vain; last: %+v of %+v; %s", f, n, run(w.t, w.here, "ip -s neigh; ip route; ip -br link"))
		}
	}
}

func (w *wire) ask(addrs ...string) (since time.Time) {
	since = time.Now()
	var list []netip.Addr
	for _, a := range addrs {
		list = append(list, netip.MustParseAddr(a))
	}
	w.Ask(list)
	return since
}

func isDark(f finding) bool  { return f.known && f.dark }
func isLight(f finding) bool { return f.known && !f.dark }
func isKnown(f finding) bool { return f.known }

func TestSilentNetworkIsDarkUntilSomebodyAnswers(t *testing.T) {
	for name, addrs := range map[string][]string{
		"IPv4": {"10.9.0.2", "10.9.0.3", "10.9.0.254"},
		"IPv6": {"fd09::2", "fd09::3"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWire(t)
			w.know(addrs...)
			w.filter("drop")
			w.run(nil)
			since := w.ask(addrs[0])
			f, n := w.waitFor(addrs[0], since, isKnown)
			if !f.dark {
				t.Fatalf("found %+v in %+v", f, n)
			}
			took := n.At.Sub(since)
			t.Logf("dark after %v: %s", took, f.detail)
			if dark, detail := n.Dark(time.Now(), since); !dark || detail != f.detail {
				t.Errorf("all: %v, %q", dark, detail)
			}
			w.filter()
			f, n = w.waitFor(addrs[0], since, isLight)
			t.Logf("light: %s", f.detail)
		})
	}
}

func TestOneOtherNeighbourThatAnswersIsLight(t *testing.T) {
	w := newWire(t)
	w.know("10.9.0.2", "10.9.0.3")
	// The target is gone altogether; the other answers ARP and nothing else.
	w.filter("arp daddr ip 10.9.0.2 drop", "meta protocol ip drop")
	w.run(nil)
	since := w.ask("10.9.0.2")
	f, n := w.waitFor("10.9.0.2", since, isKnown)
	if f.dark || !strings.Contains(f.detail, "10.9.0.3 on interface net was reached") {
		t.Fatalf("found %+v in %+v", f, n)
	}
	t.Logf("light after %v", n.At.Sub(since))
}

func TestTargetWhoseHostAnswersARPIsLight(t *testing.T) {
	w := newWire(t)
	w.know("10.9.0.2")
	w.filter("meta protocol ip drop")
	w.run(nil)
	f, n := w.waitFor("10.9.0.2", w.ask("10.9.0.2"), isKnown)
	if f.dark {
		t.Fatalf("found %+v in %+v", f, n)
	}
}

func TestSilentGatewayOfRemoteTargetsIsDark(t *testing.T) {
	w := newWire(t)
	must(t, w.here.IP("route", "add", "10.77.0.0/16", "via", "10.9.0.254"))
	w.filter("drop")
	w.run(nil)
	since := w.ask("10.77.0.1", "10.77.0.2")
	for _, a := range []string{"10.77.0.1", "10.77.0.2"} {
		if f, n := w.waitFor(a, since, isKnown); !f.dark {
			t.Fatalf("found %+v in %+v", f, n)
		}
	}
	w.filter()
	f, _ := w.waitFor("10.77.0.1", since, isLight)
	if !strings.Contains(f.detail, "10.9.0.254") {
		t.Errorf("detail %q", f.detail)
	}
}

func TestLostCarrierIsDarkAtOnceAndEndsWithIt(t *testing.T) {
	w := newWire(t)
	w.know("10.9.0.3")
	must(t, w.peer.IP("link", "set", "far", "down"))
	w.run(nil)
	since := w.ask("10.9.0.2")
	f, n := w.waitFor("10.9.0.2", since, isKnown)
	if !f.dark || !strings.Contains(f.detail, "no carrier") {
		t.Fatalf("found %+v in %+v", f, n)
	}
	t.Logf("dark after %v", n.At.Sub(since))
	must(t, w.peer.IP("link", "set", "far", "up"))
	w.waitFor("10.9.0.2", since, isLight)
}

func TestNoWayIsDark(t *testing.T) {
	w := newWire(t)
	must(t, w.here.IP("link", "set", "net", "down"))
	w.run(nil)
	f, n := w.waitFor("10.9.0.2", w.ask("10.9.0.2"), isKnown)
	if !f.dark || !strings.Contains(f.detail, "no way to 10.9.0.2") {
		t.Fatalf("found %+v in %+v", f, n)
	}
}

func TestLoopbackIsNeverDark(t *testing.T) {
	w := newWire(t)
	w.run(nil)
	since := w.ask("127.0.0.1", "10.9.0.1", "::1")
	for _, a := range []string{"127.0.0.1", "10.9.0.1", "::1"} {
		if f, n := w.waitFor(a, since, isKnown); f.dark {
			t.Errorf("%s: found %+v in %+v", a, f, n)
		}
	}
}

func TestNetworksAreToldApart(t *testing.T) {
	w := newWire(t)
	must(t, lab.Veth(w.here, "net2", w.peer, "far2"))
	must(t, w.here.Addr("net2", "10.8.0.1/24"))
	must(t, w.peer.Addr("far2", "10.8.0.2/24"))
	w.know("10.9.0.2", "10.9.0.3")
	w.filter("drop")
	w.run(nil)
	since := w.ask("10.9.0.2", "10.8.0.2")
	w.waitFor("10.8.0.2", since, isLight)
	w.waitFor("10.9.0.2", since, isDark)
	if dark, detail := w.Network().Load().Dark(time.Now(), since); dark {
		t.Errorf("all are dark: %s", detail)
	}
}

// Without the capability an answer counts, and silence proves nothing: also not
// that of a host which never was there.
func TestWithoutPrivilegesSilenceIsUnknown(t *testing.T) {
	w := newWire(t)
	w.know("10.9.0.2", "10.9.0.3")
	known := time.Now()
	// The kernel tells ages in steps of 10 ms.
	eventually(t, "the confirmations are old", func() bool { return time.Since(known) > 100*time.Millisecond })
	w.run(func() error { return dropNetAdmin() })
	since := w.ask("10.9.0.2")
	w.waitFor("10.9.0.2", since, isLight)
	w.filter("drop")
	since = w.ask("10.9.0.77")
	f, n := w.waitFor("10.9.0.77", since, func(f finding) bool {
		return f.known || strings.Contains(f.detail, "CAP_NET_ADMIN")
	})
	// Two looks later it is no other.
	for range 2 {
		if f.known {
			t.Fatalf("found %+v in %+v", f, n)
		}
		at := n.At
		f, n = w.waitFor("10.9.0.77", since, func(f finding) bool {
			return f.known || w.Network().Load().At.After(at.Add(lookEvery/2))
		})
	}
}

// dropNetAdmin takes CAP_NET_ADMIN from the calling thread, which then ends with
// its goroutine.
func dropNetAdmin() error {
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	data[0].Permitted &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("drop CAP_NET_ADMIN: %w", err)
	}
	return nil
}

func TestNothingIsKnownUnlessAsked(t *testing.T) {
	w := newWire(t)
	w.run(nil)
	since := w.ask("10.9.0.2")
	w.waitFor("10.9.0.2", since, isLight)
	w.Ask(nil)
	if n := w.Network().Load(); len(n.Links) != 0 || len(n.Ways) != 0 {
		t.Errorf("knows %+v", n)
	}
	// What an earlier question found is no answer to this one, and it is looked at
	// at once.
	since = w.ask("10.9.0.2")
	w.waitFor("10.9.0.2", since, isLight)
}

func TestWhatIsKnownOfANetwork(t *testing.T) {
	t0 := time.Unix(1000, 0)
	a, b := netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("10.9.0.3")
	at := func(s float64) time.Time { return t0.Add(time.Duration(s * float64(time.Second))) }
	for name, c := range map[string]struct {
		network     Network
		addr        netip.Addr
		dark, known bool
	}{
		"nothing":                   {Network{}, a, false, false},
		"not asked":                 {Network{At: at(1), Ways: map[netip.Addr]int{b: 0}}, a, false, false},
		"no way":                    {Network{At: at(1), Ways: map[netip.Addr]int{a: 0}}, a, true, true},
		"no carrier":                {oneLink(at(1), Link{Confirmed: at(1)}), a, true, true},
		"mute":                      {oneLink(at(1), Link{Carrier: true, Mute: true}), a, false, true},
		"confirmed since":           {oneLink(at(1), Link{Carrier: true, Confirmed: at(0)}), a, false, true},
		"confirmed before":          {oneLink(at(1), Link{Carrier: true, Confirmed: at(-0.01)}), a, false, false},
		"silent since":              {oneLink(at(1), Link{Carrier: true, Confirmed: at(-1), Silent: at(0)}), a, true, true},
		"silent before":             {oneLink(at(1), Link{Carrier: true, Confirmed: at(-1), Silent: at(-0.5)}), a, false, false},
		"confirmed and then silent": {oneLink(at(1), Link{Carrier: true, Confirmed: at(0.1), Silent: at(0.5)}), a, false, true},
		"old":                       {oneLink(at(-1), Link{}), a, false, false},
		"failed":                    {Network{At: at(1), Ways: map[netip.Addr]int{a: 0}, Err: fmt.Errorf("no")}, a, false, false},
	} {
		dark, known, detail := c.network.Of(c.addr, at(2), t0)
		if dark != c.dark || known != c.known || detail == "" {
			t.Errorf("%s: dark %v, known %v, %q", name, dark, known, detail)
		}
	}
}

func oneLink(at time.Time, l Link) Network {
	return Network{At: at, Links: map[int]Link{7: l}, Ways: map[netip.Addr]int{netip.MustParseAddr("10.9.0.2"): 7}}
}

func TestPeersAreChosenFromNearAndFar(t *testing.T) {
	table := map[netip.Addr]neighbour{}
	now := time.Unix(1000, 0)
	a := netip.MustParseAddr("10.9.0.1")
	for i := range 100 {
		table[a] = neighbour{addr: a, link: 7, confirmed: now.Add(-time.Duration(i) * time.Second)}
		a = a.Next()
	}
	hop, unknown := netip.MustParseAddr("10.9.0.50"), netip.MustParseAddr("10.9.0.254")
	chosen := choosePeers(table, []netip.Addr{hop, unknown}, 7)
	if len(chosen) != 2+maxLatest+maxChance {
		t.Fatalf("chosen are %d", len(chosen))
	}
	seen := map[netip.Addr]bool{}
	for _, p := range chosen {
		if seen[p.addr] || p.link != 7 {
			t.Errorf("%v", p)
		}
		seen[p.addr] = true
	}
	for _, want := range []string{"10.9.0.50", "10.9.0.254", "10.9.0.1", "10.9.0.2", "10.9.0.3", "10.9.0.4"} {
		if !seen[netip.MustParseAddr(want)] {
			t.Errorf("%s is not asked", want)
		}
	}
}

// TCP confirms a neighbour when it sends after an acknowledgement, however old
// that is.
func TestSegmentSentIntoTheDarkIsNoLight(t *testing.T) {
	w := newWire(t)
	var server, client net.Conn
	must(t, w.peer.Do(func() error {
		l, err := net.Listen("tcp", "10.9.0.2:5000")
		if err != nil {
			return err
		}
		defer l.Close()
		if err := w.here.Do(func() (err error) {
			client, err = net.DialTimeout("tcp", "10.9.0.2:5000", patience)
			return err
		}); err != nil {
			return err
		}
		server, err = l.Accept()
		return err
	}))
	defer client.Close()
	defer server.Close()
	send := func() {
		_, err := client.Write([]byte("x"))
		must(t, err)
	}
	send()
	_, err := server.Read(make([]byte, 1))
	must(t, err)
	eventually(t, "the segment is acknowledged", func() bool {
		return !strings.Contains(run(t, w.here, "ss -tnoH state established"), "timer:(on")
	})
	w.filter("drop")
	w.run(nil)
	since := w.ask("10.9.0.2")
	send()
	if f, n := w.waitFor("10.9.0.2", since, isKnown); !f.dark {
		t.Fatalf("found %+v in %+v", f, n)
	}
}
