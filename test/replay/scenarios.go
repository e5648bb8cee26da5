package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// budget is the limit of both numbers of every VIP.
type budget struct {
	Name  string        `json:"name"`
	Limit time.Duration `json:"limit"`
}

var (
	unplanned = budget{"unplanned", time.Second}
	planned   = budget{"planned", 0}
	wrong     = budget{"wrong edit", 0}
)

// scenario is one incident.
type scenario struct {
	id, title, link string
	cause           string // as injected
	budget          budget
	note            string // a restriction of the replay

	before       [][2]string // replacements in the trench file before the start
	lb, frontend []string    // further flags
	// inject causes the incident in vipgate, and returns once it is over.
	inject func(context.Context, *fixture) error
	// reference causes it in the common pattern; nil if that has no counterpart.
	reference func(context.Context, *fixture) error
}

// scenarios returns all incidents in the order of their numbers.
func scenarios() []scenario {
	return []scenario{
		{
			id: "I6", title: "Google 2019-06-02", link: "status.cloud.google.com/incident/cloud-networking/19009",
			cause: "both `lb` killed, absent for 8 s", budget: unplanned,
			note: "with `--on-lb-loss=keep --stale-grace=1m`",
			lb:   []string{"--stale-grace=1m"}, frontend: []string{"--on-lb-loss=keep"},
			inject: killBalancers, reference: stopScripts,
		},
		{
			id: "I7", title: "AWS 2025-10-20", link: "aws.amazon.com/message/101925",
			cause: "pod 2 starts; its wire to the targets alternates every 0.5 s for 8 s", budget: unplanned,
			inject: startFlapping, reference: startFlapping,
		},
		{
			id: "I8", title: "Datadog 2023-03-08",
			link:  "datadoghq.com/blog/engineering/2023-03-08-deep-dive-into-platform-level-impact",
			cause: "all policy rules of both pods deleted", budget: unplanned,
			inject: flushPodRules, reference: flushPodRoutes,
		},
		{
			id: "I9", title: "Heroku 2025-06-10", link: "heroku.com/blog/summary-of-june-10-outage",
			cause: "all routes of both pods and rules of all targets flushed", budget: unplanned,
			inject: flushRoutes, reference: flushPodRoutes,
		},
		{
			id: "I11", title: "K-root Belgrade, Reykjavik", link: "go.mail-archive.com/dns-wg@ripe.net/msg00401.html",
			cause: "pod 2 replaced; its `lb` starts 2 s after its `frontend`", budget: unplanned,
			inject: startLate, reference: startLate,
		},
		{
			id: "I15", title: "MetalLB #1944, #2049", link: "github.com/metallb/metallb/issues/1944",
			cause: "hold time of all gateways edited in all pods", budget: planned,
			inject: func(ctx context.Context, fx *fixture) error {
				return fx.edit("holdTime: 3s", "holdTime: 4s")
			},
			reference: func(ctx context.Context, fx *fixture) error { return fx.eachScript((*script).changeHoldTime) },
		},
		{
			id: "I16", title: "MetalLB #2470", link: "github.com/metallb/metallb/pull/2715",
			cause: "trench file written again without a change", budget: planned,
			note: "a cordon changes nothing in kube's file (test/kube-e2e)",
			inject: func(ctx context.Context, fx *fixture) error {
				return fx.edit("trench: trench-a\n", "# cordoned\ntrench: trench-a\n")
			},
		},
		{
			id: "I17", title: "fediverse.foundation 2023-04-06", link: "wiki.fediverse.foundation",
			cause: "file not updated any more; then a target resets connections", budget: unplanned,
			note: "without the API server", inject: abortTarget, reference: abortTarget,
		},
		{
			id: "I18", title: "metallb#777", link: "github.com/metallb/metallb/issues/777",
			cause: "gateway A replaced, packets of its old sessions dropped", budget: unplanned,
			inject: failOver, reference: failOver,
		},
	}
}

// targetLine returns the line of a target in the trench file.
func targetLine(n int) string {
	own := lab.TargetAddrs(n)
	return fmt.Sprintf("      - {name: target-%d, ips: [%s, %q]}\n", n, own[0], own[1])
}

