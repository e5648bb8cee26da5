package sidecar

import (
	"context"
	"net/netip"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/replypath"
	"github.com/vipgate/vipgate/pkg/vip"
)

type admin struct {
	targetadminv1.UnsafeTargetAdminServiceServer
	endpoint.StatusServer[targetadminv1.Status, struct{}]
}

func newAdmin(p *process) *admin {
	return &admin{StatusServer: endpoint.StatusServer[targetadminv1.Status, struct{}]{Read: p.status, Changes: &p.changed}}
}

// status returns this process's content of `target status`.
func (p *process) status(ctx context.Context) *targetadminv1.Status {
	// Without the flows, the rest of the status is still valid.
	flows, err := p.path.Flows(ctx)
	s := Describe(p.Options, p.path.Status(), flows)
	s.FlowsError = logs.Text(err)
	s.Conditions = p.health.Conditions()
	return s
}

// Describe returns the kernel state for `target status`.
func Describe(o Options, state replypath.Status, flows map[string]int) *targetadminv1.Status {
	s := &targetadminv1.Status{
		Version: o.Version, Pool: vip.Texts(o.ReplyPath.Pool), Interface: o.ReplyPath.Interface,
		Complete: state.Complete, Since: endpoint.Timestamp(state.Since), Repairs: state.Repairs,
		Dropped: state.Dropped,
	}
	for _, problem := range state.Problems {
		s.Problems = append(s.Problems,
			&adminv1.Problem{Object: problem.Object, Detail: problem.Detail, Remedy: problem.Remedy})
	}
	for _, peer := range state.Peers {
		all := &targetadminv1.Peer{
			Mac: peer.MAC, Fwmark: peer.FWMark, Seen: peer.Seen, Live: peer.Live, Flows: uint64(flows[peer.MAC]),
			Addresses: vip.Texts(peer.Addresses),
		}
		s.Peers = append(s.Peers, all)
	}
	return s
}

// metricState returns the state at a scrape.
func (p *process) metricState() metrics.TargetState {
	flows, _ := p.path.Flows(context.Background()) // `target status` has the error
	return metricsOf(p.path.Status(), flows)
}

func metricsOf(state replypath.Status, flows map[string]int) metrics.TargetState {
	m := metrics.TargetState{
		Complete: state.Complete, Problems: len(state.Problems), Repairs: state.Repairs, Dropped: state.Dropped,
		Full: state.Full, Evicted: state.Evicted, Flows: flows,
	}
	for _, peer := range state.Peers {
		if peer.Live {
			m.Live++
		} else {
			m.Gone++
		}
	}
	return m
}

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
