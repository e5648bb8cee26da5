package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/nsptest"
)

// waitTimeout bounds every wait for an event that must happen. It detects a hang and is far
// above every expected duration.
const waitTimeout = 60 * time.Second

// checkPort is the port of the targets.
const checkPort = 5000

// fixture is a lab with a receiver in the gateway's place. The process that attracts the
// traffic, vipgate or the reference, is started on it. In every row both get fixtures of the
// same kind.
type fixture struct {
	*lab.Lab
	receiver *lab.Receiver
	pod      *lab.Pod
	vips     []vip.VIP
	families []vip.Family
	nsp      *nsptest.NSP // nil before startNSP
	policy   bool         // the VIPs have a policy, see withPolicy

	// ctx is cancelled with an error when a process ends unexpectedly.
	ctx    context.Context
	fail   context.CancelCauseFunc
	guards sync.WaitGroup
	lax    atomic.Bool
	ends   []func() error // closes the parts of the fixture before the lab, last first
}

// newFixture creates a fixture for n VIPs, which the families share in turn.
func newFixture(ctx context.Context, s *session, n int, families ...vip.Family) (_ *fixture, err error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	fx := &fixture{
		Lab: l, pod: &lab.Pod{Lab: l, Binaries: s.binaries, ProductTimers: true},
		vips: numberedVIPs(n, families), families: families,
	}
	fx.ctx, fx.fail = context.WithCancelCause(ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, fx.close())
		}
	}()
	config := lab.ReceiverConfig{Default: true}
	for _, f := range families {
		config.Local = append(config.Local, gatewayAddr(f))
	}
	if fx.receiver, err = lab.StartReceiver(l.Gateway, config); err != nil {
		return fx, err
	}
	fx.ends = append(fx.ends, fx.receiver.Close)
	return fx, fx.pod.WriteTrench(fx.trench())
}

func gatewayAddr(f vip.Family) netip.Addr {
	if f == vip.IPv4 {
		return lab.GatewayA4
	}
	return lab.GatewayA6
}

// numberedVIPs are n VIPs: 20.0.0.1/32, 20.0.0.2/32 …, or 2000::1/128 …, or
// both in turn.
func numberedVIPs(n int, families []vip.Family) []vip.VIP {
	vips := make([]vip.VIP, n)
	for i := range vips {
		k := i/len(families) + 1
		if families[i%len(families)] == vip.IPv4 {
			vips[i] = vip.Require(
				netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(k >> 16), byte(k >> 8), byte(k)}), 32).String(),
			)
		} else {
			vips[i] = vip.Require(netip.PrefixFrom(netip.AddrFrom16([16]byte{
				0: 0x20, 13: byte(k >> 16),
				14: byte(k >> 8), 15: byte(k),
			}), 128).String())
		}
	}
	return vips
}

// attractor returns the head of the trench file, up to the streams.
func (fx *fixture) attractor() string {
	var b strings.Builder
	b.WriteString("trench: trench-a\nattractor:\n  name: attractor-a-1\n  gateways:\n")
	for _, f := range fx.families {
		fmt.Fprintf(&b, "    - {name: gateway-%s, address: %q}\n", strings.ToLower(fmt.Sprint(f)), gatewayAddr(f))
	}
	b.WriteString("  vips:\n")
	for _, v := range fx.vips {
		fmt.Fprintf(&b, "    - %q\n", v)
	}
	if fx.policy {
		b.WriteString("  policies:\n    - ready: {communities: ['64512:100', '64512:200', '64512:1:100']}\n      vips:\n")
		for _, v := range fx.vips {
			fmt.Fprintf(&b, "        - %q\n", v)
		}
	}
	return b.String()
}

// withPolicy gives each VIP three communities if the method is the one with a policy.
func (fx *fixture) withPolicy(method string) error {
	if method != communities {
		return nil
	}
	fx.policy = true
	return fx.pod.WriteTrench(fx.trench())
}

// trench returns the trench file: one stream with one target serves all VIPs.
func (fx *fixture) trench() string {
	return fx.trenchWith(fmt.Sprintf(
		"{tcp: {port: %d}, interval: 100ms, timeout: 100ms, rise: 1, fall: 2}", checkPort,
	))
}

