package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

const (
	// targetsPerStream is the number of targets of each stream, which has one VIP and needs all of
	// its targets.
	targetsPerStream = 10
	// targetsPrefix contains the addresses of the targets: all are in the backend's namespace and
	// share one listener.
	targetsPrefix = "10.99.0.0/16"

	targetInterval = time.Second
	targetTimeout  = 500 * time.Millisecond

	targetsCPUGoal   = "max ≤ 25"
	targetsStartGoal = "max ≤ 5"

	// readyTargets counts, for each VIP, the targets that are ready.
	readyTargets = "vipgate_lb_vip_ready_targets{"

	// fieldChecker is the argument that makes this program the reference of row 14.
	fieldChecker = "field-checker"
)

// numberedTarget returns the address of the target with this index.
func numberedTarget(i int) netip.Addr {
	a := netip.MustParsePrefix(targetsPrefix).Addr().As4()
	a[2], a[3] = byte(i>>8), byte(i)
	return netip.AddrFrom4(a)
}

// targetsTrench returns a trench file with one stream for each VIP of the fixture.
func (fx *fixture) targetsTrench() string {
	var b strings.Builder
	b.WriteString(fx.attractor())
	b.WriteString("streams:\n")
	for i, v := range fx.vips {
		fmt.Fprintf(&b, "  - name: stream-%d\n    vips: [%q]\n    minReady: %d\n    check: {tcp: {port: %d}, "+
			"interval: %s, timeout: %s}\n    targets:\n",
			i, v, targetsPerStream, checkPort, targetInterval, targetTimeout)
		for j := range targetsPerStream {
			k := i*targetsPerStream + j
			fmt.Fprintf(&b, "      - {name: target-%d, ips: [%q]}\n", k, numberedTarget(k))
		}
	}
	return b.String()
}

// startTargets starts all targets: a route for the addresses, and a listener in this process, so
// that the cost of accepting is not measured.
func (fx *fixture) startTargets() error {
	t := lab.NewTarget(fx.Backend, netip.AddrPortFrom(netip.IPv4Unspecified(), checkPort))
	if err := errors.Join(
		fx.Backend.IP("route", "add", "local", targetsPrefix, "dev", "lo"),
		fx.Pod.IP("route", "add", targetsPrefix, "via", lab.Target1v4.String()),
		t.Up(),
	); err != nil {
		return err
	}
	fx.ends = append(fx.ends, t.Down)
	return nil
}

// measureTargets is row 14.
func measureTargets(ctx context.Context, s *session) error {
	return errors.Join(measureManyTargets(ctx, s), measureCheckPaths(ctx, s), measureCheckKinds(ctx, s))
}

func measureManyTargets(ctx context.Context, s *session) error {
	n := s.sizes([]int{10_000}, []int{200})[0]
	return on(ctx, s, n/targetsPerStream, oneFamily, func(fx *fixture) error {
		if err := errors.Join(fx.pod.WriteTrench(fx.targetsTrench()), fx.startTargets()); err != nil {
			return err
		}
		started := Measurement{
			Row: 14, What: "lb starts → every target READY", Method: vipgate, N: n, Unit: "s", Goal: targetsStartGoal,
		}
		for range s.repeats(5, 1) {
			if fx.pod.LB != nil {
				if _, err := fx.endAll(fx.pod.LB); err != nil {
					return err
				}
			}
			began := time.Now()
			if err := fx.pod.StartLB(); err != nil {
				return err
			}
			if err := fx.waitTargets(n); err != nil {
				return err
			}
			started.Samples = append(started.Samples, time.Since(began).Seconds())
		}
		s.record(started)
		if err := fx.measureShare(s, fx.pod.LB, n, vipgate); err != nil {
			return err
		}
		// No target went down in the meantime, so only successful checks were measured.
		if err := fx.waitTargets(n); err != nil {
			return err
		}
		if _, err := fx.endAll(fx.pod.LB); err != nil {
			return err
		}
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("reference of row 14: %w", err)
		}
		p, err := fx.Start(fx.Pod, "reference-checker", self, fieldChecker, strconv.Itoa(n))
		if err != nil {
			return err
		}
		defer fx.expectExit()
		fx.guard(p)
		return fx.measureShare(s, p, n, reference)
	})
}

// measureShare measures the share of one core that a checking process takes.
func (fx *fixture) measureShare(s *session, p *lab.Process, n int, method string) error {
	if err := fx.pause(s.lasts(10*time.Second, 300*time.Millisecond)); err != nil {
		return err
	}
	share, err := fx.share(p, s.lasts(time.Minute, 300*time.Millisecond))
	if err != nil {
		return err
	}
	m := Measurement{
		Row: 14, What: "targets checked each second: share of one core", Method: method, N: n, Unit: "%",
		Samples: []float64{share},
	}
	if method == vipgate {
		m.Goal = targetsCPUGoal
	}
	s.record(m)
	return nil
}

// share returns the share of one core, in percent, that a process takes for some time.
func (fx *fixture) share(p *lab.Process, d time.Duration) (float64, error) {
	before, err := cpuTime(p.PID())
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := fx.pause(d); err != nil {
		return 0, err
	}
	after, err := cpuTime(p.PID())
	if err != nil {
		return 0, fmt.Errorf("%s did not live through its checks: %w", p.Name, err)
	}
	return 100 * float64(after-before) / float64(time.Since(began)), nil
}

// waitTargets waits until lb reports n ready targets.
func (fx *fixture) waitTargets(n int) error {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	err := lab.Eventually(ctx, 20*time.Millisecond, func() error {
		ready, err := fx.metrics(lab.LBMetrics, readyTargets)
		if err != nil {
			return err
		}
		if ready[0] != float64(n) {
			return fmt.Errorf("%v of %d targets are ready", ready[0], n)
		}
		return nil
	})
	return fx.explain(ctx, err)
}

// runFieldChecker is the field's common technique: each target has a goroutine
// with a ticker, which opens a connection by package net and closes it. It runs
// until it is killed.
func runFieldChecker(args []string, stderr io.Writer) int {
	if len(args) != 1 {
		fmt.Fprintf(stderr, "%s wants the number of targets\n", fieldChecker)
		return exitUsage
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", fieldChecker, err)
		return exitUsage
	}
	dialer := &net.Dialer{Timeout: targetTimeout, KeepAlive: -1}
	dialer.SetMultipathTCP(false)
	failed := make(chan error)
	for i := range n {
		address := netip.AddrPortFrom(numberedTarget(i), checkPort).String()
		go func() {
			time.Sleep(targetInterval * time.Duration(i) / time.Duration(n)) // spread over the interval
			for range time.Tick(targetInterval) {
				conn, err := dialer.Dial("tcp", address)
				if err != nil {
					failed <- err
					continue
				}
				// Close with RST, as vipgate does: sockets in TIME_WAIT would cost more.
				_ = conn.(*net.TCPConn).SetLinger(0)
				_ = conn.Close()
			}
		}()
	}
	for err := range failed {
		fmt.Fprintln(stderr, err)
	}
	return exitFailed
}
