package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const viaVIPTrench = `trench: trench-a
attractor:
  name: attractor-a-1
  vips: [30.0.0.1/32, 30.0.0.2/32, 30.0.0.3/32, 30.0.0.4/32, "3000::1/128", "3000::2/128", "3000::3/128"]
  gateways:
    %s
    %s
streams:
  - name: tcp
    vips: [30.0.0.1/32, 30.0.0.4/32, "3000::1/128"]
    check: {tcp: {port: 5000}, %[3]s}
    targets: [{name: target-1, ips: [%[4]s, "%[5]s"]}]
  - name: http
    vips: [30.0.0.2/32, "3000::2/128"]
    check: {http: {port: 5001}, via: vip, %[3]s}
    targets: [{name: target-1, ips: [%[4]s, "%[5]s"]}]
  - name: grpc
    vips: [30.0.0.3/32, "3000::3/128"]
    check: {grpc: {port: 5002}, %[3]s}
    targets: [{name: target-1, ips: [%[4]s, "%[5]s"]}]
`

// viaVIPTarget is a target of which a test can remove parts of the path through its VIPs.
type viaVIPTarget struct {
	t      *testing.T
	ns     *lab.NetNS
	vips   []string
	wg     sync.WaitGroup
	closes []func()
}

func (x *viaVIPTarget) must(err error) {
	x.t.Helper()
	harness.Must(x.t, err)
}

// each runs an ip command for each VIP, with the options of its family.
func (x *viaVIPTarget) each(format string) {
	x.t.Helper()
	for _, v := range x.vips {
		command := strings.Fields("-4 " + strings.ReplaceAll(format, "VIP", v))
		if strings.Contains(v, ":") {
			if command[0] = "-6"; strings.HasPrefix(format, "addr add") {
				command = append(command, "nodad") // usable immediately
			}
		}
		x.must(x.ns.IP(command...))
	}
}

func (x *viaVIPTarget) listen(at string) net.Listener {
	x.t.Helper()
	l, err := x.ns.Listen("tcp", at)
	x.must(err)
	return l
}

// serve serves TCP, HTTP and gRPC at addresses such as "[::]".
func (x *viaVIPTarget) serve(hosts ...string) {
	x.t.Helper()
	for _, host := range hosts {
		tcp := x.listen(host + ":5000")
		x.wg.Go(func() {
			for {
				conn, err := tcp.Accept()
				if err != nil {
					return
				}
				_ = conn.Close()
			}
		})
		web, l := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}, x.listen(host+":5001")
		x.wg.Go(func() { _ = web.Serve(l) })
		server := x.serveHealth(host+":5002", map[string]healthv1.HealthCheckResponse_ServingStatus{})
		x.closes = append(x.closes, func() { _, _ = tcp.Close(), web.Close(); server.Stop() })
	}
}

func (x *viaVIPTarget) serveHealth(
	at string, services map[string]healthv1.HealthCheckResponse_ServingStatus,
) *grpc.Server {
	x.t.Helper()
	app, server, l := health.NewServer(), grpc.NewServer(), x.listen(at)
	for name, status := range services {
		app.SetServingStatus(name, status)
	}
	healthv1.RegisterHealthServer(server, app)
	x.wg.Go(func() { _ = server.Serve(l) })
	return server
}

func (x *viaVIPTarget) stop() {
	for _, end := range x.closes {
		end()
	}
	x.closes = nil
	x.wg.Wait()
}

// breakReplies restricts replies from the VIPs to the target's networks.
func (x *viaVIPTarget) breakReplies(verb string) {
	x.t.Helper()
	for _, v := range x.vips {
		family, near := "-4", "172.16.0.0/16"
		if strings.Contains(v, ":") {
			family, near = "-6", "fd00:16::/64"
		}
		x.must(x.ns.IP(family, "rule", verb, "from", v, "to", near, "lookup", "main", "priority", "10"))
		x.must(x.ns.IP(family, "rule", verb, "from", v, "blackhole", "priority", "11"))
	}
}

// forwards makes the target forward a VIP's packets to another target, which accepts them.
func (x *viaVIPTarget) forwards(to *lab.App, vip string) {
	x.t.Helper()
	other := &viaVIPTarget{t: x.t, ns: to.NS, vips: []string{vip}}
	x.must(other.ns.Batch("route add default via " + lab.PodInternal(1)[0].String() + " table 300"))
	other.each("addr add VIP dev lo")
	other.each("rule add from VIP lookup 300 priority 20")
	other.serve(vip)
	x.closes = append(x.closes, other.stop)
	x.must(x.ns.Sysctl("net.ipv4.ip_forward", "1"))
	x.must(x.ns.Batch("route add " + vip + " via " + to.Addrs[0].String()))
}

