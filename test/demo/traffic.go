package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
	"github.com/vipgate/vipgate/test/traffic"
)

// trafficScenario is an act that shows the effect of changes on real traffic.
type trafficScenario struct {
	*printer
	options

	introduction string
	scenarios    []traffic.Scenario
	trench       traffic.Options // without Binaries and Control
	explanation  string          // of the comparison
}

// secondScenario changes one thing after the other.
func secondScenario(p *printer, o options) *trafficScenario {
	return &trafficScenario{
		printer: p, options: o, scenarios: traffic.Scenarios(),
		trench: traffic.Options{Targets: 1, Downloads: true, Once: 2},
		introduction: `
Second act: real traffic, forwarded by the lb in the kernel (--dataplane=nftables)

                                  .-- pod 1: frontend, lb --.
   clients == 2 gateways (BIRD) ==<-- pod 2: frontend, lb -->== 1 to 10 targets,
              spread flows        '-- pod 3: frontend, lb --'   each with "target run"

Clients send 100 requests a second, each over a connection of its own, and keep 24
long-lived flows, of which half only receive; all half over IPv4 and half over IPv6.
They are at both gateways: a flow comes through one, and its replies may leave through
the other. Each target accepts the VIPs and replies through the pod of the flow by
"target run" (target-2 by "target run --once", which has exited). "broken" counts
long-lived flows whose targets stayed, "of leavers" those whose targets were to end.
Flows of a target that leaves end with it; a lost packet is sent again and shows in the
gap.`,
		explanation: `
   Where the control loses nothing either, it is the kernel that forwards on (lb), the other
   pods that take over (frontend), or TCP that asks again after a second (death of a target).`,
	}
}

// thirdScenario returns a rollout during which a pod is lost.
func thirdScenario(p *printer, o options) *trafficScenario {
	return &trafficScenario{
		printer: p, options: o, scenarios: traffic.Rollout(),
		trench: traffic.Options{BFD: true, Targets: 10, Downloads: true},
		introduction: `
Third act: a deployment rolls through 10 targets, and a node is lost on the way

The same clients, gateways and pods as in the second act, and BFD with the gateways.
Two targets at a time are announced as terminating, drained, ended, and replaced by
new ones: another network namespace, another MAC address, another "target run". In
between pod 2 is lost with its node: its links are cut, then lb, frontend and BIRD get
kill -9, and nothing of its kernel is left. A new pod with another MAC address takes
its place later.

The loss of the pod is the one change that is not planned: until BFD notices, after
5 s, the gateways send its share of the packets to nowhere.`,
		explanation: `
   The loss of the pod costs the same with and without vipgate: its share of the packets, until
   BFD notices; TCP sends them again. Then flows continue through the other pods, to the same
   targets.`,
	}
}

// run runs the scenarios twice: as vipgate is meant to be used, and the control. With
// hold the first trench then stays until ctx ends.
func (a *trafficScenario) run(ctx context.Context) error {
	a.printf("%s", a.introduction)
	a.trench.Binaries = a.binaries
	gated, err := a.runScenarios(ctx, "As vipgate is meant to be used", a.trench)
	if err != nil || a.hold {
		return err // no control run after an error, or with --hold
	}
	without := a.trench
	without.Control = true
	control, err := a.runScenarios(ctx, "The control: the same programs with --gating=off and no drain times", without)
	if err != nil {
		return err
	}
	return a.compare(gated, control)
}

// outcome is a scenario and its result.
type outcome struct {
	scenario traffic.Scenario
	row      load.Row
}

