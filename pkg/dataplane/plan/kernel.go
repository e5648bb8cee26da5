package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// KernelState is what the kernel has, or is to have, of the data plane.
type KernelState struct {
	// Base reports whether table, base chains, their rules, the common maps and the
	// policy rules that no target owns are as they must be. problem says why nothing is
	// forwarded; "" also when only policy rules are missing, without which packets are
	// forwarded all the same.
	Base    bool
	Problem string
	Streams map[string]*KernelStream
	Targets map[uint32]*KernelTarget
	// VIPs are the elements of the maps of VIPs with the streams they lead to.
	VIPs map[vip.VIP]string
}

// KernelStream is one stream's chain and maps.
type KernelStream struct {
	Name string
	// Owned reports whether the chain has rules with our comments.
	Owned bool
	// ChainIntact reports whether the chain's rules are as they must be for size and seed.
	ChainIntact bool
	Size, Seed  uint32
	// Tables are by family; nil: there is no such map. Entry i is the number of the
	// target that hash i leads to, 0 for none.
	Tables [len(vip.Families)][]uint32
}

// KernelTarget is one target's chain, rules and routes.
type KernelTarget struct {
	FWMark      uint32
	Label       // from the comment of the chain's rule
	ChainIntact bool
	// Flows: it is among the targets whose flows live, by family.
	Flows [len(vip.Families)]bool
	// Rules, and next hops of the routes, by family; the zero Addr for none.
	Rules     [len(vip.Families)]bool
	NextHops  [len(vip.Families)]netip.Addr
	Blackhole [len(vip.Families)]bool
	Packets   uint64
	Bytes     uint64
}

// Change is what one nftables transaction does. Things that are already as they are
// to be, or already gone, are no error.
type Change struct {
	// Base has table, base chains and the common maps made or mended.
	Base bool
	// Targets have their chains made, and their elements of the live maps made as
	// flows says.
	Targets []KernelTarget
	// Streams have chains and maps made or mended; of a map only entries that differ
	// from now are written.
	Streams []StreamWrite
	// VIPs lead to other streams from now on; "" removes the element.
	VIPs map[vip.VIP]string
	// Removed after all that refers to them.
	RemoveStreams []string
	RemoveTargets []uint32
}

// StreamWrite brings one stream from what the kernel has to what it is to have.
type StreamWrite struct {
	Desired KernelStream
	// Observed is what was last read; nil for a stream that is not there.
	Observed *KernelStream
}

// Families are those that the stream has tables for.
func (s *KernelStream) Families() []vip.Family {
	return slices.DeleteFunc(slices.Clone(vip.Families[:]), func(f vip.Family) bool { return s.Tables[f] == nil })
}

func (s *KernelStream) Validate() error {
	if s.Size == 0 || s.Size > MaxTable || s.Seed == 0 {
		return fmt.Errorf("a table of %d entries with seed %d cannot be", s.Size, s.Seed)
	}
	for _, table := range s.Tables {
		if table != nil && len(table) != int(s.Size) {
			return fmt.Errorf("a table of %d entries for the size %d", len(table), s.Size)
		}
	}
	return nil
}

func SetVIP(m map[vip.VIP]string, v vip.VIP, stream string) map[vip.VIP]string {
	if m == nil {
		m = map[vip.VIP]string{}
	}
	m[v] = stream
	return m
}

func SameStream(a, b *KernelStream) bool {
	if a == nil || b == nil || a.ChainIntact != b.ChainIntact || a.Size != b.Size || a.Seed != b.Seed {
		return false
	}
	for _, f := range vip.Families {
		if (a.Tables[f] == nil) != (b.Tables[f] == nil) || !slices.Equal(a.Tables[f], b.Tables[f]) {
			return false
		}
	}
	return true
}

func (c *Change) Add(d Change) {
	c.Targets = append(c.Targets, d.Targets...)
	c.Streams = append(c.Streams, d.Streams...)
	c.RemoveStreams = append(c.RemoveStreams, d.RemoveStreams...)
	c.RemoveTargets = append(c.RemoveTargets, d.RemoveTargets...)
	for v, s := range d.VIPs {
		if _, taken := c.VIPs[v]; !taken || s != "" {
			c.VIPs = SetVIP(c.VIPs, v, s)
		}
	}
}

func (c *Change) Empty() bool {
	return !c.Base && len(c.Targets)+len(c.Streams)+len(c.VIPs)+len(c.RemoveStreams)+len(c.RemoveTargets) == 0
}

// MaxTable bounds a map that calls itself ours: the largest table is 65 537.
const MaxTable = 1 << 20