// trenchWith returns the trench file with another health check.
func (fx *fixture) trenchWith(check string) string {
	var b strings.Builder
	list := func(indent string) {
		for _, v := range fx.vips {
			fmt.Fprintf(&b, "%s- %q\n", indent, v)
		}
	}
	b.WriteString(fx.attractor())
	fmt.Fprintf(&b, `streams:
  - name: stream-a
    check: %s
    targets:
      - {name: target-1, ips: [%q, %q]}
    vips:
`, check, lab.Target1v4, lab.Target1v6)
	list("      ")
	return b.String()
}

// startTarget starts the target that serves all VIPs.
func (fx *fixture) startTarget() error {
	for _, a := range []netip.Addr{lab.Target1v4, lab.Target1v6} {
		t := lab.NewTarget(fx.Backend, netip.AddrPortFrom(a, checkPort))
		if err := t.Up(); err != nil {
			return err
		}
		fx.ends = append(fx.ends, t.Down)
	}
	return nil
}

// startFrontend starts the frontend. Flap back-off is off, so that the shortest reaction is
// measured.
func (fx *fixture) startFrontend(extra ...string) error {
	if err := fx.pod.StartFrontend(append([]string{"--flap-backoff=off"}, extra...)...); err != nil {
		return err
	}
	fx.guard(fx.pod.Frontend)
	return nil
}

// guard turns the unexpected end of a process into a failure, so that no caller waits for it
// until the timeout. expectExit disables this.
func (fx *fixture) guard(p *lab.Process) {
	fx.guards.Go(func() {
		<-p.Done()
		if !fx.lax.Load() {
			fx.fail(fmt.Errorf("%s ended by itself:\n%s", p.Name, p.Tail(20)))
		}
	})
}

// expectExit allows processes to end, because the measurement ends them.
func (fx *fixture) expectExit() { fx.lax.Store(true) }

// withTimeout returns a context for one wait.
func (fx *fixture) withTimeout() (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(fx.ctx, waitTimeout, fmt.Errorf("%v are over", waitTimeout))
}

// waitCount waits until the gateway holds n prefixes, and returns when it did first.
func (fx *fixture) waitCount(n int) (time.Time, error) {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	at, err := fx.receiver.WaitCount(ctx, n)
	return at, fx.explain(ctx, err)
}

// waitAll waits until the gateway holds all VIPs.
func (fx *fixture) waitAll() error { _, err := fx.waitCount(len(fx.vips)); return err }

// waitState waits until the gateway has received, after a mark, the announcement or withdrawal
// of a VIP.
func (fx *fixture) waitState(mark int, v vip.VIP, announced bool) (time.Time, error) {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	prefix := v.Prefix()
	heard, err := fx.receiver.WaitFor(
		ctx, mark, func(h lab.PrefixUpdate) bool { return h.Prefix == prefix && h.Withdrawn != announced },
	)
	return heard.At, fx.explain(ctx, err)
}

// waitEstablished waits until the gateway's sessions are up.
func (fx *fixture) waitEstablished() (time.Time, error) {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	at, err := fx.receiver.Established(ctx)
	return at, fx.explain(ctx, err)
}

// explain adds to the error of a wait its cause and the last log lines of lb and frontend.
func (fx *fixture) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		err = fmt.Errorf("%w (%w)", err, cause)
	}
	for _, p := range []*lab.Process{fx.pod.LB, fx.pod.Frontend} {
		if p != nil {
			err = fmt.Errorf("%w\n== last lines of %s\n%s", err, p.Name, p.Tail(10))
		}
	}
	return err
}

// pause waits for a duration, and returns an error if the run ends first.
func (fx *fixture) pause(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-fx.ctx.Done():
		return context.Cause(fx.ctx)
	}
}

// close ends everything. It can be called twice.
func (fx *fixture) close() error {
	fx.expectExit()
	fx.fail(nil)
	var errs []error
	for len(fx.ends) > 0 {
		last := len(fx.ends) - 1
		end := fx.ends[last]
		fx.ends = fx.ends[:last]
		errs = append(errs, end())
	}
	errs = append(errs, fx.Lab.Close())
	fx.guards.Wait()
	return errors.Join(errs...)
}

// path returns a file in the lab's folder.
func (fx *fixture) path(name string) string { return filepath.Join(fx.Dir, name) }

// on creates a fixture, calls a function with it, and always closes it.
func on(ctx context.Context, s *session, n int, families []vip.Family, do func(fx *fixture) error) (err error) {
	fx, err := newFixture(ctx, s, n, families...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fx.close()) }()
	return do(fx)
}

// writeWhole replaces a file by a rename.
func writeWhole(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
