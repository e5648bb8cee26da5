package frontend

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// drained names the object of a drain by an operator: a VIP, a gateway or, as the zero value, every
// VIP. A drain outlives its object, which may return.
type drained struct {
	vip     vip.VIP
	gateway string
}

const (
	allVIPs       = "all"
	gatewayObject = "gateway "
)

// String returns the object in words, which the file contains.
func (object drained) String() string {
	switch {
	case object == drained{}:
		return allVIPs
	case object.gateway != "":
		return gatewayObject + object.gateway
	}
	return object.vip.String()
}

// MarshalText implements encoding.TextMarshaler.
func (object drained) MarshalText() ([]byte, error) { return []byte(object.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (object *drained) UnmarshalText(text []byte) error {
	*object = drained{}
	if string(text) == allVIPs {
		return nil
	}
	if name, is := strings.CutPrefix(string(text), gatewayObject); is && name != "" {
		object.gateway = name
		return nil
	}
	return object.vip.UnmarshalText(text)
}

// operatorDrains holds the drains by operators.
type operatorDrains = drains.Drains[drained]

// openDrains reads the drains of the previous process. They are beside BIRD's configuration, which
// the frontend must be able to write anyway.
func (o *Options) openDrains() (*operatorDrains, error) {
	if o.BIRD.Dir == "" {
		return drains.Open[drained]("", o.Log)
	}
	return drains.Open[drained](filepath.Join(o.BIRD.Dir, "drains.json"), o.Log)
}

// applyDrains puts the drains by operators in force. It reads the newest drains, so it must run
// where calls are ordered: in the controller's loop, or before that runs.
func (p *process) applyDrains(g *gate.Gate, now time.Time) {
	orders, _ := p.drains.All(now)
	g.OperatorDrains(func(v vip.VIP) time.Time { return drainOf(orders, v).End })
	p.bird.Export(gatewayExports(orders, now))
}

// drainOf returns the drain of a VIP; the zero Drain if it is not drained. Of two drains the
// earlier end of the drain time and the later end of the drain count.
func drainOf(orders map[drained]drains.Drain, v vip.VIP) drains.Drain {
	all, isAll := orders[drained{}]
	own, isOwn := orders[drained{vip: v}]
	switch {
	case !isAll:
		return own
	case !isOwn:
		return all
	}
	if all.End.Before(own.End) {
		own.End = all.End
	}
	if all.Over.IsZero() || !own.Over.IsZero() && all.Over.After(own.Over) {
		own.Over = all.Over
	}
	return own
}

// gatewayExports returns the exports to the drained gateways: nothing once the drain time is over.
func gatewayExports(orders map[drained]drains.Drain, now time.Time) map[string]bird.Export {
	exports := map[string]bird.Export{}
	for object, drain := range orders {
		switch {
		case object.gateway == "":
		case drain.End.After(now):
			exports[object.gateway] = bird.ExportDepreferred
		default:
			exports[object.gateway] = bird.ExportNone
		}
	}
	return exports
}

// followDrains applies the ends of drains, and of the drain times of gateways, and sets the timer
// to the next one. The gate has the timers for drain times of VIPs.
func (f *follower) followDrains(ctx context.Context) error {
	now := time.Now()
	orders, next := f.drains.All(now)
	for object, drain := range orders {
		if object.gateway != "" && drain.End.After(now) && (next.IsZero() || drain.End.Before(next)) {
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
	f.drained = orders
	return f.controller.Do(ctx, f.applyDrains)
}

// refuseGateways returns why gateways must not be drained without force: no other gateway of their
// family is up and receives VIPs.
func refuseGateways(s bird.State, configured []trench.Gateway, names []string, orders map[drained]drains.Drain) string {
	for _, family := range vip.Families {
		drains := func(g trench.Gateway) bool { return g.Family() == family && slices.Contains(names, g.Name) }
		remains := func(g bird.GatewayState) bool {
			_, isDrained := orders[drained{gateway: g.Name}]
			return g.Family == family && s.Alive && g.Up && !isDrained && !slices.Contains(names, g.Name)
		}
		if slices.ContainsFunc(configured, drains) && !slices.ContainsFunc(s.Gateways, remains) {
			return fmt.Sprintf("no other %s gateway is up and receives VIPs: they would be withdrawn", family)
		}
	}
	return ""
}

// drainStatus adds the drains by operators to s. vips are those of s.
func (p *process) drainStatus(s *frontendv1.Status, now time.Time, vips []vip.VIP) {
	orders, _ := p.drains.All(now)
	for i, v := range vips {
		s.GetVips()[i].DrainEnds = endpoint.Timestamp(drainOf(orders, v).Over)
	}
	for _, gateway := range s.GetGateways() {
		if drain, is := orders[drained{gateway: gateway.GetName()}]; is {
			gateway.Drained, gateway.DrainEnds = true, endpoint.Timestamp(drain.Over)
		}
	}
}

// drainedGateways returns the names of the drained gateways, sorted.
func drainedGateways(orders map[drained]drains.Drain) (names []string) {
	for object := range orders {
		if object.gateway != "" {
			names = append(names, object.gateway)
		}
	}
	return slices.Sorted(slices.Values(names))
}

// withoutAll replaces the drain of every VIP by drains of the VIPs that are configured now, so that
// some of them can be undrained.
func withoutAll(orders map[drained]drains.Drain, configured []vip.VIP) map[drained]drains.Drain {
	_, isAll := orders[drained{}]
	if !isAll {
		return nil
	}
	each := maps.Clone(orders)
	for _, v := range configured {
		each[drained{vip: v}] = drainOf(orders, v)
	}
	return each
}
