package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/lab"
)

// servingStatus is the answer of a health service.
type servingStatus = healthv1.HealthCheckResponse_ServingStatus

// answer is the status from a health service and the time of its receipt.
type answer struct {
	status servingStatus
	at     time.Time
}

// healthWatch watches one health service over gRPC, as Kubernetes and operators may, also across
// restarts of the server.
type healthWatch struct {
	service string
	conn    *grpc.ClientConn
	cancel  context.CancelFunc
	done    chan struct{}
	last    *latest.Value[answer]
}

// watchHealth follows a service on a TCP address in a namespace.
func watchHealth(ns *lab.NetNS, addr, service string) (*healthWatch, error) {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		quickRetry(),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (conn net.Conn, err error) {
			return conn, ns.Do(func() (err error) {
				conn, err = new(net.Dialer).DialContext(ctx, "tcp", addr)
				return err
			})
		}))
	if err != nil {
		return nil, fmt.Errorf("health service at %s: %w", addr, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &healthWatch{
		service: service, conn: conn, cancel: cancel, done: make(chan struct{}),
		last: latest.New(answer{}),
	}
	go w.run(ctx)
	return w, nil
}

// quickRetry shortens the retry interval, so that clients connect soon after a process starts.
func quickRetry() grpc.DialOption {
	return grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{
			BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 200 * time.Millisecond,
		},
		MinConnectTimeout: time.Second,
	})
}

func (w *healthWatch) run(ctx context.Context) {
	defer close(w.done)
	client := healthv1.NewHealthClient(w.conn)
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	for {
		stream, err := client.Watch(ctx, &healthv1.HealthCheckRequest{Service: w.service}, grpc.WaitForReady(true))
		for err == nil {
			var r *healthv1.HealthCheckResponse
			if r, err = stream.Recv(); err == nil {
				w.last.Set(answer{r.GetStatus(), time.Now()})
			}
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return
		}
	}
}

// wait waits until the watch reports status and returns the time since which it does. A plain
// Check must return the same status.
func (w *healthWatch) wait(ctx context.Context, status servingStatus) (time.Time, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	for {
		last, changed := w.last.Get()
		if last.status == status {
			r, err := healthv1.NewHealthClient(w.conn).Check(ctx, &healthv1.HealthCheckRequest{Service: w.service})
			if err != nil {
				return last.at, fmt.Errorf("health check of %s: %w", w.service, err)
			}
			if r.GetStatus() != status {
				return last.at, fmt.Errorf(
					"the health service %s answers Check with %s, expected %s", w.service, r.GetStatus(), status,
				)
			}
			return last.at, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return last.at, fmt.Errorf(
				"the health service %s says %s, expected %s (waited: %w)", w.service, last.status, status, context.Cause(ctx),
			)
		}
	}
}

// close ends the watch.
func (w *healthWatch) close() error {
	w.cancel()
	err := w.conn.Close()
	<-w.done
	if grpcstatus.Code(err) == codes.Canceled { // closed before
		return nil
	}
	return err
}
