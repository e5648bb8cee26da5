package lb

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxDrain bounds a drain by an operator: a longer one is a typing error.
const maxDrain = 24 * time.Hour

// DrainTargets implements the LBService.
func (a *admin) DrainTargets(ctx context.Context, r *lbv1.DrainTargetsRequest) (*lbv1.DrainTargetsResponse, error) {
	// Negative: each target drains for the drain time of its stream.
	drainFor := time.Duration(-1)
	if d := r.GetDrainFor(); d != nil {
		if drainFor = d.AsDuration(); drainFor < 0 || drainFor > maxDrain {
			return nil, status.Errorf(codes.InvalidArgument, "drain for %v: between 0 and %v", drainFor, maxDrain)
		}
	}
	lasts := r.GetEndsAfter().AsDuration()
	if lasts < 0 {
		return nil, status.Errorf(codes.InvalidArgument, "ends after %v: must not be negative", lasts)
	}
	p := a.process
	ids, err := p.targetsNamed(r.GetStream(), r.GetNames())
	if err != nil {
		return nil, err
	}
	done, now, added := &lbv1.DrainTargetsResponse{}, time.Now(), map[targetset.ID]drains.Drain{}
	for _, id := range ids {
		long := drainFor
		if long < 0 {
			// If a reload has removed the stream, the drain time is 0.
			s, _ := p.stream(id.Stream)
			long = s.DrainTime
		}
		added[id] = drains.New(now, long, lasts)
		done.Drained = append(done.Drained, id.String())
		if end := now.Add(long); end.After(done.GetUntil().AsTime()) {
			done.Until = timestamppb.New(end)
		}
	}
	if err := p.sources.drains.Drain(now, added); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	p.Log.Info("targets drained by an operator", "targets", done.GetDrained(), "until", done.GetUntil().AsTime(),
		"ends_after", lasts, "by", identity.Caller(ctx))
	p.ordered(ctx, "drained", ids)
	return done, nil
}

// UndrainTargets implements the LBService.
func (a *admin) UndrainTargets(ctx context.Context, r *lbv1.UndrainTargetsRequest,
) (*lbv1.UndrainTargetsResponse, error) {
	p, names := a.process, r.GetNames()
	if len(names) == 0 {
		return nil, errNoTarget
	}
	// A drain outlives its target, so search the drains and not the index.
	now := time.Now()
	orders, _ := p.sources.drains.All(now)
	drained := slices.Collect(maps.Keys(orders))
	drained = slices.DeleteFunc(drained, func(id targetset.ID) bool { return !named(id, r.GetStream(), names) })
	// Names of targets that are not drained succeed. A name that no target has is a typing error,
	// and then no drain ends.
	others := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return slices.ContainsFunc(drained, func(id targetset.ID) bool { return id.Name == name })
	})
	if len(others) > 0 {
		if _, err := p.targetsNamed(r.GetStream(), others); err != nil {
			return nil, err
		}
	}
	if err := p.sources.drains.Undrain(now, drained...); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	done := &lbv1.UndrainTargetsResponse{Undrained: vip.Texts(drained)}
	// The order of a map is random.
	slices.Sort(done.Undrained)
	p.Log.Info("drains by an operator ended", "targets", done.GetUndrained(), "by", identity.Caller(ctx))
	slices.SortFunc(drained, func(a, b targetset.ID) int { return cmp.Compare(a.String(), b.String()) })
	p.ordered(ctx, "undrained", drained)
	return done, nil
}

// ordered adds an event for each target that a caller drained or undrained.
func (p *process) ordered(ctx context.Context, what string, targets []targetset.ID) {
	var all []*adminv1.Event
	for _, id := range targets {
		all = append(all, &adminv1.Event{
			Object: "target", To: what, Stream: id.Stream, Target: id.Name, Detail: "by an operator", By: identity.Caller(ctx),
		})
	}
	p.decisions.journal.Add(summed(all)...)
}

var errNoTarget = status.Error(codes.InvalidArgument, "no target is named")

// named reports whether a target has one of the names, in the stream unless that is "".
func named(id targetset.ID, stream string, names []string) bool {
	return (stream == "" || stream == id.Stream) && slices.Contains(names, id.Name)
}

// targetsNamed finds targets by name, or fails: a typing error must drain nothing.
func (p *process) targetsNamed(stream string, names []string) ([]targetset.ID, error) {
	if len(names) == 0 {
		return nil, errNoTarget
	}
	var ids []targetset.ID
	for _, v := range p.index.List(nil) {
		if id := (targetset.ID{Stream: v.Stream, Name: v.Name}); named(id, stream, names) {
			ids = append(ids, id)
		}
	}
	ids = slices.Compact(ids) // a target may have two addresses, which follow each other
	for _, name := range names {
		if !slices.ContainsFunc(ids, func(id targetset.ID) bool { return id.Name == name }) {
			in := "any stream"
			if stream != "" {
				in = "stream " + stream
			}
			return nil, status.Errorf(codes.NotFound, "no target %q in %s: `lb target list` shows the targets",
				name, in)
		}
	}
	return ids, nil
}

// stream returns a stream in force.
func (p *process) stream(name string) (s trench.Stream, known bool) {
	streams := p.loop.inForce.Load().Streams
	if i := slices.IndexFunc(streams, func(s trench.Stream) bool { return s.Name == name }); i >= 0 {
		return streams[i], true
	}
	return s, false
}
