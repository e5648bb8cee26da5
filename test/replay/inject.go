package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// stopControl kills both lbs, or ends the scripts, for a repair time.
func stopControl(ctx context.Context, fx *fixture) error {
	if fx.reference {
		fx.stopScripts()
		sleep(ctx, 8*time.Second)
		return nil
	}
	err := kill(fx.Pods[0].LB, fx.Pods[1].LB)
	sleep(ctx, 8*time.Second)
	return errors.Join(err, fx.startLB(0), fx.startLB(1))
}

// startFlapping replaces pod 2, whose network toward the targets alternates at first.
func startFlapping(ctx context.Context, fx *fixture) error {
	errs := []error{restartSecond(ctx, fx, 0)}
	for i := range 16 {
		errs = append(errs, fx.Backend.IP("link", "set", "pod2", []string{"down", "up"}[i%2]))
		sleep(ctx, time.Second/2)
	}
	return errors.Join(errs...)
}

// Shell commands that delete foreign state as systemd-networkd did: every policy rule, and every
// route, except the kernel's own.
const (
	flushRules = `for f in -4 -6; do
	ip $f rule show | sed 's/:.*//' | grep -vxE '0|32766|32767' | while read -r p; do ip $f rule del priority $p; done
done`
	flushRoutes = `for f in -4 -6; do
	for p in static bird boot; do ip $f route flush table all proto $p 2>/dev/null; done
done; true`
)

