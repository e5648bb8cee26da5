package frontend

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bird/exports"
	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/frontend/orders"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
)

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

// Drain implements the FrontendService.
func (a *admin) Drain(ctx context.Context, r *frontendv1.DrainRequest) (*frontendv1.Drains, error) {
	p := a.process
	kinds := 0
	for _, given := range []bool{r.GetAll(), len(r.GetVips()) > 0, len(r.GetGateways()) > 0} {
		if given {
			kinds++
		}
	}
	// An empty list must not drain every VIP by mistake.
	if lasts := r.GetEndsAfter().AsDuration(); kinds != 1 || lasts < 0 {
		return nil, status.Error(codes.InvalidArgument, "a drain needs either VIPs, gateways or all, and a positive end")
	}
	if len(r.GetGateways()) > 0 && p.External != nil {
		return nil, status.Error(codes.FailedPrecondition,
			"the sessions with gateways belong to another program: drain gateways at the speaker, or VIPs here")
	}
	objects, err := a.named(r.GetVips(), r.GetGateways())
	if err != nil {
		return nil, err
	}
	if r.GetAll() {
		objects = []orders.Object{{Node: r.GetNode()}}
	}
	now := time.Now()
	ordered, _ := p.ordered(now)
	attractor := p.Source.Value().Load().Config.Attractor
	advertised := func(v vip.VIP) bool { is, _ := p.observer.state.serves(v); return is }
	refusal := cmp.Or(ordered.RefuseGateways(r.GetGateways(), attractor.Gateways, p.bird.State().Load()),
		ordered.RefuseVIPs(objects, attractor.VIPs, advertised, p.elsewhere.Load(), now))
	if refusal != "" && !r.GetForce() {
		return nil, status.Errorf(codes.FailedPrecondition, "%s; --force drains all the same", refusal)
	}
	added := orders.Orders{}
	for _, object := range objects {
		drain := drains.New(now, p.Gate.DrainTime, r.GetEndsAfter().AsDuration())
		// A repeated order does not begin the drain time again: it would export VIPs once more.
		if before, is := ordered[object]; is {
			drain.End = before.End
		}
		added[object] = drain
	}
	d, err := a.change(ctx, "drained", objects, func() error { return p.drains.Drain(now, added) })
	if err == nil {
		d.Warning = refusal
	}
	return d, err
}

// SetAdvertisedElsewhere implements the FrontendService.
func (a *admin) SetAdvertisedElsewhere(_ context.Context, r *frontendv1.SetAdvertisedElsewhereRequest,
) (*frontendv1.SetAdvertisedElsewhereResponse, error) {
	valid := r.GetValidFor().AsDuration()
	if valid <= 0 || valid > time.Minute {
		return nil, status.Error(codes.InvalidArgument, "valid_for must be between 0 and 1 min")
	}
	next := orders.Elsewhere{VIPs: vip.Set{}, Until: time.Now().Add(valid)}
	for _, name := range r.GetVips() {
		v, err := vip.Parse(name)
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		next.VIPs[v] = struct{}{}
	}
	a.process.elsewhere.Set(next)
	return &frontendv1.SetAdvertisedElsewhereResponse{}, nil
}

// Undrain implements the FrontendService.
func (a *admin) Undrain(ctx context.Context, r *frontendv1.UndrainRequest) (*frontendv1.Drains, error) {
	p := a.process
	objects, err := a.named(r.GetVips(), r.GetGateways())
	if err != nil {
		return nil, err
	}
	now := time.Now()
	ordered, _ := p.ordered(now)
	switch {
	case r.GetAll():
		objects = []orders.Object{{Node: r.GetNode()}}
	case len(objects) == 0:
		for object := range ordered {
			if object.Gateway == "" {
				objects = append(objects, object)
			}
		}
	case len(r.GetVips()) > 0:
		if each := ordered.WithoutAll(p.Source.Value().Load().Config.Attractor.VIPs); each != nil {
			if err := p.drains.Drain(now, each); err != nil {
				return nil, status.Error(codes.FailedPrecondition, err.Error())
			}
			objects = append(objects, orders.Object{})
		}
	}
	return a.change(ctx, "undrained", objects, func() error { return p.drains.Undrain(now, objects...) })
}

