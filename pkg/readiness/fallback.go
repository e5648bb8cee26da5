package readiness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"

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

// runFallback watches a load balancer without ReadinessService until the stream ends.
func (connection *watchConn) runFallback(ctx context.Context, conn *grpc.ClientConn, silence *time.Timer,
	reports *sync.WaitGroup,
) error {
	dial := func(ctx context.Context, path string) (net.Conn, error) {
		// The responses of a process on a replaced socket would not be about this load balancer.
		if id, _ := statSocket(path); id != connection.socket {
			return nil, errReplaced
		}
		return connection.w.dial(ctx, path)
	}
	second, err := connection.w.client(connection.w.opts.Credentials, dial)
	if err != nil {
		return err
	}
	defer second.Close()
	second.Connect()
	fallback := connection.w.opts.Fallback
	connection.state.service = fallback.Service()
	event := event{
		kind: kindSnapshot, first: true, synced: true,
		// The instance ID identifies the socket file: a move to a second connection keeps the instance,
		// and a restarted load balancer, which creates another socket file, is a new one.
		position: Position{InstanceID: connection.socket.String()},
	}
	return fallback.Watch(ctx, conn, second, func(state FallbackState) error {
		event.lease = state.LeaseEnd.Sub(state.At)
		// An unchanged state renews the lease, as a heartbeat does.
		if state.VIPs == nil {
			event.kind, event.changed = kindHeartbeat, nil
		} else {
			event.kind, event.changed = kindSnapshot, state.VIPs
			event.position.Revision = connection.w.fallbackRevision.Add(1)
		}
		if err := connection.w.merger.merge(&connection.state, event, state.At); err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		connection.w.count(func(state *Stats) { state.Messages++ })
		if event.first {
			event.first = false
			silence.Stop()
			close(connection.received)
			close(connection.synced)
			reports.Go(func() { connection.dropReports(ctx) })
		}
		return nil
	})
}

// dropReports discards the reports of this connection until ctx ends. The load balancer cannot
// receive them, and Reported must not wait for them.
func (connection *watchConn) dropReports(ctx context.Context) {
	defer close(connection.retired)
	var reporter *reporter
	select {
	case reporter = <-connection.reporter:
	case <-connection.retiring.Done():
		return
	}
	defer connection.w.queue.detach(reporter)
	for {
		_, ok, replaced := connection.w.queue.take(reporter)
		switch {
		case replaced:
			return
		case ok:
			connection.w.queue.markWritten(reporter)
			continue
		}
		select {
		case <-reporter.wake:
		case <-ctx.Done():
			return
		case <-connection.retiring.Done():
			return
		}
	}
}
