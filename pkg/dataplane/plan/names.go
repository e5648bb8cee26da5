package plan

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Prefixes of the chains of streams and targets.
const (
	StreamPrefix = "stream/"
	TargetPrefix = "target/"
)

// Names of maps, or their prefixes, by family.
var (
	HostMaps   = [...]string{"vip4", "vip6"}
	NetMaps    = [...]string{"net4", "net6"}
	LiveMaps   = [...]string{"live4/", "live6/"}
	MaglevMaps = [...]string{"maglev4/", "maglev6/"}
)

func StreamChain(name string) string { return StreamPrefix + name }

func TargetChain(number uint32) string {
	return TargetPrefix + strconv.FormatUint(uint64(number), 10)
}

// ParseTargetChain parses the name of a target's chain into its fwmark.
func ParseTargetChain(chain string) (uint32, bool) {
	digits, ok := strings.CutPrefix(chain, TargetPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	// Accept only the canonical spelling: "target/05" belongs to another process.
	return uint32(n), err == nil && TargetChain(uint32(n)) == chain
}

func MaglevMap(f vip.Family, stream string) string { return MaglevMaps[f] + stream }

// LiveMap returns the name of the map of a stream's targets that keep their flows. Each stream
// has a separate map: on every change of a verdict map the kernel follows all verdicts to detect
// loops, which took 40 ms with a shared map for 1 000 targets in 100 streams.
func LiveMap(f vip.Family, stream string) string { return LiveMaps[f] + stream }

// MaxHostVIPs limits the single-address VIPs of a family. For a map with a fixed size the kernel
// allocates a constant array of hash buckets, 8 bytes each. A lookup took 0.1 µs less than in a
// growing map (Linux 6.18).
const MaxHostVIPs = 16384

// TableName is the name of the data plane's nftables table in the inet family.
const TableName = "vipgate-lb"

// RouteProtocol is the rtm_protocol of the data plane's routes and rules. The value is
// unassigned in rtnetlink.h and iproute2's rt_protos.
const RouteProtocol = 179

func VIPMap(v vip.VIP) string {
	if v.Prefix().IsSingleIP() {
		return HostMaps[v.Family()]
	}
	return NetMaps[v.Family()]
}

func familyName(f vip.Family) string {
	if f == vip.IPv4 {
		return "IPv4"
	}
	return "IPv6"
}

// RuleName returns the policy rule of a fwmark in iproute2 syntax.
func RuleName(fwmark uint32, f vip.Family) string {
	return fmt.Sprintf("rule fwmark %d lookup %d (%s)", fwmark, fwmark, familyName(f))
}

// RouteName returns the route of a fwmark in iproute2 syntax.
func RouteName(fwmark uint32, hop netip.Addr, f vip.Family) string {
	return fmt.Sprintf("route default via %s table %d (%s)", hop, fwmark, familyName(f))
}

// BlackholeName returns the blackhole route of a fwmark in iproute2 syntax.
func BlackholeName(fwmark uint32, f vip.Family) string {
	return fmt.Sprintf("route blackhole default table %d (%s)", fwmark, familyName(f))
}
