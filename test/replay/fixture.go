package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

const (
	pods, gateways, targets = 2, 2, 4
	// waitTimeout bounds every wait. It detects a hang and is far above every expected duration.
	waitTimeout  = 60 * time.Second
	pollInterval = 10 * time.Millisecond
)

// vips are served in pairs: stream-a has the first two, stream-b the others.
var vips = []netip.Addr{
	netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1"),
	netip.MustParseAddr("20.0.0.2"), netip.MustParseAddr("2000::2"),
}

// fixture is two pods, two gateways, and the targets of two streams.
type fixture struct {
	*lab.Topology
	scenario  *scenario
	direct    [pods]*lab.NetNS // clients that send everything to one pod
	text      string           // the trench file
	reference bool
	scripts   [pods]*script // of the reference
	lost      []update      // of gateways that ended, whose log has no withdrawals
}

// open starts everything and waits until both gateways use both pods. The caller closes the fixture,
// also after an error.
func open(ctx context.Context, s *scenario, binaries string, reference bool) (*fixture, error) {
	topology, err := lab.NewTopology(lab.TopologyConfig{
		Pods: pods, Gateways: gateways, Targets: targets, VIPs: vips, Binaries: binaries,
		Options: []lab.Option{lab.WithoutDAD},
	})
	if err != nil {
		return nil, err
	}
	fx := &fixture{Topology: topology, scenario: s, text: trenchText(), reference: reference}
	for _, old := range s.before {
		if err := fx.replace(old[0], old[1]); err != nil {
			return fx, err
		}
	}
	for _, a := range fx.Targets {
		if err := a.Start(); err != nil {
			return fx, err
		}
	}
	if err := errors.Join(fx.WriteTrench(fx.text), fx.wireDirect(),
		fx.StartGateways(func(c *lab.GatewayConfig) { c.BFD = !fx.reference })); err != nil {
		return fx, err
	}
	for pod := range pods {
		if err := fx.startPod(pod); err != nil {
			return fx, err
		}
	}
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return fx, fx.WantVia(bound, 1, 2)
}

// directHost is the host number of the first direct client.
const directHost = 200

// wireDirect connects a client for each pod, which has a route to the VIPs through that pod only.
func (fx *fixture) wireDirect() error {
	for pod := range pods {
		ns, err := lab.Create(lab.WithoutDAD)
		if err != nil {
			return err
		}
		fx.direct[pod] = ns
		port := fmt.Sprintf("direct%d", pod+1)
		hops := lab.PodExternal(pod + 1)
		if err := errors.Join(lab.Veth(ns, "trench0", fx.Gateway, port),
			fx.Gateway.Batch("link set "+port+" master trench0"),
			ns.Addr("trench0", fmt.Sprintf("169.254.100.%d/24", directHost+pod),
				fmt.Sprintf("fd00:100::%d/64", directHost+pod)),
			fx.replyDirectly(pod),
			ns.Batch(fmt.Sprintf("route add 20.0.0.0/24 via %s", hops[0]), fmt.Sprintf("route add 2000::/64 via %s", hops[1])),
		); err != nil {
			return err
		}
	}
	return nil
}

// directRule is the priority of the pods' rules for replies to direct clients.
const directRule = 50

// replyDirectly makes a pod reply to direct clients without the routes of its gateways: whether a
// pod serves does not depend on its sessions.
func (fx *fixture) replyDirectly(pod int) error {
	var errs []error
	for client := range pods {
		for family, format := range []string{"169.254.100.%d", "fd00:100::%d"} {
			errs = append(errs, fx.Pods[pod].NS.IP([]string{"-4", "-6"}[family], "rule", "add", "priority",
				fmt.Sprint(directRule), "to", fmt.Sprintf(format, directHost+client), "lookup", "main"))
		}
	}
	return errors.Join(errs...)
}

// startPod starts both programs of a pod, or the reference.
func (fx *fixture) startPod(pod int) error {
	if fx.reference {
		return fx.startReference(pod)
	}
	return errors.Join(fx.startLB(pod), fx.startFrontend(pod))
}

