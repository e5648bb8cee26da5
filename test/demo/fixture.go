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
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
)

const (
	// pollInterval is the interval at which the gateway's table is polled.
	pollInterval = 2 * time.Millisecond
	// waitTimeout bounds every wait. It detects a hang and is far above every expected duration.
	waitTimeout = 30 * time.Second
	// checkPort is the port of the targets, and appPort the port of the target that registers
	// itself; it shares addresses with target-2.
	checkPort = 5000
	appPort   = 5001
	// appStream is the stream whose targets register.
	appStream = "stream-3"
	// grace is how long a registered target outlives its call, and drainTime how long it drains after
	// that: longer than a machine stalls, so that the de-preferred routes are seen.
	grace, drainTime = 2 * time.Second, 4 * time.Second
)

// service is a target with the VIPs that it alone serves.
type service struct {
	name      string
	addrs     []netip.Addr
	vips      []netip.Prefix
	listeners []*lab.Target // one of an address
}

// up makes the target accept connections.
func (s *service) up() error {
	var errs []error
	for _, l := range s.listeners {
		errs = append(errs, l.Up())
	}
	return errors.Join(errs...)
}

// down makes the target refuse connections.
func (s *service) down() error {
	var errs []error
	for _, l := range s.listeners {
		errs = append(errs, l.Down())
	}
	return errors.Join(errs...)
}

// fixture is everything that runs in the demo.
type fixture struct {
	lab      *lab.Lab
	pod      *lab.Pod
	gateway  *lab.Gateway
	control  *lab.Control // of the gateway's BIRD
	watcher  *lab.RouteWatcher
	one, two *service
	app      *service // registers itself
	egress   *healthWatch
	grpcurl  *lab.Process // that holds the registration; nil before

	// fail is called when a process ended unexpectedly.
	fail   func(error)
	guards sync.WaitGroup
	mu     sync.Mutex
	lax    bool                  // every process may end
	leave  map[*lab.Process]bool // these may end
}

