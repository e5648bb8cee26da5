package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
	"github.com/vipgate/vipgate/test/traffic"
)

// trafficScenario is the second act: what becomes of real traffic while things change.
type trafficScenario struct {
	*printer
	options
}

// run runs the scenarios twice: as vipgate is meant to be used, and the control. With
// hold the first trench then stays until ctx ends.
func (a *trafficScenario) run(ctx context.Context) error {
	a.printIntroduction()
	gated, err := a.runScenarios(
		ctx, "As vipgate is meant to be used", traffic.Options{
			Binaries: a.binaries,
			Targets:  1,
		}, traffic.Scenarios(), a.hold,
	)
	if err != nil {
		return err
	}
	for _, o := range gated {
		if err := o.scenario.Check(o.row); err != nil {
			return fmt.Errorf("%s: %w", o.scenario.Title, err)
		}
	}
	a.printf("   ok: no planned change lost a request, or a long-lived flow whose target stayed")
	if a.hold {
		return nil // the control has nothing to play with
	}
	control, err := a.runScenarios(ctx, "The control: the same programs with --gating=off and no drain times",
		traffic.Options{Binaries: a.binaries, Control: true, Targets: 1}, traffic.Scenarios(), false)
	if err != nil {
		return err
	}
	return a.compare(gated, control)
}

// printIntroduction says what is to be seen.
func (a *trafficScenario) printIntroduction() {
	a.printf(`
Second act: real traffic, forwarded by the lb in the kernel (--dataplane=nftables)

                                  .-- pod 1: frontend, lb --.
   clients -- gateway (BIRD) ====<                           >==== 1 to 10 targets
                spreads flows     '-- pod 2: frontend, lb --'

Clients send 100 requests a second, each over a connection of its own, and keep 24
long-lived flows, all half over IPv4 and half over IPv6. "broken" counts long-lived
flows whose targets stayed, "of leavers" those whose targets were to end. Flows of a
target that leaves end with it; a lost packet is sent again and shows in the gap.`)
}

// outcome is a scenario and its result.
type outcome struct {
	scenario traffic.Scenario
	row      load.Row
}

// runScenarios runs scenarios on one trench.
func (a *trafficScenario) runScenarios(ctx context.Context, title string, o traffic.Options,
	scenarios []traffic.Scenario, hold bool,
) (_ []outcome, err error) {
	a.printf("\n%s:", title)
	from := time.Now()
	t, err := traffic.Open(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	a.printf("   two pods and %d targets are up, and the gateway spreads flows over both pods (%s)\n", len(t.Targets),
		short(time.Since(from)))
	var all []outcome
	var rows []load.Row
	for _, s := range scenarios {
		row, err := t.Run(ctx, s)
		if err != nil {
			return all, err
		}
		all, rows = append(all, outcome{s, row}), append(rows, row)
		a.printf("   %-38s %5d sent, %d failed", s.Title, row.Result.Sent, row.Result.Failed)
	}
	a.printf("")
	for line := range strings.Lines(load.Table(rows...)) {
		a.printf("   %s", strings.TrimRight(line, "\n"))
	}
	if hold {
		return all, a.keepRunning(ctx, t)
	}
	return all, a.err
}

// compare shows what the two runs lost side by side. A control that loses nothing
// would prove nothing.
func (a *trafficScenario) compare(gated, control []outcome) error {
	a.printf("\nSide by side, requests that failed and flows that broke although their targets stayed:\n")
	a.printf("   %-38s %16s %16s", "", "vipgate", "control")
	var lost int
	for i, x := range gated {
		y := control[i]
		a.printf("   %-38s %16s %16s", x.scenario.Title, losses(x.row), losses(y.row))
		if y.scenario.Planned && y.scenario.Check(y.row) != nil {
			lost++
		}
	}
	if lost == 0 {
		return errors.New("the control lost nothing, so that the act proves nothing")
	}
	a.printf("\n   Where the control loses nothing either, it is the kernel that forwards on (lb), the other\n   pod " +
		"that takes over (frontend), or TCP that asks again after a second (death of a target).")
	a.printf("   ok: the control loses what vipgate keeps")
	return a.err
}

func losses(r load.Row) string {
	broken, _ := r.Result.Broken(r.Left...)
	return fmt.Sprintf("%d + %d", r.Result.Failed, broken)
}

// keepRunning leaves the trench running until ctx ends, with what can be tried.
func (a *trafficScenario) keepRunning(ctx context.Context, t *traffic.Trench) error {
	if err := t.Revive(); err != nil {
		return err
	}
	pod := t.Pods[0]
	inPod := "ip netns exec " + pod.Namespace().Name() + " "
	lb, admin := quote(filepath.Join(a.binaries, "lb")), pod.LBAdmin()
	target := t.Targets[0]
	a.printf("\nThe trench runs on. Try in another terminal, as root:")
	for _, c := range []exampleCommand{
		{
			"what the data plane of pod 1 has: streams, targets, their marks, drift",
			fmt.Sprintf("%s status --admin-socket=unix://%s", lb, admin),
		},
		{"a packet's way: the stream's rules", inPod + "nft list chain inet vipgate-lb stream/stream-a"},
		{"the targets whose flows live", inPod + "nft list map inet vipgate-lb live4/stream-a"},
		{"the rules that take a mark to a target", inPod + "ip rule"},
		{"where packets with a target's mark go", inPod + "ip route get 20.0.0.1 mark 5000"},
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
			"delete a rule: it is repaired within a second, and an event says so",
			inPod + "ip rule del fwmark 5000/0xffffff",
		},
		{
			"hold the data plane: now it stays away, and is shown as drift",
			fmt.Sprintf("%s hold --admin-socket=unix://%s", lb, admin),
		},
		{"delete it again", inPod + "ip rule del fwmark 5000/0xffffff"},
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
