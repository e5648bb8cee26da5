package e2e

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// unnumberedTrench is the example of docs/gateways.md, with target 1.
func unnumberedTrench(t *testing.T) string {
	t.Helper()
	document, err := os.ReadFile("../../docs/gateways.md")
	harness.Must(t, err)
	_, example, found := strings.Cut(string(document), "```yaml unnumbered\n")
	example, _, _ = strings.Cut(example, "```\n")
	_, streams, _ := strings.Cut(usualTrench(), "streams:\n")
	stream, _, _ := strings.Cut(streams, "  - name: stream-b")
	if !found || !strings.Contains(stream, "target-1") {
		t.Fatal("the document or the usual trench file has changed")
	}
	return example + "streams:\n" + stream
}

// printedRouter starts a gateway with exactly the text of `frontend gateway-config`.
func (f *fixture) printedRouter(kind lab.Kind, replace ...string) lab.Router {
	f.t.Helper()
	return f.printedRouterIn(f.Gateway, kind, replace...)
}

func (f *fixture) printedRouterIn(ns *lab.NetNS, kind lab.Kind, replace ...string) lab.Router {
	f.t.Helper()
	args := []string{"gateway-config", strings.ToLower(string(kind))}
	if ns != f.Gateway {
		args = append(args, "gateway-a4", "gateway-a6")
	}
	printed, status := f.run("frontend", append(args,
		"--trench-file="+f.pod.TrenchFile(), "--external-interface="+lab.External)...)
	if status != 0 {
		f.t.Fatalf("exit status %d: %s", status, printed)
	}
	c := lab.GatewayA()
	c.Name, c.Text = "router-a", strings.NewReplacer(replace...).Replace(printed)
	c.BFD = strings.Contains(printed, "bfdd=yes")
	return f.startRouter(kind, ns, c)
}

// waitFamily waits until both families of a gateway's session, or only IPv4, are up.
func (f *fixture) waitFamilies(name string, ipv4, ipv6 bool) {
	f.t.Helper()
	want := map[string]bool{"ipv4": ipv4, "ipv6": ipv6}
	f.waitFor(func() error {
		found := f.frontendStatus().GetGateways()
		seen := 0
		for _, g := range found {
			if g.GetName() == name && g.GetUp() == want[g.GetFamily()] && (!g.GetUp() || g.GetImported() == 1) {
				seen++
			}
		}
		if seen != len(want) {
			return fmt.Errorf("gateways are %v", found)
		}
		return nil
	})
}

// Without any address in the trench file and on the link, VIPs of both families reach a gateway,
// and replies leave by it.
func TestUnnumberedGateway(t *testing.T) {
	t.Parallel()
	for _, bird := range lab.BIRDs() {
		for _, kind := range kinds {
			t.Run(string(kind)+" and BIRD "+bird, func(t *testing.T) {
				t.Parallel()
				need(t, kind)
				f := newFixture(t)
				f.must(f.gateway.Process.Kill())
				f.must(f.Pod.IP("addr", "flush", "dev", lab.External, "scope", "global"))
				f.must(f.Gateway.IP("addr", "flush", "dev", "trench0", "scope", "global"))
				f.must(f.pod.WriteTrench(unnumberedTrench(t)))
				f.up(f.target1)
				var router lab.Router
				start := func() { router = f.printedRouter(kind, "INTERFACE", "trench0") }
				if kind != lab.KindGoBGP { // which reads the neighbor table once
					start()
				}
				begin := time.Now()
				f.startPod(podBIRD(t, bird))
				if kind == lab.KindGoBGP {
					f.waitFor(func() error {
						out, err := f.Gateway.Run(t.Context(), "ip", "-6", "neigh", "show", "dev", "trench0", "nud", "all")
						if err == nil && !strings.Contains(out, "fe80::") {
							err = fmt.Errorf("neighbors are %q", out)
						}
						return err
					})
					begin = time.Now()
					start()
				}
				f.waitRouter(router, vipA4, vipA6)
				t.Logf("VIPs at the gateway after %v", time.Since(begin).Round(10*time.Millisecond))
				f.waitFamilies("gateway-a", true, true)
				f.waitGateway("gateway-a", func(g *frontendv1.GatewayStatus) bool { return g.GetNoDelay() })
				if kind != lab.KindGoBGP { // it installs no routes
					f.connectVIPs(f.Gateway)
				}

				// Families are independent.
				f.must(f.target1[0].Down())
				f.waitRouter(router, vipA6)
				f.must(f.target1[0].Up())
				f.waitRouter(router, vipA4, vipA6)
			})
		}
	}
}

