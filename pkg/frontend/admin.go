package frontend

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
)

// admin implements the FrontendService.
type admin struct {
	frontendv1.UnsafeFrontendServiceServer
	endpoint.StatusServer[frontendv1.Status, uint64]
	process *process
}

func newAdmin(p *process) *admin {
	read := func(context.Context) *frontendv1.Status { return p.status() }
	return &admin{
		process: p, StatusServer: endpoint.StatusServer[frontendv1.Status, uint64]{Read: read, Changes: p.changed},
	}
}

func (a *admin) Drain(ctx context.Context, r *frontendv1.DrainRequest) (*frontendv1.Drains, error) {
	// An empty list must not drain every VIP by mistake.
	if r.GetAll() != (len(r.GetVips()) == 0) {
		return nil, status.Error(codes.InvalidArgument, "a drain needs either VIPs or all, not both")
	}
	return a.drain(ctx, "drained", r.GetVips(), (*gate.Gate).Drain)
}

func (a *admin) Undrain(ctx context.Context, r *frontendv1.UndrainRequest) (*frontendv1.Drains, error) {
	return a.drain(ctx, "undrained", r.GetVips(), func(g *gate.Gate, _ time.Time, vips ...vip.VIP) { g.Undrain(vips...) })
}

// drain applies f to the named VIPs, or to all, and returns the drained VIPs.
func (a *admin) drain(ctx context.Context, what string, names []string,
	f func(*gate.Gate, time.Time, ...vip.VIP),
) (*frontendv1.Drains, error) {
	configured := a.process.Source.Value().Load().Config.Attractor.VIPs
	vips := configured
	if len(names) > 0 {
		// Check every name first: a mistyped one must not leave a part of the VIPs drained.
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
	d := &frontendv1.Drains{}
	// The controller owns the gate. Do returns after the decisions are published, so that the response
	// states the result.
	err := a.process.controller.Do(ctx, func(g *gate.Gate, now time.Time) {
		f(g, now, vips...)
		drained := g.Drained()
		for _, v := range slices.SortedFunc(maps.Keys(drained), vip.Compare) {
			d.Drained = append(d.Drained, v.String())
			// Until its end a drained VIP is de-preferred, not withdrawn.
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
	// The event keeps the operator's names; the log line has only their number.
	which := "every VIP"
	if len(names) > 0 {
		which = strings.Join(names, ", ")
	}
	a.process.observer.note("an operator " + what + " " + which)
	return d, nil
}

func (a *admin) ApplyNow(ctx context.Context, _ *frontendv1.ApplyNowRequest) (*frontendv1.ApplyNowResponse, error) {
	response := &frontendv1.ApplyNowResponse{}
	for _, g := range a.process.bird.State().Load().Gateways {
		if g.Change.Phase != turns.Steady {
			response.Gateways = append(response.Gateways, g.Name)
		}
	}
	left := make(chan []vip.VIP, 1)
	select {
	case a.process.immediate <- left:
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	for _, v := range <-left {
		response.Vips = append(response.Vips, v.String())
	}
	a.process.Log.Info("operator applied the configuration now", "vips", len(response.GetVips()),
		"gateways", response.GetGateways())
	a.process.observer.note("an operator applied the configuration without drains and turns")
	return response, nil
}
