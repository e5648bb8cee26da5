package rtnetlink

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Link is a network interface.
type Link struct {
	Index  int
	Name   string
	Flags  uint32 // unix.IFF_*
	MTU    int
	Master int // the index of the bridge, bond or VRF; 0: none
	MAC    net.HardwareAddr
	// Statistics begin like struct rtnl_link_stats64: packets, bytes, errors and dropped packets,
	// each received and sent.
	Statistics [8]uint64
}

// Up reports whether the interface is up and has a carrier. IFF_LOWER_UP is the carrier;
// IFF_RUNNING follows it up to a second late.
func (l Link) Up() bool {
	const up = unix.IFF_UP | unix.IFF_LOWER_UP
	return l.Flags&(up|unix.IFF_DORMANT) == up
}

// Links lists the network interfaces.
func (c *Conn) Links() ([]Link, error) {
	links, err := list(c.requests, unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg), nil, always(ParseLink))
	if err != nil {
		return nil, fmt.Errorf("failed to list interfaces: %w", err)
	}
	return links, nil
}

// always adapts a parser to list.
func always[T any](parse func([]byte) (T, error)) func([]byte) (T, bool, error) {
	return func(b []byte) (T, bool, error) {
		x, err := parse(b)
		return x, true, err
	}
}

// ParseLink parses the data of RTM_NEWLINK and RTM_DELLINK.
func ParseLink(b []byte) (l Link, err error) {
	err = decode(b, unix.SizeofIfInfomsg, "interface", func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.IFLA_IFNAME:
			l.Name = ad.String()
		case unix.IFLA_MTU:
			l.MTU = int(ad.Uint32())
		case unix.IFLA_MASTER:
			l.Master = int(ad.Uint32())
		case unix.IFLA_ADDRESS:
			l.MAC = ad.Bytes()
		case unix.IFLA_STATS64:
			for i, s := 0, ad.Bytes(); i < len(l.Statistics) && len(s) >= 8; i, s = i+1, s[8:] {
				l.Statistics[i] = binary.NativeEndian.Uint64(s)
			}
		}
	})
	if err == nil {
		l.Index, l.Flags = int(int32(binary.NativeEndian.Uint32(b[4:]))), binary.NativeEndian.Uint32(b[8:])
	}
	return l, err
}

// Address is an address of this host.
type Address struct {
	Link int
	Addr netip.Addr
	// Network is what the interface reaches directly. That of a point-to-point address is its
	// peer's.
	Network netip.Prefix
	Flags   uint32 // unix.IFA_F_*
}

// Tentative reports whether duplicate address detection (RFC 4862) is not over.
func (a Address) Tentative() bool {
	return a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0
}

// Duplicate reports whether another host has the address.
func (a Address) Duplicate() bool { return a.Flags&unix.IFA_F_DADFAILED != 0 }

// Addresses lists the addresses of all interfaces and families.
func (c *Conn) Addresses() ([]Address, error) {
	body := make([]byte, unix.SizeofIfAddrmsg)
	addrs, err := list(c.requests, unix.RTM_GETADDR, body, nil, func(b []byte) (Address, bool, error) {
		a, err := parseAddress(b)
		return a, err != nil || a.Addr.IsValid() && a.Network.IsValid(), err
	})
	if err != nil {
		return nil, fmt.Errorf("failed to list addresses: %w", err)
	}
	return addrs, nil
}

func parseAddress(b []byte) (a Address, err error) {
	var local, address netip.Addr
	err = decode(b, unix.SizeofIfAddrmsg, "address", func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.IFA_LOCAL:
			local, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.IFA_ADDRESS:
			address, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.IFA_FLAGS:
			a.Flags = ad.Uint32()
		}
	})
	if err != nil {
		return a, err
	}
	a.Flags |= uint32(b[2])
	a.Link = int(binary.NativeEndian.Uint32(b[4:]))
	// IFA_ADDRESS is the peer of a point-to-point address, which IFA_LOCAL then has.
	if a.Addr = local; !local.IsValid() {
		a.Addr = address
	}
	a.Network = netip.PrefixFrom(address, int(b[1])).Masked()
	return a, nil
}

// Neighbor is an entry of the neighbor table: ARP or neighbor discovery.
type Neighbor struct {
	Link  int
	Addr  netip.Addr
	MAC   net.HardwareAddr
	State uint16 // unix.NUD_*
}

// Probe returns the request that has the kernel resolve the neighbor as if there were a packet for
// it. The kernel does not create an entry: it fails with ENOENT if there is none.
func (n Neighbor) Probe() Request {
	a := make(attributes, unix.SizeofNdMsg, 40)
	a[0], a[10] = systemFamily(vip.FamilyOf(n.Addr)), unix.NTF_USE
	binary.NativeEndian.PutUint32(a[4:], uint32(n.Link))
	a.bytes(unix.NDA_DST, n.Addr.AsSlice())
	return Request{Header: netlink.Header{Type: unix.RTM_NEWNEIGH, Flags: netlink.Replace}, Data: a}
}

// Neighbors lists the neighbor entries of a family.
func (c *Conn) Neighbors(f vip.Family) ([]Neighbor, error) {
	body := make([]byte, unix.SizeofNdMsg)
	body[0] = systemFamily(f)
	entries, err := list(c.requests, unix.RTM_GETNEIGH, body, nil, func(b []byte) (Neighbor, bool, error) {
		n, err := ParseNeighbor(b)
		return n, err != nil || n.Addr.IsValid(), err
	})
	if err != nil {
		return nil, fmt.Errorf("failed to list %s neighbors: %w", f, err)
	}
	return entries, nil
}

// ParseNeighbor parses the data of RTM_NEWNEIGH and RTM_DELNEIGH. The zero Addr: it is about a
// bridge.
func ParseNeighbor(b []byte) (n Neighbor, err error) {
	err = decode(b, unix.SizeofNdMsg, "neighbor", func(ad *netlink.AttributeDecoder) {
		switch _, ok := familyFrom(b[0]); {
		case ok && ad.Type() == unix.NDA_DST:
			n.Addr, _ = netip.AddrFromSlice(ad.Bytes())
		case ad.Type() == unix.NDA_LLADDR:
			n.MAC = ad.Bytes()
		}
	})
	if err == nil {
		n.Link, n.State = int(int32(binary.NativeEndian.Uint32(b[4:]))), binary.NativeEndian.Uint16(b[8:])
	}
	return n, err
}