// A router is between the pod and its gateways, one of each family. VIPs reach them, replies leave
// by the router, and BFD guards the sessions.
func TestMultihopGateway(t *testing.T) {
	t.Parallel()
	for kind, settings := range map[lab.Kind]string{
		lab.KindBIRD: ", ttlSecurity: true, bfd: {}", lab.KindFRR: ", bfd: {}", lab.KindGoBGP: ", ttlSecurity: true",
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			need(t, kind)
			f := newFixture(t)
			f.must(f.gateway.Process.Kill())
			beyond, err := lab.Create(lab.WithoutDAD)
			f.must(err)
			t.Cleanup(func() { harness.Check(t, beyond.Close()) })
			f.must(lab.Veth(beyond, "router0", f.Gateway, "gateway0"))
			f.must(f.Gateway.Addr("gateway0", "198.51.100.1/24", "fd00:200::1/64"))
			f.must(beyond.Addr("router0", "198.51.100.2/24", "fd00:200::2/64"))
			f.must(f.Pod.Batch("route add 198.51.100.0/24 via "+lab.GatewayA4.String(),
				"route add fd00:200::/64 via "+lab.GatewayA6.String()))
			f.must(beyond.Batch("route add 169.254.100.0/24 via 198.51.100.1", "route add fd00:100::/64 via fd00:200::1"))
			f.must(f.Gateway.Batch("route add "+vipA4+" via "+lab.PodExternal4.String(),
				"route add "+vipA6+" via "+lab.PodExternal6.String()))
			f.must(f.pod.WriteTrench(edited(t,
				lineA4, "- {name: gateway-a4, address: 198.51.100.2, multihop: 2"+settings+"}",
				lineA6, "- {name: gateway-a6, address: 'fd00:200::2', multihop: 2"+settings+"}")))
			f.up(f.target1)
			router := f.printedRouterIn(beyond, kind)
			f.startPod()
			f.waitRouter(router, vipA4, vipA6)
			for _, name := range []string{"gateway-a4", "gateway-a6"} {
				f.waitGateway(name, func(g *frontendv1.GatewayStatus) bool {
					return g.GetImported() == 1 && (g.GetBfd() == "Up") == strings.Contains(settings, "bfd")
				})
			}
			if kind != lab.KindGoBGP {
				f.connectVIPs(beyond, "route add 192.0.2.1/32 via 198.51.100.2", "route add 2001:db8::1/128 via fd00:200::2")
			}
		})
	}
}

// connectVIPs connects a client of a gateway with the VIPs of target 1.
func (f *fixture) connectVIPs(beyond *lab.NetNS, routes ...string) {
	f.t.Helper()
	f.must(f.Gateway.Batch(routes...))
	for vip, client := range map[string]string{vipA4: "192.0.2.1/32", vipA6: "2001:db8::1/128"} {
		target, pod := lab.Target1v4.String(), "172.16.0.1"
		if vip == vipA6 {
			target, pod = lab.Target1v6.String(), "fd00:16::1"
		}
		f.must(f.Pod.IP("route", "add", vip, "via", target))
		f.must(f.Backend.Addr("lo", vip))
		f.must(f.Backend.IP("route", "add", client, "via", pod))
		f.must(beyond.Addr("lo", client))
		address, _, _ := strings.Cut(vip, "/")
		source, _, _ := strings.Cut(client, "/")
		var listener net.Listener
		f.must(f.Backend.Do(func() (err error) {
			listener, err = net.Listen("tcp", net.JoinHostPort(address, "0"))
			return err
		}))
		f.waitFor(func() error {
			var conn net.Conn
			dial := net.Dialer{Timeout: time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
			return beyond.Do(func() (err error) {
				if conn, err = dial.Dial("tcp", listener.Addr().String()); err == nil {
					err = conn.Close()
				}
				return err
			})
		})
		f.must(listener.Close())
	}
}

// One session over IPv4 carries both families. A gateway that has not activated IPv6 does not
// count for IPv6.
func TestSessionWithBothFamilies(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			need(t, kind)
			f := newFixture(t)
			f.must(f.gateway.Process.Kill())
			both := edited(t, lineA4, strings.TrimSuffix(lineA4, "}")+", families: both, keepaliveTime: 1s, "+
				"connectRetryTime: 2s}", "    "+lineA6+"\n", "")
			f.must(f.pod.WriteTrench(both))
			f.up(f.target1)
			router := f.printedRouter(kind)
			f.startPod()
			f.waitRouter(router, vipA4, vipA6)
			if gobgp, is := router.(*lab.GoBGP); is { // whose own IPv6 routes have no next hop over IPv4
				_, err := gobgp.Command(t.Context(), "global", "rib", "add", "::/0", "nexthop", lab.GatewayA6.String(),
					"-a", "ipv6")
				f.must(err)
			}
			f.waitFamilies("gateway-a4", true, true)
			routes, err := router.Routes(t.Context())
			f.must(err)
			for prefix, route := range routes {
				if !isVIP(route) {
					t.Errorf("next hop of %s is %s", prefix, route.NextHop)
				}
			}
			if kind != lab.KindGoBGP {
				f.connectVIPs(f.Gateway)
			}
			f.must(f.target1[1].Down())
			f.waitRouter(router, vipA4)
			f.must(f.target1[1].Up())
			f.waitRouter(router, vipA4, vipA6)
		})
	}
}

// IPv6 VIPs are not advertised to a gateway whose session has no IPv6.
func TestFamilyIsNotActivated(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.pod.WriteTrench(edited(t, lineA4, strings.TrimSuffix(lineA4, "}")+", families: both}",
		"    "+lineA6+"\n", "")))
	f.up(f.target1)
	f.startPod()
	f.wantRoutes(vipA4)
	f.waitFamilies("gateway-a4", true, false)
	f.waitFor(func() error {
		text, _ := f.run("frontend", "explain", vipA6, "--admin-socket=unix://"+f.pod.FrontendAdmin())
		if !strings.Contains(text, "has not activated ipv6 unicast") {
			return fmt.Errorf("explanation is %s", text)
		}
		return nil
	})
}
