package fwstate

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Sizes of struct ifinfomsg, ifaddrmsg and ndmsg.
const (
	ifinfomsgLength = 16
	ifaddrmsgLength = 8
	ndmsgLength     = 12
)

func parseLink(b []byte) (plan.Link, bool) {
	if len(b) < ifinfomsgLength {
		return plan.Link{}, false
	}
	flags := nlmsg.Uint32(b[8:])
	l := plan.Link{Index: int(int32(nlmsg.Uint32(b[4:])))}
	// IFF_LOWER_UP is the carrier. IFF_RUNNING follows it up to a second later, when the
	// interface forwards already.
	l.Up = flags&(unix.IFF_UP|unix.IFF_LOWER_UP|unix.IFF_DORMANT) == unix.IFF_UP|unix.IFF_LOWER_UP
	l.Loopback = flags&unix.IFF_LOOPBACK != 0
	l.Name = nlmsg.Text(nlmsg.Attribute(b[ifinfomsgLength:], unix.IFLA_IFNAME))
	return l, true
}

func parseNeighbor(b []byte) (key neighborKey, state uint16, ok bool) {
	if len(b) < ndmsgLength {
		return key, 0, false
	}
	key.link = int(int32(nlmsg.Uint32(b[4:])))
	key.addr, ok = netip.AddrFromSlice(nlmsg.Attribute(b[ndmsgLength:], unix.NDA_DST))
	// Forwarding tables of bridges use the same messages.
	ok = ok && (b[0] == unix.AF_INET || b[0] == unix.AF_INET6)
	return key, binary.NativeEndian.Uint16(b[8:]), ok
}

// ReadNetwork reads links, addresses and neighbors. A failed neighbor that is probed again stays
// failed until it answers.
func (f *Conn) ReadNetwork() (*plan.Network, error) {
	s := &plan.Network{LocalAddrs: map[netip.Addr]struct{}{}, FailedNeighbors: map[netip.Addr]struct{}{}}
	at := map[int]int{}
	if err := f.listRtnetlink(unix.RTM_GETLINK, unix.AF_UNSPEC, ifinfomsgLength, func() { s.Links, at = nil, map[int]int{} }, func(b []byte) {
		if l, ok := parseLink(b); ok {
			at[l.Index] = len(s.Links)
			s.Links = append(s.Links, l)
		}
	}); err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	if err := f.listRtnetlink(unix.RTM_GETADDR, unix.AF_UNSPEC, ifaddrmsgLength, nil, func(b []byte) {
		if len(b) < ifaddrmsgLength {
			return
		}
		// On a point-to-point link the prefix is that of the peer address.
		peer, _ := netip.AddrFromSlice(nlmsg.Attribute(b[ifaddrmsgLength:], unix.IFA_ADDRESS))
		own, ok := netip.AddrFromSlice(nlmsg.Attribute(b[ifaddrmsgLength:], unix.IFA_LOCAL))
		if !ok {
			own = peer
		}
		if own.IsValid() {
			s.LocalAddrs[own] = struct{}{}
		}
		if i, ok := at[int(nlmsg.Uint32(b[4:]))]; ok && peer.IsValid() {
			s.Links[i].Prefixes = append(s.Links[i].Prefixes, netip.PrefixFrom(peer, int(b[1])).Masked())
		}
	}); err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	failing, answering := map[neighborKey]bool{}, map[netip.Addr]bool{}
	for _, family := range vip.Families {
		if family == vip.IPv6 && f.noIPv6 {
			continue
		}
		if err := f.listRtnetlink(unix.RTM_GETNEIGH, systemFamily(family), ndmsgLength, nil, func(b []byte) {
			key, state, ok := parseNeighbor(b)
			switch {
			case !ok:
			case state&unix.NUD_FAILED != 0, state&unix.NUD_INCOMPLETE != 0 && f.failedNeighbors[key]:
				failing[key] = true
			case state&(unix.NUD_REACHABLE|unix.NUD_PERMANENT) != 0:
				answering[key.addr] = true
			}
		}); err != nil {
			return nil, fmt.Errorf("list %s neighbours: %w", family, err)
		}
	}
	f.failedNeighbors = failing
	for key := range failing {
		if !answering[key.addr] {
			s.FailedNeighbors[key.addr] = struct{}{}
		}
	}
	return s, nil
}

// listRtnetlink lists objects of rtnetlink. It calls from, if not nil, before each attempt.
func (f *Conn) listRtnetlink(kind uint16, family byte, header int, from func(), each func(b []byte)) error {
	return f.retryInterrupted(func() error {
		if from != nil {
			from()
		}
		var m nlmsg.Messages
		m.Begin(kind, unix.NLM_F_DUMP, append([]byte{family}, make([]byte, header-1)...)...)
		return f.rt.Dump(m.End(), func(data []byte) error {
			each(data)
			return nil
		})
	})
}

// Links lists the network interfaces.
func (f *Conn) Links() ([]plan.Link, error) {
	var links []plan.Link
	err := f.listRtnetlink(unix.RTM_GETLINK, unix.AF_UNSPEC, ifinfomsgLength, func() { links = nil }, func(b []byte) {
		if l, ok := parseLink(b); ok {
			links = append(links, l)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	return links, nil
}
