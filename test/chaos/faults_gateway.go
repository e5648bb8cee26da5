package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/test/lab"
)

var bothFamilies = []int{ipv4, ipv6}

// frrDaemon returns the daemon of gateway B for an argument.
func frrDaemon(arg int) string { return []string{"bgpd", "zebra", "bfdd"}[arg] }

// familiesOf returns the families for an argument.
func familiesOf(arg int) []int { return [][]int{{ipv4}, {ipv6}, {ipv4, ipv6}}[arg] }

func familiesName(list []int) string {
	if len(list) == families {
		return "both families"
	}
	return familyName(list[0])
}

// gatewayKinds returns the faults of gateways and of the sessions with them. The gateway is the
// lowest digit of an argument.
func gatewayKinds() []*kind {
	gateway := func(name string, weight int, d span, resource func(int) string) *kind {
		return &kind{
			Name: name, Args: gateways, Weight: weight, Least: d.least, Most: d.most, Breadth: ofGateway,
			describe: gatewayName,
			touches:  func(arg int) scope { return atGateway(arg%gateways, bothFamilies...) },
			holds:    func(arg int) []string { return []string{resource(arg % gateways)} },
		}
	}
	ofB := func(k *kind) *kind {
		k.touches = constant(atGateway(gatewayB, bothFamilies...))
		k.holds = constant([]string{resGateway(gatewayB)})
		return k.variants(3, frrDaemon)
	}
	blackhole := gateway("blackhole", 4, ms(200, 5500), resPath).variants(gateways*3*3, func(arg int) string {
		return fmt.Sprintf(
			"%s, %s, %s", gatewayName(arg%gateways), familiesName(familiesOf(arg/gateways%3)), hookName(arg/gateways/3),
		)
	})
	blackhole.touches = func(arg int) scope { return atGateway(arg%gateways, familiesOf(arg/gateways%3)...) }
	reset := gateway("session reset by pod", 4, once, resPath).variants(gateways*families, func(arg int) string {
		return gatewayName(arg%gateways) + ", " + familyName(arg/gateways)
	})
	reset.touches = func(arg int) scope { return atGateway(arg%gateways, arg/gateways) }
	pause := gateway("gateway pause", 2, ms(50, 600), resGateway)
	pause.Breadth, pause.touches = quiet, constant(nothing)
	slow := gateway("slow wire", 2, ms(500, 2500), resQueue)
	slow.Breadth, slow.touches = quiet, constant(nothing)
	link := gateway("link down", 4, ms(100, 4500), resPath).variants(1,
		func(int) string { return gatewayName(gatewayB) })
	link.touches = constant(atGateway(gatewayB, bothFamilies...))
	link.holds = constant([]string{resPath(gatewayB), resExternal})
	return []*kind{
		gateway("gateway kill -9", 3, ms(0, 2500), resGateway).by(killGateway),
		gateway("gateway SIGSTOP", 2, ms(700, 5000), resGateway).by(stopGateway),
		pause.by(stopGateway),
		ofB(gateway("daemon kill -9", 3, ms(0, 2000), resGateway)).by(killDaemon),
		ofB(gateway("daemon SIGSTOP", 2, ms(500, 5000), resGateway)).by(stopDaemon),
		gateway("session reset by gateway", 4, once, resPath).by(resetByGateway),
		reset.by(resetByPod),
		simple("loopback session reset", 2, once, wide, everything, resSpeaker).by(resetLoopback),
		blackhole.by(blackholeSessions),
		gateway("packets lost", 3, ms(500, 3000), resPath).by(losePackets),
		link.by(func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
			return fx.linkDown(fx.Second, "trench0", pathSubject(gatewayB, "link"))
		}),
		slow.by(slowWire),
	}
}

// hookName returns the direction in which packets are lost.
func hookName(arg int) string {
	return []string{"in both directions", "to the gateway", "from the gateway"}[arg]
}

func (fx *fixture) gatewayNS(g int) *lab.NetNS {
	if g == gatewayA {
		return fx.Gateway
	}
	return fx.Second
}

func killGateway(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	g := fx.routers[f.Arg%gateways]
	return func(context.Context) error { return g.start() }, g.kill()
}

