package plan

import (
	"fmt"
	"net/netip"
)

// Network is the state of links, addresses and neighbors.
type Network struct {
	// LocalAddrs are the addresses of this host.
	LocalAddrs map[netip.Addr]struct{}
	// FailedNeighbors do not answer on any link (NUD_FAILED).
	FailedNeighbors map[netip.Addr]struct{}
	Links           []Link
}

// Link is a network interface.
type Link struct {
	Name  string
	Index int
	// Up reports whether it is enabled and has a carrier.
	Up       bool
	Loopback bool
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
