package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

const (
	// waitTimeout bounds every wait. It detects a hang and is far above every expected duration.
	waitTimeout = 30 * time.Second
	// commandTime bounds a command to a daemon that may be stopped.
	commandTime = 2 * time.Second
	// birdSpace is the size of the file system of BIRD's configuration.
	birdSpace = "256k"
)

// fixture is the lab and everything that runs in it.
type fixture struct {
	*lab.Lab
	pod                    *lab.Pod
	out                    *printer
	timeline               *timeline
	targets                [][]*lab.Target // of each target, one per family; then of each VIP
	routers                [gateways]*router
	proxy                  *proxy
	lbID, frontendID       *attestor
	lb, frontend           *supervisor
	holder                 *lab.Process // keeps the mount namespace of BIRD's folder
	tb                     *tb
	report                 func(violation)
	late                   func(from, to time.Time) time.Duration // of the process watcher
	lbFlags, frontendFlags []string
	external               bool    // speaker is used instead of the frontend's BIRD
	speaker                *router // nil without external

	mu      sync.Mutex             // guards damaged and the state of Lab
	damaged map[string][]time.Time // when the same fault hit before
}

// newFixture creates the lab and starts all processes. With an error it also returns the
// fixture, which the caller closes.
func newFixture(o options, out *printer, report func(violation)) (*fixture, error) {
	// Addresses that faults remove are usable as soon as they are restored: the time of the detection,
	// 1 to 2 s, would hide a late recovery.
	l, err := lab.New(lab.WithoutDAD)
	if err != nil {
		return nil, err
	}
	fx := &fixture{
		Lab: l, pod: &lab.Pod{
			Lab: l, Binaries: o.binaries, ProductTimers: true,
		}, out: out, timeline: newTimeline(), tb: &tb{}, report: report,
		lbFlags: o.lbFlags, frontendFlags: o.frontendFlags, external: o.external,
	}
	return fx, fx.build()
}

func (fx *fixture) build() (err error) {
	if err := fx.connect(); err != nil {
		return err
	}
	for t := range targetCount {
		var each []*lab.Target
		for f := range families {
			l := lab.NewTarget(fx.Backend, netip.AddrPortFrom(targetAddr(t, f), checkPort))
			if err := l.Up(); err != nil {
				return err
			}
			each = append(each, l)
		}
		fx.targets = append(fx.targets, each)
	}
	// Clients connect to the VIPs, so a listener on each VIP answers for all targets.
	for _, v := range vips {
		l := lab.NewTarget(fx.Backend, netip.AddrPortFrom(v.prefix.Addr(), checkPort))
		if err := l.Up(); err != nil {
			return err
		}
		fx.targets = append(fx.targets, []*lab.Target{l})
	}
	if err := fx.pod.WriteTrench(trenchText()); err != nil {
		return err
	}
	fx.attest()
	if err := fx.tb.failed(); err != nil {
		return err
	}
	if fx.proxy, err = newProxy(filepath.Join(fx.Dir, "proxy.sock"), fx.pod.Socket()); err != nil {
		return err
	}
	if err := fx.mountBirdDir(); err != nil {
		return err
	}
	if err := fx.startGateways(); err != nil {
		return err
	}
	if err := fx.startSpeaker(); err != nil {
		return err
	}
	fx.lb = fx.newSupervisor("lb", fx.startLB)
	fx.frontend = fx.newSupervisor("frontend", fx.startFrontend)
	return errors.Join(fx.lb.begin(), fx.frontend.begin())
}

// connect adds the addresses, routes and sysctls that the default lab lacks.
func (fx *fixture) connect() error {
	second, err := fx.SecondGateway()
	if err != nil {
		return err
	}
	var errs []error
	for t := range targetCount {
		errs = append(
			errs, fx.Backend.Addr("pod0", fmt.Sprintf("%s/16", targetAddr(t, ipv4)),
				fmt.Sprintf("%s/64", targetAddr(t, ipv6))),
		)
	}
	// Every target has every VIP, and answers through the pod.
	var lines []string
	for _, v := range vips {
		lines = append(lines, fmt.Sprintf("addr add %s dev lo", v.prefix)+[]string{"", " nodad"}[v.family])
	}
	errs = append(errs, fx.Backend.Batch(lines...), fx.routeAnswers(),
		fx.Backend.IP("-4", "rule", "add", "from", "20.0.0.0/24", "lookup", "100"), fx.Backend.IP("-6", "rule", "add",
			"from", "2000::/64", "lookup", "100"))
	for _, ns := range []*lab.NetNS{fx.Pod, fx.Gateway, second, fx.Backend} {
		errs = append(errs, ns.Sysctl("net.ipv4.conf.all.rp_filter", "0"),
			ns.Sysctl("net.ipv4.conf.default.rp_filter", "0"),
			ns.Sysctl("net.ipv4.fib_multipath_hash_policy", "1"), ns.Sysctl("net.ipv6.fib_multipath_hash_policy", "1"))
	}
	errs = append(errs, fx.Backend.Sysctl("net.ipv4.conf.all.arp_ignore", "1"))
	// A link that goes down and comes back keeps its addresses.
	const keep = "net.ipv6.conf.%s.keep_addr_on_down"
	return errors.Join(append(errs,
		fx.Backend.Sysctl(fmt.Sprintf(keep, "pod0"), "1"),
		fx.Gateway.Sysctl(fmt.Sprintf(keep, "trench0"), "1"),
		second.Sysctl(fmt.Sprintf(keep, "trench0"), "1"))...)
}

