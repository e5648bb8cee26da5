package rtnetlink

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Neighbor is an entry of the ARP or NDP neighbor table.
type Neighbor struct {
	Link  int
	Addr  netip.Addr
	MAC   net.HardwareAddr
	State uint16 // unix.NUD_*
	// Router reports whether the neighbor forwards packets, by its advertisements (RFC 4861).
	Router bool
}

// Probe returns the request that triggers resolution of the neighbor, as a packet to it would. For
// a missing entry the kernel returns ENOENT, unless flags is unix.NLM_F_CREATE.
func (n Neighbor) Probe(flags uint16) Request {
	header := [unix.SizeofNdMsg]byte{0: systemFamilies[vip.FamilyOf(n.Addr)], 10: unix.NTF_USE}
	binary.NativeEndian.PutUint32(header[4:], uint32(n.Link))
	q := Request{operation: "probe neighbor", object: n.Addr}
	q.Begin(unix.RTM_NEWNEIGH, flags|unix.NLM_F_ACK, header[:]...)
	q.Bytes(unix.NDA_DST, n.Addr.AsSlice())
	return q
}

// Permanent returns the request that adds the entry, or replaces the entry of the same address, as
// NUD_PERMANENT: it does not expire while the interface is up.
func (n Neighbor) Permanent() Request {
	n.State = unix.NUD_PERMANENT
	return n.request("add neighbor", unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
}

// Verify returns the request that triggers an immediate unicast probe of the neighbor. The entry
// becomes FAILED without a reply. The request fails for an entry without a link-layer address.
func (n Neighbor) Verify() Request {
	n.State = unix.NUD_PROBE
	n.MAC = nil // the kernel keeps the one that it has
	return n.request("verify neighbor", unix.RTM_NEWNEIGH, 0)
}

// Delete returns the request that deletes the entry.
func (n Neighbor) Delete() Request {
	q := n.request("delete neighbor", unix.RTM_DELNEIGH, 0)
	q.Satisfied = absent
	return q
}

func (n Neighbor) request(operation string, kind, flags uint16) Request {
	header := [unix.SizeofNdMsg]byte{0: systemFamilies[vip.FamilyOf(n.Addr)]}
	binary.NativeEndian.PutUint32(header[4:], uint32(n.Link))
	binary.NativeEndian.PutUint16(header[8:], n.State)
	q := Request{operation: operation, object: n.Addr}
	q.Begin(kind, flags|unix.NLM_F_ACK, header[:]...)
	q.Bytes(unix.NDA_DST, n.Addr.AsSlice())
	if n.MAC != nil {
		q.Bytes(unix.NDA_LLADDR, n.MAC)
	}
	return q
}

// Neighbors lists the neighbor entries of a family.
func (c *Conn) Neighbors(f vip.Family) ([]Neighbor, error) {
	header := [unix.SizeofNdMsg]byte{systemFamilies[f]}
	entries, err := list(c, f.String()+" neighbors", dump(unix.RTM_GETNEIGH, header[:]), ParseNeighbor, nil)
	return slices.DeleteFunc(entries, func(n Neighbor) bool { return !n.Addr.IsValid() }), err
}

// ParseNeighbor parses the data of RTM_NEWNEIGH and RTM_DELNEIGH. Entries of a bridge's forwarding
// database have no Addr.
func ParseNeighbor(b []byte) (Neighbor, error) {
	a, err := attributes(b, unix.SizeofNdMsg, "neighbor")
	if err != nil {
		return Neighbor{}, err
	}
	n := Neighbor{
		Link: int(int32(binary.NativeEndian.Uint32(b[4:]))), State: binary.NativeEndian.Uint16(b[8:]),
		Router: b[10]&unix.NTF_ROUTER != 0,
		MAC:    bytes.Clone(a.Get(unix.NDA_LLADDR)),
	}
	if _, ok := familyFrom(b[0]); ok {
		n.Addr = a.Addr(unix.NDA_DST)
	}
	return n, nil
}

// NeighborTable is the size and limit of a neighbor table of the node.
type NeighborTable struct {
	Entries uint32
	Limit   uint32 // gc_thresh3
}

// linux/neighbour.h
const (
	ndtmsgLength = 4 // struct ndtmsg
	ndtaThresh3  = 4
	ndtaConfig   = 5
	// ndtConfigLength is the size of struct ndt_config up to its entries.
	ndtConfigLength = 8
)

// NeighborTables returns the node's neighbor tables, which all network namespaces share. It reads
// the limits from netlink, because their sysctls exist in the initial namespace only.
func (c *Conn) NeighborTables() (map[vip.Family]NeighborTable, error) {
	tables := map[vip.Family]NeighborTable{}
	request := dump(unix.RTM_GETNEIGHTBL, make([]byte, ndtmsgLength))
	_, err := list(c, "neighbor tables", request, func(b []byte) (t NeighborTable, err error) {
		a, err := attributes(b, ndtmsgLength, "neighbor table")
		if err != nil {
			return t, err
		}
		t.Limit = a.Uint32(ndtaThresh3)
		if config := a.Get(ndtaConfig); len(config) >= ndtConfigLength {
			t.Entries = config[4:].Uint32()
		}
		// Messages for a single interface carry no limit.
		if family, ok := familyFrom(b[0]); ok && t.Limit > 0 {
			tables[family] = t
		}
		return t, nil
	}, nil)
	return tables, err
}
