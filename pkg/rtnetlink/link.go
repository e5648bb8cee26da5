package rtnetlink

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"

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
	// Metric is the metric of the connected route, which kernels since 4.18 report with the address.
	Metric uint32
}

// MetricVIP is the metric of the VIPs that lb adds to an interface. They have no connected
// route, so it only shows which addresses are those of lb: the letters "vipg".
const MetricVIP = 0x76697067

// HostAddress returns a VIP as an address of an interface that the kernel selects as the source
// of no packet but replies. It does not run duplicate address detection, because several hosts
// have the VIP.
func HostAddress(link int, address netip.Addr) Address {
	return Address{
		Link: link, Addr: address, Network: netip.PrefixFrom(address, address.BitLen()),
		Flags: unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE, Metric: MetricVIP,
	}
}

func (a Address) String() string { return fmt.Sprintf("address %s of interface %d", a.Addr, a.Link) }

// Add returns the request that adds the address with the scope host (IPv4), or deprecated (IPv6).
func (a Address) Add() Request {
	q := a.request(Request{operation: "add", Satisfied: exists}, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	q.Uint32(unix.IFA_FLAGS, a.Flags)
	q.Uint32(unix.IFA_RT_PRIORITY, a.Metric)
	if a.Addr.Is6() {
		const forever = math.MaxUint32
		// struct ifa_cacheinfo: the preferred and the valid lifetime, and two times that the kernel sets.
		q.Bytes(unix.IFA_CACHEINFO, binary.NativeEndian.AppendUint32(make([]byte, 4, 16), forever)[:16])
	}
	return q
}

// Delete returns the request that deletes the address.
func (a Address) Delete() Request {
	gone := func(err error) bool { return absent(err) || errors.Is(err, unix.EADDRNOTAVAIL) }
	return a.request(Request{operation: "delete", Satisfied: gone}, unix.RTM_DELADDR, 0)
}

func (a Address) request(q Request, kind, flags uint16) Request {
	q.object = a
	header := [unix.SizeofIfAddrmsg]byte{systemFamilies[vip.FamilyOf(a.Addr)], uint8(a.Network.Bits())}
	if a.Addr.Is4() {
		header[3] = unix.RT_SCOPE_HOST
	}
	binary.NativeEndian.PutUint32(header[4:], uint32(a.Link))
	q.Begin(kind, flags|unix.NLM_F_ACK, header[:]...)
	q.Bytes(unix.IFA_LOCAL, a.Addr.AsSlice())
	q.Bytes(unix.IFA_ADDRESS, a.Addr.AsSlice())
	return q
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
		Flags: attributes.Uint32(unix.IFA_FLAGS) | uint32(b[2]), Metric: attributes.Uint32(unix.IFA_RT_PRIORITY),
	}
	// IFA_ADDRESS is the peer of a point-to-point address; IFA_LOCAL is then the local address.
	peer := attributes.Addr(unix.IFA_ADDRESS)
	if !a.Addr.IsValid() {
		a.Addr = peer
	}
	a.Network = netip.PrefixFrom(peer, int(b[1])).Masked()
	return a, nil
}
