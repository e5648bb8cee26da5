package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/load"
)

var topologyVIPs = []netip.Addr{netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")}

// plainTopology is a topology whose gateway and pods forward by static routes of the test.
type plainTopology struct {
	*Topology
	t   *testing.T
	ctx context.Context
}

func newPlainTopology(t *testing.T, pods, targets int) *plainTopology {
	t.Helper()
	if errs := Missing(); len(errs) > 0 {
		t.Fatal(errs)
	}
	if missing := MissingForTopology(); missing != "" {
		Skip(t, missing)
	}
	binaries, err := Programs()
	harness.Must(t, err)
	topology, err := NewTopology(TopologyConfig{
		Pods: pods, Targets: targets, VIPs: topologyVIPs, Binaries: binaries, Options: []Option{QuickDAD},
	})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, topology.Close()) })
	ctx := harness.Context(t, 2*waitTimeout)
	p := &plainTopology{Topology: topology, t: t, ctx: ctx}
	for _, a := range topology.Targets {
		p.must(a.Start())
	}
	return p
}

func (p *plainTopology) must(err error) {
	p.t.Helper()
	harness.Must(p.t, err)
}

// route replaces the routes to the VIPs in a namespace; hops are of the family
// of the index.
func (p *plainTopology) route(ns *NetNS, hops ...[]netip.Addr) {
	p.t.Helper()
	for i, vip := range p.VIPs {
		line := "route replace " + netip.PrefixFrom(vip, vip.BitLen()).String()
		for _, h := range hops {
			line += " nexthop via " + h[i].String()
		}
		p.must(ns.Batch(line))
	}
}

// forward installs routes from the gateway to these pods, and from the pods to these targets.
func (p *plainTopology) forward(pods, targets []int) {
	p.t.Helper()
	var toTargets, toPods [][]netip.Addr
	for _, n := range targets {
		toTargets = append(toTargets, TargetAddrs(n))
	}
	for _, n := range pods {
		toPods = append(toPods, PodExternal(n))
		p.route(p.Pods[n-1].NS, toTargets...)
	}
	p.route(p.Gateway, toPods...)
}

// load starts clients that the test ends.
func (p *plainTopology) load(rate, flows int, c load.Config) *load.Generator {
	p.t.Helper()
	g, err := p.Load(p.ctx, rate, flows, c)
	p.must(err)
	p.t.Cleanup(func() { g.Stop(p.ctx) })
	p.must(g.WaitFlows(p.ctx))
	return g
}

func (p *plainTopology) take(g *load.Generator) load.Result {
	p.t.Helper()
	r, err := g.Take(p.ctx)
	p.must(err)
	return r
}

func TestTopologyForwarding(t *testing.T) {
	p := newPlainTopology(t, 2, 3)
	p.forward([]int{1, 2}, []int{1, 2, 3})
	p.must(p.WantVia(p.ctx, 1, 2))
	inside := make([]*Capture, 2)
	for i, pod := range p.Pods {
		inside[i] = NewCapture(t, pod.NS, External)
	}
	g := p.load(100, 16, load.Config{})
	p.must(g.WaitTargets(p.ctx, "target-1", "target-2", "target-3"))
	for i, c := range inside {
		for _, vip := range p.VIPs {
			// There and back, through the same pod.
			p.must(c.Wait(p.ctx, func(x Packet) bool { return x.Dst == vip && !x.Outgoing }))
			p.must(c.Wait(p.ctx, func(x Packet) bool { return x.Src == vip && x.Outgoing }))
		}
		type flow struct{ client, vip netip.AddrPort }
		asked := map[flow]bool{}
		for _, x := range c.Packets() {
			if slices.Contains(p.VIPs, x.Dst) {
				asked[flow{netip.AddrPortFrom(x.Src, x.SrcPort), netip.AddrPortFrom(x.Dst, x.DstPort)}] = true
			}
			if slices.Contains(p.VIPs, x.Src) &&
				!asked[flow{netip.AddrPortFrom(x.Dst, x.DstPort), netip.AddrPortFrom(x.Src, x.SrcPort)}] {
				t.Fatalf("pod %d sends an answer to what another pod was asked: %+v", i+1, x)
			}
		}
	}
	r := g.Stop(p.ctx)
	if r.Lost() != nil || r.Sent != r.Answered || r.Withheld > 0 {
		t.Errorf("%v", r)
	}
	t.Logf("\n%v%v", r, r.ByTarget)
}

