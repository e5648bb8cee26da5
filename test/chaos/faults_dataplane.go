package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http2"

	"github.com/vipgate/vipgate/test/lab"
)

// repairBound is how long a program may take to restore kernel state or files that another
// process removed.
const repairBound = time.Second

// ownSlack is how long a program has to run undisturbed before it must repair in time: a new
// process first reads the kernel state.
const ownSlack = 3 * time.Second

func resFamily(f int) string     { return fmt.Sprintf("kernel-%d", f) }
func kernelSubject(f int) string { return fmt.Sprintf("kernel/%d", f) }

// option returns ip's option for a family.
func option(f int) string { return []string{"-4", "-6"}[f] }

// kernelSetting is a sysctl of the pod without which a family is not forwarded.
type kernelSetting struct {
	key, broken, sound string
	family             int
}

var kernelSettings = []kernelSetting{
	{"net.ipv4.ip_forward", "0", "1", ipv4},
	{"net.ipv6.conf.all.forwarding", "0", "1", ipv6},
	{"net.ipv4.conf." + lab.Internal + ".forwarding", "0", "1", ipv4},
	{"net.ipv4.conf." + lab.External + ".forwarding", "0", "1", ipv4},
	{"net.ipv4.conf." + lab.External + ".rp_filter", "1", "0", ipv4},
	{"net.ipv4.conf." + lab.Internal + ".rp_filter", "1", "0", ipv4},
	{"net.ipv6.conf." + lab.Internal + ".disable_ipv6", "1", "0", ipv6},
}

// rivals are commands of a second instance, started while the program runs.
var rivals = []struct {
	program, command string
	ports            []string
}{
	{"lb", "run", []string{"--health-address=127.0.0.1:8781", "--metrics-address=127.0.0.1:8223"}},
	{"frontend", "run", []string{"--health-address=127.0.0.1:8780", "--metrics-address=127.0.0.1:8224"}},
	{"lb", "cleanup", nil},
	{"frontend", "cleanup", nil},
}

// dataPlaneKinds returns the faults of the pod's kernel state, of socket files, and of second
// instances.
func dataPlaneKinds() []*kind {
	repair := ms(1500, 3000) // longer than a repair takes
	families := []string{resFamily(ipv4), resFamily(ipv6)}
	ofFamily := func(k *kind, family func(arg int) int) *kind {
		k.touches = func(arg int) scope {
			return scope{vips: atGateway(gatewayA, family(arg)).vips, gateways: everything.gateways}
		}
		k.holds = func(arg int) []string { return []string{resFamily(family(arg))} }
		return k
	}
	parity := func(arg int) int { return arg % len(bothFamilies) }
	rules := []string{"90", "92", "100", "101"}
	target := func(name string, remove func(ctx context.Context, fx *fixture, table string, family int) error) *kind {
		k := simple(name, 3, repair, ofTargets, nothing).by(removeTargetState(remove))
		k = k.variants(touchable*len(bothFamilies), func(arg int) string {
			return fmt.Sprintf("%s of target %d", familyName(parity(arg)), arg/len(bothFamilies))
		})
		k.touches = func(arg int) scope { return ofStream(arg / len(bothFamilies) / targetsPerStream) }
		k.holds = func(arg int) []string {
			return []string{resTarget(arg / len(bothFamilies)), resFamily(parity(arg))}
		}
		return k
	}
	setting := simple("sysctl", 6, ms(500, 4000), wide, everything).by(breakSetting).variants(len(kernelSettings),
		func(arg int) string {
			return kernelSettings[arg].key + "=" + kernelSettings[arg].broken
		})
	rule := simple("policy rule deleted", 4, repair, wide,
		everything).by(deleteRule(rules)).variants(len(rules)*len(bothFamilies), func(arg int) string {
		return familyName(parity(arg)) + ", priority " + rules[arg/len(bothFamilies)]
	})
	back := simple("routes of gateways flushed", 3, repair, quiet, nothing).by(flushGatewayRoutes).variants(
		len(bothFamilies), func(arg int) string { return familyName(arg) },
	)
	back.holds = func(arg int) []string { return []string{resFamily(arg)} }
	rival := simple("second instance", 3, once, quiet, nothing).by(startRival).variants(len(rivals),
		func(arg int) string {
			return rivals[arg].program + " " + rivals[arg].command
		})
	rival.holds = func(arg int) []string {
		return []string{map[string]string{"lb": resLB, "frontend": resFrontend}[rivals[arg].program]}
	}
	return []*kind{
		simple("nft flush ruleset", 4, repair, wide, everything, families...).by(flushRuleset),
		ofFamily(rule, parity),
		target("target rule deleted", func(ctx context.Context, fx *fixture, table string, family int) error {
			_, err := fx.Pod.Run(ctx, "ip", option(family), "rule", "del", "lookup", table)
			return err
		}),
		target("target route deleted", func(ctx context.Context, fx *fixture, table string, family int) error {
			_, err := fx.Pod.Run(ctx, "ip", option(family), "route", "flush", "table", table)
			return err
		}),
		back,
		ofFamily(setting, func(arg int) int { return kernelSettings[arg].family }),
		simple("socket file deleted", 3, repair, quiet, nothing, "sockets").by(deleteSocket).variants(3,
			func(arg int) string {
				return []string{"readiness", "admin of the lb", "admin of the frontend"}[arg]
			}),
		rival,
	}
}

