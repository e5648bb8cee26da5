package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// networkKinds returns the faults of targets and wires.
func networkKinds() []*kind {
	target := func(arg int) string {
		return fmt.Sprintf("target %d of %s", arg%targetsPerStream+1, streams[arg/targetsPerStream].name)
	}
	ofTarget := func(arg int) scope { return ofStream(arg / targetsPerStream) }
	oneTarget := func(name string, weight int, d span) *kind {
		return &kind{
			Name: name, Args: touchable, Weight: weight, Least: d.least, Most: d.most, Breadth: ofTargets,
			describe: target, touches: ofTarget, holds: func(arg int) []string { return []string{resTarget(arg)} },
		}
	}
	wholeStream := &kind{
		Name: "stream down", Args: untouchedStream, Weight: 10, Least: 500 * time.Millisecond, Most: 5 * time.Second,
		Breadth:  ofTargets,
		describe: func(arg int) string { return "both targets of " + streams[arg].name }, touches: ofStream,
		holds: func(arg int) []string {
			return []string{resTarget(arg * targetsPerStream), resTarget(arg*targetsPerStream + 1)}
		},
	}
	return []*kind{
		oneTarget("target down", 4,
			ms(200, 4000)).by(func(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
			return fx.targetsDown(f.Arg)
		}),
		oneTarget("target flaps", 3, ms(500, 2500)).by(flap),
		oneTarget("target silent", 3, ms(500, 5000)).by(silence),
		wholeStream.by(func(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
			return fx.targetsDown(f.Arg*targetsPerStream, f.Arg*targetsPerStream+1)
		}),
		simple("internal link down", 3, ms(500, 4500), wide, everything, resInternal).by(
			func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
				heal, err := fx.linkDown(fx.Backend, "pod0", "net/internal")
				return together(heal, func(context.Context) error { return fx.routeAnswers() }), err
			}),
		simple("internal interface down", 3, ms(500, 4500), wide, everything, resInternal, resFamily(ipv6)).by(
			func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
				heal, err := fx.linkDown(fx.Pod, lab.Internal, "net/internal")
				// It comes back without its IPv6 address.
				return together(heal, func(context.Context) error {
					return fx.restoreInternal6()
				}), err
			}),
		simple("external link down", 3, ms(100, 4000), wide, everything, resExternal).by(
			func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
				// Gateway B's interface is a macvlan on gateway A's.
				return fx.linkDown(fx.Gateway, "trench0", pathSubject(gatewayA, "link"), pathSubject(gatewayB, "link"))
			}),
	}
}

// targetsDown makes targets refuse connections.
func (fx *fixture) targetsDown(targets ...int) (func(context.Context) error, error) {
	set := func(up bool) error {
		var errs []error
		for _, t := range targets {
			for f, l := range fx.targets[t] {
				if up {
					fx.timeline.set(targetSubject(t, f), healthy)
					errs = append(errs, l.Up())
				} else {
					errs = append(errs, l.Down())
					fx.timeline.set(targetSubject(t, f), down)
				}
			}
		}
		return errors.Join(errs...)
	}
	return func(context.Context) error { return set(true) }, set(false)
}

// flap has a target come and go until it is healed.
func flap(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	interval := time.Duration(20+f.Salt%480) * time.Millisecond
	done := make(chan error, 1)
	quit := make(chan struct{})
	go func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		var up func(context.Context) error
		var err error
		for err == nil {
			if up == nil {
				up, err = fx.targetsDown(f.Arg)
			} else {
				err, up = up(ctx), nil
			}
			select {
			case <-tick.C:
			case <-quit:
				if up != nil {
					err = errors.Join(err, up(ctx))
				}
				done <- err
				return
			}
		}
		<-quit
		done <- err
	}()
	return func(context.Context) error { close(quit); return <-done }, nil
}

// silence drops every packet to a target, without an ICMP error.
func silence(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	var rules []string
	for family := range families {
		rules = append(rules, fmt.Sprintf("%s daddr %s drop", []string{"ip", "ip6"}[family], targetAddr(f.Arg, family)))
	}
	return fx.drop(fx.Backend, fmt.Sprintf("target%d", f.Arg), "input", rules, down,
		targetSubject(f.Arg, ipv4)+"/silent", targetSubject(f.Arg, ipv6)+"/silent")
}

// drop adds nftables rules in a separate table.
func (fx *fixture) drop(ns *lab.NetNS, table, hook string, rules []string, s state,
	subjects ...string,
) (func(context.Context) error, error) {
	table = "inet chaos_" + table
	lines := []string{"add table " + table}
	for chain, hooks := range map[string]bool{"input": hook != "output", "output": hook != "input"} {
		if !hooks {
			continue
		}
		lines = append(lines, fmt.Sprintf("add chain %s %s { type filter hook %s priority 0; }", table, chain, chain))
		for _, r := range rules {
			lines = append(lines, fmt.Sprintf("add rule %s %s %s", table, chain, r))
		}
	}
	nft := func(command string) error {
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		_, err := ns.Run(ctx, "nft", command)
		return err
	}
	if err := nft(strings.Join(lines, "; ")); err != nil {
		return nil, err
	}
	fx.timeline.set2(s, subjects...)
	return func(context.Context) error {
		fx.timeline.set2(healthy, subjects...)
		return nft("delete table " + table)
	}, nil
}

// linkDown takes an interface down.
func (fx *fixture) linkDown(ns *lab.NetNS, dev string, subjects ...string) (func(context.Context) error, error) {
	if err := ns.IP("link", "set", dev, "down"); err != nil {
		return nil, err
	}
	fx.timeline.set2(down, subjects...)
	return func(context.Context) error {
		fx.timeline.set2(healthy, subjects...)
		return ns.IP("link", "set", dev, "up")
	}, nil
}
