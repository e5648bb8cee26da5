package readiness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// Service is the name of the gRPC service of this package.
var Service = readinessv1.ReadinessService_ServiceDesc.ServiceName

// Fallback reads the readiness from a load balancer that responds Unimplemented to WatchReadiness.
type Fallback interface {
	// Service returns the name of the gRPC service that the Fallback uses.
	Service() string
	// Watch publishes the state of the load balancer on the connection first until ctx ends or the
	// load balancer is lost, and returns the cause. second is another connection to the same socket
	// file with the same credentials, which reconnects on demand. publish does not block; if it
	// returns an error, Watch must return.
	Watch(ctx context.Context, first, second grpc.ClientConnInterface, publish func(FallbackState) error) error
}

// FallbackState is a state that a Fallback received.
type FallbackState struct {
	// VIPs is the complete state without duplicates; nil if it is unchanged. The receiver owns it.
	VIPs []VIPReadiness
	// At is the time of receipt.
	At time.Time
	// LeaseEnd is the end of the validity of the state. It never shortens an earlier lease.
	LeaseEnd time.Time
}

var errReplaced = errors.New("another process has created the socket")

// unimplemented reports whether an error means that the server does not have the called service.
func unimplemented(err error) bool { return status.Code(err) == codes.Unimplemented }

// runFallback watches a load balancer without ReadinessService until the stream ends.
func (c *watchConn) runFallback(ctx context.Context, conn *grpc.ClientConn, silence *time.Timer,
	reports *sync.WaitGroup,
) error {
	second, err := c.w.client(c.w.opts.Credentials, func(ctx context.Context, path string) (net.Conn, error) {
		// The responses of a process on a replaced socket would not be about this load balancer.
		if id, _ := statSocket(path); id != c.socket {
			return nil, errReplaced
		}
		return c.w.dial(ctx, path)
	})
	if err != nil {
		return err
	}
	defer second.Close()
	second.Connect()
	fallback := c.w.opts.Fallback
	c.state.service = fallback.Service()
	e := event{
		kind: kindSnapshot, first: true, synced: true,
		// The instance ID identifies the socket file: a move to a second connection keeps the instance,
		// and a restarted load balancer, which creates another socket file, is a new one.
		position: Position{InstanceID: fmt.Sprintf("%x-%x-%x", c.socket.device, c.socket.inode, c.socket.changed.Nano())},
	}
	return fallback.Watch(ctx, conn, second, func(s FallbackState) error {
		e.lease = s.LeaseEnd.Sub(s.At)
		if s.VIPs == nil {
			e.kind, e.changed = kindHeartbeat, nil
		} else {
			e.kind, e.changed = kindSnapshot, s.VIPs
			e.position.Revision = c.w.fallbackRevision.Add(1)
		}
		if err := c.w.merger.merge(&c.state, e, s.At); err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		c.w.count(func(s *Stats) { s.Messages++ })
		if e.first {
			e.first = false
			silence.Stop()
			close(c.received)
			close(c.synced)
			reports.Go(func() { c.dropReports(ctx) })
		}
		return nil
	})
}

// dropReports discards the reports of this connection until ctx ends. The load balancer cannot
// receive them, and Reported must not wait for them.
func (c *watchConn) dropReports(ctx context.Context) {
	defer close(c.retired)
	var r *reporter
	select {
	case r = <-c.reporter:
	case <-c.retiring.Done():
		return
	}
	defer c.w.queue.detach(r)
	for {
		_, ok, replaced := c.w.queue.take(r)
		switch {
		case replaced:
			return
		case ok:
			c.w.queue.markWritten(r)
			continue
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
			return
		case <-c.retiring.Done():
			return
		}
	}
}
