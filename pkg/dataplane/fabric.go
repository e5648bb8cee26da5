package dataplane

import (
	"net/netip"

	"github.com/vipgate/vipgate/pkg/vip"
)

// TableName is the nftables table of the data plane, of the family inet.
const TableName = "vipgate-lb"

// RouteProtocol marks routes and rules as ours (rtm_protocol; free according to
// rtnetlink.h and iproute2's rt_protos).
const RouteProtocol = 179

// content is what the kernel has, or is to have, of the data plane.
type content struct {
	// base says that table, base chains, rules in them, the maps of VIPs and of
	// targets, and the policy rules that no target owns stand as they must.
	base    bool
	streams map[string]*streamContent
	slots   map[uint32]*slotContent
	// vips are the elements of the maps of VIPs with the streams they lead to.
	vips map[vip.VIP]string
}

// streamContent is one stream's chain and maps.
type streamContent struct {
	name string
	// chain says that the chain's rules stand as they must for size and seed.
	chain      bool
	size, seed uint32
	// tables are by family; nil: there is no such map. Entry i is the number of the
	// target that hash i leads to, 0 for none.
	tables [len(vip.Families)][]uint32
}

// slotContent is one target's chain, rules and routes.
type slotContent struct {
	number       uint32
	stream, name string // from the comment of the chain's rule
	chain        bool
	// flows: it is among the targets whose flows live, by family.
	flows [len(vip.Families)]bool
	// rules, and next hops of the routes, by family; the zero Addr for none.
	rules     [len(vip.Families)]bool
	hops      [len(vip.Families)]netip.Addr
	blackhole [len(vip.Families)]bool
	packets   uint64
	bytes     uint64
}

// change is what one nftables transaction does. Things that are already as they are
// to be, or already gone, are no error.
type change struct {
	// base has table, base chains and the common maps made or mended.
	base bool
	// slots have their chains made, and their elements of the live maps made as
	// flows says.
	slots []slotContent
	// streams have chains and maps made or mended; of a map only entries that differ
	// from now are written.
	streams []streamWrite
	// vips lead to other streams from now on; "" removes the element.
	vips map[vip.VIP]string
	// Removed after all that refers to them.
	removeStreams []string
	removeSlots   []uint32
}

// streamWrite brings one stream from what the kernel has to what it is to have.
type streamWrite struct {
	want streamContent
	// now is what was last read; nil for a stream that is not there.
	now *streamContent
}

// fabric is the kernel's side of the data plane, in the network namespace of the
// calling thread when it was made. It belongs to one goroutine. It remembers
// nothing of what it did: who calls it does.
type fabric struct {
	o Options
}

// newFabric opens the sockets.
func newFabric(o Options) (*fabric, error) { return &fabric{o: o}, nil }

// close closes the sockets.
func (f *fabric) close() error { return nil }

// generation is the number of the ruleset, which each transaction of anybody
// changes.
func (f *fabric) generation() (uint32, error) { return 0, nil }

// read reads everything of the data plane: what has our names, and the rules and
// routes of these numbers.
func (f *fabric) read(numbers []uint32) (*content, error) { return &content{}, nil }

// readStream reads one stream, and readSlots some targets, in nftables only.
func (f *fabric) readStream(name string) (*streamContent, error) { return nil, nil }

func (f *fabric) readSlots(numbers []uint32) (map[uint32]*slotContent, error) { return nil, nil }

// readVIPs reads the elements of the maps of VIPs.
func (f *fabric) readVIPs() (map[vip.VIP]string, error) { return nil, nil }

// write does one transaction.
func (f *fabric) write(c change) error { return nil }

// addWays makes the rule and the routes of targets; hops are by family. It removes
// routes of ours that lead elsewhere. One that cannot be made does not keep the
// others from it: errors are by number.
func (f *fabric) addWays(slots []slotContent) map[uint32]error { return nil }

// way asks the kernel where a packet with the mark of a number goes, which is what
// rule and route come to. The zero Addr: it is dropped.
func (f *fabric) way(number uint32, family vip.Family) (netip.Addr, error) {
	return netip.Addr{}, nil
}

// removeWays removes rules and routes of ours of these numbers.
func (f *fabric) removeWays(numbers []uint32) error { return nil }

// taken tells who else uses a number as a routing table or in a rule; "" is nobody.
func (f *fabric) taken(number uint32) (string, error) { return "", nil }

// forget removes connection-tracking entries with the marks of these numbers, so
// that the number of a target that is gone can be used again.
func (f *fabric) forget(numbers []uint32) error { return nil }

// removeAll removes what is left that is ours when no stream and no target is: base
// chains, maps, the table unless somebody else's things are in it, and the rules
// that no target owns.
func (f *fabric) removeAll() error { return nil }
