package lb

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

type admin struct {
	lbv1.UnsafeLBServiceServer
	endpoint.StatusServer[lbv1.Status, uint64]
	process *process
}

func newAdmin(p *process) *admin {
	return &admin{process: p, StatusServer: endpoint.StatusServer[lbv1.Status, uint64]{Read: p.status, Changes: p.changed}}
}

// status returns the content of `lb status`.
func (p *process) status(ctx context.Context) *lbv1.Status {
	loaded := p.config.Value().Load()
	own := p.Identity.Status().Load()
	table := p.table.State()
	s := &lbv1.Status{
		Version: p.Version, Trench: loaded.Config.Trench, Position: table.Position.Proto(), Synced: table.Synced,
		GoingAway: table.GoingAway, Lease: durationpb.New(p.Lease), ConfigurationError: logs.Text(loaded.Err),
		Streams: p.streamStatus(p.loop.inForce.Load()), Sources: p.sourceStatus(), DataPlane: p.dataPlaneStatus(ctx),
		Conditions: p.health.Conditions(),
	}
	if !own.ID.IsZero() {
		s.SpiffeId, s.IdentityExpires = own.ID.String(), endpoint.Timestamp(own.NotAfter)
	}
	// The frontend may withdraw a VIP that is ready, so the status has both states.
	reported := p.server.AllReported()
	for _, r := range table.VIPs {
		v := &lbv1.VipStatus{Vip: r.VIP.String(), Readiness: r.Proto(time.Now())}
		if report, ok := reported[r.VIP]; ok {
			v.Reported = report.Proto()
		}
		s.Vips = append(s.Vips, v)
	}
	if p.probes != nil {
		s.ProbeQuorum = uint32(p.ProbeQuorum)
		for _, probe := range p.probes.Status() {
			status := &lbv1.ProbeStatus{
				SpiffeId: probe.ID.String(), Live: probe.Live, Paths: uint32(probe.Paths), PathsHere: uint32(probe.Here),
				DeadHere: uint32(probe.Dead), DeadVips: vip.Texts(probe.DeadVIPs),
			}
			if !probe.Reported.IsZero() {
				status.LastReport = timestamppb.New(probe.Reported)
			}
			s.Probes = append(s.Probes, status)
		}
	}
	for _, w := range p.server.Watchers() {
		s.Watchers = append(s.Watchers, &lbv1.WatcherStatus{
			WatchId: w.WatchID, Peer: w.Peer.String(), Reader: w.Reader, Since: timestamppb.New(w.Since),
			SentRevision: w.SentRevision, AppliedRevision: w.Report.Applied.Revision, Reporting: w.Reporting,
			Families: readiness.FamiliesProto(w.Report.Families),
		})
	}
	return s
}

func (p *process) streamStatus(config *trench.Config) []*lbv1.StreamStatus {
	checked := map[healthcheck.Key]healthcheck.Health{}
	for _, h := range p.checker.List() {
		checked[h.Key] = h
	}
	byStream := map[string][]*lbv1.TargetStatus{}
	for _, v := range p.index.List(nil) {
		t := &lbv1.TargetStatus{
			Name: v.Name, Address: v.Addr.String(), State: v.State.String(), Since: timestamppb.New(v.Since),
			LastError: v.LastError, Sources: v.Origins.Names(), RegisteredBy: v.Owner, DrainCause: v.DrainCause,
		}
		if v.DrainCause != "" {
			t.DrainEnd, t.Checks = timestamppb.New(v.DrainEnd), v.Checks.String()
		}
		// The index has changes of the state only.
		if h, ok := checked[v.Key]; ok && !h.LastCheck.IsZero() {
			t.LastCheck, t.LastError = timestamppb.New(h.LastCheck), h.LastError
		}
		byStream[v.Stream] = append(byStream[v.Stream], t)
	}
	var streams []*lbv1.StreamStatus
	for _, s := range config.Streams {
		streams = append(streams, &lbv1.StreamStatus{
			Name: s.Name, MinReady: uint32(s.MinReady), Targets: byStream[s.Name], Vips: vip.Texts(s.VIPs),
		})
	}
	return streams
}

func (p *process) sourceStatus() []*lbv1.SourceStatus {
	var list []*lbv1.SourceStatus
	for _, s := range p.sources.states.Load() {
		if s.Name == "registry" {
			s.Detail += neighborTables()
		}
		list = append(list, &lbv1.SourceStatus{
			Name: s.Name, Live: s.Live, Since: timestamppb.New(s.Since), Detail: s.Detail, OnGone: string(s.OnGone),
			Targets: uint32(s.Targets), Problems: s.Problems,
		})
	}
	return list
}

// neighborTables describes the node's neighbor tables. Targets beyond their limits are unreachable.
func neighborTables() string {
	c, err := rtnetlink.Dial()
	if err != nil {
		// The rest of the status does not depend on netlink, so the error is a detail.
		return "; " + err.Error()
	}
	defer c.Close()
	tables, err := c.NeighborTables()
	if err != nil {
		return "; " + err.Error()
	}
	var all string
	for _, f := range vip.Families {
		if t, ok := tables[f]; ok {
			all += fmt.Sprintf("; %d of %d %s neighbor entries of the node", t.Entries, t.Limit, f)
		}
	}
	return all
}

// targetMetrics returns the targets at the moment of a scrape.
func (p *process) targetMetrics() metrics.Targets {
	m := metrics.Targets{States: map[string]int{}}
	for s := healthcheck.Starting; s <= healthcheck.Drained; s++ {
		// Without the zero, the series of a state would vanish with its last target.
		m.States[s.String()] = 0
	}
	for _, v := range p.index.List(nil) {
		m.States[v.State.String()]++
	}
	for _, s := range p.sources.states.Load() {
		m.Sources = append(m.Sources, metrics.Source{
			Name: s.Name, Live: s.Live, Targets: s.Targets, Problems: len(s.Problems),
		})
	}
	for _, n := range p.sources.registry.Refused() {
		m.Rejections += n
	}
	return m
}
