package turn

import (
	"net/netip"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// sessions maps a family to the time since which its session is up. Families without a session
// are missing.
type sessions map[vip.Family]time.Time

// sessionsOf returns the sessions of families; none if the status is unknown.
func sessionsOf(status *frontendv1.Status, families map[vip.Family]bool) sessions {
	all := sessions{}
	for _, gateway := range status.GetGateways() {
		address, err := netip.ParseAddr(gateway.GetAddress())
		// A session that lacks exports does not carry its VIPs yet.
		if err != nil || !gateway.GetUp() || gateway.GetExported() < gateway.GetExpected() {
			continue
		}
		if family := vip.FamilyOf(address); families[family] {
			all[family] = gateway.GetSince().AsTime()
		}
	}
	return all
}

// familiesOf returns the families of gateways.
func familiesOf(gateways []trench.Gateway) map[vip.Family]bool {
	families := map[vip.Family]bool{}
	for _, gateway := range gateways {
		families[gateway.Family()] = true
	}
	return families
}

// restarted reports whether each session from before the change has been reset and is up again.
func (before sessions) restarted(now sessions) bool {
	for family, since := range before {
		if again, up := now[family]; !up || again.Equal(since) {
			return false
		}
	}
	return true
}

// kept reports whether each session from before the change is up and was not reset.
func (before sessions) kept(now sessions) bool {
	for family, since := range before {
		if again, up := now[family]; !up || !again.Equal(since) {
			return false
		}
	}
	return true
}
