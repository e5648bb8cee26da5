package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
)

// statusTimeout bounds the status commands after a failed step.
const statusTimeout = 5 * time.Second

// scenario runs the steps on the fixture.
type scenario struct {
	*fixture
	*printer
	options
	done int // acts so far
}

// step is one step: a cause, and its expected effect on the gateway's table.
type step struct {
	title string
	run   func(context.Context) error
}

// printIntroduction prints the topology and the purpose of the demo.
func (t *scenario) printIntroduction() {
	t.printf(`A VIP is advertised exactly while a gateway session is up and the load balancer
can forward this VIP. Everything here is real: processes, BIRD, wires, mutual TLS.

   target-1 --.
               >-- lb ==readiness over mTLS==> frontend + BIRD --BGP-- gateway
   target-2 --'    '------------- one trench pod ------------'         (BIRD)
                                  AS %d                                AS %d

   %s serves %s
   %s serves %s
   %s, which registers itself later, serves %s

Each table below is the gateway's own, out of its BIRD, which is asked every %d ms.
+ is new in it, ~ has changed, - is gone. Times run from the cause to the table.`,
		lab.PodAS, lab.GatewayAS, t.one.name, list(t.one.vips), t.two.name, list(t.two.vips), t.app.name, list(t.app.vips),
		pollInterval.Milliseconds())
}

// steps returns the steps before the pod is stopped.
func (t *scenario) steps() []step {
	all := t.vips()
	return []step{
		{"The pod starts: nothing is advertised before a target is ready", t.start},
		{t.one.name + " comes up: only its VIPs appear", func(ctx context.Context) error {
			return t.expectDecision(ctx, t.one.name+" listens", t.one.up, t.one.vips)
		}},
		{t.two.name + " comes up: its VIPs follow", func(ctx context.Context) error {
			return t.expectDecision(ctx, t.two.name+" listens", t.two.up, all)
		}},
		{t.one.name + " dies: only its VIPs go", func(ctx context.Context) error {
			return t.expectDecision(
				ctx, t.one.name+" refuses connections (ten checks in a row must fail, 10 ms apart)", t.one.down, t.two.vips,
			)
		}},
		{t.one.name + " lives again", func(ctx context.Context) error {
			return t.expectDecision(ctx, t.one.name+" listens", t.one.up, all)
		}},
		{"The load balancer is killed: every VIP goes", func(ctx context.Context) error {
			t.expectExit(t.pod.LB)
			return t.expect(ctx, fmt.Sprintf("kill -9 %d (lb)", t.pod.LB.PID()), t.pod.LB.Kill, nil)
		}},
		{"The load balancer starts again: they return", func(ctx context.Context) error {
			return t.expect(ctx, "lb is started; its targets have to be checked first", t.startLB, all)
		}},
		{"The gateway's sessions drop: Egress turns NOT_SERVING", func(ctx context.Context) error {
			return t.sessions(ctx, "disable", nil, healthv1.HealthCheckResponse_NOT_SERVING)
		}},
		{"The gateway's sessions return, and so does Egress", func(ctx context.Context) error {
			return t.sessions(ctx, "enable", all, healthv1.HealthCheckResponse_SERVING)
		}},
		{"An application registers its target by grpcurl, with its SVID: its VIPs appear", t.register},
		{"grpcurl is killed: the lease ends, the target drains, and its VIPs go", t.leaseEnds},
	}
}

// runSteps runs acts and, when one fails, prints the state that may explain it.
func (t *scenario) runSteps(ctx context.Context, acts []step) error {
	for _, a := range acts {
		t.done++
		t.printf("\n%d. %s", t.done, a.title)
		err := a.run(ctx)
		if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		if err == nil {
			err = t.err
		}
		if err != nil {
			t.printFailure(err)
			return fmt.Errorf("step %d, %s: %w", t.done, a.title, err)
		}
	}
	return nil
}

// printFailure prints the gateway's routes, the state of the pod, and the ends of the logs.
func (t *scenario) printFailure(err error) {
	t.printf("   FAILED: %v", err)
	t.printf("   the gateway holds:")
	last := t.watcher.Last()
	t.show(last, last)
	ctx, cancel := context.WithTimeout(context.Background(), statusTimeout)
	defer cancel()
	for _, c := range []struct{ program, socket string }{{"frontend", t.pod.FrontendAdmin()}, {"lb", t.pod.LBAdmin()}} {
		// Status exits with an error here, because the pod is not healthy.
		out, _ := t.pod.Run(ctx, c.program, "status", "--admin-socket=unix://"+c.socket)
		t.printf("   %s status:", c.program)
		t.quote(out)
	}
	for _, p := range []*lab.Process{t.pod.LB, t.pod.Frontend, t.gateway.Process} {
		if p != nil {
			t.printf("   last lines of %s (pid %d):", p.Name, p.PID())
			t.quote(p.Tail(25))
		}
	}
}