// named returns the objects of these names. It checks every name first: a mistyped one must not
// leave a part of them drained.
func (a *admin) named(vips, gateways []string) (objects []orders.Object, err error) {
	config := a.process.Source.Value().Load().Config.Attractor
	known := vip.NewSet(config.VIPs...)
	ordered, _ := a.process.ordered(time.Now())
	for _, n := range vips {
		v, err := vip.Parse(n)
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		if _, isDrained := ordered[orders.Object{VIP: v}]; !known.Has(v) && !isDrained {
			return nil, status.Errorf(codes.NotFound, "VIP %s is not in the attractor", v)
		}
		objects = append(objects, orders.Object{VIP: v})
	}
	for _, name := range gateways {
		object := orders.Object{Gateway: name}
		i := slices.IndexFunc(config.Gateways, func(g trench.Gateway) bool { return g.Name == name })
		if _, isDrained := ordered[object]; !isDrained && i < 0 {
			return nil, status.Errorf(codes.NotFound, "gateway %q is not in the attractor", name)
		}
		if i >= 0 && config.Gateways[i].Protocol == trench.Static {
			return nil, status.Errorf(codes.InvalidArgument,
				"gateway %s is static and takes all VIPs of a family or none: drain the VIPs instead", name)
		}
		objects = append(objects, object)
	}
	return objects, nil
}

// change applies a change of the drains of objects, and returns all drains.
func (a *admin) change(ctx context.Context, what string, objects []orders.Object, change func() error,
) (*frontendv1.Drains, error) {
	p := a.process
	if err := change(); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	// Do returns after the decisions are published, so that the response states the result.
	if err := p.controller.Do(ctx, p.applyDrains); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	now := time.Now()
	ordered, _ := p.ordered(now)
	d := &frontendv1.Drains{Gateways: ordered.Gateways()}
	until := func(end time.Time) {
		if end.After(now) && end.After(d.GetUntil().AsTime()) {
			d.Until = timestamppb.New(end)
		}
	}
	for _, v := range vip.NewSet(p.Source.Value().Load().Config.Attractor.VIPs...).Sorted() {
		drain := ordered.Of(v)
		if drain.End.IsZero() {
			continue
		}
		d.Drained = append(d.Drained, v.String())
		// Until its end a drained VIP is de-preferred, not withdrawn.
		if drain.End.After(now) {
			d.Draining = append(d.Draining, v.String())
			until(drain.End)
		}
	}
	for _, name := range d.GetGateways() {
		until(ordered[orders.Object{Gateway: name}].End)
	}
	caller := identity.Caller(ctx)
	p.Log.Info("operator changed drains", "drained", len(d.GetDrained()), "gateways", d.GetGateways(), "by", caller)
	// The event keeps the operator's names; the log line has only their number.
	names := cmp.Or(strings.Join(vip.Texts(objects), ", "), orders.Object{}.String())
	p.observer.journal.Add(&adminv1.Event{Detail: "an operator " + what + " " + names, By: caller})
	return d, nil
}

// ListExports implements the FrontendService.
func (a *admin) ListExports(ctx context.Context, r *frontendv1.ListExportsRequest) (*frontendv1.ListExportsResponse,
	error,
) {
	var prefix vip.VIP // zero for all
	var err error
	if r.GetVip() != "" {
		if prefix, err = vip.Parse(r.GetVip()); err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
	}
	if a.process.External != nil {
		return nil, status.Error(codes.Unimplemented,
			"the speaker belongs to another program: ask it for the routes that it exports")
	}
	var names []string
	for _, g := range a.process.bird.State().Load().Gateways {
		// A gateway with both families is listed twice.
		if g.Up && !isStatic(g) && (prefix.IsZero() || g.Family == prefix.Family()) && !slices.Contains(names, g.Name) {
			names = append(names, g.Name)
		}
	}
	all, err := exports.Read(ctx, a.process.BIRD.Socket, names, prefix)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &frontendv1.ListExportsResponse{Exports: all}, nil
}

func (a *admin) ApplyNow(ctx context.Context, _ *frontendv1.ApplyNowRequest) (*frontendv1.ApplyNowResponse, error) {
	response := &frontendv1.ApplyNowResponse{}
	for _, g := range a.process.bird.State().Load().Gateways {
		if g.Change.Phase != turns.Steady && !slices.Contains(response.GetGateways(), g.Name) {
			response.Gateways = append(response.Gateways, g.Name)
		}
	}
	left := make(chan []vip.VIP, 1)
	select {
	case a.process.immediate <- left:
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	response.Vips = vip.Texts(<-left)
	caller := identity.Caller(ctx)
	a.process.Log.Info("operator applied the configuration now", "vips", len(response.GetVips()),
		"gateways", response.GetGateways(), "by", caller)
	a.process.observer.journal.Add(&adminv1.Event{
		Detail: "an operator applied the configuration without drains and turns", By: caller,
	})
	return response, nil
}