func (fx *fixture) startLB(pod int) error {
	return fx.Pods[pod].StartLB(append([]string{"--dataplane=nftables"}, fx.scenario.lb...)...)
}

func (fx *fixture) startFrontend(pod int) error {
	return fx.Pods[pod].StartFrontend(append([]string{"--ecmp"}, fx.scenario.frontend...)...)
}

// replace edits the text of the trench file without writing it.
func (fx *fixture) replace(old, text string) error {
	if !strings.Contains(fx.text, old) {
		return fmt.Errorf("the trench file lacks %q", old)
	}
	fx.text = strings.ReplaceAll(fx.text, old, text)
	return nil
}

// edit replaces text in the trench file of every pod.
func (fx *fixture) edit(pairs ...string) error {
	var errs []error
	for i := 0; i < len(pairs); i += 2 {
		errs = append(errs, fx.replace(pairs[i], pairs[i+1]))
	}
	return errors.Join(append(errs, fx.WriteTrench(fx.text))...)
}

// kill kills processes and waits for their ends.
func kill(processes ...*lab.Process) error {
	var errs []error
	for _, p := range processes {
		errs = append(errs, p.Signal(syscall.SIGKILL))
	}
	for _, p := range processes {
		errs = append(errs, p.Kill())
	}
	return errors.Join(errs...)
}

// gatewayLost notes that a gateway lost its routes without a withdrawal.
func (fx *fixture) gatewayLost(g int) {
	fx.lost = append(fx.lost, update{at: time.Now(), gateway: g, withdrawn: true})
}

// close ends everything.
func (fx *fixture) close() error {
	for _, s := range fx.scripts {
		if s != nil {
			s.stop()
		}
	}
	errs := []error{fx.Topology.Close()}
	for _, ns := range fx.direct {
		if ns != nil {
			errs = append(errs, ns.Close())
		}
	}
	return errors.Join(errs...)
}

// logs returns the ends of all logs.
func (fx *fixture) logs() string {
	var b strings.Builder
	files, _ := filepath.Glob(filepath.Join(fx.Dir, "*", "*.log"))
	for _, path := range files {
		if strings.HasSuffix(path, "trace.log") || strings.Contains(path, "/target-") {
			continue
		}
		p := lab.Process{Log: path}
		fmt.Fprintf(&b, "== %s\n%s\n", strings.TrimPrefix(path, fx.Dir+"/"), p.Tail(30))
	}
	return b.String()
}

// trenchText returns the trench file before an incident. Scenarios replace parts of it.
func trenchText() string {
	var b strings.Builder
	b.WriteString("trench: trench-a\nattractor:\n  name: attractor-a-1\n" +
		"  vips: [20.0.0.1/32, \"2000::1/128\", 20.0.0.2/32, \"2000::2/128\"]\n  gateways:\n")
	for _, g := range []lab.GatewayConfig{lab.GatewayA(), lab.GatewayB()} {
		for family, address := range g.Local {
			fmt.Fprintf(&b, "    - {name: %s-v%d, address: %q, remoteASN: %d, holdTime: 3s, "+
				"bfd: {minTx: 200ms, minRx: 300ms, multiplier: 5}}\n", g.Name, 4+2*family, address, g.LocalAS)
		}
	}
	b.WriteString("streams:\n")
	for i, name := range []string{"a", "b"} {
		fmt.Fprintf(&b, `  - name: stream-%s
    vips: [20.0.0.%d/32, "2000::%d/128"]
    check: {%s, interval: 200ms, timeout: 200ms, rise: 2, fall: 2}
    drainTime: 1s
    targets:
`, name, i+1, i+1, healthCheck)
		for n := 2*i + 1; n <= 2*i+2; n++ {
			own := lab.TargetAddrs(n)
			fmt.Fprintf(&b, "      - {name: target-%d, ips: [%s, %q]}\n", n, own[0], own[1])
		}
	}
	return b.String()
}

// healthCheck is the check of every stream.
var healthCheck = fmt.Sprintf("tcp: {port: %d}", lab.HealthPort)