const (
	// damageMemory is for how long a program remembers a repair: each further repair of the same
	// object within that time may take twice as long.
	damageMemory = time.Minute
	// maxBackOff bounds the additional time.
	maxBackOff = 5 * time.Second
)

// restored returns the heal function of a fault that a program repairs itself: it waits until
// check passes. A repair that takes too long is a violation, unless one of these subjects was
// disturbed.
func (fx *fixture) restored(since time.Time, what string, check func(ctx context.Context) error,
	subjects ...string,
) func(context.Context) error {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	if fx.damaged == nil {
		fx.damaged = map[string][]time.Time{}
	}
	fx.damaged[what] = append(
		slices.DeleteFunc(fx.damaged[what], func(at time.Time) bool { return since.Sub(at) > damageMemory }), since,
	)
	limit := repairBound + min(repairBound<<(len(fx.damaged[what])-1)-repairBound, maxBackOff)
	return func(ctx context.Context) error {
		bound, cancel := context.WithDeadline(
			ctx, since.Add(limit+alwaysSlack+lateSlack*fx.late(since.Add(-time.Second), time.Now())),
		)
		defer cancel()
		err := lab.Eventually(bound, 20*time.Millisecond, func() error { return check(ctx) })
		if err != nil && fx.timeline.wasHealthy(since.Add(-ownSlack), subjects...) {
			fx.report(violation{
				fmt.Sprintf("%s: not repaired after %s: %v", what, short(time.Since(since)), err), -1,
				-1,
			})
		}
		return nil
	}
}

// podLines returns the lines that a command prints in the pod. A table that does not exist has
// none.
func (fx *fixture) podLines(ctx context.Context, command ...string) ([]string, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	out, err := fx.Pod.Run(bound, command[0], command[1:]...)
	if err != nil && strings.Contains(out, "FIB table does not exist") {
		err = nil
	}
	var all []string
	for line := range strings.Lines(out) {
		words := strings.Fields(volatile.ReplaceAllString(line, ""))
		slices.Sort(words)
		all = append(all, strings.Join(words, " "))
	}
	return all, err
}

// hasAll returns a check that a command prints all of these lines again.
func (fx *fixture) hasAll(want []string, command ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		now, err := fx.podLines(ctx, command...)
		if missing := difference(want, now); err == nil && len(missing) > 0 {
			err = fmt.Errorf("%s does not print %q", strings.Join(command, " "), missing)
		}
		return err
	}
}

// flushRuleset removes the whole nftables ruleset of the pod.
func flushRuleset(ctx context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	list := []string{"nft", "list", "tables"}
	before, err := fx.podLines(ctx, list...)
	if err != nil {
		return nil, err
	}
	since := time.Now()
	if _, err := fx.Pod.Run(ctx, "nft", "flush", "ruleset"); err != nil {
		return nil, err
	}
	return fx.restored(since, "nft flush ruleset", fx.hasAll(before, list...), "lb", "frontend"), nil
}

// deleteRule removes a policy rule of the lb or of the frontend.
func deleteRule(priorities []string) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
	return func(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
		family, priority := f.Arg%len(bothFamilies), priorities[f.Arg/len(bothFamilies)]
		list := []string{"ip", option(family), "rule", "show", "priority", priority}
		before, err := fx.podLines(ctx, list...)
		if err != nil || len(before) == 0 {
			return nil, err
		}
		since := time.Now()
		if _, err := fx.Pod.Run(ctx, "ip", option(family), "rule", "del", "priority", priority); err != nil {
			return nil, err
		}
		return fx.restored(since, f.String(), fx.hasAll(before, list...), "lb", "frontend"), nil
	}
}

