package dataplane

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// surroundings are what is around the data plane, as it was read.
type surroundings struct {
	// local are the addresses of this host.
	local map[netip.Addr]struct{}
	// failed are neighbours that do not answer, on any link.
	failed map[netip.Addr]struct{}
	links  []link
}

// link is a network interface.
type link struct {
	name  string
	index int
	// up: it is switched on and has a carrier.
	up       bool
	loopback bool
	// prefixes are of the networks that it is connected to.
	prefixes []netip.Prefix
}

// leadsTo returns the link with the longest prefix that has the address, up or not.
func (s *surroundings) leadsTo(a netip.Addr) (l link, ok bool) {
	longest := -1
	for _, k := range s.links {
		for _, p := range k.prefixes {
			if p.Contains(a) && p.Bits() > longest {
				longest, l, ok = p.Bits(), k, true
			}
		}
	}
	return l, ok
}

// Sizes of struct ifinfomsg, ifaddrmsg and ndmsg.
const (
	ifinfomsgLength = 16
	ifaddrmsgLength = 8
	ndmsgLength     = 12
)

func parseLink(b []byte) (link, bool) {
	if len(b) < ifinfomsgLength {
		return link{}, false
	}
	flags := nativeUint32(b[8:])
	l := link{index: int(int32(nativeUint32(b[4:])))}
	// IFF_LOWER_UP is the carrier. IFF_RUNNING follows it up to a second late, so that an
	// interface that forwards again would be taken for one that is down.
	l.up = flags&(unix.IFF_UP|unix.IFF_LOWER_UP|unix.IFF_DORMANT) == unix.IFF_UP|unix.IFF_LOWER_UP
	l.loopback = flags&unix.IFF_LOOPBACK != 0
	l.name = text(attribute(b[ifinfomsgLength:], unix.IFLA_IFNAME))
	return l, true
}

func parseNeighbour(b []byte) (key neighbourKey, state uint16, ok bool) {
	if len(b) < ndmsgLength {
		return key, 0, false
	}
	key.link = int(int32(nativeUint32(b[4:])))
	key.addr, ok = netip.AddrFromSlice(attribute(b[ndmsgLength:], unix.NDA_DST))
	// A bridge's table of addresses uses the same messages.
	ok = ok && (b[0] == unix.AF_INET || b[0] == unix.AF_INET6)
	return key, binary.NativeEndian.Uint16(b[8:]), ok
}

// surroundings reads them. A neighbour that failed and is being asked again is failed
// until it answers.
func (f *fabric) surroundings() (*surroundings, error) {
	s := &surroundings{local: map[netip.Addr]struct{}{}, failed: map[netip.Addr]struct{}{}}
	at := map[int]int{}
	if err := f.look(unix.RTM_GETLINK, unix.AF_UNSPEC, ifinfomsgLength, func() { s.links, at = nil, map[int]int{} }, func(b []byte) {
		if l, ok := parseLink(b); ok {
			at[l.index] = len(s.links)
			s.links = append(s.links, l)
		}
	}); err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	if err := f.look(unix.RTM_GETADDR, unix.AF_UNSPEC, ifaddrmsgLength, nil, func(b []byte) {
		if len(b) < ifaddrmsgLength {
			return
		}
		// The peer's, on a link that has one, is the one that the prefix is of.
		peer, _ := netip.AddrFromSlice(attribute(b[ifaddrmsgLength:], unix.IFA_ADDRESS))
		own, ok := netip.AddrFromSlice(attribute(b[ifaddrmsgLength:], unix.IFA_LOCAL))
		if !ok {
			own = peer
		}
		if own.IsValid() {
			s.local[own] = struct{}{}
		}
		if i, ok := at[int(nativeUint32(b[4:]))]; ok && peer.IsValid() {
			s.links[i].prefixes = append(s.links[i].prefixes, netip.PrefixFrom(peer, int(b[1])).Masked())
		}
	}); err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	failing, answering := map[neighbourKey]bool{}, map[netip.Addr]bool{}
	for _, family := range vip.Families {
		if family == vip.IPv6 && f.noIPv6 {
			continue
		}
		if err := f.look(unix.RTM_GETNEIGH, systemFamily(family), ndmsgLength, nil, func(b []byte) {
			key, state, ok := parseNeighbour(b)
			switch {
			case !ok:
			case state&unix.NUD_FAILED != 0, state&unix.NUD_INCOMPLETE != 0 && f.failing[key]:
				failing[key] = true
			case state&(unix.NUD_REACHABLE|unix.NUD_PERMANENT) != 0:
				answering[key.addr] = true
			}
		}); err != nil {
			return nil, fmt.Errorf("list %s neighbours: %w", family, err)
		}
	}
	f.failing = failing
	for key := range failing {
		if !answering[key.addr] {
			s.failed[key.addr] = struct{}{}
		}
	}
	return s, nil
}

// look lists something of rtnetlink; from has what is known forgotten when the list
// begins anew.
func (f *fabric) look(kind uint16, family byte, header int, from func(), each func(b []byte)) error {
	return f.again(func() error {
		if from != nil {
			from()
		}
		var m messages
		m.begin(kind, unix.NLM_F_DUMP, append([]byte{family}, make([]byte, header-1)...)...)
		return f.rt.dump(m.end(), func(data []byte) error {
			each(data)
			return nil
		})
	})
}