// Flows that the gateway moves to another pod continue if that pod selects the same target, and
// break if it selects another one.
func TestFlowsMoveBetweenPods(t *testing.T) {
	p := newPlainTopology(t, 2, 2)
	p.forward([]int{1, 2}, []int{1})
	g := p.load(100, 16, load.Config{})
	p.must(g.WaitAnswered(p.ctx, 20))
	p.take(g)
	p.forward([]int{2}, []int{1})
	p.must(p.WantVia(p.ctx, 2))
	p.take(g) // until every flow was answered once on this path
	p.must(p.Replace(1))
	p.must(g.WaitAnswered(p.ctx, 20))
	p.forward([]int{1, 2}, []int{1})
	p.must(g.WaitAnswered(p.ctx, 20))
	p.take(g)
	p.forward([]int{1}, []int{1})
	p.must(g.WaitAnswered(p.ctx, 20))
	r := p.take(g)
	if r.Lost() != nil || g.Live() != 16 {
		t.Fatalf("%d flows live\n%v", g.Live(), r)
	}
	// Now the pod sends the flows to another target.
	p.route(p.Pods[0].NS, TargetAddrs(2))
	_, err := g.Wait(p.ctx, func(load.Result) error {
		if n := g.Live(); n > 0 {
			return fmt.Errorf("%d flows live", n)
		}
		return nil
	})
	p.must(err)
	r = p.take(g)
	if stayed, left := r.Broken("target-2"); stayed != 16 || left != 0 {
		t.Errorf("%d flows of target-1 and %d of target-2 broke\n%v", stayed, left, r)
	}
}