// newFixture creates the lab with a gateway; no process of the pod runs yet. fail is called when
// a process ended unexpectedly.
func newFixture(ctx context.Context, binaries string, fail func(error)) (_ *fixture, err error) {
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	s := &fixture{
		lab: l, pod: &lab.Pod{Lab: l, Binaries: binaries},
		one: newService(l, "target-1", checkPort, []netip.Addr{lab.Target1v4, lab.Target1v6}, "20.0.0.1/32",
			"2000::1/128"),
		two: newService(l, "target-2", checkPort, []netip.Addr{lab.Target2v4, lab.Target2v6}, "20.0.0.2/32",
			"2000::2/128"),
		app:  newService(l, "app-1", appPort, []netip.Addr{lab.Target2v4, lab.Target2v6}, "20.0.0.3/32", "2000::3/128"),
		fail: fail, leave: map[*lab.Process]bool{},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := s.pod.WriteTrench(s.trench()); err != nil {
		return s, err
	}
	if s.gateway, err = l.StartGateway(lab.GatewayA()); err != nil {
		return s, err
	}
	s.guard(s.gateway.Process)
	bound, cancel := withTimeout(ctx)
	defer cancel()
	err = lab.Eventually(bound, 10*time.Millisecond, func() (err error) {
		s.control, err = s.gateway.Control(bound)
		return err
	})
	if err != nil {
		return s, errors.Join(
			fmt.Errorf("the gateway's BIRD does not answer: %w", err), errors.New(s.gateway.Process.Tail(10)),
		)
	}
	if s.watcher, err = s.gateway.WatchRoutes(ctx, pollInterval); err != nil {
		return s, err
	}
	s.egress, err = watchHealth(l.Pod, lab.FrontendHealth, "Egress")
	return s, err
}

func newService(l *lab.Lab, name string, port uint16, addrs []netip.Addr, vips ...string) *service {
	s := &service{name: name, addrs: addrs}
	for _, v := range vips {
		s.vips = append(s.vips, netip.MustParsePrefix(v))
	}
	for _, a := range addrs {
		s.listeners = append(s.listeners, lab.NewTarget(l.Backend, netip.AddrPortFrom(a, port)))
	}
	return s
}

// vips returns the VIPs of the targets in the trench file.
func (s *fixture) vips() []netip.Prefix {
	return append(append([]netip.Prefix(nil), s.one.vips...), s.two.vips...)
}

// trench returns the trench file: a refused connection fails a target sooner than by default, so that
// its effect is soon visible.
func (s *fixture) trench() string {
	stream := func(name string, v *service) string {
		return fmt.Sprintf(`  - name: %s
    vips: [%q, %q]
    check: {tcp: {port: %d}, %s}
    targets:
      - {name: %s, ips: [%q, %q]}
`, name, v.vips[0], v.vips[1], checkPort, lab.CheckTimers, v.name, v.addrs[0],
			v.addrs[1])
	}
	return fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%q, %q, %q, %q, %q, %q]
  gateways:
    - {name: gateway-a4, address: %q, %s}
    - {name: gateway-a6, address: %q, %s}
streams:
`, s.one.vips[0], s.one.vips[1], s.two.vips[0], s.two.vips[1], s.app.vips[0], s.app.vips[1],
		lab.GatewayA4, lab.HoldTime, lab.GatewayA6, lab.HoldTime) +
		stream("stream-1", s.one) + stream("stream-2", s.two) + fmt.Sprintf(`  - name: %s
    vips: [%q, %q]
    check: {tcp: {port: %d}, %s}
    drainTime: %v
`, appStream, s.app.vips[0], s.app.vips[1], appPort,
		strings.Replace(lab.CheckTimers, "rise: 1", "rise: 2", 1), drainTime)
}

// startLB starts the lb, guarded.
func (s *fixture) startLB() error {
	if err := s.pod.StartLB("--source=file", "--source=registry", "--target-id="+appStream+"="+lab.AppID,
		"--registry-settle=0s", fmt.Sprintf("--registry-grace=%v", grace)); err != nil {
		return err
	}
	s.guard(s.pod.LB)
	return s.notePID(s.pod.LB)
}

// startFrontend starts the frontend, guarded.
func (s *fixture) startFrontend() error {
	if err := s.pod.StartFrontend(); err != nil {
		return err
	}
	s.guard(s.pod.Frontend)
	return s.notePID(s.pod.Frontend)
}

// pidFile holds the process ID of a container of the pod, for the user.
func (s *fixture) pidFile(name string) string { return filepath.Join(s.lab.Dir, name+".pid") }

func (s *fixture) notePID(p *lab.Process) error {
	if err := os.WriteFile(s.pidFile(p.Name), fmt.Appendln(nil, p.PID()), 0o600); err != nil {
		return fmt.Errorf("pid of %s: %w", p.Name, err)
	}
	return nil
}

// guard turns the unexpected end of a process into a failure, so that no caller waits for it
// until the timeout. expectExit disables this for a process.
func (s *fixture) guard(p *lab.Process) {
	s.guards.Go(func() {
		<-p.Done()
		s.mu.Lock()
		expected := s.lax || s.leave[p]
		s.mu.Unlock()
		if expected {
			return
		}
		status, err := p.Wait(context.Background())
		s.fail(errors.Join(fmt.Errorf("%s ended by itself with status %d", p.Name, status), err))
	})
}

// expectExit allows these processes to end; without arguments, all processes.
func (s *fixture) expectExit(processes ...*lab.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lax = s.lax || len(processes) == 0
	for _, p := range processes {
		s.leave[p] = true
	}
}

// withTimeout returns a context for one wait.
func withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, waitTimeout, fmt.Errorf("%v are over", waitTimeout))
}

// decided requests from the lb the time of its last decision about each VIP.
func (s *fixture) decided(ctx context.Context) (map[netip.Prefix]time.Time, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	r, err := admin.LBStatus(ctx, s.pod)
	if err != nil {
		return nil, fmt.Errorf("status of the lb: %w", err)
	}
	since := map[netip.Prefix]time.Time{}
	for _, v := range r.GetVips() {
		p, err := netip.ParsePrefix(v.GetVip())
		if err != nil {
			return nil, fmt.Errorf("status of the lb: %w", err)
		}
		since[p] = v.GetReadiness().GetSince().AsTime()
	}
	return since, nil
}

// close ends every process and removes every namespace and file.
func (s *fixture) close() error {
	s.expectExit()
	var errs []error
	if s.egress != nil {
		errs = append(errs, s.egress.close())
	}
	if s.watcher != nil {
		errs = append(errs, s.watcher.Close())
	}
	if s.control != nil {
		errs = append(errs, s.control.Close())
	}
	errs = append(errs, s.one.down(), s.two.down(), s.app.down(), s.lab.Close())
	s.guards.Wait()
	return errors.Join(errs...)
}
