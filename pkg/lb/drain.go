package lb

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// maxDrain bounds a drain by an operator: a longer one is a typing error.
const maxDrain = 24 * time.Hour

// DrainTargets implements the LBService.
func (a *admin) DrainTargets(_ context.Context, r *lbv1.DrainTargetsRequest) (*lbv1.DrainTargetsResponse, error) {
	p := a.process
	ids, err := p.targetsNamed(r.GetStream(), r.GetNames())
	if err != nil {
		return nil, err
	}
	drainFor := time.Duration(-1)
	if d := r.GetDrainFor(); d != nil {
		if drainFor = d.AsDuration(); drainFor < 0 || drainFor > maxDrain {
			return nil, status.Errorf(codes.InvalidArgument, "drain for %v: between 0 and %v", drainFor, maxDrain)
		}
	}
	done, now := &lbv1.DrainTargetsResponse{}, time.Now()
	for _, id := range ids {
		long := drainFor
		if long < 0 {
			long = p.drainTime(id.Stream)
		}
		if err := p.sources.drains.Drain(id, long, now); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "drain %s: %v", id, err)
		}
		p.Log.Info("target drained by an operator", "stream", id.Stream, "target", id.Name, "drain_for", long)
		done.Drained = append(done.Drained, id.String())
		if end := now.Add(long); end.After(done.GetUntil().AsTime()) {
			done.Until = timestamppb.New(end)
		}
	}
	return done, nil
}

// UndrainTargets implements the LBService.
func (a *admin) UndrainTargets(_ context.Context, r *lbv1.UndrainTargetsRequest) (*lbv1.UndrainTargetsResponse, error) {
	p := a.process
	if len(r.GetNames()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "no target is named")
	}
	drained := p.sources.drains.All()
	maps.DeleteFunc(drained, func(id targetset.ID, _ time.Time) bool {
		return !slices.Contains(r.GetNames(), id.Name) || (r.GetStream() != "" && r.GetStream() != id.Stream)
	})
	// A target that is not drained already is as wanted; a name that nothing has is a
	// typing error, and undrains nothing.
	others := slices.DeleteFunc(slices.Clone(r.GetNames()), func(name string) bool {
		for id := range drained {
			if id.Name == name {
				return true
			}
		}
		return false
	})
	if len(others) > 0 {
		if _, err := p.targetsNamed(r.GetStream(), others); err != nil {
			return nil, err
		}
	}
	done := &lbv1.UndrainTargetsResponse{}
	for id := range drained {
		if err := p.sources.drains.Undrain(id); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "undrain %s: %v", id, err)
		}
		p.Log.Info("drain by an operator ended", "stream", id.Stream, "target", id.Name)
		done.Undrained = append(done.Undrained, id.String())
	}
	slices.Sort(done.Undrained)
	return done, nil
}

// targetsNamed finds targets by name, in one stream or in all. Each name must be
// found, so that a typing error drains nothing.
func (p *process) targetsNamed(stream string, names []string) ([]targetset.ID, error) {
	if len(names) == 0 {
		return nil, status.Error(codes.InvalidArgument, "no target is named")
	}
	seen := map[targetset.ID]bool{}
	var ids []targetset.ID
	for _, v := range p.index.List(func(k healthcheck.Key) bool {
		return (stream == "" || k.Stream == stream) && slices.Contains(names, k.Name)
	}) {
		if id := (targetset.ID{Stream: v.Stream, Name: v.Name}); !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(ids, func(id targetset.ID) bool { return id.Name == name }) {
			in := "any stream"
			if stream != "" {
				in = "stream " + stream
			}
			return nil, status.Errorf(codes.NotFound, "no target %q in %s: `lb target list` shows the targets", name, in)
		}
	}
	return ids, nil
}

// drainTime is the drain time of a stream in force.
func (p *process) drainTime(stream string) time.Duration {
	for _, s := range p.config.Value().Load().Config.Streams {
		if s.Name == stream {
			return s.DrainTime
		}
	}
	return 0
}
