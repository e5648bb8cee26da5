package frontend

import (
	"cmp"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/vip"
)

// status returns the content of `frontend status`.
func (p *process) status() *frontendv1.Status {
	now := time.Now()
	loaded := p.config.Value().Load()
	s := &frontendv1.Status{
		Version: p.Version, Trench: loaded.Config.Trench, Attractor: loaded.Config.Attractor.Name,
		Gating: !p.Gate.Ungated, Stopping: p.stopping.Load(), LoadBalancer: p.lbStatus(now),
		ConfigurationError: logs.Text(loaded.Err), ConfigurationSource: p.configName,
	}
	if p.Identity != nil {
		if own := p.Identity.Status().Load(); !own.ID.IsZero() {
			s.SpiffeId, s.IdentityExpires = own.ID.String(), timestamppb.New(own.NotAfter)
		}
	}
	for _, c := range p.health.Conditions() {
		s.Conditions = append(s.Conditions, &frontendv1.Condition{Name: c.Name, Serving: c.Serving, Detail: c.Detail})
	}
	upByFamily := p.birdStatus(s)
	s.Vips = p.observer.state.vipStatus(now, loaded.Config.Attractor.VIPs, upByFamily, senders(p.bird.State().Load()))
	return s
}

func (p *process) lbStatus(now time.Time) *frontendv1.LoadBalancerStatus {
	lb := p.observer.lb.Load()
	s := &frontendv1.LoadBalancerStatus{
		Freshness: freshnessProto(lb.Freshness), Synced: lb.Synced, GoingAway: lb.GoingAway,
		Error: logs.Text(lb.Err), Service: lb.Service,
	}
	if p.Directory != nil {
		s.ReadinessDir = p.Directory.Path
	}
	if lb.Position.InstanceID != "" {
		s.Position = lb.Position.Proto()
		s.LeaseLeft = durationpb.New(p.observer.lease.Load().End.Sub(now))
	}
	return s
}

// The enums of the API have the order of the gate's or the opposite one; a test compares the names.

func freshnessProto(f gate.Freshness) frontendv1.Freshness {
	return frontendv1.Freshness_FRESHNESS_LOST - frontendv1.Freshness(f)
}

func advertisementProto(a gate.Advertisement) readinessv1.Advertisement {
	return readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN - readinessv1.Advertisement(a)
}

func reasonProto(r gate.Reason) readinessv1.AdvertisementReason {
	return readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED + readinessv1.AdvertisementReason(r)
}

// birdStatus sets BIRD and the gateways in s, and returns the names of the gateways that are up.
func (p *process) birdStatus(s *frontendv1.Status) [len(vip.Families)][]string {
	var up [len(vip.Families)][]string
	b := p.bird.State().Load()
	s.Bird = &frontendv1.BirdStatus{
		Version: b.Version, Pid: uint32(b.PID), Restarts: uint32(b.Restarts),
		Error: cmp.Or(birdProblem(b), configProblem(b)), Since: endpoint.Timestamp(b.Since),
	}
	for _, g := range b.Gateways {
		st := &frontendv1.GatewayStatus{
			Name: g.Name, Address: g.Address.String(), Up: g.Up && b.Alive, State: gatewayDetail(g),
			Imported: uint32(g.Imported), Exported: uint32(g.Exported), Bfd: g.BFD,
			Since: endpoint.Timestamp(g.Since), Protocol: g.Protocol.String(), Held: g.Held, Warning: g.Warning,
			NoDelay: g.NoDelay, NoDelayProblem: g.NoDelayProblem,
		}
		if !st.Up { // BIRD keeps the error of the previous session
			st.LastError = g.LastError
		}
		if !b.Alive {
			st.State = "unknown, BIRD does not answer"
		}
		if st.Up {
			up[g.Family] = append(up[g.Family], g.Name)
		}
		s.Gateways = append(s.Gateways, st)
	}
	return up
}

func (s *state) vipStatus(
	now time.Time, configured []vip.VIP, up, senders [len(vip.Families)][]string,
) []*frontendv1.VipStatus {
	list := make([]*frontendv1.VipStatus, 0, len(configured))
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, v := range vip.NewSet(configured...).Sorted() {
		st := s.vips.Get(v)
		if st == nil {
			st = &vipState{}
		}
		x := &frontendv1.VipStatus{
			Vip: v.String(), Gateways: up[v.Family()], Since: endpoint.Timestamp(st.Since),
			Advertisement: advertisementProto(st.Decision.Advertisement), Reason: reasonProto(st.Decision.Reason),
		}
		if st.Decision.Advertisement != gate.Announced {
			x.StaticGateways = senders[v.Family()]
		}
		if st.Reported {
			x.Readiness = st.Readiness.Proto(now)
		}
		list = append(list, x)
	}
	return list
}
