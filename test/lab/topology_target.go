package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
)

// addTarget adds a target, whose application does not serve yet.
func (t *Topology) addTarget(n int) error {
	ns, err := t.create(WithoutDAD)
	if err != nil {
		return err
	}
	t.Targets = append(t.Targets, &App{
		Name: fmt.Sprintf("target-%d", n), NS: ns, Addrs: TargetAddrs(n),
		backend: t.Backend, port: fmt.Sprintf("target%d", n),
		dir: filepath.Join(t.Dir, fmt.Sprintf("target-%d", n)),
	})
	return t.wireTarget(n)
}

// wireTarget connects a target and makes it accept packets to VIPs and reply to them.
func (t *Topology) wireTarget(n int) error {
	a := t.Targets[n-1]
	if err := errors.Join(
		a.NS.Sysctl("net.ipv4.conf.all.rp_filter", "0"), a.NS.Sysctl("net.ipv4.conf.default.rp_filter", "0"),
		ip("link", "add", "net0", "netns", a.NS.name, "type", "veth", "peer", "name", a.port, "netns", t.Backend.name),
		t.plug(t.Backend, "targets", a.port, a.NS, "net0", fmt.Sprintf("02:76:67:04:%02x:%02x", a.replaced, n),
			prefix(a.Addrs[0], 16), prefix(a.Addrs[1], 64)),
	); err != nil {
		return err
	}
	if t.replies == ECMP {
		return t.spreadReplies(a)
	}
	return t.startSidecar(n)
}

// replyTable is the routing table of replies over all pods.
const replyTable = "100"

// spreadReplies makes a target accept packets to VIPs and reply over all pods.
func (t *Topology) spreadReplies(a *App) error {
	var lines []string
	for f, anywhere := range []string{"0.0.0.0/0", "::/0"} {
		line := "route add " + anywhere + " table " + replyTable
		for pod := range t.Pods {
			line += fmt.Sprintf(" nexthop via %s dev net0", PodInternal(pod + 1)[f])
		}
		lines = append(lines, line)
	}
	rules := map[bool][]string{} // true for IPv6
	for _, vip := range t.VIPs {
		lines = append(lines, fmt.Sprintf("route add local %s dev lo", vip))
		rules[vip.Is6()] = append(rules[vip.Is6()], fmt.Sprintf("rule add from %s lookup %s", vip, replyTable))
	}
	return errors.Join(
		hashFlows(a.NS),
		// Do not select a pod whose neighbor entry is invalid.
		a.NS.Sysctl("net.ipv4.fib_multipath_use_neigh", "1"),
		// No ARP replies for addresses of lo: only the pods have routes to a VIP.
		a.NS.Sysctl("net.ipv4.conf.all.arp_ignore", "1"), a.NS.Sysctl("net.ipv4.conf.all.arp_announce", "2"),
		a.NS.Batch(lines...), a.NS.Batch(rules[false]...), a.NS.batch([]string{"-6"}, rules[true]),
	)
}

// startSidecar starts `target run` for a target and waits until it is ready.
func (t *Topology) startSidecar(n int) (err error) {
	a := t.Targets[n-1]
	fail := func(err error) error { return fmt.Errorf("sidecar of %s: %w\n%s", a.Name, err, a.Sidecar.Tail(20)) }
	program := filepath.Join(t.binaries, "target")
	args := []string{
		program, "run", "--interface=net0", "--admin-socket=unix://" + a.Admin(), "--log-format=text",
	}
	for _, vip := range t.VIPs {
		// VIPs may share a pool, and pools must not overlap.
		if arg := "--pool=" + pool(vip).String(); !slices.Contains(args, arg) {
			args = append(args, arg)
		}
	}
	if n == t.once {
		args = append(args, "--once")
	}
	if err := os.MkdirAll(a.dir, 0o700); err != nil {
		return err
	}
	if a.Sidecar, err = t.startIn(a.dir, a.NS, "target", args...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	if n == t.once {
		if status, err := a.Sidecar.Wait(ctx); err != nil || status != 0 {
			return fail(errors.Join(fmt.Errorf("exit status %d", status), err))
		}
		return nil
	}
	if err := Eventually(ctx, pollInterval, func() error {
		_, err := a.NS.Run(ctx, program, "healthcheck")
		return err
	}); err != nil {
		return fail(err)
	}
	return nil
}

// pool returns the prefix from which a VIP is taken.
func pool(vip netip.Addr) netip.Prefix {
	bits := 24
	if vip.Is6() {
		bits = 64
	}
	return netip.PrefixFrom(vip, bits).Masked()
}

// ReplaceTarget replaces a target by a new one, with a new network namespace, a new link address
// and a new sidecar. The new application does not serve yet; the old one is aborted if it still
// serves.
func (t *Topology) ReplaceTarget(a *App) error {
	fail := func(err error) error { return fmt.Errorf("replace %s: %w", a.Name, err) }
	if err := a.Abort(); err != nil {
		return fail(err)
	}
	a.NS.endProcesses()
	if err := a.NS.IP("link", "del", "net0"); err != nil {
		return fail(err)
	}
	ns, err := Create(WithoutDAD)
	if err != nil {
		return fail(err)
	}
	old := a.NS
	t.others[slices.Index(t.others, old)] = ns
	a.move(ns)
	if err := errors.Join(old.Close(), t.wireTarget(slices.Index(t.Targets, a)+1)); err != nil {
		return fail(err)
	}
	return nil
}
