package orders

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

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
		drains := func(g trench.Gateway) bool { return g.Family() == family && slices.Contains(names, g.Name) }
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
