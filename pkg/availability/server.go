package availability

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
)

// ServerOptions configure a Server.
type ServerOptions struct {
	// Host is the host name of the pod, which the frontend compares with its own.
	Host string
	// Peer returns the SPIFFE ID that the transport has authenticated.
	Peer func(context.Context) (spiffeid.ID, bool)
	// Role returns the role of a peer. Watch requires RoleReader.
	Role func(spiffeid.ID) readiness.Role
	Log  *slog.Logger
}

// Server serves the availability of a readiness table.
type Server struct {
	loadbalancerv1.UnimplementedStreamAvailabilityServiceServer

	table    *readiness.Table
	opts     ServerOptions
	log      *slog.Logger
	throttle logs.Throttle
	watching *latest.Value[int]

	mu      sync.Mutex
	streams map[spiffeid.ID]int
	stopped bool
	stop    chan struct{} // closed by EndWatches
}

// NewServer returns a server of the table.
func NewServer(t *readiness.Table, o ServerOptions) *Server {
	return &Server{
		table: t, opts: o, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), watching: latest.New(0),
		streams: map[spiffeid.ID]int{}, stop: make(chan struct{}),
	}
}

// Watching returns the number of open streams.
func (s *Server) Watching() *latest.Value[int] { return s.watching }

var errStopping = status.Error(codes.Unavailable, "the load balancer is stopping")

// open authorizes and counts a stream; done must be called when the stream ends.
func (s *Server) open(ctx context.Context) (id spiffeid.ID, done func(), err error) {
	id, ok := s.opts.Peer(ctx)
	switch {
	case !ok:
		return id, nil, status.Error(codes.Unauthenticated, "the connection has no SPIFFE ID")
	case s.opts.Role(id) < readiness.RoleReader:
		s.throttle.Log(s.log.Warn, id.String(), "call denied on the readiness socket", "peer", id.String(), "method", "Watch")
		return id, nil, status.Errorf(codes.PermissionDenied, "%s may not call Watch", id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopped:
		return id, nil, errStopping
	case s.streams[id] >= readiness.DefaultMaxStreamsPerPeer:
		s.throttle.Log(s.log.Warn, id.String(), "stream refused on the readiness socket: too many open streams",
			"peer", id.String(), "limit", readiness.DefaultMaxStreamsPerPeer)
		return id, nil, status.Errorf(codes.ResourceExhausted, "%s has %d open streams, the limit", id, s.streams[id])
	}
	s.streams[id]++
	s.watching.Update(func(n int) int { return n + 1 })
	return id, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.streams[id]--; s.streams[id] == 0 {
			delete(s.streams, id)
		}
		s.watching.Update(func(n int) int { return n - 1 })
	}, nil
}

// Watch implements the StreamAvailabilityService.
func (s *Server) Watch(_ *emptypb.Empty, stream grpc.ServerStreamingServer[loadbalancerv1.Response]) error {
	id, done, err := s.open(stream.Context())
	if err != nil {
		return err
	}
	defer done()
	log, opened := s.log.With("peer", id.String()), time.Now()
	log.Debug("availability watch opened")
	err = s.serve(stream.Context(), func(available bool) error {
		s.throttle.Log(log.Info, id.String(), "availability sent to a frontend of Meridio", "available", available)
		return stream.Send(s.response(available))
	})
	log.Debug("availability watch ended", "open_for", time.Since(opened), "reason", err)
	return err
}

// response returns the message of a state.
func (s *Server) response(available bool) *loadbalancerv1.Response {
	t := &loadbalancerv1.Target{}
	if available {
		t.Context = map[string]string{"identifier": s.opts.Host}
	}
	return &loadbalancerv1.Response{Targets: []*loadbalancerv1.Target{t}}
}

// serve sends the state and its changes until ctx or the server ends. The last message before the
// server ends a stream is always "unavailable".
func (s *Server) serve(ctx context.Context, send func(available bool) error) error {
	changed, end := s.table.Subscribe()
	defer end()
	expired := time.NewTimer(0)
	defer expired.Stop()
	sent, first, stopping := false, true, false
	for {
		now := s.table.Summary()
		available := !stopping && now.Synced && !now.GoingAway && now.Ready > 0 && now.LeaseLeft > 0
		if first || available != sent {
			if err := send(available); err != nil {
				return err
			}
			sent, first = available, false
		}
		if stopping {
			return errStopping
		}
		if available {
			// The table does not notify of an expiry, so set a timer. LeaseLeft is rounded up to a
			// hundredth of the lease.
			expired.Reset(now.LeaseLeft)
		}
		select {
		case <-changed:
		case <-expired.C:
		case <-s.stop:
			stopping = true
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

// EndWatches sends "unavailable" on all streams, ends them, refuses new ones, and waits for the
// handlers. If a client has stopped reading, the handler ends only with the connection. Therefore
// ctx bounds the wait; stop the grpc.Server afterwards.
func (s *Server) EndWatches(ctx context.Context) error {
	s.mu.Lock()
	if !s.stopped {
		s.stopped = true
		close(s.stop)
	}
	s.mu.Unlock()
	if err := s.watching.Wait(ctx, func(n int) bool { return n == 0 }); err != nil {
		return fmt.Errorf("failed to end availability streams: %w", err)
	}
	return nil
}
