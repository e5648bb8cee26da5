package kernel

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

var _ task.Task = (*Addresses)(nil)

// wire is a host with one interface, and a peer at the other end of the link.
type wire struct{ here, peer *lab.NetNS }

func newWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{here: lab.NewNetNS(t), peer: lab.NewNetNS(t)}
	must(t, lab.Veth(w.here, "net", w.peer, "far"))
	must(t, w.here.Addr("net", "10.9.0.1/24", "fd09::1/64"))
	must(t, w.peer.Addr("far", "10.9.0.2/24", "10.9.0.3/24", "10.9.0.254/24", "fd09::2/64", "fd09::3/64"))
	return w
}

// startAddresses runs an Addresses in a namespace until the test ends.
func startAddresses(t *testing.T, ns *lab.NetNS, named func() string) *Addresses {
	t.Helper()
	created := make(chan *Addresses, 1)
	ns.Background(t, func(ctx context.Context) error {
		a := NewAddresses(slog.New(slog.NewTextHandler(t.Output(), nil)), named)
		created <- a
		return a.Run(ctx)
	})
	a := <-created
	<-a.Ready()
	return a
}

// detectsDuplicates switches duplicate address detection on for an interface.
func detectsDuplicates(t *testing.T, ns *lab.NetNS, device string) {
	t.Helper()
	must(t, ns.Sysctl("net.ipv6.conf.all.accept_dad", "1"))
	must(t, ns.Sysctl("net.ipv6.conf."+device+".accept_dad", "1"))
}

func linkAddress(t *testing.T, ns *lab.NetNS, device string) string {
	t.Helper()
	return strings.Fields(ns.Shell(t, "ip -brief link show dev "+device))[2]
}

func TestStaleNeighborsAreCorrected(t *testing.T) {
	const elsewhere = "02:00:00:00:00:99"
	w := newWire(t)
	mac := linkAddress(t, w.here, "net")
	stale := func() {
		for _, a := range []string{"10.9.0.1", "fd09::1"} {
			w.peer.Shell(t, fmt.Sprintf("ip neigh replace %s lladdr %s nud reachable dev far", a, elsewhere))
		}
	}
	corrected := func() {
		t.Helper()
		for _, a := range []string{"10.9.0.1", "fd09::1"} {
			await.True(t, a+" has the link address of the new pod", func() bool {
				return strings.Contains(w.peer.Shell(t, "ip neigh show "+a), mac)
			})
		}
	}
	stale()
	startAddresses(t, w.here, func() string { return "net" })
	corrected() // at the start

	// At run time, after duplicate address detection.
	detectsDuplicates(t, w.here, "net")
	w.here.Shell(t, "ip addr del 10.9.0.1/24 dev net; ip addr del fd09::1/64 dev net")
	stale()
	w.here.Shell(t, "ip addr add 10.9.0.1/24 dev net; ip addr add fd09::1/64 dev net")
	await.True(t, "duplicate address detection is over", func() bool {
		return !strings.Contains(w.here.Shell(t, "ip addr show dev net"), "tentative")
	})
	usable := time.Now()
	corrected()
	t.Logf("corrected after %v", time.Since(usable))
}

// An advertisement keeps the router flag, so that neighbors continue to use the sender as a
// router.
func TestAdvertisementKeepsRouter(t *testing.T) {
	w := newWire(t)
	must(t, w.here.Sysctl("net.ipv6.conf.all.forwarding", "1"))
	w.peer.Shell(t, "ip neigh replace fd09::1 lladdr 02:00:00:00:00:99 nud reachable router dev far")
	startAddresses(t, w.here, func() string { return "net" })
	mac := linkAddress(t, w.here, "net")
	await.True(t, "fd09::1 is corrected and a router", func() bool {
		entry := w.peer.Shell(t, "ip neigh show fd09::1")
		return strings.Contains(entry, mac) && strings.Contains(entry, "router")
	})
}

func TestAnnouncementAfterMACChange(t *testing.T) {
	host, peer := lab.NewNetNS(t), lab.NewNetNS(t)
	startAddresses(t, host, func() string { return "eth1" })
	corrected := func(mac string) {
		t.Helper()
		for _, a := range []string{"10.9.0.1", "fd09::1"} {
			await.True(t, a+" at "+mac, func() bool {
				return strings.Contains(peer.Shell(t, "ip neigh show "+a+" dev eth0"), mac)
			})
		}
	}
	// The interface appears while the announcer runs.
	must(t, lab.Veth(host, "eth1", peer, "eth0"))
	peer.Shell(t, "ip neigh replace 10.9.0.1 dev eth0 lladdr 02:00:00:00:00:99 nud reachable; ip neigh replace fd09::1 "+
		"dev eth0 lladdr 02:00:00:00:00:99 nud reachable")
	host.Shell(t, "ip link set eth1 address 02:00:00:00:00:01; ip addr add 10.9.0.1/24 dev eth1; ip addr add fd09::1/64 "+
		"dev eth1 nodad")
	corrected("02:00:00:00:00:01")
	host.Shell(t, "ip link set eth1 address 02:00:00:00:00:02")
	corrected("02:00:00:00:00:02")
	// The interface is removed and appears again with a new index.
	peer.Shell(t, "ip link del eth0")
	must(t, lab.Veth(host, "eth1", peer, "eth0"))
	peer.Shell(t, "ip neigh replace 10.9.0.1 dev eth0 lladdr 02:00:00:00:00:99 nud reachable; ip neigh replace fd09::1 "+
		"dev eth0 lladdr 02:00:00:00:00:99 nud reachable")
	host.Shell(t, "ip link set eth1 address 02:00:00:00:00:03; ip addr add 10.9.0.1/24 dev eth1; ip addr add fd09::1/64 "+
		"dev eth1 nodad")
	corrected("02:00:00:00:00:03")
}

