package sidecar

import (
	"context"
	"net/netip"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/health"
)

// addressHealth adds a service for each address to a health server, only in Check: lb calls it to
// diagnose a failed check through a VIP. An address of the pool is SERVING while the kernel state
// is complete; an address outside the pool is NOT_FOUND.
type addressHealth struct {
	*health.Server
	process *process
}

func (h addressHealth) register(r grpc.ServiceRegistrar) { healthv1.RegisterHealthServer(r, h) }

// Check implements healthv1.HealthServer.
func (h addressHealth) Check(ctx context.Context, r *healthv1.HealthCheckRequest,
) (*healthv1.HealthCheckResponse, error) {
	address, err := netip.ParseAddr(r.GetService())
	switch {
	case err != nil:
		return h.Server.Check(ctx, r)
	case !h.process.inPool(address):
		return nil, status.Errorf(codes.NotFound, "%s is not in the pool of this target", address)
	// The state covers the whole pool, so every address in it has the same answer.
	case h.process.path.Status().Complete:
		return &healthv1.HealthCheckResponse{Status: healthv1.HealthCheckResponse_SERVING}, nil
	}
	return &healthv1.HealthCheckResponse{Status: healthv1.HealthCheckResponse_NOT_SERVING}, nil
}