// removeTargetState removes a part of the data plane's state for one target.
func removeTargetState(remove func(ctx context.Context, fx *fixture, table string,
	family int) error,
) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
	return func(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
		family, t := f.Arg%len(bothFamilies), f.Arg/len(bothFamilies)
		routes, err := fx.Pod.Run(ctx, "ip", option(family), "-o", "route", "show", "table", "all", "proto", "179")
		if err != nil {
			return nil, err
		}
		table := ""
		for line := range strings.Lines(routes) {
			if words := strings.Fields(line); slices.Contains(words, targetAddr(t, family).String()) {
				table = words[slices.Index(words, "table")+1]
			}
		}
		if table == "" {
			fx.out.note("target %d has no %s route at present", t, familyName(family))
			return nil, nil
		}
		var checks []func(context.Context) error
		found := 0
		for _, list := range [][]string{
			{"ip", option(family), "rule", "show", "lookup", table},
			{"ip", option(family), "-o", "route", "show", "table", table},
		} {
			before, err := fx.podLines(ctx, list...)
			if err != nil {
				return nil, err
			}
			found += min(1, len(before))
			checks = append(checks, fx.hasAll(before, list...))
		}
		// Removing from an incomplete state would not cause drift.
		if found < len(checks) {
			fx.out.note("the data plane has no %s rule and route of target %d at present", familyName(family), t)
			return nil, nil
		}
		since := time.Now()
		if err := remove(ctx, fx, table, family); err != nil {
			return nil, err
		}
		return fx.restored(since, f.String(), func(ctx context.Context) error {
			var errs []error
			for _, check := range checks {
				errs = append(errs, check(ctx))
			}
			return errors.Join(errs...)
		}, "lb", "net/internal", targetSubject(t, ipv4), targetSubject(t, ipv6)), nil
	}
}

// flushGatewayRoutes removes the routes to the clients, which BIRD installs.
func flushGatewayRoutes(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	list := []string{"ip", option(f.Arg), "-o", "route", "show", "table", "4096"}
	before, err := fx.podLines(ctx, list...)
	if err != nil || len(before) == 0 {
		return nil, err
	}
	since := time.Now()
	if _, err := fx.Pod.Run(ctx, "ip", option(f.Arg), "route", "flush", "table", "4096"); err != nil {
		return nil, err
	}
	return fx.restored(since, f.String(), fx.hasAll(before, list...), "frontend", "speaker", "gateway/", "path/",
		sessionsSubject), nil
}

// restoreInternal6 restores the IPv6 address of the internal interface.
func (fx *fixture) restoreInternal6() error {
	return fx.Pod.Addr(lab.Internal, lab.PodInternal(1)[ipv6].String()+"/64")
}

// breakSetting changes a sysctl. An interface without IPv6 loses its addresses.
func breakSetting(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	s := kernelSettings[f.Arg]
	if err := fx.Pod.Sysctl(s.key, s.broken); err != nil {
		return nil, err
	}
	fx.timeline.set(kernelSubject(s.family), down)
	return func(context.Context) error {
		fx.timeline.set(kernelSubject(s.family), healthy)
		err := fx.Pod.Sysctl(s.key, s.sound)
		if strings.HasSuffix(s.key, "disable_ipv6") {
			err = errors.Join(err, fx.restoreInternal6())
		}
		return err
	}, nil
}

// deleteSocket removes the file of a socket on which a program listens.
func deleteSocket(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	path := []string{fx.pod.Socket(), fx.pod.LBAdmin(), fx.pod.FrontendAdmin()}[f.Arg]
	program := []string{"lb", "lb", "frontend"}[f.Arg]
	since := time.Now()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return fx.restored(since, f.String(), func(ctx context.Context) error { return accepted(ctx, path) }, program), nil
}

// acceptTime is how long a check waits for a program to accept a connection.
const acceptTime = 200 * time.Millisecond

// accepted returns an error unless a program accepts a connection to a socket. The kernel
// completes a connect before that, so the check waits for an answer: HTTP/2 settings of an
// admin socket, or the end of the connection by TLS, which does not know the preface.
func accepted(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{Timeout: commandTime}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(acceptTime))
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return err
	}
	if _, err := conn.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the connection is not accepted: %w", err)
	}
	return nil
}

func dialUnix(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{Timeout: commandTime}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// startRival runs a command that may not touch the pod while its program runs.
func startRival(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	r := rivals[f.Arg]
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	// Wait until the program owns its namespace: a program that starts or ends would let the second
	// instance run alone.
	owned := func() error {
		if !fx.timeline.wasHealthy(time.Now().Add(-recovery), r.program) {
			return errors.New("it was disturbed")
		}
		return fx.Pod.Do(func() error { return dialUnix(bound, "@vipgate/"+r.program) })
	}
	if err := lab.Eventually(bound, 20*time.Millisecond, owned); err != nil {
		return nil, fmt.Errorf("%s does not own the namespace: %w", r.program, err)
	}
	second := &lab.Pod{Lab: fx.Lab, Binaries: fx.pod.Binaries, Dir: filepath.Join(fx.Dir, "second"), ProductTimers: true}
	if err := second.WriteTrench(trenchText()); err != nil {
		return nil, err
	}
	args := []string{filepath.Join(fx.pod.Binaries, r.program), r.command}
	if r.command == "run" {
		args = map[string][]string{
			"lb":       second.LBArgs("--dataplane=nftables"),
			"frontend": second.FrontendArgs(),
		}[r.program]
	}
	out, err := fx.Pod.Run(bound, args[0], slices.Concat(args[1:], r.ports)...)
	if err == nil || !strings.Contains(err.Error()+out, "owns this network namespace") {
		fx.report(violation{fmt.Sprintf("%s beside a running %s: %v %s", f, r.program, err, out), -1, -1})
	}
	return nil, nil
}
