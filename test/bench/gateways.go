package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/lab"
)

// dialTCP connects to a gRPC server on a TCP address in a namespace.
func dialTCP(ns *lab.NetNS, addr string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 100 * time.Millisecond,
			},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (conn net.Conn, err error) {
			return conn, ns.Do(func() (err error) {
				conn, err = new(net.Dialer).DialContext(ctx, "tcp", addr)
				return err
			})
		}))
	if err != nil {
		return nil, fmt.Errorf("gRPC at %s: %w", addr, err)
	}
	return conn, nil
}

// answer is the status from a health service and the time of its receipt.
type answer struct {
	status healthv1.HealthCheckResponse_ServingStatus
	at     time.Time
}

// watchEgress follows the frontend's health service Egress. It ends with the fixture.
func (fx *fixture) watchEgress() (*latest.Value[answer], error) {
	conn, err := dialTCP(fx.Pod, lab.FrontendHealth)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(fx.ctx)
	stream, err := healthv1.NewHealthClient(conn).Watch(
		ctx, &healthv1.HealthCheckRequest{Service: "Egress"}, grpc.WaitForReady(true),
	)
	if err != nil {
		cancel()
		return nil, errors.Join(fmt.Errorf("watch of Egress: %w", err), conn.Close())
	}
	egress, done := latest.New(answer{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			r, err := stream.Recv()
			if err != nil {
				if ctx.Err() == nil {
					fx.fail(fmt.Errorf("watch of Egress: %w", err))
				}
				return
			}
			egress.Set(answer{r.GetStatus(), time.Now()})
		}
	}()
	fx.ends = append(fx.ends, func() error { cancel(); <-done; return conn.Close() })
	return egress, nil
}

// waitEgress waits until Egress has a status, and returns when it changed to it.
func (fx *fixture) waitEgress(egress *latest.Value[answer],
	status healthv1.HealthCheckResponse_ServingStatus,
) (time.Time, error) {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	for {
		last, changed := egress.Get()
		if last.status == status {
			return last.at, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return time.Time{}, fx.explain(ctx, fmt.Errorf("health service Egress is %s, not %s", last.status, status))
		}
	}
}

const resetWhat = "gateway resets the session → Egress NOT_SERVING"

// measureReset is row 5: the gateway resets the session.
func measureReset(ctx context.Context, s *session) error {
	err := on(ctx, s, 1, oneFamily, func(fx *fixture) error {
		if _, err := fx.startScriptedPod(); err != nil {
			return err
		}
		egress, err := fx.watchEgress()
		if err != nil {
			return err
		}
		m := Measurement{Row: 5, Method: vipgate, Goal: "median ≤ 2, p95 ≤ 10"}
		return resetSessions(s, fx, m, s.repeats(100, 1), egress, nil)
	})
	if err != nil || s.quick {
		return err
	}
	return on(ctx, s, 1, oneFamily, func(fx *fixture) error {
		r, err := fx.startReference()
		if err != nil {
			return err
		}
		repeats := s.repeats(20, 0)
		s.note(5, "the reference shows the protocols once a second; %d repeats, as each takes seconds, and the "+
			"gateway refuses the session until it was seen down: a poll a second misses an outage of one", repeats)
		m := Measurement{Row: 5, What: resetWhat, Method: reference, N: 1, Unit: "ms"}
		for range repeats {
			if _, err := r.waitSessions(1); err != nil {
				return err
			}
			if err := fx.pause(phase(referencePoll)); err != nil {
				return err
			}
			// Without this the session would be up again before the next poll of the reference.
			if err := fx.receiver.Refuse(); err != nil {
				return err
			}
			start := time.Now()
			fx.receiver.Reset()
			at, err := r.waitSessions(0)
			if err != nil {
				return err
			}
			if err := fx.receiver.Listen(); err != nil {
				return err
			}
			m.Samples = append(m.Samples, milliseconds(at.Sub(start)))
		}
		s.record(m)
		return nil
	})
}

// resetSessions has the gateway reset its session repeatedly, and records how long Egress took
// to fail. after, which may be nil, is called after each reset with its time.
func resetSessions(s *session, fx *fixture, m Measurement, repeats int, egress *latest.Value[answer],
	after func(reset time.Time) error,
) error {
	m.What, m.N, m.Unit = resetWhat, len(fx.vips), "ms"
	for range repeats {
		if _, err := fx.waitEgress(egress, healthv1.HealthCheckResponse_SERVING); err != nil {
			return err
		}
		if _, err := fx.waitCount(m.N); err != nil {
			return err
		}
		if err := fx.pause(phase(s.lasts(time.Second, time.Millisecond))); err != nil {
			return err
		}
		start := time.Now()
		fx.receiver.Reset()
		at, err := fx.waitEgress(egress, healthv1.HealthCheckResponse_NOT_SERVING)
		if err != nil {
			return err
		}
		m.Samples = append(m.Samples, milliseconds(at.Sub(start)))
		if after == nil {
			continue
		}
		if err := after(start); err != nil {
			return err
		}
	}
	s.record(m)
	return nil
}

// measureFirstFeed is row 6: a session comes up while all VIPs are ready.
func measureFirstFeed(ctx context.Context, s *session) error {
	goals := map[int]string{1000: "median ≤ 12, max ≤ 50", 10_000: "max ≤ 150"}
	for _, n := range s.sizes([]int{1000, 10_000}, []int{1000}) {
		feed := func(fx *fixture, method string, repeats int) error {
			m := Measurement{Row: 6, What: "session Established → all at the gateway", Method: method, N: n, Unit: "ms"}
			if method == vipgate {
				m.Goal = goals[n]
			}
			for range repeats {
				if err := fx.pause(s.lasts(500*time.Millisecond, 0) +
					phase(s.lasts(time.Second, time.Millisecond))); err != nil {
					return err
				}
				fx.receiver.Forget()
				fx.receiver.Reset()
				if _, err := fx.waitCount(0); err != nil {
					return err
				}
				start, err := fx.waitEstablished()
				if err != nil {
					return err
				}
				at, err := fx.waitCount(n)
				if err != nil {
					return err
				}
				m.Samples = append(m.Samples, milliseconds(at.Sub(start)))
			}
			s.record(m)
			return nil
		}
		err := on(ctx, s, n, oneFamily, func(fx *fixture) error {
			if _, err := fx.startScriptedPod(); err != nil {
				return err
			}
			return feed(fx, vipgate, s.repeats(10, 1))
		})
		if err != nil {
			return err
		}
		if s.quick {
			continue
		}
		err = on(ctx, s, n, oneFamily, func(fx *fixture) error {
			if _, err := fx.startReference(); err != nil {
				return err
			}
			return feed(fx, reference, s.repeats(10, 0))
		})
		if err != nil {
			return err
		}
	}
	return nil
}
