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
	defer s.watches.Add(-1)
	if s.watches.Add(1) > maxWatches {
		return status.Errorf(codes.ResourceExhausted, "too many open watches: the limit is %d", maxWatches)
	}
	last := healthv1.HealthCheckResponse_ServingStatus(-1)
	for {
		// In this order: a change after the read closes changed.
		_, changed := s.changed.Get()
		s.mu.Lock()
		state, stopping := s.state(name), s.stopping
		s.mu.Unlock()
		if state != last {
			last = state
			if err := stream.Send(&healthv1.HealthCheckResponse{Status: state}); err != nil {
				return err
			}
		}
		if stopping {
			return status.Error(codes.Unavailable, "the process is stopping")
		}
		select {
		case <-changed:
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

// state returns the status of a service by its canonical name.
func (s *Server) state(name string) healthv1.HealthCheckResponse_ServingStatus {
	c, known := s.conditions[cmp.Or(name, Readiness)]
	if prefix, is := strings.CutPrefix(name, VIPPrefix); is {
		// A canonical name parses.
		v, _ := vip.Parse(prefix)
		c.Serving, known = s.vips[v]
	}
	switch {
	case !known && name != "":
		return healthv1.HealthCheckResponse_SERVICE_UNKNOWN
	case c.Serving && (!s.stopping || name == Liveness):
		return healthv1.HealthCheckResponse_SERVING
	}
	return healthv1.HealthCheckResponse_NOT_SERVING
}
