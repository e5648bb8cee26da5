package health

import (
	"cmp"
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/vip"
)

// maxNameBytes bounds the name of a service in a request.
const maxNameBytes = 256

// detailKey is the trailer of a Check response with the detail of a service that does not serve.
const detailKey = "vipgate-detail-bin"

// maxDetail bounds the detail, in bytes.
const maxDetail = 1000

// watch is one Watch call. The channel holds the newest state that was not sent yet.
type watch struct {
	newest chan healthv1.HealthCheckResponse_ServingStatus
}

// Check implements grpc.health.v1.
func (s *Server) Check(ctx context.Context, r *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	name, err := canonical(r.GetService())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	state, detail := s.state(name), s.conditions[cmp.Or(name, Readiness)].Detail
	s.mu.Unlock()
	if detail != "" {
		// The trailer is optional: an error has no consequence.
		_ = grpc.SetTrailer(ctx, metadata.Pairs(detailKey, detail[:min(len(detail), maxDetail)]))
	}
	if state == healthv1.HealthCheckResponse_SERVICE_UNKNOWN {
		return nil, status.Errorf(codes.NotFound, "unknown service %q", name)
	}
	return &healthv1.HealthCheckResponse{Status: state}, nil
}

// List implements grpc.health.v1. VIPs are not listed.
func (s *Server) List(context.Context, *healthv1.HealthListRequest) (*healthv1.HealthListResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := map[string]*healthv1.HealthCheckResponse{"": {Status: s.state("")}}
	for _, name := range s.order {
		list[name] = &healthv1.HealthCheckResponse{Status: s.state(name)}
	}
	return &healthv1.HealthListResponse{Statuses: list}, nil
}

// Watch implements grpc.health.v1. It ends with the call, or with Unavailable after
// [Server.Shutdown].
func (s *Server) Watch(r *healthv1.HealthCheckRequest,
	stream grpc.ServerStreamingServer[healthv1.HealthCheckResponse],
) error {
	name, err := canonical(r.GetService())
	if err != nil {
		return err
	}
	w, err := s.addWatch(name)
	if err != nil {
		return err
	}
	defer s.removeWatch(name, w)
	last := healthv1.HealthCheckResponse_ServingStatus(-1)
	send := func(state healthv1.HealthCheckResponse_ServingStatus) error {
		if state == last {
			return nil
		}
		last = state
		return stream.Send(&healthv1.HealthCheckResponse{Status: state})
	}
	for {
		select {
		case state := <-w.newest:
			if err := send(state); err != nil {
				return err
			}
		case <-s.stopped:
			// Shutdown put the final state into the channel before it closed stopped.
			select {
			case state := <-w.newest:
				if err := send(state); err != nil {
					return err
				}
			default:
			}
			return status.Error(codes.Unavailable, "the process is stopping")
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}

// canonical returns the canonical name of a service: VIPs have several spellings.
func canonical(name string) (string, error) {
	if len(name) > maxNameBytes {
		return "", status.Errorf(codes.InvalidArgument, "a service name has at most %d bytes", maxNameBytes)
	}
	if prefix, is := strings.CutPrefix(name, VIPPrefix); is {
		v, err := vip.Parse(prefix)
		if err != nil {
			return "", status.Error(codes.InvalidArgument, err.Error())
		}
		return VIPPrefix + v.String(), nil
	}
	return name, nil
}

// addWatch adds a watch with the current state as its first message.
func (s *Server) addWatch(name string) (*watch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watchCount >= maxWatches {
		return nil, status.Errorf(codes.ResourceExhausted, "too many open watches: the limit is %d", maxWatches)
	}
	s.watchCount++
	w := &watch{newest: make(chan healthv1.HealthCheckResponse_ServingStatus, 1)}
	w.newest <- s.state(name)
	if s.watches[name] == nil {
		s.watches[name] = map[*watch]struct{}{}
	}
	s.watches[name][w] = struct{}{}
	return w, nil
}

func (s *Server) removeWatch(name string, w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchCount--
	delete(s.watches[name], w)
	if len(s.watches[name]) == 0 {
		delete(s.watches, name)
	}
}

// notify replaces the pending state of a service in its watches.
func (s *Server) notify(name string) {
	for w := range s.watches[name] {
		select {
		case <-w.newest:
		default:
		}
		// Only notify sends, under the lock, so there is room.
		w.newest <- s.state(name)
	}
}

// state returns the status of a service by its canonical name.
func (s *Server) state(name string) healthv1.HealthCheckResponse_ServingStatus {
	serving, known := s.lookup(name)
	switch {
	case !known:
		return healthv1.HealthCheckResponse_SERVICE_UNKNOWN
	case serving && (!s.stopping || name == Liveness):
		return healthv1.HealthCheckResponse_SERVING
	}
	return healthv1.HealthCheckResponse_NOT_SERVING
}

func (s *Server) lookup(name string) (serving, known bool) {
	if name == "" {
		return s.conditions[Readiness].Serving, true
	}
	if prefix, is := strings.CutPrefix(name, VIPPrefix); is {
		v, err := vip.Parse(prefix)
		if err != nil {
			return false, false
		}
		serving, known = s.vips[v]
		return serving, known
	}
	c, known := s.conditions[name]
	return c.Serving, known
}
