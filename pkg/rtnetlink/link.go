package rtnetlink

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// Link is a network interface.
type Link struct {
	Index  int
	Name   string
	Flags  uint32 // unix.IFF_*
	MTU    int
	Master int // the index of the bridge, bond or VRF; 0: none
	MAC    net.HardwareAddr
	// Ethernet reports whether packets have an Ethernet header.
	Ethernet bool
	// Statistics holds the first fields of struct rtnl_link_stats64: packets, bytes, errors and
	// dropped packets, each received and sent.
	Statistics [8]uint64
}

// Up reports whether the interface is up and has a carrier. It tests IFF_LOWER_UP, because the
// kernel updates IFF_RUNNING up to a second later.
func (l Link) Up() bool {
	const up = unix.IFF_UP | unix.IFF_LOWER_UP
	return l.Flags&(up|unix.IFF_DORMANT) == up
}

// Links lists the network interfaces.
func (c *Conn) Links() ([]Link, error) {
	return list(c, "interfaces", dump(unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg)), ParseLink, nil)
}

// ParseLink parses the data of RTM_NEWLINK and RTM_DELLINK.
func ParseLink(b []byte) (Link, error) {
	a, err := attributes(b, unix.SizeofIfInfomsg, "interface")
	if err != nil {
		return Link{}, err
	}
	l := Link{
		Index: int(int32(binary.NativeEndian.Uint32(b[4:]))), Flags: binary.NativeEndian.Uint32(b[8:]),
		Name: a.Text(unix.IFLA_IFNAME), MTU: int(a.Uint32(unix.IFLA_MTU)), Master: int(a.Uint32(unix.IFLA_MASTER)),
		MAC: bytes.Clone(a.Get(unix.IFLA_ADDRESS)), Ethernet: binary.NativeEndian.Uint16(b[2:]) == unix.ARPHRD_ETHER,
	}
	_, _ = binary.Decode(a.Get(unix.IFLA_STATS64), binary.NativeEndian, &l.Statistics) // absent before the link is up
	return l, nil
}

// Address is a local address.
type Address struct {
	Link int
	Addr netip.Addr
	// Network is the connected prefix; the peer's prefix for a point-to-point address.
	Network netip.Prefix
	Flags   uint32 // unix.IFA_F_*
}

// Tentative reports whether duplicate address detection (RFC 4862) is in progress.
func (a Address) Tentative() bool {
	return a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0
}

// Duplicate reports whether another host has the address.
func (a Address) Duplicate() bool { return a.Flags&unix.IFA_F_DADFAILED != 0 }

// Addresses lists the addresses of all interfaces and families.
func (c *Conn) Addresses() ([]Address, error) {
	addrs, err := list(c, "addresses", dump(unix.RTM_GETADDR, make([]byte, unix.SizeofIfAddrmsg)), parseAddress, nil)
	return slices.DeleteFunc(addrs, func(a Address) bool { return !a.Addr.IsValid() || !a.Network.IsValid() }), err
}

func parseAddress(b []byte) (Address, error) {
	attributes, err := attributes(b, unix.SizeofIfAddrmsg, "address")
	if err != nil {
		return Address{}, err
	}
	a := Address{
		Link: int(binary.NativeEndian.Uint32(b[4:])), Addr: attributes.Addr(unix.IFA_LOCAL),
		Flags: attributes.Uint32(unix.IFA_FLAGS) | uint32(b[2]),
	}
	// IFA_ADDRESS is the peer of a point-to-point address; IFA_LOCAL is then the local address.
	peer := attributes.Addr(unix.IFA_ADDRESS)
	if !a.Addr.IsValid() {
		a.Addr = peer
	}
	a.Network = netip.PrefixFrom(peer, int(b[1])).Masked()
	return a, nil
}