// killBalancers kills both lbs, and starts them again after a repair time.
func killBalancers(ctx context.Context, fx *fixture) error {
	if err := kill(fx.Pods[0].LB, fx.Pods[1].LB); err != nil {
		return err
	}
	sleep(ctx, 8*time.Second)
	return errors.Join(fx.startLB(0), fx.startLB(1))
}

// stopScripts ends the scripts of the reference, as its control plane, for the same time.
func stopScripts(ctx context.Context, fx *fixture) error {
	err := fx.eachScript(func(s *script) error { s.end(); return nil })
	sleep(ctx, 8*time.Second)
	return err
}

// startFlapping replaces pod 2, whose network toward the targets alternates at first.
func startFlapping(ctx context.Context, fx *fixture) error {
	if err := restartSecond(ctx, fx, 0); err != nil {
		return err
	}
	const half = 500 * time.Millisecond
	for i := range 16 {
		if err := fx.Backend.IP("link", "set", "pod2", []string{"down", "up"}[i%2]); err != nil {
			return err
		}
		sleep(ctx, half)
	}
	return nil
}

// eachPod runs shell commands in the namespaces of both pods.
func (fx *fixture) eachPod(ctx context.Context, shell string) error {
	var errs []error
	for _, p := range fx.Pods {
		_, err := p.NS.Run(ctx, "sh", "-c", shell)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// flushRulesShell deletes every policy rule except those of the kernel and of direct clients, as systemd-networkd did.
const flushRulesShell = `for f in -4 -6; do
	ip $f rule show | sed 's/:.*//' | grep -vxE '0|50|32766|32767' | while read -r p; do ip $f rule del priority $p; done
done`

func flushPodRules(ctx context.Context, fx *fixture) error { return fx.eachPod(ctx, flushRulesShell) }

// flushPodRoutes deletes every route that is not the kernel's own.
func flushPodRoutes(ctx context.Context, fx *fixture) error {
	return fx.eachPod(ctx, `for f in -4 -6; do
	for p in static bird boot; do ip $f route flush table all proto $p 2>/dev/null; done; done; true`)
}

// flushRoutes deletes the routes of both pods, and the rules of all targets.
func flushRoutes(ctx context.Context, fx *fixture) error {
	err := flushPodRoutes(ctx, fx)
	for _, a := range fx.Targets {
		_, errTarget := a.NS.Run(ctx, "sh", "-c", flushRulesShell)
		err = errors.Join(err, errTarget)
	}
	return err
}

// startLate replaces pod 2, and starts its parts in the order of the incident.
func startLate(ctx context.Context, fx *fixture) error { return restartSecond(ctx, fx, 2*time.Second) }

// restartSecond replaces pod 2, whose lb, or script, starts after a delay.
func restartSecond(ctx context.Context, fx *fixture, delay time.Duration) error {
	if fx.reference {
		return fx.scripts[1].restart(fx, delay)
	}
	p := fx.Pods[1]
	for _, process := range []*lab.Process{p.LB, p.Frontend} {
		if err := process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
	}
	for _, process := range []*lab.Process{p.LB, p.Frontend} {
		if _, err := process.Wait(ctx); err != nil {
			return err
		}
	}
	if err := errors.Join(fx.Replace(2), fx.replyDirectly(1), fx.startFrontend(1)); err != nil {
		return err
	}
	sleep(ctx, delay)
	return fx.startLB(1)
}

// abortTarget ends a target abruptly: its kernel answers with RST.
func abortTarget(_ context.Context, fx *fixture) error { return fx.Targets[0].Abort() }

// failOver replaces gateway A: the new one has no session and no route, and a firewall drops the
// packets of the old sessions without a RST.
func failOver(ctx context.Context, fx *fixture) error {
	router := fx.Routers[0]
	if err := kill(router.Processes()...); err != nil {
		return err
	}
	if _, err := fx.Gateway.Run(ctx, "sh", "-c", fmt.Sprintf(`set -e
nft add table inet failover
nft 'add chain inet failover input { type filter hook input priority 0; }'
for port in sport dport; do
	nft "add rule inet failover input tcp $port %d tcp flags & syn == 0 ct state new drop"
done
ip -4 route flush proto bird
ip -6 route flush proto bird`, lab.BGPPort)); err != nil {
		return err
	}
	fx.gatewayLost(0)
	sleep(ctx, time.Second)
	return router.Start()
}