// routeAnswers installs the targets' routes for replies from VIPs, which the kernel removes when
// the link goes down.
func (fx *fixture) routeAnswers() error {
	return fx.Backend.Batch(
		"route replace default via 172.16.0.1 dev pod0 table 100", "route replace ::/0 via fd00:16::1 dev pod0 table 100",
	)
}

// mountBirdDir mounts a small file system on the folder of BIRD's configuration, in a mount
// namespace of the pod, which ends with its processes, also after a killed run.
func (fx *fixture) mountBirdDir() (err error) {
	dir := fx.pod.BirdDir()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	fx.holder, err = fx.spawn(fx.Pod, "holder", "unshare", "--mount", "--", "sh", "-c",
		`mount -t tmpfs -o size=`+birdSpace+` tmpfs "$1" && touch "$1/.mounted" && exec sleep infinity`, "sh", dir)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	return lab.Eventually(ctx, 5*time.Millisecond, func() error {
		_, err := os.Stat(filepath.Join(fx.birdDir(), ".mounted"))
		return err
	})
}

// birdDir returns the folder of BIRD's configuration as the pod sees it.
func (fx *fixture) birdDir() string {
	return fmt.Sprintf("/proc/%d/root%s", fx.holder.PID(), fx.pod.BirdDir())
}

// spawn starts a process, which ends with the lab.
func (fx *fixture) spawn(ns *lab.NetNS, name string, args ...string) (*lab.Process, error) {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	return fx.Start(ns, name, args...)
}

// replaceArgs removes the arguments that create a development identity or depend on the speaker,
// and appends replacements.
func replaceArgs(args []string, others ...string) []string {
	args = slices.DeleteFunc(args, func(a string) bool {
		return slices.ContainsFunc([]string{"--identity=", "--dev-authority-dir=", "--lb-socket=", "--bird-socket="},
			func(flag string) bool { return strings.HasPrefix(a, flag) })
	})
	return append(args, others...)
}

func (fx *fixture) startLB() (*lab.Process, error) {
	args := replaceArgs(fx.pod.LBArgs(),
		slices.Concat([]string{
			"--identity=spiffe", "--drain-time=" + drainTime.String(), "--lease=" + lease.String(),
			"--dataplane=nftables", "--stale-grace=0s",
		}, fx.lbFlags)...)
	return fx.spawn(fx.Pod, "lb",
		slices.Concat([]string{"env", "SPIFFE_ENDPOINT_SOCKET=" + fx.lbID.api.Addr()}, args)...)
}

// startFrontend starts the frontend where BIRD's folder is mounted. Flaps have no back-off,
// which is 30 s at most: a ready VIP must be back sooner here. All routes are imported: the
// clients of a gateway are reachable only through it, so the other gateway's default route does
// not suffice.
func (fx *fixture) startFrontend() (*lab.Process, error) {
	args := replaceArgs(fx.pod.FrontendArgs(), slices.Concat([]string{
		"--identity=spiffe", "--lb-socket=unix://" + fx.proxy.path, "--drain-time=" + drainTime.String(), "--settle=" +
			settle.String(),
		"--flap-backoff=off",
	}, fx.speakerFlags(), fx.frontendFlags)...)
	return fx.spawn(fx.Pod, "frontend", slices.Concat([]string{
		"nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", fx.holder.PID()), "--", "env", "SPIFFE_ENDPOINT_SOCKET=" +
			fx.frontendID.api.Addr(),
	}, args)...)
}

func (fx *fixture) newSupervisor(name string, start func() (*lab.Process, error)) *supervisor {
	return &supervisor{
		name: name, start: start, timeline: fx.timeline,
		report: func(p *lab.Process, began time.Time, status int) {
			if status > 0 && fx.timeline.wasDown("trench", began) {
				fx.out.note("%s does not start with a bad trench file (status %d)", name, status)
				return
			}
			fx.report(violation{fmt.Sprintf("%s (pid %d) ended by itself with status %d", name, p.PID(), status), -1, -1})
		},
	}
}

func (fx *fixture) supervisor(name string) *supervisor {
	if name == "lb" {
		return fx.lb
	}
	return fx.frontend
}

// speakerPID returns the process ID of the pod's BIRD or bgpd, 0 if it does not run.
func (fx *fixture) speakerPID() int {
	if fx.external {
		return running(fx.speaker.process("bgpd"))
	}
	b, err := os.ReadFile(fx.pod.BirdSocket() + ".pid")
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return pid
}

// close ends everything and removes it.
func (fx *fixture) close() error {
	for _, s := range []*supervisor{fx.lb, fx.frontend} {
		if s != nil {
			s.end()
		}
	}
	var errs []error
	for _, each := range fx.targets {
		for _, l := range each {
			errs = append(errs, l.Down())
		}
	}
	errs = append(errs, fx.Close())
	if fx.proxy != nil {
		fx.proxy.close()
	}
	fx.tb.close()
	return errors.Join(append(errs, fx.tb.failed())...)
}

// tb implements the methods of testing.TB that the Workload API uses.
type tb struct {
	testing.TB // nothing else is called

	mu       sync.Mutex
	errs     []error
	cleanups []func()
}

func (t *tb) Helper()                           {}
func (t *tb) Fatal(args ...any)                 { t.Error(args...) }
func (t *tb) Errorf(format string, args ...any) { t.Error(fmt.Sprintf(format, args...)) }

func (t *tb) Error(args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.errs = append(t.errs, errors.New(fmt.Sprint(args...)))
}

func (t *tb) Cleanup(fn func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, fn)
}

func (t *tb) failed() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return errors.Join(t.errs...)
}

func (t *tb) close() {
	for i := len(t.cleanups) - 1; i >= 0; i-- {
		t.cleanups[i]()
	}
}