// runScenarios runs the scenarios on one trench, and checks them unless it is the control.
func (a *trafficScenario) runScenarios(ctx context.Context, title string, o traffic.Options) (_ []outcome, err error) {
	a.printf("\n%s:", title)
	from := time.Now()
	t, err := traffic.Open(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	a.printf("   %d pods and %d targets are up, and both gateways spread flows over all pods (%s)\n", len(t.Pods),
		len(t.Targets), short(time.Since(from)))
	var all []outcome
	var rows []load.Row
	for _, s := range a.scenarios {
		row, err := t.Run(ctx, s)
		if err != nil {
			return all, err
		}
		all, rows = append(all, outcome{s, row}), append(rows, row)
		a.printf("   %-42s %5d sent, %d failed", s.Title, row.Result.Sent, row.Result.Failed)
	}
	a.printf("")
	for line := range strings.Lines(load.Table(rows...)) {
		a.printf("   %s", strings.TrimRight(line, "\n"))
	}
	if o.Control {
		return all, a.err
	}
	for _, o := range all {
		if err := o.scenario.Check(o.row); err != nil {
			return all, fmt.Errorf("%s: %w", o.scenario.Title, err)
		}
	}
	if err := t.CheckAsymmetry(ctx); err != nil {
		return all, err
	}
	if err := a.probe(ctx, t); err != nil {
		return all, err
	}
	a.printf("   ok: no planned change lost a request, or a long-lived flow whose target stayed")
	if a.hold {
		return all, a.keepRunning(ctx, t)
	}
	return all, a.err
}

// probe prints what a user at the first gateway reaches, over several paths.
func (a *trafficScenario) probe(ctx context.Context, t *traffic.Trench) error {
	a.printf("\n   What users reach, by vipgate-probe at the first gateway:")
	out, err := t.Gateway.Run(ctx, filepath.Join(a.binaries, "vipgate-probe"), "run", "--once", "--ports=16",
		"--trench-file="+t.Pods[0].TrenchFile())
	for line := range strings.Lines(out) {
		a.printf("   %s", strings.TrimRight(line, " \n"))
	}
	if err != nil {
		return fmt.Errorf("a path to the VIPs is dead: %w", err)
	}
	return nil
}

// compare prints the losses of the two runs side by side. A control that loses nothing would
// prove nothing.
func (a *trafficScenario) compare(gated, control []outcome) error {
	a.printf("\nSide by side, requests that failed and flows that broke although their targets stayed:\n")
	a.printf("   %-42s %16s %16s", "", "vipgate", "control")
	var lost int
	for _, planned := range []bool{true, false} {
		for i, x := range gated {
			if x.scenario.Planned != planned {
				continue
			}
			y := control[i]
			a.printf("   %-42s %16s %16s", x.scenario.Title, losses(x.row), losses(y.row))
			if planned && y.row.Result.Lost(y.row.Left...) != nil {
				lost++
			}
			if !planned { // an unplanned change costs time
				a.printf("   %-42s %16s %16s", "  longest gap of a flow", short(x.row.Result.LongestGap(x.row.Left...)),
					short(y.row.Result.LongestGap(y.row.Left...)))
				a.printf("   %-42s %16s %16s", "  slowest answer", short(x.row.Result.Slowest), short(y.row.Result.Slowest))
			}
		}
		if planned {
			a.printf("   not planned:")
		}
	}
	if lost == 0 {
		return errors.New("the control lost nothing, so that the act proves nothing")
	}
	a.printf("%s", a.explanation)
	a.printf("   ok: the control loses what vipgate keeps")
	return a.err
}

func losses(r load.Row) string {
	broken, _ := r.Result.Broken(r.Left...)
	return fmt.Sprintf("%d + %d", r.Result.Failed, broken)
}

// targetRule matches the policy rule of a target, and its mark: numbers change when targets do.
var targetRule = regexp.MustCompile(`fwmark (0x[0-9a-f]+)/0xffffff lookup \d+`)

// keepRunning leaves the trench running until ctx ends, and prints commands to try.
func (a *trafficScenario) keepRunning(ctx context.Context, t *traffic.Trench) error {
	if err := t.Revive(); err != nil {
		return err
	}
	pod := t.Pods[0]
	inPod := "ip netns exec " + pod.Namespace().Name() + " "
	lb, admin := quote(filepath.Join(a.binaries, "lb")), pod.LBAdmin()
	target := t.Targets[0]
	inTarget := "ip netns exec " + target.NS.Name() + " "
	rules, err := pod.Namespace().Run(ctx, "ip", "rule")
	if err != nil {
		return err
	}
	mark := "5000"
	if found := targetRule.FindStringSubmatch(rules); found != nil {
		mark = found[1]
	}
	a.printf("\nThe trench runs on. Try in another terminal, as root:")
	for _, c := range []exampleCommand{
		{
			"what the data plane of pod 1 has: streams, targets, their marks, drift",
			fmt.Sprintf("%s status --admin-socket=unix://%s", lb, admin),
		},
		{"a packet's way: the stream's rules", inPod + "nft list chain inet vipgate-lb stream/stream-a"},
		{"the targets whose flows live", inPod + "nft list map inet vipgate-lb live4/stream-a"},
		{"the rules that take a mark to a target", inPod + "ip rule"},
		{"where packets with a target's mark go", inPod + "ip route get 20.0.0.1 mark " + mark},
		{
			"requests through the gateway: which target answers",
			fmt.Sprintf("ip netns exec %s curl -s http://20.0.0.1:%d", t.Gateway.Name(), lab.RequestPort),
		},
		{
			"no new flows for a target, in pod 1 (pod 2 continues to use it)",
			fmt.Sprintf("%s target drain --admin-socket=unix://%s %s", lb, admin, target.Name),
		},
		{"and take it back", fmt.Sprintf("%s target undrain --admin-socket=unix://%s %s", lb, admin, target.Name)},
		{
			"the VIP pool of target 1, the pods that it knows, and their flows",
			fmt.Sprintf("%s status --admin-socket=unix://%s", quote(filepath.Join(a.binaries, "target")), target.Admin()),
		},
		{"how it accepts the VIPs and replies", inTarget + "nft list table inet vipgate-target"},
		{
			"delete a rule: it is repaired within a second, and an event says so",
			inPod + "ip rule del fwmark " + mark + "/0xffffff",
		},
		{
			"hold the data plane: now it stays away, and is shown as drift",
			fmt.Sprintf("%s hold --admin-socket=unix://%s", lb, admin),
		},
		{"delete it again", inPod + "ip rule del fwmark " + mark + "/0xffffff"},
		{"end the hold, which repairs it", fmt.Sprintf("%s resume --admin-socket=unix://%s", lb, admin)},
		{"what happens to the kernel's part when the lb is gone: nothing", fmt.Sprintf("kill -9 %d", pod.LB.PID())},
	} {
		a.printf("\n# %s\n%s", c.what, c.command)
	}
	a.printf("\nCtrl-C clears everything up.")
	if a.err != nil {
		return a.err
	}
	<-ctx.Done()
	return nil
}
