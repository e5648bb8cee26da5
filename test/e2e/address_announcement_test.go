package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// staleMAC is the MAC address of the host that had an address before the pod.
const staleMAC = "02:00:00:00:00:99"

// linkAddress is the MAC address of an interface.
func linkAddress(ctx context.Context, ns *lab.NetNS, dev string) (string, error) {
	out, err := ns.Run(ctx, "ip", "-o", "link", "show", "dev", dev)
	if err != nil {
		return "", err
	}
	words := strings.Fields(out)
	i := slices.Index(words, "link/ether")
	if i < 0 || i+1 == len(words) {
		return "", fmt.Errorf("interface %s has no MAC address: %s", dev, out)
	}
	return words[i+1], nil
}

// An address that another pod had before is in the neighbor tables of gateways and targets with
// the MAC address of that pod, for up to 45 s after the last packet. The addresses are in separate
// networks, so that no packet of lb, frontend or BIRD has them as its source.
func TestReusedAddressIsAnnounced(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, dev, peerDev string
		start              func(*lab.Pod) error
		peer               func(*fixture) *lab.NetNS
	}{
		{
			"lb", lab.Internal, "pod0", func(p *lab.Pod) error { return p.StartLB() },
			func(f *fixture) *lab.NetNS { return f.Backend },
		},
		{
			"frontend", lab.External, "trench0", func(p *lab.Pod) error { return p.StartFrontend() },
			func(f *fixture) *lab.NetNS { return f.Lab.Gateway },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			peer := c.peer(f)
			mac, err := linkAddress(t.Context(), f.Pod, c.dev)
			f.must(err)
			f.must(f.Pod.Sysctl("net.ipv6.conf."+c.dev+".accept_dad", "1"))
			add := func(addrs ...string) {
				t.Helper()
				for _, a := range addrs {
					addr, _, _ := strings.Cut(a, "/")
					f.must(peer.IP("neigh", "replace", addr, "lladdr", staleMAC, "nud", "reachable", "dev", c.peerDev))
					f.must(f.Pod.IP("addr", "add", a, "dev", c.dev))
				}
			}
			corrected := func(addrs ...string) {
				t.Helper()
				f.waitFor(func() error {
					for _, a := range addrs {
						out, err := peer.Run(t.Context(), "ip", "neigh", "show", a, "dev", c.peerDev)
						// The pod forwards, and hosts drop routes through a neighbor whose
						// neighbor advertisement clears the router flag (RFC 4861, section 7.2.5).
						if err != nil || !strings.Contains(out, mac) ||
							strings.Contains(a, ":") && !strings.Contains(out, "router") {
							return fmt.Errorf("the neighbor has not %s at %s, a router if IPv6, but: %s (%v)", a, mac,
								out, err)
						}
					}
					return nil
				})
			}
			add("10.99.0.8/24", "fd00:99::8/64")
			f.must(c.start(f.pod))
			corrected("10.99.0.8", "fd00:99::8")
			add("10.99.0.9/24", "fd00:99::9/64")
			corrected("10.99.0.9", "fd00:99::9")
		})
	}
}

func TestLBWithoutNetRawRuns(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	p, err := f.Start(
		f.Pod, "lb", append([]string{"setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw"},
			f.pod.LBArgs()...)...,
	)
	f.must(err)
	f.waitLog(p, "ndisc_notify")
	f.waitLog(p, "serving readiness")
}