// A replacement pod inherits only the trench file and the logs.
func TestReplacePod(t *testing.T) {
	p := newPlainTopology(t, 2, 1)
	p.must(p.WriteTrench("trench: x\n"))
	pod := p.Pods[0]
	p.must(os.MkdirAll(pod.StateDir(), 0o700))
	p.must(os.WriteFile(filepath.Join(pod.Dir, "lb.log"), nil, 0o600))
	sleeper, err := p.Start(pod.NS, "sleeper", "sleep", "1000")
	p.must(err)
	p.route(pod.NS, TargetAddrs(1))
	old := pod.NS
	p.must(p.Replace(1))
	if _, err := os.Stat(pod.TrenchFile()); err != nil {
		t.Error(err)
	}
	entries, err := os.ReadDir(pod.Dir)
	p.must(err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if got := fmt.Sprint(names); got != "[lb.log trench]" {
		t.Errorf("the new pod's folder has %s", got)
	}
	if _, err := os.Stat(old.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old namespace: %v", err)
	}
	if _, err := sleeper.Wait(p.ctx); err != nil {
		t.Error(err)
	}
	out, err := pod.NS.Run(p.ctx, "ip", "route")
	if err != nil || p.Topology.Pod != pod.NS || strings.Contains(out, "20.0.0.1") {
		t.Errorf("routes of the new namespace: %s, %v", out, err)
	}
}

// A lost pod sends neither a FIN nor a BGP notification: its flows and requests time out, until
// the gateway moves them. A replaced target is reachable immediately, with its new link address.
func TestLostPodAndReplacedTarget(t *testing.T) {
	p := newPlainTopology(t, 2, 2)
	p.forward([]int{1, 2}, []int{2})
	g := p.load(100, 0, load.Config{})
	p.must(g.WaitAnswered(p.ctx, 20))
	g.Stop(p.ctx)
	p.forward([]int{1, 2}, []int{1})
	g = p.load(100, 16, load.Config{})
	p.must(g.WaitAnswered(p.ctx, 20))
	p.take(g)
	p.must(p.Lose(2))
	_, err := g.Wait(p.ctx, func(r load.Result) error {
		if r.Failed == 0 {
			return errors.New("no request failed")
		}
		return nil
	})
	p.must(err)
	p.forward([]int{1}, []int{1})
	r := p.take(g)
	if stayed, _ := r.Broken(); stayed > 0 || g.Live() != 16 {
		t.Errorf("%d flows live\n%v", g.Live(), r)
	}
	for _, f := range r.Failures {
		if !strings.Contains(f.Err, "timeout") {
			t.Errorf("a client was notified of the loss: %v", f)
		}
	}
	g.Stop(p.ctx)

	p.must(p.ReplaceTarget(p.Targets[1]))
	p.must(p.Targets[1].Start())
	p.forward([]int{1}, []int{2})
	g = p.load(100, 16, load.Config{})
	p.must(g.WaitAnswered(p.ctx, 20))
	if r := g.Stop(p.ctx); r.Lost() != nil || r.ByTarget["target-2"] != r.Answered {
		t.Errorf("after the replacement: %v\n%v", r.ByTarget, r)
	}
}

// After a sudden loss only the flows and requests of that target time out.
func TestKilledTargetTimesOut(t *testing.T) {
	p := newPlainTopology(t, 1, 2)
	p.forward([]int{1}, []int{1, 2})
	// Silence is short enough to detect the loss, and long enough for a busy machine.
	g := p.load(100, 16, load.Config{Silence: 4 * time.Second})
	p.must(g.WaitTargets(p.ctx, "target-1", "target-2"))
	before := p.take(g)
	of := before.Targets()
	if of["target-1"] == 0 || of["target-2"] == 0 || before.Lost() != nil {
		t.Fatalf("flows of %v\n%v", of, before)
	}
	wire := NewCapture(t, p.Pods[0].NS, Internal)
	p.must(p.Targets[0].Kill())
	_, err := g.Wait(p.ctx, func(r load.Result) error {
		if n := g.Live(); n != of["target-2"] || r.Failed == 0 {
			return fmt.Errorf("%d flows live, %d requests failed", n, r.Failed)
		}
		return nil
	})
	p.must(err)
	p.forward([]int{1}, []int{2})
	r := p.take(g)
	if stayed, left := r.Broken("target-1"); stayed != 0 || left != of["target-1"] {
		t.Errorf("%d flows of target-2 and %d of target-1 broke\n%v", stayed, left, r)
	}
	for _, f := range r.Flows {
		if f.Target == "target-1" && !strings.Contains(f.Broken, "timeout") {
			t.Errorf("a flow of target-1 broke by %q", f.Broken)
		}
	}
	for _, f := range r.Failures {
		// The pod's ICMP error follows after 3 s.
		if !strings.Contains(f.Err, "timeout") && !strings.Contains(f.Err, "no route") {
			t.Errorf("flow was notified of the death: %v", f)
		}
	}
	if n := wire.Count(func(x Packet) bool { return x.Src == TargetAddrs(1)[0] }); n > 0 {
		t.Errorf("the dead target sent %d packets", n)
	}
	p.must(g.WaitAnswered(p.ctx, 20))
	if r := p.take(g); r.Lost() != nil || r.ByTarget["target-1"] > 0 {
		t.Errorf("after the repair:\n%v", r)
	}
	p.must(p.Targets[0].Revive())
	p.forward([]int{1}, []int{1})
	_, err = g.Wait(p.ctx, func(r load.Result) error {
		if r.ByTarget["target-1"] < 20 {
			return fmt.Errorf("answers by %v", r.ByTarget)
		}
		return nil
	})
	p.must(err)
	p.take(g)
	p.must(g.WaitAnswered(p.ctx, 20))
	if r := p.take(g); r.Lost() != nil {
		t.Errorf("after it came back:\n%v", r)
	}
}

// After an orderly end of a target, flows receive a FIN, requests that come
// later are refused, and a health check fails.
func TestStoppedTargetRefuses(t *testing.T) {
	p := newPlainTopology(t, 1, 1)
	p.forward([]int{1}, []int{1})
	g := p.load(100, 4, load.Config{})
	p.must(g.WaitAnswered(p.ctx, 10))
	health := func(own netip.Addr) error {
		return p.Pods[0].NS.Do(func() error {
			c, err := net.DialTimeout("tcp", netip.AddrPortFrom(own, HealthPort).String(), waitTimeout)
			if err != nil {
				return err
			}
			return c.Close()
		})
	}
	for _, own := range p.Targets[0].Addrs {
		p.must(health(own))
	}
	p.must(p.Targets[0].Unhealthy())
	p.must(g.WaitAnswered(p.ctx, 10))
	if r := p.take(g); r.Lost() != nil {
		t.Errorf("an unhealthy target answers no more: %v", r)
	}
	p.must(p.Targets[0].Stop(p.ctx))
	for _, own := range p.Targets[0].Addrs {
		if err := health(own); err == nil {
			t.Errorf("%s is healthy", own)
		}
	}
	r, err := g.Wait(p.ctx, func(r load.Result) error {
		if _, left := r.Broken("target-1"); left < 4 || r.Failed == 0 {
			return fmt.Errorf("%d flows broke and %d requests failed", left, r.Failed)
		}
		return nil
	})
	p.must(err)
	for _, f := range r.Flows {
		// A frame that crosses the FIN is answered by a RST.
		if f.Broken != "EOF" && !strings.Contains(f.Broken, "reset") {
			t.Errorf("a flow broke by %q, want a FIN", f.Broken)
		}
	}
	p.must(p.Targets[0].Start())
	p.take(g)
	p.must(g.WaitAnswered(p.ctx, 10))
}

// Only a pod that has a route for a VIP reaches it on the targets' network.
func TestTargetsIgnoreARPForVIPs(t *testing.T) {
	p := newPlainTopology(t, 1, 1)
	for _, vip := range p.VIPs {
		p.must(p.Pods[0].NS.Batch(fmt.Sprintf("route add %s dev %s", netip.PrefixFrom(vip, vip.BitLen()), Internal)))
	}
	wire := NewCapture(t, p.Targets[0].NS, "net0")
	for _, vip := range p.VIPs {
		err := p.Pods[0].NS.Do(func() error {
			_, err := net.DialTimeout("tcp", netip.AddrPortFrom(vip, RequestPort).String(), waitTimeout)
			return err
		})
		harness.WantError(t, err, "no route to host")
	}
	if n := wire.Count(func(x Packet) bool { return slices.Contains(p.VIPs, x.Dst) }); n > 0 {
		t.Errorf("%d packets for a VIP reached the target", n)
	}
}

// announce starts a BIRD in a pod that announces the VIPs.
func (p *plainTopology) announce(pod int) *Gateway {
	p.t.Helper()
	c := GatewayConfig{
		Name: fmt.Sprintf("peer-%d",
			pod), RouterID: PodExternal(pod)[0], LocalAS: PodAS, RemoteAS: GatewayAS, Port: BGPPort,
		Local: PodExternal(pod), Peers: []netip.Addr{GatewayA4, GatewayA6},
	}
	for _, vip := range p.VIPs {
		c.Routes = append(c.Routes, netip.PrefixFrom(vip, vip.BitLen()))
	}
	g, err := StartGateway(p.Pods[pod-1].NS, p.Dir, c)
	p.must(err)
	p.t.Cleanup(func() { p.must(g.Process.Kill()) })
	return g
}

// One ECMP gateway: BIRD spreads flows over the pods that announce a VIP, and
// nothing is lost when they come and go.
func TestGatewaySpreadsFlows(t *testing.T) {
	p := newPlainTopology(t, 2, 1)
	for _, pod := range p.Pods {
		p.route(pod.NS, TargetAddrs(1))
		// BIRD announces drop routes, which it never installs in the kernel.
	}
	gateway, err := p.StartGateway(p.GatewayConfig())
	p.must(err)
	p.must(p.WantVia(p.ctx))
	one, two := p.announce(1), p.announce(2)
	p.must(p.WantVia(p.ctx, 1, 2))
	g := p.load(100, 16, load.Config{})
	p.must(g.WaitAnswered(p.ctx, 10))
	for range 2 {
		for n, peer := range []*Gateway{one, two} {
			control, err := peer.Control(p.ctx)
			p.must(err)
			_, err = control.Command(`disable "trench*"`)
			p.must(errors.Join(err, p.WantVia(p.ctx, 2-n)))
			p.must(g.WaitAnswered(p.ctx, 10))
			_, err = control.Command(`enable "trench*"`)
			p.must(errors.Join(err, control.Close(), p.WantVia(p.ctx, 1, 2)))
			p.must(g.WaitAnswered(p.ctx, 10))
		}
	}
	r := g.Stop(p.ctx)
	if r.Lost() != nil {
		t.Errorf("%v\n%s", r, gateway.Process.Tail(10))
	}
	t.Logf("\n%v", r)
}

// A request to a VIP without a route fails immediately, so that no interval without a route is
// hidden.
func TestUnannouncedVIPIsUnreachable(t *testing.T) {
	p := newPlainTopology(t, 1, 1)
	g, err := p.Load(p.ctx, 50, 2, load.Config{})
	p.must(err)
	r, err := g.Wait(p.ctx, func(r load.Result) error {
		if r.Failed < 2 || r.Unopened < 2 {
			return fmt.Errorf("%d requests failed and %d flows", r.Failed, r.Unopened)
		}
		return nil
	})
	p.must(err)
	for _, f := range r.Failures {
		if !strings.Contains(f.Err, "unreachable") {
			t.Errorf("%v", f)
		}
	}
	g.Stop(p.ctx)
}

// A topology whose owner was killed is removed by the next one.
func TestTopologyOfKilledProcessIsRemoved(t *testing.T) {
	if os.Getenv(childVariable) != "" {
		p := newPlainTopology(t, 2, 2)
		fmt.Println(p.Dir, p.Gateway.Name(), p.Pods[1].NS.Name(), p.Targets[1].NS.Name())
		<-p.ctx.Done() // killed
		return
	}
	self, err := os.Executable()
	harness.Must(t, err)
	child := exec.Command(self, "-test.run=^"+t.Name()+"$")
	child.Env = append(os.Environ(), childVariable+"=1")
	out, err := child.StdoutPipe()
	harness.Must(t, err)
	harness.Must(t, child.Start())
	var dir, gateway, pod, target string
	_, errScan := fmt.Fscanln(out, &dir, &gateway, &pod, &target)
	_ = child.Process.Kill()
	_ = child.Wait()
	if errScan != nil {
		t.Fatal(errScan)
	}
	left := []string{dir}
	for _, ns := range []string{gateway, pod, target} {
		left = append(left, filepath.Join(netnsDir, ns))
	}
	for _, path := range left {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("a killed topology removed itself: %v", err)
		}
	}
	newPlainTopology(t, 1, 1)
	for _, path := range left {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
}

// childVariable makes a run of this test binary the owner of a topology that is killed.
const childVariable = "VIPGATE_TEST_TOPOLOGY"
