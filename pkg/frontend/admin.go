package frontend

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/vip"
)

// admin implements the FrontendService.
type admin struct {
	frontendv1.UnimplementedFrontendServiceServer
	process *process
}

func (a *admin) GetStatus(context.Context, *frontendv1.GetStatusRequest) (*frontendv1.GetStatusResponse, error) {
	return &frontendv1.GetStatusResponse{Status: a.process.status()}, nil
}

func (a *admin) WatchStatus(_ *frontendv1.WatchStatusRequest,
	stream grpc.ServerStreamingServer[frontendv1.WatchStatusResponse],
) error {
	return endpoint.WatchStatus(stream.Context(), a.process.changed, func() error {
		return stream.Send(&frontendv1.WatchStatusResponse{Status: a.process.status()})
	})
}

func (a *admin) ListEvents(_ context.Context, r *frontendv1.ListEventsRequest) (*frontendv1.ListEventsResponse, error) {
	v, err := filter(r.GetVip())
	if err != nil {
		return nil, err
	}
	if err := a.known(v); err != nil {
		return nil, err
	}
	match := about(v)
	s := a.process.observer.state
	s.mu.RLock()
	defer s.mu.RUnlock()
	found, _, _ := s.events.page(s.events.tail(r.GetAfter(), int(r.GetLimit()), match), maxEvents, match)
	return &frontendv1.ListEventsResponse{Events: eventsProto(found, v)}, nil
}

// WatchEvents sends new events. A slow client receives the number of events that it missed.
func (a *admin) WatchEvents(r *frontendv1.WatchEventsRequest,
	stream grpc.ServerStreamingServer[frontendv1.WatchEventsResponse],
) error {
	v, err := filter(r.GetVip())
	if err != nil {
		return err
	}
	if r.GetInstanceId() == "" { // otherwise the client continues, perhaps with another frontend
		if err := a.known(v); err != nil {
			return err
		}
	}
	match := about(v)
	s, instance := a.process.observer.state, a.process.instance
	s.mu.RLock()
	after := s.events.oldest() - 1
	if r.GetInstanceId() == instance {
		after = min(r.GetAfter(), s.events.last)
	}
	after = s.events.tail(after, int(r.GetLimit()), match)
	s.mu.RUnlock()
	for first := true; ; first = false {
		// Get the channel before the read: an event that is added after the read closes it.
		_, changed := s.changed.Get()
		s.mu.RLock()
		found, upTo, lost := s.events.page(after, maxEventsPerMessage, match)
		more := upTo < s.events.last
		s.mu.RUnlock()
		after = upTo
		if first || len(found) > 0 || lost > 0 {
			if err := stream.Send(&frontendv1.WatchEventsResponse{
				InstanceId: instance, Events: eventsProto(found, v), Lost: lost, UpTo: upTo,
			}); err != nil {
				return err
			}
		}
		if more {
			continue
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}

// known returns an error for a VIP that is not in the attractor and has no events. Without a
// configuration it accepts every VIP.
func (a *admin) known(v vip.VIP) error {
	loaded := a.process.Source.Value().Load()
	if v.IsZero() || loaded.Generation == 0 || slices.Contains(loaded.Config.Attractor.VIPs, v) {
		return nil
	}
	s := a.process.observer.state
	s.mu.RLock()
	defer s.mu.RUnlock()
	if found, _, _ := s.events.page(0, 1, about(v)); len(found) > 0 || s.vips.Get(v) != nil {
		return nil
	}
	return status.Errorf(codes.NotFound,
		"VIP %s is not in the attractor and has no events; `frontend status` lists the VIPs", v)
}

// filter parses the VIP of a request. The zero VIP selects all VIPs.
func filter(name string) (vip.VIP, error) {
	if name == "" {
		return vip.VIP{}, nil
	}
	v, err := vip.Parse(name)
	if err != nil {
		return v, status.Error(codes.InvalidArgument, err.Error())
	}
	return v, nil
}

func (a *admin) Drain(ctx context.Context, r *frontendv1.DrainRequest) (*frontendv1.DrainResponse, error) {
	if r.GetAll() != (len(r.GetVips()) == 0) {
		return nil, status.Error(codes.InvalidArgument, "a drain needs either VIPs or all, not both")
	}
	return a.drain(ctx, "drained", r.GetVips(), (*gate.Gate).Drain)
}

func (a *admin) Undrain(ctx context.Context, r *frontendv1.UndrainRequest) (*frontendv1.UndrainResponse, error) {
	d, err := a.drain(ctx, "undrained", r.GetVips(), func(g *gate.Gate, _ time.Time, vips ...vip.VIP) {
		g.Undrain(vips...)
	})
	return &frontendv1.UndrainResponse{Drained: d.GetDrained()}, err
}

// drain applies f to the named VIPs, or to all, and returns the drained VIPs.
func (a *admin) drain(ctx context.Context, what string, names []string,
	f func(*gate.Gate, time.Time, ...vip.VIP),
) (*frontendv1.DrainResponse, error) {
	configured := a.process.Source.Value().Load().Config.Attractor.VIPs
	vips := configured
	if len(names) > 0 {
		known := vip.NewSet(configured...)
		vips = nil
		for _, n := range names {
			v, err := vip.Parse(n)
			if err != nil {
				return nil, status.Error(codes.InvalidArgument, err.Error())
			}
			if !known.Has(v) {
				return nil, status.Errorf(codes.NotFound, "VIP %s is not in the attractor", v)
			}
			vips = append(vips, v)
		}
	}
	d := &frontendv1.DrainResponse{}
	err := a.process.controller.Do(ctx, func(g *gate.Gate, now time.Time) {
		f(g, now, vips...)
		drained := g.Drained()
		for _, v := range slices.SortedFunc(maps.Keys(drained), vip.Compare) {
			d.Drained = append(d.Drained, v.String())
			if end := drained[v]; end.After(now) {
				d.Draining = append(d.Draining, v.String())
				if end.After(d.GetUntil().AsTime()) {
					d.Until = timestamppb.New(end)
				}
			}
		}
	})
	if err != nil {
		return nil, status.FromContextError(err).Err()
	}
	a.process.Log.Info("operator changed drains", "drained", len(d.GetDrained()))
	which := "every VIP"
	if len(names) > 0 {
		which = strings.Join(names, ", ")
	}
	a.process.observer.note("an operator " + what + " " + which)
	return d, nil
}

func (a *admin) SetLogLevel(_ context.Context,
	r *frontendv1.SetLogLevelRequest,
) (*frontendv1.SetLogLevelResponse, error) {
	previous, err := endpoint.SetLogLevel(a.process.Level, a.process.Log, r.GetLevel())
	return &frontendv1.SetLogLevelResponse{Previous: previous}, err
}
