package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// MaxTable limits the size of a map that is read. The largest written map has 131 071.
const MaxTable = 1 << 20

// KernelState is the forwarding state of the data plane in the kernel.
type KernelState struct {
	// Base reports whether the common objects are intact: table, base chains and their rules,
	// common maps, common policy rules. Problem is the reason why no packets are forwarded; it is
	// empty if only policy rules are missing, because forwarding works without them.
	Base    bool
	Problem string
	Checks  bool // chain checks, which no forwarded packet passes, is intact
	Streams map[string]*KernelStream
	Targets map[uint32]*KernelTarget
	// VIPs maps each element of the VIP maps to its stream.
	VIPs map[vip.VIP]string
	// Guests holds the live map elements that lead to targets of other streams.
	Guests map[Guest]bool
}

// Guest is a target of another stream whose flows a stream keeps: its live maps contain the fwmark.
type Guest struct {
	Stream string
	FWMark uint32
}

// KernelStream is the chain and maps of one stream, in both written and observed state.
type KernelStream struct {
	Name string
	// Owned reports whether the chain has rules with the data plane's comments.
	Owned bool
	// ChainIntact reports whether the rules of the chain match Size and Seed.
	ChainIntact bool
	// Size and Seed are 0 without a Maglev map.
	Size, Seed uint32
	// Tables holds the Maglev map of each family, or nil. Entry i is the fwmark for hash i, or 0.
	Tables [len(vip.Families)][]uint32
	// Match is the sorted content of the port set, or nil without a set.
	Match []Port
}

// KernelTarget is the chain, rules and routes of one target, in both written and observed state.
type KernelTarget struct {
	FWMark      uint32
	Label       // from the comment of the chain's rule
	ChainIntact bool
	// Flows reports by family whether the live map contains the target, which keeps its flows.
	Flows [len(vip.Families)]bool
	// Rules reports by family whether the policy rule exists. NextHops holds the next hop of the
	// default route, invalid without a route.
	Rules     [len(vip.Families)]bool
	NextHops  [len(vip.Families)]netip.Addr
	Blackhole [len(vip.Families)]bool
	Packets   uint64
	Bytes     uint64
}

// Change is one nftables change. Objects already in the desired state do not cause an error.
type Change struct {
	// Base creates or repairs the common objects.
	Base bool
	// Targets lists the targets whose chains and live map elements are written.
	Targets []KernelTarget
	// Streams lists the streams whose chains and differing map entries are written.
	Streams []StreamWrite
	// VIPs maps VIPs to their new streams; "" removes the element.
	VIPs map[vip.VIP]string
	// RemoveStreams and RemoveTargets are removed after all objects that reference them.
	RemoveStreams []string
	RemoveTargets []uint32
	// AddGuests and RemoveGuests change the live maps of streams.
	AddGuests, RemoveGuests []Guest
}

// StreamWrite changes one stream from the observed to the desired state.
type StreamWrite struct {
	Desired KernelStream
	// Observed is the last state read; nil for a stream that does not exist.
	Observed *KernelStream
}

// Families returns the families for which the stream has a Maglev map.
func (stream *KernelStream) Families() []vip.Family {
	return slices.DeleteFunc(slices.Clone(vip.Families[:]), func(f vip.Family) bool { return stream.Tables[f] == nil })
}

// SameStream reports whether two streams have equal rules, maps and ports.
func SameStream(a, b *KernelStream) bool {
	return a != nil && b != nil && a.ChainIntact == b.ChainIntact && a.Size == b.Size && a.Seed == b.Seed &&
		SameMatch(a.Match, b.Match) &&
		slices.EqualFunc(a.Tables[:], b.Tables[:], func(x, y []uint32) bool {
			return (x == nil) == (y == nil) && slices.Equal(x, y)
		})
}

// Add merges d into c. A VIP that c assigns remains assigned even if d removes it.
func (c *Change) Add(d Change) {
	c.Targets = append(c.Targets, d.Targets...)
	c.Streams = append(c.Streams, d.Streams...)
	c.RemoveStreams = append(c.RemoveStreams, d.RemoveStreams...)
	c.RemoveTargets = append(c.RemoveTargets, d.RemoveTargets...)
	c.AddGuests = append(c.AddGuests, d.AddGuests...)
	c.RemoveGuests = append(c.RemoveGuests, d.RemoveGuests...)
	if c.VIPs == nil {
		c.VIPs = map[vip.VIP]string{}
	}
	for v, s := range d.VIPs {
		if _, taken := c.VIPs[v]; !taken || s != "" {
			c.VIPs[v] = s
		}
	}
}

// Empty reports whether the change contains no operations.
func (change *Change) Empty() bool {
	return !change.Base &&
		len(change.Targets)+len(change.Streams)+len(change.VIPs)+len(change.RemoveStreams)+len(change.RemoveTargets) == 0 &&
		len(change.AddGuests)+len(change.RemoveGuests) == 0
}

// LinkAddress is an Ethernet address; the zero value is unknown.
type LinkAddress [6]byte

// Network is the state of links, addresses and neighbors.
type Network struct {
	// LocalAddrs holds the addresses of this host.
	LocalAddrs map[netip.Addr]struct{}
	// LocalRoutes deliver prefixes to this host without an address on it (AnyIP).
	LocalRoutes []LocalRoute
	// FailedNeighbors holds addresses that do not respond on any link (NUD_FAILED).
	FailedNeighbors map[netip.Addr]struct{}
	// LinkAddresses maps neighbors to their link-layer addresses.
	LinkAddresses map[netip.Addr]LinkAddress
	Links         []Link
}

// LocalRoute is a route of type local.
type LocalRoute struct {
	Prefix netip.Prefix
	// Target: the route belongs to the target program.
	Target bool
}

// Link is a network interface.
type Link struct {
	Name  string
	Index int
	// Up reports whether the link is enabled and has a carrier.
	Up       bool
	Loopback bool
	// Ethernet reports whether packets have an Ethernet header, Port whether another link, a bridge
	// or bond, receives them.
	Ethernet, Port bool
	MTU            int // in bytes
	// Prefixes lists the connected networks.
	Prefixes []netip.Prefix
}

// LinkTo returns the link with the longest matching connected prefix, whether up or down.
func (network *Network) LinkTo(address netip.Addr) (link Link, ok bool) {
	longest := -1
	for _, k := range network.Links {
		for _, prefix := range k.Prefixes {
			if prefix.Contains(address) && prefix.Bits() > longest {
				longest, link, ok = prefix.Bits(), k, true
			}
		}
	}
	return link, ok
}

// Connects reports whether one of the addresses is on a connected network whose link is up.
func (network *Network) Connects(ips []netip.Addr) bool {
	return slices.ContainsFunc(ips, func(a netip.Addr) bool {
		l, ok := network.LinkTo(a)
		return ok && l.Up
	})
}

// UnreachableReason returns why an address is unreachable, or "" if it is reachable.
func (network *Network) UnreachableReason(address netip.Addr) string {
	if _, ok := network.FailedNeighbors[address]; ok {
		return "the neighbour does not answer (NUD_FAILED)"
	}
	link, ok := network.LinkTo(address)
	switch {
	case !ok:
		return "it is on no connected network"
	case !link.Up:
		return fmt.Sprintf("link %s is down", link.Name)
	case link.Loopback:
		return "it is this host itself, which only --dataplane=none allows"
	}
	return ""
}
