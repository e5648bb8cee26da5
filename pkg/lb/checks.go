package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// sourceLifetime is how long the source address toward the gateways is cached.
const sourceLifetime = time.Second

// checkFWMark returns the fwmark that leads to a target, or the reason why none does.
func (p *process) checkFWMark(k healthcheck.Key) (fwmark uint32, problem string) {
	state := p.plane.State().Load()
	if s := state.Streams[k.Stream]; s != nil {
		if fwmark, ok := s.FWMarks[k.Addr]; ok {
			return fwmark, ""
		}
	}
	// The problem of one address is more specific than an error of the whole data plane.
	if why := state.Unreachable[k.Addr]; why != "" {
		return 0, why
	}
	if state.Err != nil {
		return 0, fmt.Sprintf("the data plane has no route to the target: %v", state.Err)
	}
	return 0, "the data plane has no route to the target yet"
}

// localVIP returns why packets to an address of a VIP do not leave this host, or "".
func (p *process) localVIP(a netip.Addr) string {
	for _, x := range p.plane.State().Load().Problems {
		if x.Local && slices.ContainsFunc(x.VIPs, func(v vip.VIP) bool { return v.Prefix().Contains(a) }) {
			return fmt.Sprintf("%s: %s; %s", x.Object, x.Detail, x.Remedy)
		}
	}
	return ""
}

// gatewaySources caches the local addresses from which the gateways are reached.
type gatewaySources struct {
	mu sync.Mutex
	by [len(vip.Families)]struct {
		addr netip.Addr
		at   time.Time
	}
}

// checkSource returns the local address toward the gateways of a family; the zero Addr if none.
func (p *process) checkSource(f vip.Family) netip.Addr {
	p.gatewaySources.mu.Lock()
	defer p.gatewaySources.mu.Unlock()
	s := &p.gatewaySources.by[f]
	if now := time.Now(); now.Sub(s.at) >= sourceLifetime {
		// Cache a missing source, too: the checks of all targets need it.
		s.addr, s.at = netip.Addr{}, now
		for _, gateway := range p.gateways() {
			if gateway.IsValid() && vip.FamilyOf(gateway) == f && !s.addr.IsValid() {
				s.addr = addressToward(gateway)
			}
		}
	}
	return s.addr
}

func (p *process) gateways() []netip.Addr {
	configured := p.config.Value().Load().Config.Attractor.Gateways
	addrs := make([]netip.Addr, len(configured))
	for i, g := range configured {
		addrs[i] = g.Address
	}
	return addrs
}

// addressToward returns the source address that the kernel selects for packets to an address; the
// zero Addr without a route. It is zero, too, for a link-local address or ::1, which the kernel
// selects during duplicate address detection: targets could not reply to it.
func addressToward(to netip.Addr) netip.Addr {
	addr, _ := rtnetlink.SourceToward(to)
	if addr.Is6() && (addr.IsLinkLocalUnicast() || addr.IsLoopback() && !to.IsLoopback()) {
		return netip.Addr{}
	}
	return addr
}