// Another host owns the duplicate address.
func TestDuplicateAddressIsNotAnnounced(t *testing.T) {
	host, peer := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(host, "eth1", peer, "eth0"))
	detectsDuplicates(t, host, "eth1")
	peer.Shell(t, "ip addr add fd09::1/64 dev eth0 nodad")
	host.Shell(t, "ip addr add fd09::1/64 dev eth1")
	await.True(t, "duplicate address detection to fail", func() bool {
		return strings.Contains(host.Shell(t, "ip addr show dev eth1"), "dadfailed")
	})
	await.True(t, "the link-local address is announced", func() bool {
		announced := false
		must(t, host.Do(func() error {
			known, _ := NewAddresses(testOptions(t).Log, nil).announce(nil, time.Now())
			for x := range known {
				if !x.Addr.IsLinkLocalUnicast() {
					t.Errorf("%s is announced", x.Addr)
				}
			}
			announced = len(known) > 0
			return nil
		}))
		return announced
	})
}

func TestSourceAddress(t *testing.T) {
	w := newWire(t)
	target4, target6 := netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("fd09::2")
	remote := netip.MustParseAddr("fd77::1")
	var none netip.Addr
	a := startAddresses(t, w.here, nil)
	want := func(to, from netip.Addr, words string, passing bool) {
		t.Helper()
		var problem string
		var passes bool
		deadline := time.Now().Add(patience)
		for time.Now().Before(deadline) {
			if problem, passes = a.Source(to, from); (problem == "") == (words == "") && strings.Contains(problem, words) &&
				passes == passing {
				return
			}
			<-time.After(10 * time.Millisecond)
		}
		t.Fatalf("source toward %s: %q, passing %v; want %q, %v", to, problem, passes, words, passing)
	}
	want(target4, none, "", false)
	want(target6, none, "", false)
	want(remote, none, "", false)

	w.here.Shell(t, "ip addr del fd09::1/64 dev net")
	want(target6, none, "no ipv6 address", true)
	want(target4, none, "", false)

	// The address stays tentative for long: no host responds to many detection probes.
	detectsDuplicates(t, w.here, "net")
	must(t, w.here.Sysctl("net.ipv6.conf.net.dad_transmits", "255"))
	w.here.Shell(t, "ip addr add fd09::1/64 dev net")
	for _, to := range []netip.Addr{target6, remote} {
		want(to, none, "fd09::1 is tentative", true)
	}
	want(target6, netip.MustParseAddr("fd09::1"), "fd09::1 is tentative", true)

	// The kernel solicits the neighbor from an address of the link, or else from the link-local one.
	elsewhere4, elsewhere6 := netip.MustParseAddr("10.8.0.1"), netip.MustParseAddr("fd08::1")
	w.here.Shell(t, "ip addr del fd09::1/64 dev net; ip addr add fe80::99/64 dev net; "+
		"ip addr add fd09::1/64 dev net nodad; ip addr add 10.8.0.1/24 dev lo; ip addr add fd08::1/64 dev lo")
	want(target6, elsewhere6, "fe80::99 is tentative", true)
	want(target6, none, "", false)
	want(target6, netip.MustParseAddr("fd09::1"), "", false)
	want(target4, none, "", false)
	want(target4, elsewhere4, "", false)
	w.here.Shell(t, "ip addr del fd09::1/64 dev net; ip addr add fd09::1/64 dev net")
	want(target6, elsewhere6, "fd09::1 is tentative", true) // the target resolves it for its reply
	want(target4, elsewhere4, "", false)
	w.here.Shell(t, "ip addr del fe80::99/64 dev net; ip addr del fd08::1/64 dev lo")

	// Another network of the family does not help a target in this one.
	w.here.Shell(t, "ip addr add fd10::1/64 dev lo")
	want(target6, none, "fd09::1 is tentative", true)
	want(remote, none, "", false)

	w.here.Shell(t, "ip addr del fd10::1/64 dev lo; ip addr del fd09::1/64 dev net")
	must(t, w.here.Sysctl("net.ipv6.conf.net.dad_transmits", "1"))
	w.here.Shell(t, "ip addr add fd09::2/64 dev net") // the peer has it
	want(netip.MustParseAddr("fd09::3"), none, "detection failed for own address fd09::2", false)
}
