package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/test/lab"
)

// phase returns a random wait up to a period, so that causes are spread over all phases of
// periodic work.
func phase(period time.Duration) time.Duration { return rand.N(period) }

// loss is a kind of loss of a process.
type loss struct {
	name   string
	signal syscall.Signal
	goal   string
}

// measureLBLoss is row 3: the lb is killed or stopped.
func measureLBLoss(ctx context.Context, s *session) error {
	const n = 1000
	losses := []loss{
		{"lb kill -9", syscall.SIGKILL, "median ≤ 3, p99 ≤ 10"},
		{"lb SIGSTOP, lease 300 ms", syscall.SIGSTOP, "p99 ≤ 350"},
	}
	lose := func(losses []loss, flags ...string) error {
		return on(ctx, s, n, oneFamily, func(fx *fixture) error {
			fx.expectExit()
			start := func() error { return fx.pod.StartLB(flags...) }
			// The target has no VIP, to which a check goes with a data plane.
			text := strings.ReplaceAll(fx.trench(), "interval: 100ms", "via: address, interval: 100ms")
			if err := errors.Join(fx.pod.WriteTrench(text), fx.startTarget(), start(), fx.startFrontend()); err != nil {
				return err
			}
			for _, l := range losses {
				m := Measurement{Row: 3, Method: vipgate, Goal: l.goal}
				err := loseLBs(s, fx, m, l, s.repeats(100, 1), 200*time.Millisecond, fx.waitAll, start)
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := lose(losses, "--lease=300ms"); err != nil {
		return err
	}
	// With a data plane the process has more sockets and memory, which the kernel frees first.
	withPlane := []loss{{"lb kill -9, --dataplane=nftables", syscall.SIGKILL, "p99 ≤ 10"}}
	if err := lose(withPlane, "--dataplane=nftables", "--stale-grace=0s"); err != nil || s.quick {
		return err
	}
	return on(ctx, s, n, oneFamily, func(fx *fixture) error {
		fx.expectExit()
		start := func() error { return fx.pod.StartLB("--lease=300ms") }
		if err := errors.Join(fx.startTarget(), start()); err != nil {
			return err
		}
		r, err := fx.startReference()
		if err != nil {
			return err
		}
		alive, err := r.watchLB()
		if err != nil {
			return err
		}
		repeats := s.repeats(30, 0)
		s.note(3, "the reference asks the lb's health once a second; %d repeats, as each takes seconds", repeats)
		for _, l := range losses {
			err := loseLBs(s, fx, Measurement{Row: 3, Method: reference}, l, repeats, referencePoll,
				func() error { return fx.waitAlive(alive) }, start)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// loseLBs loses the lb of a fixture repeatedly, at a random moment of the period, and records
// how long the last withdrawal took. alive waits until the lb can be lost, start starts it
// again.
func loseLBs(s *session, fx *fixture, m Measurement, l loss, repeats int, period time.Duration,
	alive, start func() error,
) error {
	m.What, m.N, m.Unit = l.name+" → last withdraw", len(fx.vips), "ms"
	for range repeats {
		if err := alive(); err != nil {
			return err
		}
		if err := fx.pause(100*time.Millisecond + phase(period)); err != nil {
			return err
		}
		took, err := fx.lose(l, fx.pod.LB)
		if err != nil {
			return err
		}
		m.Samples = append(m.Samples, took)
		if err := errors.Join(fx.pod.LB.Kill(), start()); err != nil {
			return err
		}
	}
	s.record(m)
	return nil
}

// lose loses a process and returns the time in milliseconds until the gateway held no prefix.
func (fx *fixture) lose(l loss, p *lab.Process) (float64, error) {
	start := time.Now()
	if err := p.Signal(l.signal); err != nil {
		return 0, err
	}
	at, err := fx.waitCount(0)
	return milliseconds(at.Sub(start)), err
}

// waitAlive waits until all VIPs are at the gateway and the reference has detected that the lb
// is healthy.
func (fx *fixture) waitAlive(alive <-chan struct{}) error {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	select {
	case <-alive:
	case <-ctx.Done():
		return fmt.Errorf("the reference does not see that the lb lives: %w", context.Cause(ctx))
	}
	_, err := fx.waitCount(len(fx.vips))
	return err
}

// watchLB has the reference poll the lb's health once a second, and configure all VIPs up or
// down when the status changes. The channel gets a value when the VIPs went up. It ends with the
// fixture.
func (r *referenceRouter) watchLB() (alive <-chan struct{}, err error) {
	fx := r.fixture
	conn, err := dialTCP(fx.Pod, lab.LBHealth)
	if err != nil {
		return nil, err
	}
	client := healthv1.NewHealthClient(conn)
	ctx, cancel := context.WithCancel(fx.ctx)
	done, up := make(chan struct{}), make(chan struct{}, 1)
	go func() {
		defer close(done)
		tick := time.NewTicker(referencePoll)
		defer tick.Stop()
		was := false
		for {
			// A stopped lb accepts the request but does not answer, so the poll needs a timeout.
			asking, end := context.WithTimeout(ctx, referencePoll/2)
			answer, err := client.Check(asking, &healthv1.HealthCheckRequest{Service: "Readiness"})
			end()
			// A lost lb causes Unavailable or DeadlineExceeded; any other error is a fault of the
			// benchmark.
			if code := grpcstatus.Code(err); code != codes.OK && code != codes.Unavailable &&
				code != codes.DeadlineExceeded && ctx.Err() == nil {
				fx.fail(fmt.Errorf("health of the lb: %w", err))
			}
			if is := answer.GetStatus() == healthv1.HealthCheckResponse_SERVING; is != was && ctx.Err() == nil {
				was = is
				if err := r.set(is, r.all()...); err != nil {
					fx.fail(err)
				}
				if is {
					up <- struct{}{}
				}
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	fx.ends = append(fx.ends, func() error { cancel(); <-done; return conn.Close() })
	return up, nil
}

// sideBySide is the number of labs that wait for a hold time concurrently.
const sideBySide = 5

// measureFrontendLoss is row 4: the frontend is killed or stopped. Measurements that last a hold
// time run in several labs concurrently: all of them only wait.
func measureFrontendLoss(ctx context.Context, s *session) error {
	const n = 1000
	measure := func(ctx context.Context, what, goal string, signal syscall.Signal, labs int) error {
		m := Measurement{Row: 4, What: what, Method: vipgate, N: n, Unit: "ms", Goal: goal}
		var mu sync.Mutex
		g, ctx := errgroup.WithContext(ctx)
		for range labs {
			g.Go(func() error {
				samples, err := loseFrontends(ctx, s, n, loss{what, signal, goal}, s.repeats(100/labs, 1))
				mu.Lock()
				defer mu.Unlock()
				m.Samples = append(m.Samples, samples...)
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		s.record(m)
		return nil
	}
	if err := measure(ctx, "frontend kill -9 → last withdraw", "median ≤ 3", syscall.SIGKILL, 1); err != nil {
		return err
	}
	if !s.quick { // it takes as long as the hold time
		if err := measure(ctx, "frontend SIGSTOP → last withdraw", "max ≤ 3500", syscall.SIGSTOP,
			sideBySide); err != nil {
			return err
		}
	}
	if err := measureExternalLoss(ctx, s); err != nil {
		return err
	}
	s.note(4, "the reference never withdraws: BIRD continues to announce the static routes of its file when the "+
		"process that wrote it is gone, also after a restart of BIRD")
	return nil
}

// loseFrontends loses the frontend of one lab repeatedly and returns the times in milliseconds
// of the last withdrawals.
func loseFrontends(ctx context.Context, s *session, n int, l loss, repeats int) (samples []float64, err error) {
	err = on(ctx, s, n, oneFamily, func(fx *fixture) error {
		if _, err := fx.startScriptedPod(); err != nil {
			return err
		}
		fx.expectExit()
		for range repeats {
			if _, err := fx.waitCount(n); err != nil {
				return err
			}
			if err := fx.pause(200*time.Millisecond + phase(s.lasts(time.Second, time.Millisecond))); err != nil {
				return err
			}
			took, err := fx.lose(l, fx.pod.Frontend)
			if err != nil {
				return err
			}
			samples = append(samples, took)
			if l.signal == syscall.SIGSTOP {
				err = fx.pod.Frontend.Signal(syscall.SIGCONT)
			} else if err = fx.pod.Frontend.Kill(); err == nil {
				err = fx.startFrontend()
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return samples, err
}