// TestChecksThroughTheVIP removes each part of the path through a VIP at a target, and restores
// it, for TCP, HTTP and gRPC checks in both families.
func TestChecksThroughTheVIP(t *testing.T) {
	t.Parallel()
	if lack := lab.MissingForTopology(); lack != "" {
		lab.Skip(t, lack)
	}
	topology, err := lab.NewTopology(lab.TopologyConfig{
		Pods: 1, Targets: 2, VIPs: []netip.Addr{netip.MustParseAddr("20.0.0.1")}, Binaries: binaries, Replies: lab.ECMP,
	})
	harness.Must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 4*waitTimeout)
	f := &dataPlaneFixture{t: t, Topology: topology, ctx: ctx, pod: topology.Pods[0]}
	x := &viaVIPTarget{t: t, ns: topology.Targets[0].NS, vips: strings.Fields(
		"30.0.0.1 30.0.0.2 30.0.0.3 30.0.0.4 3000::1 3000::2 3000::3",
	)}
	t.Cleanup(func() {
		defer cancel()
		x.stop()
		if t.Failed() && f.pod.LB != nil {
			t.Logf("== last lines of lb\n%s", f.pod.LB.Tail(60))
		}
		f.must(topology.Close())
	})
	own, pod := lab.TargetAddrs(1), lab.PodInternal(1)
	x.must(x.ns.Batch(
		fmt.Sprintf("route add default via %s table 300", pod[0]),
		fmt.Sprintf("route add default via %s table 300", pod[1]),
	))
	x.each("addr add VIP dev lo")
	x.each("rule add from VIP lookup 300 priority 20")
	x.serve("[::]")
	f.must(topology.WriteTrench(fmt.Sprintf(viaVIPTrench, lineA4, lineA6,
		lab.CheckTimers, own[0], own[1])))
	f.must(f.pod.StartLB("--dataplane=nftables"))
	const isReady = "  ready  "
	// want waits until the targets are not ready for these reasons, by stream and family.
	want := func(step string, texts map[string]string) {
		t.Helper()
		var last string
		err := lab.Eventually(ctx, 10*time.Millisecond, func() (err error) {
			if last, err = f.lb("status"); err != nil {
				return err
			}
			for key, text := range texts {
				stream, family, _ := strings.Cut(key, "/")
				address := own[map[string]int{"4": 0, "6": 1}[family]].String()
				if !slices.ContainsFunc(strings.Split(last, "\n"), func(line string) bool {
					words := strings.Fields(line)
					return len(words) > 3 && words[0] == stream && words[2] == address && strings.Contains(line, text) &&
						strings.Contains(line, "  not ready  ") == (text != isReady)
				}) {
					return fmt.Errorf("%s: no row of %s has %q", step, key, text)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatalf("%v\n%s", err, last)
		}
		t.Logf("%s\n%s", step, last)
	}
	all := func(format string) map[string]string {
		texts := map[string]string{}
		for i, stream := range []string{"tcp", "http", "grpc"} {
			texts[stream+"/4"] = strings.ReplaceAll(format, "VIP", fmt.Sprintf("30.0.0.%d", i+1))
			texts[stream+"/6"] = strings.ReplaceAll(format, "VIP", fmt.Sprintf("3000::%d", i+1))
		}
		return texts
	}
	ready := all(isReady)
	want("all is well", ready)

	x.breakReplies("add")
	broken := all("the target accepts VIP, but its replies to other networks do not return; " +
		"is \"target run\" running there?")
	broken["tcp/4"] = "but its replies to other networks do not return" // one of its VIPs
	want("replies do not return", broken)
	x.breakReplies("del")
	want("replies return", ready)

	// Own addresses answer, and the VIPs do not; of tcp/4 only the second VIP fails.
	x.stop()
	x.serve(own[0].String(), "["+own[1].String()+"]", "30.0.0.1")
	refused := all("connection refused: the application does not listen on VIP")
	refused["tcp/4"] = "connection refused: the application does not listen on 30.0.0.4"
	want("the application listens on its own addresses", refused)
	x.stop()
	x.serve("[::]")
	want("the application listens everywhere", ready)

	sidecar := x.serveHealth(own[0].String()+":7783", map[string]healthv1.HealthCheckResponse_ServingStatus{
		"30.0.0.2": healthv1.HealthCheckResponse_NOT_SERVING, "30.0.0.3": healthv1.HealthCheckResponse_SERVING,
	})
	x.closes = append(x.closes, sidecar.Stop)
	x.vips = slices.DeleteFunc(x.vips, func(v string) bool { return v == "30.0.0.1" })
	x.each("addr del VIP dev lo")
	x.forwards(topology.Targets[1], "30.0.0.2")
	missing := all("the target does not accept packets to VIP: no \"target run\" runs there")
	missing["tcp/4"] = "the target does not accept packets to 30.0.0.4: it is not in the --pool of \"target run\" there"
	missing["http/4"] = "the target does not accept packets to 30.0.0.2: the kernel state of \"target run\" is " +
		"incomplete there; see \"target status\""
	missing["grpc/4"] = "no answer from 30.0.0.3 although \"target run\" accepts it there; is a firewall in between?"
	want("VIPs are missing", missing)
	x.each("addr add VIP dev lo")
	want("VIPs are back", ready)

	x.must(x.ns.IP("link", "set", "net0", "down"))
	dead := all("VIP port 500")
	dead["tcp/4"] = "no answer, and none at 172.16.1.1 either"
	want("the target is dead", dead)
}

// A VIP outside every pool of `target run` makes its targets not ready, and the status of `target`
// names it.
func TestVIPOutsideThePool(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.must(f.WriteTrench(strings.ReplaceAll(dataPlaneTrench(1, 2), "[20.0.0.1/32,", "[20.0.0.1/32, 40.0.0.1/32,")))
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.waitOutput(`the target does not accept packets to 40.0.0.1: it is not in the --pool of "target run" there`, "status")
	f.must(f.WriteTrench(dataPlaneTrench(1, 2)))
	f.waitOutput("2 of 2 VIPs ready", "status")
}
