package frontend

import (
	"cmp"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

func (p *process) status() *frontendv1.Status {
	now := time.Now()
	loaded := p.Source.Value().Load()
	s := &frontendv1.Status{
		Version: p.Version, Trench: loaded.Config.Trench, Attractor: loaded.Config.Attractor.Name,
		Gating: !p.Gate.Ungated, Stopping: p.stopping.Load(), LoadBalancer: p.lbStatus(now),
		ConfigurationError: logs.Text(loaded.Err), ConfigurationSource: p.SourceName,
		Conditions: p.health.Conditions(),
	}
	if p.Identity != nil {
		if own := p.Identity.Status().Load(); !own.ID.IsZero() {
			s.SpiffeId, s.IdentityExpires = own.ID.String(), endpoint.Timestamp(own.NotAfter)
		}
	}
	b := p.bird.State().Load()
	p.birdStatus(s, b, now)
	inForce, receivers := p.InForce.Load(), receivers(b, p.announcer.Up().Load().Accepted(now))
	vips := vip.NewSet(inForce.Config.Attractor.VIPs...).Sorted()
	s.Vips = p.observer.state.vipStatus(now, vips, inForce.Kept, receivers, senders(b))
	s.Leaving = p.observer.state.vipStatus(now, inForce.Leaving(), inForce.Kept, receivers, senders(b))
	p.drainStatus(s, now, vips)
	return s
}

func (p *process) lbStatus(now time.Time) *frontendv1.LoadBalancerStatus {
	lb := p.observer.lb.Load()
	s := &frontendv1.LoadBalancerStatus{
		Freshness: freshnesses[lb.Freshness], Synced: lb.Synced, GoingAway: lb.GoingAway,
		Error: logs.Text(lb.Err), Service: lb.Service,
	}
	if p.Directory != nil {
		s.ReadinessDir = p.Directory.Path
	}
	// Without a snapshot there is no lease.
	if lb.Position.InstanceID != "" {
		s.Position = lb.Position.Proto()
		s.LeaseLeft = durationpb.New(p.observer.lease.Load().End.Sub(now))
	}
	return s
}

var freshnesses = [...]frontendv1.Freshness{
	gate.Lost:  frontendv1.Freshness_FRESHNESS_LOST,
	gate.Stale: frontendv1.Freshness_FRESHNESS_STALE,
	gate.Live:  frontendv1.Freshness_FRESHNESS_LIVE,
}

var advertisements = [...]readinessv1.Advertisement{
	gate.Withdrawn:   readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
	gate.Depreferred: readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED,
	gate.Announced:   readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED,
}

var reasons = [...]readinessv1.AdvertisementReason{
	gate.NotConfigured:   readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED,
	gate.LBNeverSeen:     readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN,
	gate.LBNotReady:      readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY,
	gate.NoSourceRouting: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_SOURCE_ROUTING,
	gate.NoGateway:       readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY,
	gate.NotAccepted:     readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_ACCEPTED,
	gate.LBLost:          readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_LOST,
	gate.Stopping:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_STOPPING,
	gate.Drained:         readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED,
	gate.LBDraining:      readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING,
	gate.LBStale:         readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_STALE,
	gate.LastResort:      readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LAST_RESORT,
	gate.Flapping:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_FLAPPING,
	gate.Suspected:       readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_PROBES,
	gate.NotExported:     readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_EXPORTED,
	gate.Ready:           readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY,
}

// birdStatus adds BIRD and the gateways to s.
func (p *process) birdStatus(s *frontendv1.Status, b bird.State, now time.Time) {
	s.GatewayChange = isChanging(b)
	s.Bird = &frontendv1.BirdStatus{
		Version: b.Version, Pid: uint32(b.PID), Restarts: uint32(b.Restarts),
		Error: cmp.Or(birdProblem(b), configProblem(b)), Since: endpoint.Timestamp(b.Since),
		External: p.External != nil, ExternalRouting: p.Kernel.Foreign,
	}
	if p.External != nil && p.External.Session.Password == "" {
		s.Bird.Version = cmp.Or(b.Version, "unknown") + " without a password"
	}
	advertised := p.observer.state.expected()
	for _, g := range b.Gateways {
		st := &frontendv1.GatewayStatus{
			Name: g.Name, Address: g.Peer(), Family: g.Family.String(), Up: g.Up && b.Alive, State: gatewayDetail(g),
			Imported: uint32(g.Imported), Exported: uint32(g.Exported), Expected: uint32(expectedOf(g, advertised)),
			Bfd: g.BFD, Since: endpoint.Timestamp(g.Since), Protocol: g.Protocol.String(), Held: g.Held,
			Usable: g.Usable && b.Alive, Export: g.Export.String(), Change: changeText(g.Change, now),
			Warning: g.Warning, NoDelay: g.NoDelay, NoDelayProblem: g.NoDelayProblem,
			LastNotification: g.Notification, LastNotificationAt: endpoint.Timestamp(g.NotificationAt),
		}
		if !st.Up { // BIRD keeps the error of the previous session
			st.LastError, st.LastErrorAt = g.LastError, endpoint.Timestamp(g.LastErrorAt)
		}
		if !b.Alive {
			st.State = "unknown, " + cmp.Or(b.Name, "BIRD") + " does not answer"
		}
		if st.Up && g.Short {
			st.Warning = g.ExportsProblem()
		}
		s.Gateways = append(s.Gateways, st)
	}
}

// expectedOf returns the number of VIPs that BIRD should export to a gateway.
func expectedOf(g bird.GatewayState, advertised [len(vip.Families)]int) int {
	if isStatic(g) || g.Export == bird.ExportNone {
		return 0
	}
	return advertised[g.Family]
}

// receivers returns a function that names the gateways that receive a VIP. These are the gateways
// that are up, except those to which BIRD does not export the VIP. accepted reports whether BIRD
// accepts VIPs from the announcer, which static gateways do not need.
func receivers(b bird.State, accepted bool) func(vip.VIP) []string {
	var all [len(vip.Families)][]string
	var lacking []bird.GatewayState
	for _, g := range b.Gateways {
		switch {
		// Without the loopback session BIRD has no VIPs to export.
		case !g.Up || !b.Alive, !isStatic(g) && !accepted, g.Export == bird.ExportNone:
		case !isStatic(g) && g.Short:
			lacking = append(lacking, g)
		default:
			all[g.Family] = append(all[g.Family], g.Name)
		}
	}
	return func(v vip.VIP) []string {
		// The clip makes append copy: all VIPs of a family share this slice.
		names := slices.Clip(all[v.Family()])
		for _, g := range lacking {
			if g.Family == v.Family() && g.Exports.Has(v) {
				names = append(names, g.Name)
			}
		}
		return names
	}
}

func (s *state) vipStatus(
	now time.Time, vips []vip.VIP, kept map[vip.VIP]change.Why, receivers func(vip.VIP) []string,
	senders [len(vip.Families)][]string,
) []*frontendv1.VipStatus {
	list := make([]*frontendv1.VipStatus, 0, len(vips))
	s.mu.RLock()
	defer s.mu.RUnlock()
	unknown := &vipState{} // without a decision and a report
	for _, v := range vips {
		st := cmp.Or(s.vips.Get(v), unknown)
		x := &frontendv1.VipStatus{
			Vip: v.String(), Since: endpoint.Timestamp(st.Since), Kept: kept[v].String(),
			Advertisement: advertisements[shown(st.Decision)], Reason: reasons[st.Decision.Reason],
		}
		if st.Decision.Advertised() {
			x.Gateways = receivers(v)
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
