package orders

import (
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Object names what is drained: a VIP, a gateway or, as the zero value, every VIP. A drain outlives
// its object, which may return.
type Object struct {
	VIP     vip.VIP
	Gateway string
	Node    bool // every VIP, by kube with its node
}

const (
	allVIPs       = "all"
	nodeVIPs      = "all with the node"
	gatewayPrefix = "gateway "
)

// String returns the object in words, which the file contains.
func (object Object) String() string {
	switch {
	case object == Object{}:
		return allVIPs
	case object.Node:
		return nodeVIPs
	case object.Gateway != "":
		return gatewayPrefix + object.Gateway
	}
	return object.VIP.String()
}

// MarshalText implements encoding.TextMarshaler.
func (object Object) MarshalText() ([]byte, error) { return []byte(object.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (object *Object) UnmarshalText(text []byte) error {
	*object = Object{Node: string(text) == nodeVIPs}
	if object.Node || string(text) == allVIPs {
		return nil
	}
	if name, is := strings.CutPrefix(string(text), gatewayPrefix); is && name != "" {
		object.Gateway = name
		return nil
	}
	return object.VIP.UnmarshalText(text)
}

// Orders are drains by their objects.
type Orders map[Object]drains.Drain

// Open reads the drains of the previous process. They are in the directory of BIRD's configuration,
// which the frontend must be able to write anyway; "" keeps them in memory.
func Open(dir string, log *slog.Logger) (*drains.Drains[Object], error) {
	if dir == "" {
		return drains.Open[Object]("", log)
	}
	return drains.Open[Object](filepath.Join(dir, "drains.json"), log)
}

// Of returns the drain of a VIP; the zero Drain if it is not drained. Of several drains the
// earliest end of the drain time and the latest end of the drain count.
func (orders Orders) Of(v vip.VIP) (drain drains.Drain) {
	drained := false
	for _, object := range []Object{{VIP: v}, {}, {Node: true}} {
		next, is := orders[object]
		if is && (!drained || next.End.Before(drain.End)) {
			drain.End = next.End
		}
		if is && (!drained || next.Over.IsZero() || !drain.Over.IsZero() && next.Over.After(drain.Over)) {
			drain.Over = next.Over
		}
		drained = drained || is
	}
	return drain
}

// Exports returns the exports to the drained gateways: nothing once the drain time is over.
func (orders Orders) Exports(now time.Time) map[string]bird.Export {
	exports := map[string]bird.Export{}
	for object, drain := range orders {
		switch {
		case object.Gateway == "":
		case drain.End.After(now):
			exports[object.Gateway] = bird.ExportDepreferred
		default:
			exports[object.Gateway] = bird.ExportNone
		}
	}
	return exports
}

// Gateways returns the names of the drained gateways, sorted.
func (orders Orders) Gateways() (names []string) {
	for object := range orders {
		if object.Gateway != "" {
			names = append(names, object.Gateway)
		}
	}
	return slices.Sorted(slices.Values(names))
}

// WithoutAll replaces the drain of every VIP by drains of the configured VIPs, so that some of them
// can be undrained. It returns nil if there is no such drain.
func (orders Orders) WithoutAll(configured []vip.VIP) Orders {
	if _, isAll := orders[Object{}]; !isAll {
		return nil
	}
	each := maps.Clone(orders)
	delete(each, Object{Node: true}) // kube ends it
	for _, v := range configured {
		each[Object{VIP: v}] = each.Of(v)
	}
	return each
}

// maxNamed is the maximum number of VIPs in a refusal.
const maxNamed = 5

// Elsewhere is what is known about the other pods of the trench. The frontend cannot see their
// routes: a gateway sends one best route, and the AS path of another pod's has the own AS number.
type Elsewhere struct {
	VIPs  vip.Set // VIPs that one of them advertises
	Until time.Time
}

// RefuseVIPs returns why objects must not be drained without force: this pod advertises a VIP that
// no other pod is known to advertise.
func (orders Orders) RefuseVIPs(objects []Object, configured []vip.VIP, advertised func(vip.VIP) bool,
	elsewhere Elsewhere, now time.Time,
) string {
	isKnown := now.Before(elsewhere.Until)
	var last []string
	check := func(v vip.VIP) {
		isDrained := !orders.Of(v).End.IsZero()
		if advertised(v) && !isDrained && !(isKnown && elsewhere.VIPs.Has(v)) {
			last = append(last, v.String())
		}
	}
	for _, object := range objects {
		switch {
		case object == Object{}:
			for _, v := range configured {
				check(v)
			}
		case object.Gateway == "":
			check(object.VIP)
		}
	}
	list := strings.Join(last[:min(len(last), maxNamed)], ", ")
	if more := len(last) - maxNamed; more > 0 {
		list += fmt.Sprintf(" and %d more VIPs", more)
	}
	switch {
	case len(last) == 0:
		return ""
	case isKnown:
		return "no other pod advertises " + list
	}
	return "it is not known whether another pod advertises " + list
}

// RefuseGateways returns why gateways must not be drained without force: no other gateway of their
// family is up and receives VIPs.
func (orders Orders) RefuseGateways(names []string, configured []trench.Gateway, state bird.State) string {
	for _, family := range vip.Families {
		drains := func(g trench.Gateway) bool { return g.Has(family) && slices.Contains(names, g.Name) }
		remains := func(g bird.GatewayState) bool {
			_, isDrained := orders[Object{Gateway: g.Name}]
			return g.Family == family && state.Alive && g.Up && !isDrained && !slices.Contains(names, g.Name)
		}
		if slices.ContainsFunc(configured, drains) && !slices.ContainsFunc(state.Gateways, remains) {
			return fmt.Sprintf("no other %s gateway is up and receives VIPs: they would be withdrawn", family)
		}
	}
	return ""
}
