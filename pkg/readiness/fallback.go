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

// Fallback reads the readiness from a load balancer that answers Unimplemented to WatchReadiness.
type Fallback interface {
	// Service is the name of the gRPC service that it reads.
	Service() string
	// Watch publishes the state of the load balancer behind first until ctx ends or the load balancer
	// is lost, and returns the cause. second is another connection to the same socket file with the
	// same credentials, which connects again on demand. publish does not block, and returns an error
	// when the watch must end.
	Watch(ctx context.Context, first, second grpc.ClientConnInterface, publish func(FallbackState) error) error
}

// FallbackState is what a Fallback has received.
type FallbackState struct {
	// VIPs is the whole state, each VIP once; nil: it did not change. The receiver owns it.
	VIPs []VIPReadiness
	// At is the receipt.
	At time.Time
	// LeaseEnd is how long the state is valid; an end before that of an earlier state changes nothing.
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
		// Another process answers for itself, not for this load balancer.
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
		// The same on every connection to one socket file, so that a move to a second connection is no
		// new instance. A load balancer that was restarted has created another socket file.
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

// dropReports takes the reports of this connection, which the load balancer cannot receive, until
// ctx ends: nothing waits for them.
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