// start starts the pod and verifies that nothing is advertised although lb and frontend are up.
func (t *scenario) start(ctx context.Context) error {
	from, polls := time.Now(), t.watcher.Polls()
	t.printf("   lb and frontend are started; no target listens")
	if err := errors.Join(t.startLB(), t.startFrontend()); err != nil {
		return err
	}
	bound, cancel := withTimeout(ctx)
	defer cancel()
	if err := lab.Eventually(bound, 20*time.Millisecond, func() error { return t.up(bound) }); err != nil {
		return err
	}
	egress, err := t.egress.wait(ctx, healthv1.HealthCheckResponse_SERVING)
	if err != nil {
		return err
	}
	t.printf("   after %s both BGP sessions are up, Egress is SERVING, and the lb has checked every target",
		short(egress.Sub(from)))
	t.show(t.watcher.Last(), t.watcher.Last())
	if err := t.waitPause(ctx); err != nil {
		return err
	}
	for _, s := range t.watcher.Since(from) {
		if len(s.Routes) > 0 {
			return fmt.Errorf(
				"%s after the start the gateway held %s, expected nothing", short(s.At.Sub(from)), list(s.Prefixes()),
			)
		}
	}
	t.printf("   ok: empty at each of %d polls", t.watcher.Polls()-polls)
	return nil
}

// up returns an error unless all conditions of an advertisement hold, except ready targets.
func (t *scenario) up(ctx context.Context) error {
	s, err := admin.FrontendStatus(ctx, t.pod)
	if err != nil {
		return err
	}
	lb := s.GetLoadBalancer()
	if lb.GetFreshness() != frontendv1.Freshness_FRESHNESS_LIVE || !lb.GetSynced() {
		return fmt.Errorf("the frontend does not know every VIP: the readiness of the lb is %s, synced: %t %s",
			lb.GetFreshness(), lb.GetSynced(), lb.GetError())
	}
	if len(s.GetGateways()) < len(t.gateway.Peers) {
		return fmt.Errorf("the frontend knows %d BGP sessions, expected %d", len(s.GetGateways()), len(t.gateway.Peers))
	}
	for _, g := range s.GetGateways() {
		if !g.GetUp() {
			return fmt.Errorf("the BGP session with %s is not up: %s %s", g.GetName(), g.GetState(), g.GetLastError())
		}
	}
	return nil
}

// change is a running change.
type change struct {
	from    time.Time // of the cause
	before  lab.Snapshot
	want    []netip.Prefix
	updates map[netip.Prefix]int // updates of each VIP before
	after   lab.Snapshot         // the table as wanted
}

// newChange returns a change that begins now.
func (t *scenario) newChange(want []netip.Prefix) *change {
	c := &change{before: t.watcher.Last(), want: want, updates: map[netip.Prefix]int{}}
	for _, p := range c.untouched() {
		c.updates[p] = t.gateway.Updates(p.String())
	}
	c.from = time.Now()
	return c
}

// untouched returns the VIPs that the change must not affect.
func (c *change) untouched() []netip.Prefix {
	var stay []netip.Prefix
	for _, p := range c.before.Prefixes() {
		if slices.Contains(c.want, p) {
			stay = append(stay, p)
		}
	}
	return stay
}

// touched returns the VIPs that must be added or removed.
func (c *change) touched() []netip.Prefix {
	var turn []netip.Prefix
	for _, p := range append(c.before.Prefixes(), c.want...) {
		if c.before.Has(p) != slices.Contains(c.want, p) {
			turn = append(turn, p)
		}
	}
	return turn
}

// took returns the time from the cause to the gateway's table.
func (c *change) took() string { return short(c.after.At.Sub(c.from)) }

// apply runs a cause, waits until the gateway's table is as wanted, and prints it.
func (t *scenario) apply(ctx context.Context, say string, cause func() error, want []netip.Prefix) (*change, error) {
	t.printf("   %s", say)
	c := t.newChange(want)
	if err := cause(); err != nil {
		return c, err
	}
	bound, cancel := withTimeout(ctx)
	defer cancel()
	var err error
	if c.after, err = t.watcher.Wait(bound, exactly(want)); err != nil {
		return c, err
	}
	t.show(c.before, c.after)
	return c, nil
}

// expect runs a change that the lb does not decide.
func (t *scenario) expect(ctx context.Context, say string, cause func() error, want []netip.Prefix) error {
	c, err := t.apply(ctx, say, cause, want)
	if err != nil {
		return err
	}
	t.printf("   %s from the cause to the gateway's table", c.took())
	return t.verify(ctx, c)
}

