package fastpath

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Content is the state of nftables that the program forwards by.
type Content struct {
	// Streams holds the streams that nftables is confirmed to forward. A packet of any other stream
	// continues to nftables.
	Streams []Stream
	// Hops maps the targets of the streams to their next hops. Flows of others continue to nftables.
	Hops map[Target]Hop
}

// Stream is a stream as it was read back from nftables.
type Stream struct {
	*plan.KernelStream
	// VIPs may contain wide VIPs, whose packets continue to nftables.
	VIPs []vip.VIP
	// Asks reports whether packets of a slot are marked that may belong to a flow of an earlier target
	// (package returning); nil if none are.
	Asks func(family vip.Family, slot uint32) bool
}

// Target identifies one address of a target.
type Target struct {
	FWMark uint32
	Family vip.Family
}

// Hop is a next hop on a link.
type Hop struct {
	Address   netip.Addr
	Link, MTU int
}

// Counter counts the forwarded packets of a target.
type Counter struct{ Packets, Bytes uint64 }

// Layouts of map keys and values in fastpath.c.
type (
	record struct{ Offset, Size, Seed, Match uint32 }

	hop struct {
		Family  uint32
		Address [16]byte
		Link    uint32
		MTU     uint32
	}

	port struct {
		Record   uint32
		Number   [2]byte
		Protocol uint8
		_        uint8
	}
)

// asks is ASKS.
const asks = 1 << 31

// addressFamilies are the values of bpf_redir_neigh.nh_family.
var addressFamilies = [...]uint32{unix.AF_INET, unix.AF_INET6}

func (h Hop) layout() hop {
	value := hop{Family: addressFamilies[vip.FamilyOf(h.Address)], Link: uint32(h.Link), MTU: uint32(h.MTU)}
	copy(value.Address[:], h.Address.AsSlice())
	return value
}

func portKeys(record uint32, ports []plan.Port) []port {
	keys := make([]port, len(ports))
	for i, p := range ports {
		keys[i] = port{Record: record, Protocol: p.Protocol}
		binary.BigEndian.PutUint16(keys[i].Number[:], p.Number)
	}
	return keys
}

// hostVIPs returns the addresses of VIPs of one address, by family.
func hostVIPs(vips []vip.VIP, family vip.Family) (addresses []netip.Addr) {
	for _, v := range vips {
		if v.Family() == family && v.Prefix().IsSingleIP() {
			addresses = append(addresses, v.Prefix().Addr())
		}
	}
	return addresses
}
