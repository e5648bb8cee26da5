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
	text      string // the trench file
	reference bool
	scripts   [pods]*script // of the reference
	servers   []*nameServer // of the targets, if the checks are DNS queries
	lost      []update      // of gateways that ended, whose log has no withdrawals
}

// open starts everything and waits until both gateways use both pods. The caller closes the
// fixture, also after an error.
func open(ctx context.Context, s *scenario, binaries string, reference bool) (*fixture, error) {
	topology, err := lab.NewTopology(lab.TopologyConfig{
		Pods: pods, Gateways: gateways, Targets: targets, VIPs: vips, Binaries: binaries,
		Options: []lab.Option{lab.WithoutDAD},
	})
	if err != nil {
		return nil, err
	}
	fx := &fixture{Topology: topology, scenario: s, text: trenchText(s), reference: reference}
	errs := []error{fx.edit(s.before...), fx.StartGateways(func(c *lab.GatewayConfig) {
		c.BFD, c.BFDMultiplier = !reference, 3
	})}
	for _, a := range fx.Targets {
		errs = append(errs, a.Start())
		if s.dns {
			server, err := startNameServer(a.NS)
			if err != nil {
				return fx, err
			}
			fx.servers = append(fx.servers, server)
		}
	}
	for pod := range pods {
		fx.Pods[pod].ProductTimers = true
		if reference {
			fx.scripts[pod] = fx.newScript(pod)
			errs = append(errs, fx.scripts[pod].start(fx, 0))
		} else {
			errs = append(errs, fx.startLB(pod), fx.startFrontend(pod))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fx, err
	}
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return fx, fx.WantVia(bound, 1, 2)
}

func (fx *fixture) startLB(pod int) error {
	return fx.Pods[pod].StartLB(append([]string{"--dataplane=nftables"}, fx.scenario.lb...)...)
}

func (fx *fixture) startFrontend(pod int) error {
	return fx.Pods[pod].StartFrontend(append([]string{"--ecmp"}, fx.scenario.frontend...)...)
}

// edit replaces text, given as pairs, in the trench file of every pod.
func (fx *fixture) edit(pairs ...string) error {
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(fx.text, pairs[i]) {
			return fmt.Errorf("the trench file lacks %q", pairs[i])
		}
		fx.text = strings.ReplaceAll(fx.text, pairs[i], pairs[i+1])
	}
	return fx.WriteTrench(fx.text)
}

// kill kills processes and waits for their ends.
func kill(processes ...*lab.Process) error {
	var errs []error
	for _, p := range processes { // at the same time
		errs = append(errs, p.Signal(syscall.SIGKILL))
	}
	for _, p := range processes {
		errs = append(errs, p.Kill())
	}
	return errors.Join(errs...)
}

// close ends everything.
func (fx *fixture) close() error {
	fx.stopScripts()
	var errs []error
	for _, server := range fx.servers {
		errs = append(errs, server.close())
	}
	return errors.Join(append(errs, fx.Topology.Close())...)
}

func (fx *fixture) stopScripts() {
	for _, s := range fx.scripts {
		if s != nil && s.end != nil {
			s.stop()
		}
	}
}

// logs returns the ends of all logs.
func (fx *fixture) logs() string {
	var b strings.Builder
	files, _ := filepath.Glob(filepath.Join(fx.Dir, "*", "[^t]*.log"))
	for _, path := range files {
		p := lab.Process{Log: path}
		fmt.Fprintf(&b, "== %s\n%s\n", strings.TrimPrefix(path, fx.Dir), p.Tail(40))
	}
	return b.String()
}

// trenchText returns the trench file before an incident. Scenarios replace parts of it.
func trenchText(s *scenario) string {
	var b strings.Builder
	check := fmt.Sprintf("tcp: {port: %d}", lab.HealthPort)
	if s.dns {
		check = dnsCheck
	}
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
`, name, i+1, i+1, check)
		for n := 2*i + 1; n <= 2*i+2; n++ {
			b.WriteString(targetLine(n))
		}
	}
	return b.String()
}

// targetLine returns the line of a target in the trench file.
func targetLine(n int) string {
	own := lab.TargetAddrs(n)
	return fmt.Sprintf("      - {name: target-%d, ips: [%s, %q]}\n", n, own[0], own[1])
}
