package frontend

import (
	"context"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/frontend/orders"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/vip"
)

// ordered returns the operators' drains in effect at now, and when the next one ends; zero: never.
func (p *process) ordered(now time.Time) (orders.Orders, time.Time) { return p.drains.All(now) }

// applyDrains puts the drains by operators in force. It reads the newest drains, so it must run
// where calls are ordered: in the controller's loop, or before that runs.
func (p *process) applyDrains(g *gate.Gate, now time.Time) {
	ordered, _ := p.ordered(now)
	g.OperatorDrains(func(v vip.VIP) time.Time { return ordered.Of(v).End })
	p.bird.Export(ordered.Exports(now))
}

// followDrains applies the ends of drains, and of the drain times of gateways, and sets the timer
// to the next one. The gate has the timers for drain times of VIPs.
func (f *follower) followDrains(ctx context.Context) error {
	now := time.Now()
	ordered, next := f.ordered(now)
	for object, drain := range ordered {
		if object.Gateway != "" && drain.End.After(now) && (next.IsZero() || drain.End.Before(next)) {
			next = drain.End
		}
	}
	if f.drainsEnd.Stop(); !next.IsZero() {
		f.drainsEnd.Reset(next.Sub(now))
	}
	for object := range f.drained {
		// An order that an operator ended has an event already.
		if drain := f.drained[object]; !drain.Over.IsZero() && !drain.Over.After(now) {
			f.Log.Info("drain by an operator ended by itself", "object", object.String())
			f.observer.note("drain of " + object.String() + " by an operator ended by itself")
		}
	}
	f.drained = ordered
	return f.controller.Do(ctx, f.applyDrains)
}

// drainStatus adds the drains by operators to s. vips are those of s.
func (p *process) drainStatus(s *frontendv1.Status, now time.Time, vips []vip.VIP) {
	ordered, _ := p.ordered(now)
	for i, v := range vips {
		s.GetVips()[i].DrainEnds = endpoint.Timestamp(ordered.Of(v).Over)
	}
	for _, gateway := range s.GetGateways() {
		if drain, is := ordered[orders.Object{Gateway: gateway.GetName()}]; is {
			gateway.Drained, gateway.DrainEnds = true, endpoint.Timestamp(drain.Over)
		}
	}
}
