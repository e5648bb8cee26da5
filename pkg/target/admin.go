package target

import (
	"context"

	"google.golang.org/grpc"

	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/replypath"
)

// admin implements the TargetAdminService.
type admin struct {
	targetadminv1.UnimplementedTargetAdminServiceServer
	process *process
}

// GetStatus implements the TargetAdminService.
func (a *admin) GetStatus(ctx context.Context, _ *targetadminv1.GetStatusRequest,
) (*targetadminv1.GetStatusResponse, error) {
	return &targetadminv1.GetStatusResponse{Status: a.process.status(ctx)}, nil
}

// WatchStatus implements the TargetAdminService.
func (a *admin) WatchStatus(_ *targetadminv1.WatchStatusRequest,
	stream grpc.ServerStreamingServer[targetadminv1.WatchStatusResponse],
) error {
	return endpoint.WatchStatus(stream.Context(), &a.process.changed, func() error {
		return stream.Send(&targetadminv1.WatchStatusResponse{Status: a.process.status(stream.Context())})
	})
}

// SetLogLevel implements the TargetAdminService.
func (a *admin) SetLogLevel(_ context.Context, r *targetadminv1.SetLogLevelRequest,
) (*targetadminv1.SetLogLevelResponse, error) {
	previous, err := endpoint.SetLogLevel(a.process.Level, a.process.Log, r.GetLevel())
	return &targetadminv1.SetLogLevelResponse{Previous: previous}, err
}

// status returns this process's content of `target status`.
func (p *process) status(ctx context.Context) *targetadminv1.Status {
	flows, err := p.flows(ctx)
	s := Describe(p.Options, p.path.Status(), flows)
	s.FlowsError = logs.Text(err)
	for _, c := range p.health.Conditions() {
		s.Conditions = append(s.Conditions,
			&targetadminv1.Condition{Name: c.Name, Serving: c.Serving, Detail: c.Detail})
	}
	return s
}

// Describe returns the kernel state for `target status`.
func Describe(o Options, state replypath.Status, flows map[string]int) *targetadminv1.Status {
	s := &targetadminv1.Status{
		Version: o.Version, Interface: o.Interface, Complete: state.Complete,
		Since: endpoint.Timestamp(state.Since), Repairs: state.Repairs, Dropped: state.Dropped,
	}
	for _, prefix := range o.Pool {
		s.Pool = append(s.Pool, prefix.String())
	}
	for _, problem := range state.Problems {
		s.Problems = append(s.Problems,
			&targetadminv1.Problem{Object: problem.Object, Detail: problem.Detail, Remedy: problem.Remedy})
	}
	for _, peer := range state.Peers {
		all := &targetadminv1.Peer{
			Mac: peer.MAC, Fwmark: peer.FWMark, Seen: peer.Seen, Live: peer.Live, Flows: uint64(flows[peer.MAC]),
		}
		for _, a := range peer.Addresses {
			all.Addresses = append(all.Addresses, a.String())
		}
		s.Peers = append(s.Peers, all)
	}
	return s
}

// metricState returns the state at a scrape.
func (p *process) metricState() metrics.TargetState {
	flows, _ := p.flows(context.Background()) // `target status` has the error
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