// expectDecision is a change that the lb decides, so that the time of its decision is printed, too.
func (t *scenario) expectDecision(ctx context.Context, say string, cause func() error, want []netip.Prefix) error {
	c, err := t.apply(ctx, say, cause, want)
	if err != nil {
		return err
	}
	decided, err := t.decided(ctx)
	if err != nil {
		return err
	}
	history := t.watcher.Since(c.from)
	var slowest time.Duration
	for _, p := range c.touched() {
		slowest = max(slowest, changedAt(history, p).Sub(decided[p]))
	}
	t.printf("   %s from the cause to the gateway's table, %s of it after the lb's decision", c.took(), short(slowest))
	return t.verify(ctx, c)
}

// sessions takes the gateway's sessions down, or up, at the gateway.
func (t *scenario) sessions(ctx context.Context, command string, want []netip.Prefix, egress servingStatus) error {
	c, err := t.apply(ctx, fmt.Sprintf(`birdc %s "trench*" (on the gateway)`, command), func() error {
		_, err := t.control.Command(command + ` "trench*"`)
		return err
	}, want)
	if err != nil {
		return err
	}
	at, err := t.egress.wait(ctx, egress)
	if err != nil {
		return err
	}
	t.printf("   %s from the cause to the gateway's table; gRPC health of the frontend: Egress is %s after %s",
		c.took(), egress, short(at.Sub(c.from)))
	return t.verify(ctx, c)
}

// verify leaves the table on the screen to be read and then checks every snapshot since the
// cause.
func (t *scenario) verify(ctx context.Context, c *change) error {
	if err := t.waitPause(ctx); err != nil {
		return err
	}
	if err := exactly(c.want)(t.watcher.Last()); err != nil {
		return fmt.Errorf("it did not last: %w", err)
	}
	if err := verifySnapshots(c, t.watcher.Since(c.from)); err != nil {
		return err
	}
	if err := t.wantNoUpdates(c); err != nil {
		return err
	}
	stay := c.untouched()
	if len(stay) == 0 {
		t.printf("   ok")
		return nil
	}
	t.printf("   ok: the gateway received no update of %s", list(stay))
	return nil
}

// wantNoUpdates checks that the gateway received no update of the VIPs that the change must not
// affect.
func (t *scenario) wantNoUpdates(c *change) error {
	for _, p := range c.untouched() {
		if n := t.gateway.Updates(p.String()) - c.updates[p]; n > 0 {
			return fmt.Errorf("the gateway received %d updates of %s, expected none", n, p)
		}
	}
	return nil
}

// exactly is satisfied when the table holds exactly these prefixes, none of them de-preferred.
func exactly(want []netip.Prefix) func(lab.Snapshot) error {
	want = slices.SortedFunc(slices.Values(want), netip.Prefix.Compare)
	return func(s lab.Snapshot) error {
		if got := s.Prefixes(); !slices.Equal(got, want) {
			return fmt.Errorf("the gateway holds %s, expected %s", list(got), list(want))
		}
		for _, p := range want {
			if s.Routes[p].GracefulShutdown() {
				return fmt.Errorf("the gateway holds %s with 65535:0, expected without", p)
			}
		}
		return nil
	}
}

// verifySnapshots checks every table from a cause on, including the one before it: prefixes to
// keep were always present and unchanged, prefixes to add or remove changed once, and no other
// prefix ever appeared.
func verifySnapshots(c *change, history []lab.Snapshot) error {
	for _, s := range history[1:] {
		for _, p := range s.Prefixes() {
			if !c.before.Has(p) && !slices.Contains(c.want, p) {
				return fmt.Errorf("%s after the cause the gateway held %s, expected at no moment",
					short(s.At.Sub(c.from)), p)
			}
		}
	}
	if err := c.keptUntouched(history); err != nil {
		return err
	}
	for _, p := range c.touched() {
		turns := 0
		for i, s := range history[1:] {
			if s.Has(p) == history[i].Has(p) && s.Routes[p].Equal(history[i].Routes[p]) {
				continue
			}
			if turns++; turns > 1 {
				return fmt.Errorf("%s after the cause %s changed again, expected to come or go once",
					short(s.At.Sub(c.from)), p)
			}
		}
	}
	return nil
}

// keptUntouched checks that the VIPs that the change must not affect were present and unchanged.
func (c *change) keptUntouched(history []lab.Snapshot) error {
	for i, s := range history[1:] {
		for _, p := range c.untouched() {
			if is, has := s.Routes[p]; !has || !is.Equal(history[i].Routes[p]) {
				return fmt.Errorf("%s after the cause the gateway lost or changed %s, expected to keep it as it was",
					short(s.At.Sub(c.from)), p)
			}
		}
	}
	return nil
}

// changedAt returns when a prefix was added or removed first.
func changedAt(history []lab.Snapshot, p netip.Prefix) time.Time {
	for _, s := range history[1:] {
		if s.Has(p) != history[0].Has(p) {
			return s.At
		}
	}
	return history[0].At
}

// waitPause leaves a table to be read.
func (t *scenario) waitPause(ctx context.Context) error {
	timer := time.NewTimer(t.pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