// shell returns an incident that runs commands in both pods, and others in all targets.
func shell(inPods, inTargets string) func(context.Context, *fixture) error {
	return func(ctx context.Context, fx *fixture) error {
		var errs []error
		for _, p := range fx.Pods {
			_, err := p.NS.Run(ctx, "sh", "-c", inPods)
			errs = append(errs, err)
		}
		for _, a := range fx.Targets {
			_, err := a.NS.Run(ctx, "sh", "-c", inTargets)
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
}

// startLate replaces pod 2, and starts its parts in the order of the incident.
func startLate(ctx context.Context, fx *fixture) error { return restartSecond(ctx, fx, 4*time.Second) }

// restartSecond replaces pod 2, whose lb, or script, starts after a delay.
func restartSecond(ctx context.Context, fx *fixture, delay time.Duration) error {
	if fx.reference {
		return fx.scripts[1].restart(fx, delay)
	}
	p := fx.Pods[1]
	if err := errors.Join(p.LB.Signal(syscall.SIGTERM), p.Frontend.Signal(syscall.SIGTERM)); err != nil {
		return err
	}
	_, errLB := p.LB.Wait(ctx)
	_, errFrontend := p.Frontend.Wait(ctx)
	if err := errors.Join(errLB, errFrontend, fx.Replace(2), fx.startFrontend(1)); err != nil {
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
	errKill := kill(fx.Routers[0].Processes()...)
	_, errFlush := fx.Gateway.Run(ctx, "sh", "-c", fmt.Sprintf(`set -e
nft add table inet failover
nft 'add chain inet failover input { type filter hook input priority 0; }'
for port in sport dport; do
	nft "add rule inet failover input tcp $port %d tcp flags & syn == 0 ct state new drop"
done
ip -4 route flush proto bird
ip -6 route flush proto bird`, lab.BGPPort))
	fx.lost = append(fx.lost, update{at: time.Now(), gateway: 0}) // its log has no withdrawals
	sleep(ctx, time.Second)
	return errors.Join(errKill, errFlush, fx.Routers[0].Start())
}

// emptyList is the edit of a generator that lost most of its input: one VIP of four is left.
func emptyList(_ context.Context, fx *fixture) error {
	fx.text, _, _ = strings.Cut(fx.text, "  - name: stream-b\n")
	return fx.edit(", \"2000::1/128\", 20.0.0.2/32, \"2000::2/128\"]", "]", "[20.0.0.1/32, \"2000::1/128\"]",
		"[20.0.0.1/32]")
}

// deleteStreams removes all streams, with VIPs and gateways left.
func deleteStreams(_ context.Context, fx *fixture) error {
	attractor, _, _ := strings.Cut(fx.text, "streams:\n")
	return fx.WriteTrench(attractor + "streams: []\n")
}

// emptySelectors removes the targets of all streams.
func emptySelectors(_ context.Context, fx *fixture) error {
	pairs := []string{"    targets:\n", "    targets: []\n"}
	for n := 1; n <= targets; n++ {
		pairs = append(pairs, targetLine(n), "")
	}
	return fx.edit(pairs...)
}

// offline is a gateway that does not exist.
var offline = []netip.Addr{netip.MustParseAddr("169.254.100.199"), netip.MustParseAddr("fd00:100::199")}

// moveOffline replaces all gateways by one that is offline.
func moveOffline(_ context.Context, fx *fixture) error {
	first, rest, _ := strings.Cut(fx.text, "    - {name: gateway-a")
	_, last, _ := strings.Cut(rest, "streams:\n")
	return fx.WriteTrench(fmt.Sprintf("%s    - {name: off4, address: %q}\n    - {name: off6, address: %q}\nstreams:\n%s",
		first, offline[0], offline[1], last))
}

// replaceVIP replaces a VIP by another one, although the comparison with the configuration in force
// shows the loss.
func replaceVIP(ctx context.Context, fx *fixture) error {
	const before, after = "20.0.0.2/32", "20.0.0.9/32"
	p, path := fx.Pods[0], filepath.Join(fx.Dir, "edited.yaml")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(fx.text, before, after)), 0o600); err != nil {
		return err
	}
	out, err := p.Run(ctx, "frontend", "validate", "--diff", "--admin-socket=unix://"+p.FrontendAdmin(), path)
	if err == nil && !strings.Contains(out, "- VIP "+before) {
		err = fmt.Errorf("the diff does not show the withdrawal: %s", out)
	}
	return errors.Join(err, fx.edit(before, after))
}

// replaceBIRD gives the BIRD of pod 2 another configuration, as an update of its package: the VIPs
// are static routes, and no route to clients reaches the kernel.
func replaceBIRD(_ context.Context, fx *fixture) error {
	p, config := fx.Pods[1], strings.ReplaceAll(fx.newScript(1).config(), "export where source = RTS_BGP", "export none")
	return errors.Join(os.WriteFile(filepath.Join(p.BirdDir(), "vipgate.conf"), []byte(config), 0o600),
		birdConfigure(p.BirdSocket()))
}

// failAnswers makes the targets of the first stream answer with errors.
func failAnswers(_ context.Context, fx *fixture) error {
	for n := range 2 {
		fx.Targets[n].Fail()
		fx.servers[n].failing.Store(true)
	}
	return nil
}

// flood makes both gateways send more routes than any limit.
func flood(_ context.Context, fx *fixture) error {
	var b strings.Builder
	b.WriteString("protocol static flood {\n\tipv4;\n")
	for i := range 20_000 {
		fmt.Fprintf(&b, "\troute 10.%d.%d.0/24 blackhole;\n", i/256, i%256)
	}
	b.WriteString("}\n")
	var errs []error
	for _, router := range fx.Routers {
		dir := filepath.Join(fx.Dir, router.Config().Name)
		text, err := os.ReadFile(filepath.Join(dir, "bird.conf"))
		errs = append(errs, err, os.WriteFile(filepath.Join(dir, "bird.conf"), append(text, b.String()...), 0o600),
			birdConfigure(filepath.Join(dir, "bird.ctl")))
	}
	return errors.Join(errs...)
}

// crashAfterEdit kills both lbs whenever they accept a valid edit, as a defect that it triggers.
// They must go back to the configuration before it.
func crashAfterEdit(ctx context.Context, fx *fixture) error {
	if err := errors.Join(fx.await(ctx, "state/last-good.yaml", ""),
		fx.edit("interval: 200ms", "interval: 210ms")); err != nil {
		return err
	}
	for starts := 1; starts <= 2; starts++ {
		if err := errors.Join(fx.await(ctx, "state/trial.json", fmt.Sprintf(`"starts": %d`, starts)),
			kill(fx.Pods[0].LB, fx.Pods[1].LB), fx.startLB(0), fx.startLB(1)); err != nil {
			return err
		}
	}
	return fx.await(ctx, "lb.log", "last good configuration is in force")
}

// await waits until a file in the folder of both pods contains text.
func (fx *fixture) await(ctx context.Context, name, text string) error {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return lab.Eventually(bound, pollInterval, func() error {
		for _, p := range fx.Pods {
			content, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				return err
			}
			if !strings.Contains(string(content), text) {
				return fmt.Errorf("%s in %s lacks %q", name, p.Dir, text)
			}
		}
		return nil
	})
}

// unhealthy makes all targets report that they are unhealthy, while they serve.
func unhealthy(_ context.Context, fx *fixture) error {
	var errs []error
	for _, a := range fx.Targets {
		errs = append(errs, a.Unhealthy())
	}
	return errors.Join(errs...)
}

// edit returns an incident that replaces text, given as pairs, in the trench file of every pod.
func edit(pairs ...string) func(context.Context, *fixture) error {
	return func(_ context.Context, fx *fixture) error { return fx.edit(pairs...) }
}
