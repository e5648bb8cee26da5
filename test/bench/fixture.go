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
)

// patience bounds every wait for something that must happen: it is a bound of
// liveness, far above what is expected.
const patience = 60 * time.Second

// checkPort is where targets listen.
const checkPort = 5000

// stage is a laboratory with a receiver in the gateway's place. What attracts
// the traffic, vipgate or the reference, is started on it. In every row both
// get stages made alike.
type stage struct {
	*lab.Lab
	receiver *lab.Receiver
	pod      *lab.Pod
	vips     []vip.VIP
	families []vip.Family

	// ctx ends with an error when a process ends that should not.
	ctx    context.Context
	fail   context.CancelCauseFunc
	guards sync.WaitGroup
	lax    atomic.Bool
	ends   []func() error // what to end before the laboratory, last first
}

// newStage makes a stage for n VIPs, which the families share in turn.
func newStage(ctx context.Context, s *session, n int, families ...vip.Family) (_ *stage, err error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	st := &stage{Lab: l, pod: &lab.Pod{Lab: l, Binaries: s.binaries}, vips: numberedVIPs(n, families), families: families}
	st.ctx, st.fail = context.WithCancelCause(ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, st.close())
		}
	}()
	config := lab.ReceiverConfig{Default: true}
	for _, f := range families {
		config.Local = append(config.Local, gatewayAddr(f))
	}
	if st.receiver, err = lab.StartReceiver(l.Gateway, config); err != nil {
		return st, err
	}
	st.ends = append(st.ends, st.receiver.Close)
	return st, st.pod.WriteTrench(st.trench())
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
			vips[i] = vip.Require(netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(k >> 16), byte(k >> 8), byte(k)}), 32).String())
		} else {
			vips[i] = vip.Require(netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0x20, 13: byte(k >> 16), 14: byte(k >> 8), 15: byte(k)}), 128).String())
		}
	}
	return vips
}

// attractor is the head of the trench file, up to the streams.
func (st *stage) attractor() string {
	var b strings.Builder
	b.WriteString("trench: trench-a\nattractor:\n  name: attractor-a-1\n  gateways:\n")
	for _, f := range st.families {
		fmt.Fprintf(&b, "    - {name: gateway-%s, address: %q}\n", strings.ToLower(fmt.Sprint(f)), gatewayAddr(f))
	}
	b.WriteString("  vips:\n")
	for _, v := range st.vips {
		fmt.Fprintf(&b, "    - %q\n", v)
	}
	return b.String()
}

// trench is the trench file: one stream with one target serves all VIPs.
func (st *stage) trench() string {
	var b strings.Builder
	list := func(indent string) {
		for _, v := range st.vips {
			fmt.Fprintf(&b, "%s- %q\n", indent, v)
		}
	}
	b.WriteString(st.attractor())
	fmt.Fprintf(&b, `streams:
  - name: stream-a
    check: {tcp: {port: %d}, interval: 100ms, timeout: 100ms, rise: 1, fall: 2}
    targets:
      - {name: target-1, ips: [%q, %q]}
    vips:
`, checkPort, lab.Target1v4, lab.Target1v6)
	list("      ")
	return b.String()
}

// startTarget starts the target that serves all VIPs.
func (st *stage) startTarget() error {
	for _, a := range []netip.Addr{lab.Target1v4, lab.Target1v6} {
		t := lab.NewTarget(st.Backend, netip.AddrPortFrom(a, checkPort))
		if err := t.Up(); err != nil {
			return err
		}
		st.ends = append(st.ends, t.Down)
	}
	return nil
}

// startFrontend starts the frontend. Flap back-off is off: what is measured is
// how fast it can be.
func (st *stage) startFrontend(extra ...string) error {
	if err := st.pod.StartFrontend(append([]string{"--flap-backoff=off"}, extra...)...); err != nil {
		return err
	}
	st.guard(st.pod.Frontend)
	return nil
}

// guard makes the end of a process a failure, so that nobody waits in vain for
// what it should have done, unless mayEnd was called.
func (st *stage) guard(p *lab.Process) {
	st.guards.Go(func() {
		<-p.Done()
		if !st.lax.Load() {
			st.fail(fmt.Errorf("%s ended by itself:\n%s", p.Name, p.Tail(20)))
		}
	})
}

// mayEnd says that processes end by what is measured.
func (st *stage) mayEnd() { st.lax.Store(true) }

// patient returns a context for one wait.
func (st *stage) patient() (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(st.ctx, patience, fmt.Errorf("%v are over", patience))
}

// waitCount waits until the gateway holds n prefixes, and returns since when.
func (st *stage) waitCount(n int) (time.Time, error) {
	ctx, cancel := st.patient()
	defer cancel()
	at, err := st.receiver.WaitCount(ctx, n)
	return at, st.explain(ctx, err)
}

// waitState waits until the gateway hears after a mark that a VIP is announced
// or withdrawn.
func (st *stage) waitState(mark int, v vip.VIP, announced bool) (time.Time, error) {
	ctx, cancel := st.patient()
	defer cancel()
	prefix := v.Prefix()
	heard, err := st.receiver.WaitFor(ctx, mark, func(h lab.PrefixUpdate) bool { return h.Prefix == prefix && h.Withdrawn != announced })
	return heard.At, st.explain(ctx, err)
}

// waitEstablished waits until the gateway's sessions are up.
func (st *stage) waitEstablished() (time.Time, error) {
	ctx, cancel := st.patient()
	defer cancel()
	at, err := st.receiver.Established(ctx)
	return at, st.explain(ctx, err)
}

// explain adds to the error of a wait why it ended, and what the frontend said.
func (st *stage) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		err = fmt.Errorf("%w (%w)", err, cause)
	}
	for _, p := range []*lab.Process{st.pod.LB, st.pod.Frontend} {
		if p != nil {
			err = fmt.Errorf("%w\n== last lines of %s\n%s", err, p.Name, p.Tail(10))
		}
	}
	return err
}

// pause waits a moment, and returns an error if the run ends meanwhile.
func (st *stage) pause(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-st.ctx.Done():
		return context.Cause(st.ctx)
	}
}

// close ends everything. It can be called twice.
func (st *stage) close() error {
	st.mayEnd()
	st.fail(nil)
	var errs []error
	for len(st.ends) > 0 {
		last := len(st.ends) - 1
		end := st.ends[last]
		st.ends = st.ends[:last]
		errs = append(errs, end())
	}
	errs = append(errs, st.Lab.Close())
	st.guards.Wait()
	return errors.Join(errs...)
}

// path is a file in the laboratory's folder.
func (st *stage) path(name string) string { return filepath.Join(st.Dir, name) }

// on makes a stage, does something on it, and clears it whatever happens.
func on(ctx context.Context, s *session, n int, families []vip.Family, do func(st *stage) error) (err error) {
	st, err := newStage(ctx, s, n, families...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.close()) }()
	return do(st)
}

// writeWhole replaces a file by a rename.
func writeWhole(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
