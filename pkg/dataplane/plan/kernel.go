package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// MaxTable bounds the maps that are read; the largest that is written has 65 537 entries.
const MaxTable = 1 << 20

// KernelState is the forwarding state of the data plane in the kernel.
type KernelState struct {
	// Base reports whether the objects that no stream and no target owns are intact:
	// table, base chains and their rules, common maps, common policy rules. Problem
	// is why nothing is forwarded; it is empty when only policy rules are missing, since
	// packets are forwarded without them.
	Base    bool
	Problem string
	Streams map[string]*KernelStream
	Targets map[uint32]*KernelTarget
	// VIPs maps each element of the VIP maps to the stream that it leads to.
	VIPs map[vip.VIP]string
}

// KernelStream is the chain and the maps of one stream, as written and as read.
type KernelStream struct {
	Name string
	// Owned reports whether the chain has rules with comments of the data plane.
	Owned bool
	// ChainIntact reports whether the rules of the chain are those for Size and Seed.
	ChainIntact bool
	// Size and Seed are 0 without a Maglev map.
	Size, Seed uint32
	// Tables are the Maglev maps, nil for none. Entry i is the fwmark for hash i, 0 for none.
	Tables [len(vip.Families)][]uint32
	// Match is the sorted content of the set of ports, nil without a set.
	Match []Port
}

// KernelTarget is the chain, the rules and the routes of one target, as written and as read.
type KernelTarget struct {
	FWMark      uint32
	Label       // from the comment of the chain's rule
	ChainIntact bool
	// Flows reports by family whether the live map has the target, so that its flows continue.
	Flows [len(vip.Families)]bool
	// Rules reports by family whether the policy rule exists; NextHops are those of the
	// default routes, invalid without a route.
	Rules     [len(vip.Families)]bool
	NextHops  [len(vip.Families)]netip.Addr
	Blackhole [len(vip.Families)]bool
	Packets   uint64
	Bytes     uint64
}

// Change is one change of nftables. Objects that already have the desired state are no error.
type Change struct {
	// Base creates or repairs the objects that no stream owns.
	Base bool
	// Targets are those whose chains and elements of live maps are written.
	Targets []KernelTarget
	// Streams are those whose chains, and entries of maps that differ, are written.
	Streams []StreamWrite
	// VIPs maps VIPs to their new streams; "" removes the element.
	VIPs map[vip.VIP]string
	// RemoveStreams and RemoveTargets are removed after everything that refers to them.
	RemoveStreams []string
	RemoveTargets []uint32
}

// StreamWrite changes one stream from the observed to the desired state.
type StreamWrite struct {
	Desired KernelStream
	// Observed is what was last read; nil for a stream that does not exist.
	Observed *KernelStream
}

// Families returns the families for which the stream has a Maglev map.
func (s *KernelStream) Families() []vip.Family {
	return slices.DeleteFunc(slices.Clone(vip.Families[:]), func(f vip.Family) bool { return s.Tables[f] == nil })
}

// SameStream reports whether two streams have equal rules, maps and ports.
func SameStream(a, b *KernelStream) bool {
	return a != nil && b != nil && a.ChainIntact == b.ChainIntact && a.Size == b.Size && a.Seed == b.Seed &&
		SameMatch(a.Match, b.Match) &&
		slices.EqualFunc(a.Tables[:], b.Tables[:], func(x, y []uint32) bool {
			return (x == nil) == (y == nil) && slices.Equal(x, y)
		})
}

// Add merges d into c. A VIP that d removes and c assigns stays assigned.
func (c *Change) Add(d Change) {
	c.Targets = append(c.Targets, d.Targets...)
	c.Streams = append(c.Streams, d.Streams...)
	c.RemoveStreams = append(c.RemoveStreams, d.RemoveStreams...)
	c.RemoveTargets = append(c.RemoveTargets, d.RemoveTargets...)
	if c.VIPs == nil {
		c.VIPs = map[vip.VIP]string{}
	}
	for v, s := range d.VIPs {
		if _, taken := c.VIPs[v]; !taken || s != "" {
			c.VIPs[v] = s
		}
	}
}

// Empty reports whether the change does nothing.
func (c *Change) Empty() bool {
	return !c.Base && len(c.Targets)+len(c.Streams)+len(c.VIPs)+len(c.RemoveStreams)+len(c.RemoveTargets) == 0
}

// Network is the state of links, addresses and neighbors.
type Network struct {
	// LocalAddrs are the addresses of this host.
	LocalAddrs map[netip.Addr]struct{}
	// LocalRoutes deliver prefixes to this host that are none of its addresses (AnyIP).
	LocalRoutes []LocalRoute
	// FailedNeighbors do not answer on any link (NUD_FAILED).
	FailedNeighbors map[netip.Addr]struct{}
	Links           []Link
}

// LocalRoute is a route of type local.
type LocalRoute struct {
	Prefix netip.Prefix
	// Target: it is a route of the program target.
	Target bool
}

// Link is a network interface.
type Link struct {
	Name  string
	Index int
	// Up reports whether it is enabled and has a carrier.
	Up       bool
	Loopback bool
	MTU      int // in bytes
	// Prefixes are those of its connected networks.
	Prefixes []netip.Prefix
}

// LinkTo returns the link with the longest prefix that has the address, up or not.
func (s *Network) LinkTo(a netip.Addr) (l Link, ok bool) {
	longest := -1
	for _, k := range s.Links {
		for _, p := range k.Prefixes {
			if p.Contains(a) && p.Bits() > longest {
				longest, l, ok = p.Bits(), k, true
			}
		}
	}
	return l, ok
}

// Connects reports whether one of the addresses is on a connected network.
func (s *Network) Connects(ips []netip.Addr) bool {
	return slices.ContainsFunc(ips, func(a netip.Addr) bool {
		l, ok := s.LinkTo(a)
		return ok && l.Up
	})
}

// UnreachableReason returns why an address cannot be reached, "" if it can.
func (s *Network) UnreachableReason(a netip.Addr) string {
	if _, ok := s.FailedNeighbors[a]; ok {
		return "the neighbour does not answer (NUD_FAILED)"
	}
	l, ok := s.LinkTo(a)
	switch {
	case !ok:
		return "it is on no connected network"
	case !l.Up:
		return fmt.Sprintf("link %s is down", l.Name)
	}
	return ""
}
