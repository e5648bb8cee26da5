package lb

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// admin implements the LBService.
type admin struct {
	lbv1.UnimplementedLBServiceServer
	process *process
}

// GetStatus implements the LBService.
func (a *admin) GetStatus(ctx context.Context, _ *lbv1.GetStatusRequest) (*lbv1.GetStatusResponse, error) {
	return &lbv1.GetStatusResponse{Status: a.process.status(ctx)}, nil
}

// WatchStatus implements the LBService.
func (a *admin) WatchStatus(_ *lbv1.WatchStatusRequest,
	stream grpc.ServerStreamingServer[lbv1.WatchStatusResponse],
) error {
	return endpoint.WatchStatus(stream.Context(), a.process.changed, func() error {
		return stream.Send(&lbv1.WatchStatusResponse{Status: a.process.status(stream.Context())})
	})
}

// SetLogLevel implements the LBService.
func (a *admin) SetLogLevel(_ context.Context, r *lbv1.SetLogLevelRequest) (*lbv1.SetLogLevelResponse, error) {
	previous, err := endpoint.SetLogLevel(a.process.Level, a.process.Log, r.GetLevel())
	return &lbv1.SetLogLevelResponse{Previous: previous}, err
}

// status returns the content of `lb status`.
func (p *process) status(ctx context.Context) *lbv1.Status {
	loaded := p.config.Value().Load()
	own := p.Identity.Status().Load()
	table := p.table.State()
	s := &lbv1.Status{
		Version: p.Version, Trench: loaded.Config.Trench, Position: table.Position.Proto(), Synced: table.Synced,
		GoingAway: table.GoingAway, Lease: durationpb.New(p.Lease), ConfigurationError: logs.Text(loaded.Err),
		Streams: p.streamStatus(loaded.Config), Sources: p.sourceStatus(), DataPlane: p.dataPlaneStatus(ctx),
	}
	if !own.ID.IsZero() {
		s.SpiffeId, s.IdentityExpires = own.ID.String(), timestamppb.New(own.NotAfter)
	}
	for _, c := range p.health.Conditions() {
		s.Conditions = append(s.Conditions, &lbv1.Condition{Name: c.Name, Serving: c.Serving, Detail: c.Detail})
	}
	reported := p.server.AllReported()
	for _, r := range table.VIPs {
		v := &lbv1.VipStatus{Readiness: r.Proto(time.Now())}
		if rep, ok := reported[r.VIP]; ok {
			v.Reported = &readinessv1.VipAdvertisement{
				Vip: r.VIP.String(), Advertisement: rep.Advertisement, Reason: rep.Reason, Unconfirmed: rep.Unconfirmed,
			}
		}
		s.Vips = append(s.Vips, v)
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
			Name: s.Name, MinReady: uint32(s.MinReady), Targets: byStream[s.Name], Vips: texts(s.VIPs),
		})
	}
	return streams
}

func texts[T fmt.Stringer](list []T) (all []string) {
	for _, x := range list {
		all = append(all, x.String())
	}
	return all
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

// neighborTables describes the neighbor tables of the node. Targets beyond their limits are
// unreachable.
func neighborTables() string {
	c, err := rtnetlink.Dial()
	if err != nil {
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

// maxEvents is how many events are kept for `lb events`.
const maxEvents = 1000

// events keeps the newest events. Its methods may be called from any goroutine and do not block.
type events struct {
	mu   sync.Mutex
	list []*lbv1.Event
	last uint64 // sequence number of the newest
}

func (e *events) add(all ...*lbv1.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, x := range all {
		e.last++
		x.Sequence, x.Time = e.last, timestamppb.Now()
	}
	e.list = append(e.list, all...)
	e.list = e.list[max(0, len(e.list)-maxEvents):]
}

// newest returns the newest n events after a sequence number, oldest first; n of 0 means all.
func (e *events) newest(after uint64, n int) []*lbv1.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	found := slices.Clone(e.list)
	found = slices.DeleteFunc(found, func(x *lbv1.Event) bool { return x.Sequence <= after })
	if n > 0 {
		found = found[max(0, len(found)-n):]
	}
	return found
}

// ListEvents implements the LBService.
func (a *admin) ListEvents(_ context.Context, r *lbv1.ListEventsRequest) (*lbv1.ListEventsResponse, error) {
	return &lbv1.ListEventsResponse{
		InstanceId: a.process.table.Position().InstanceID,
		Events:     a.process.events.newest(r.GetAfter(), int(r.GetLimit())),
	}, nil
}
