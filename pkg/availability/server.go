package availability

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
)

// Server serves the availability of a readiness table.
type Server struct {
	loadbalancerv1.UnimplementedStreamAvailabilityServiceServer

	table    *readiness.Table
	readers  *readiness.Server
	host     string
	log      *slog.Logger
	throttle logs.Throttle
	watching latest.Value[int]
}

// NewServer returns a server of the table. readers authorizes, limits and ends the streams. host is
// the host name of the pod, which the frontend compares with its own.
func NewServer(table *readiness.Table, readers *readiness.Server, host string, log *slog.Logger) *Server {
	return &Server{table: table, readers: readers, host: host, log: log}
}

// Watching returns the number of open streams.
func (s *Server) Watching() *latest.Value[int] { return &s.watching }

// Watch implements the StreamAvailabilityService.
func (s *Server) Watch(_ *emptypb.Empty, stream grpc.ServerStreamingServer[loadbalancerv1.Response]) error {
	id, done, stopping, err := s.readers.OpenStream(stream.Context(), "Watch")
	if err != nil {
		return err
	}
	defer done()
	s.watching.Update(func(n int) int { return n + 1 })
	defer s.watching.Update(func(n int) int { return n - 1 })
	log, opened := s.log.With("peer", id.String()), time.Now()
	log.Debug("availability watch opened")
	err = s.serve(stream.Context(), stopping, func(available bool) error {
		s.throttle.Log(log.Info, id.String(), "availability sent to a frontend of Meridio", "available", available)
		return stream.Send(s.response(available))
	})
	log.Debug("availability watch ended", "open_for", time.Since(opened), "reason", err)
	return err
}

// response returns the message of a state. Meridio's frontend is available if a target has the
// identifier of its host.
func (s *Server) response(available bool) *loadbalancerv1.Response {
	target := &loadbalancerv1.Target{}
	if available {
		target.Context = map[string]string{"identifier": s.host}
	}
	return &loadbalancerv1.Response{Targets: []*loadbalancerv1.Target{target}}
}

// serve sends the state and its changes until ctx ends or stopping is closed. The last message
// before the server ends a stream is always "unavailable".
func (s *Server) serve(ctx context.Context, stopping <-chan struct{}, send func(available bool) error) error {
	// Subscribe before the first Summary, so that no change between the two is missed.
	changed, end := s.table.Subscribe()
	defer end()
	expired := time.After(0)
	sent, first, stopped := false, true, false
	for {
		now := s.table.Summary()
		available := !stopped && now.Synced && !now.GoingAway && now.Ready > 0 && now.LeaseLeft > 0
		if first || available != sent {
			if err := send(available); err != nil {
				return err
			}
			sent, first = available, false
		}
		if stopped {
			return status.Error(codes.Unavailable, "the load balancer is stopping")
		}
		if available {
			// The table notifies of no expiry: set a timer. LeaseLeft rounds up to a hundredth of the lease.
			expired = time.After(now.LeaseLeft)
		}
		select {
		case <-changed:
		case <-expired:
		case <-stopping:
			stopped = true
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}