func stopGateway(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	return stopAll(fx.routers[f.Arg%gateways].processes())
}

func stopAll(processes []*lab.Process) (func(context.Context) error, error) {
	var heals []func(context.Context) error
	var errs []error
	for _, p := range processes {
		heal, err := stopProcess(p.PID())
		heals, errs = append(heals, heal), append(errs, err)
	}
	return together(heals...), errors.Join(errs...)
}

// killDaemon kills one daemon of gateway B.
func killDaemon(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	return fx.routers[gatewayB].killDaemon(frrDaemon(f.Arg))
}

func stopDaemon(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	p := fx.routers[gatewayB].process(frrDaemon(f.Arg))
	if p == nil {
		return nil, fmt.Errorf("gateway B has no %s", frrDaemon(f.Arg))
	}
	return stopAll([]*lab.Process{p})
}

// resetByGateway restarts the sessions at the gateway. It has no effect if the gateway is down
// or stopped.
func resetByGateway(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	bound, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	if err := fx.routers[f.Arg%gateways].Reset(bound); err != nil {
		fx.out.note("gateway could not be asked: %v", err)
	}
	return nil, nil
}

// resetByPod restarts a session at the pod's speaker, as an operator could.
func resetByPod(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	name := fmt.Sprintf("NBR-gateway-%c%d", 'a'+rune(f.Arg%gateways), []int{4, 6}[f.Arg/gateways])
	sessions := [][]netip.Addr{{lab.GatewayA4, lab.GatewayB4}, {lab.GatewayA6, lab.GatewayB6}}
	address := sessions[f.Arg/gateways][f.Arg%gateways]
	fx.askSpeaker(ctx, fmt.Sprintf("restart %q", name), "clear bgp "+address.String())
	return nil, nil
}

// resetLoopback restarts the session over which the frontend announces VIPs to the speaker.
func resetLoopback(ctx context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	fx.askSpeaker(ctx, `restart "LB"`, "clear bgp "+announcer.String())
	return nil, nil
}

// askSpeaker sends a command to the pod's BIRD or FRR, without effect if it is down or stopped.
func (fx *fixture) askSpeaker(ctx context.Context, forBIRD, forFRR string) {
	bound, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	var out string
	var err error
	if fx.external {
		out, err = fx.speaker.frr().Command(bound, forFRR)
	} else {
		out, err = fx.Pod.Run(bound, "birdc", "-s", fx.pod.BirdSocket(), forBIRD)
	}
	if err != nil {
		fx.out.note("the pod's speaker could not be asked: %v %s", err, out)
	}
}

// blackholeSessions drops every packet of the families.
func blackholeSessions(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	g, list, hook := f.Arg%gateways, familiesOf(f.Arg/gateways%3), []string{"both", "input", "output"}[f.Arg/gateways/3]
	var rules, subjects []string
	for _, family := range list {
		rules = append(rules, fmt.Sprintf("meta nfproto %s drop", []string{"ipv4", "ipv6"}[family]))
		subjects = append(subjects, familySubject(g, family, "blackhole"))
	}
	return fx.drop(fx.gatewayNS(g), "hole", hook, rules, stopped, subjects...)
}

// losePackets drops a share of the packets at random.
func losePackets(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	g := f.Arg % gateways
	rules := []string{fmt.Sprintf("numgen random mod 100 < %d drop", 10+f.Salt%50)}
	return fx.drop(fx.gatewayNS(g), "loss", "input", rules, disturbed, pathSubject(g, "loss"))
}

// slowWire limits the bandwidth so that packets are late but not lost.
func slowWire(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	g := f.Arg % gateways
	ns := fx.gatewayNS(g)
	run := func(args ...string) error {
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		_, err := ns.Run(ctx, "tc", slices.Concat([]string{"qdisc"}, args)...)
		return err
	}
	if err := run("add", "dev", "trench0", "root", "tbf", "rate", "256kbit", "burst", "3000", "latency",
		"400ms"); err != nil {
		return nil, err
	}
	fx.timeline.set2(disturbed, pathSubject(g, "slow"))
	return func(context.Context) error {
		err := run("del", "dev", "trench0", "root")
		fx.timeline.set2(healthy, pathSubject(g, "slow"))
		return err
	}, nil
}
