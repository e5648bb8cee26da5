package dataplane

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// TableName is the nftables table of the data plane, of the family inet.
const TableName = "vipgate-lb"

// RouteProtocol marks routes and rules as ours (rtm_protocol; free according to
// rtnetlink.h and iproute2's rt_protos).
const RouteProtocol = 179

// content is what the kernel has, or is to have, of the data plane.
type content struct {
	// base reports whether table, base chains, their rules, the common maps and the
	// policy rules that no target owns are as they must be. problem says why nothing is
	// forwarded; "" also when only policy rules are missing, without which packets are
	// forwarded all the same.
	base    bool
	problem string
	streams map[string]*streamContent
	slots   map[uint32]*slotContent
	// vips are the elements of the maps of VIPs with the streams they lead to.
	vips map[vip.VIP]string
}

// streamContent is one stream's chain and maps.
type streamContent struct {
	name string
	// ours reports whether the chain has rules with our comments.
	ours bool
	// chain reports whether the chain's rules are as they must be for size and seed.
	chain      bool
	size, seed uint32
	// tables are by family; nil: there is no such map. Entry i is the number of the
	// target that hash i leads to, 0 for none.
	tables [len(vip.Families)][]uint32
}

// slotContent is one target's chain, rules and routes.
type slotContent struct {
	number uint32
	label  // from the comment of the chain's rule
	chain  bool
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
	// nft changes and reads nftables, rt routing, and ct connection tracking.
	nft, rt, ct *socket
	// told has what is reported of policy rules, whoever changes them.
	told *socket
	// noIPv6: the kernel has none.
	noIPv6 bool
	// failing are the neighbours that had failed at the last look: the kernel forgets
	// it when it asks again.
	failing map[neighbourKey]bool
	// committed counts transactions.
	committed uint32
}

// newFabric opens the sockets.
func newFabric(o Options) (*fabric, error) {
	f := &fabric{o: o.withDefaults()}
	for at, protocol := range map[**socket]int{&f.nft: unix.NETLINK_NETFILTER, &f.ct: unix.NETLINK_NETFILTER, &f.rt: unix.NETLINK_ROUTE, &f.told: unix.NETLINK_ROUTE} {
		s, err := dial(protocol)
		if err != nil {
			return nil, errors.Join(err, f.close())
		}
		*at = s
	}
	if err := f.told.join(unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE); err != nil {
		return nil, errors.Join(err, f.close())
	}
	_, err := os.Stat("/proc/sys/net/ipv6")
	f.noIPv6 = errors.Is(err, fs.ErrNotExist)
	return f, nil
}

// close closes the sockets.
func (f *fabric) close() error {
	return errors.Join(f.nft.close(), f.ct.close(), f.rt.close(), f.told.close())
}
