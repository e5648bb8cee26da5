package replypath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/nlmsg"
)

// Constants of linux/netfilter/nfnetlink_conntrack.h.
const (
	conntrackGet = 1
	ctaTupleOrig = 1
	ctaMark      = 8
	ctaTupleIP   = 1
	ctaLastAddr  = 4 // source and destination of IPv4, then of IPv6
)

// Flows counts the kernel's connection tracking entries of VIPs by the peer's link-layer address.
// The key is the fwmark if its peer is unknown.
func (path *Path) Flows(ctx context.Context) (map[string]int, error) {
	conn, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	peers, err := readPeers(conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	flows := map[string]int{}
	var request nlmsg.Messages
	request.Begin(unix.NFNL_SUBSYS_CTNETLINK<<8|conntrackGet, unix.NLM_F_DUMP, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	_, err = conn.Socket.Dump(&request, func(data []byte) {
		attributes := nlmsg.Netfilter(data)
		mark := attributes.Uint32BE(ctaMark)
		// Flows without a mark belong to no peer.
		if mark == 0 || !path.o.hasAddress(attributes.Get(ctaTupleOrig, ctaTupleIP)) {
			return
		}
		name := fmt.Sprintf("fwmark %#x", mark)
		if peer, found := peers[mark]; found {
			name = peer.mac.String()
		}
		flows[name]++
	})
	// Packets change the table during a dump; an interrupted dump suffices for counts.
	if err = errors.Join(err, conn.Close(), ctx.Err()); err != nil && !errors.Is(err, nlmsg.ErrInterrupted) {
		return nil, fmt.Errorf("failed to list connection tracking entries: %w", err)
	}
	return flows, nil
}

// hasAddress reports whether an address of the flow is in the pool.
func (options Options) hasAddress(tuple nlmsg.Attributes) bool {
	for kind := uint16(1); kind <= ctaLastAddr; kind++ {
		address := tuple.Addr(kind)
		if slices.ContainsFunc(options.Pool, func(prefix netip.Prefix) bool { return prefix.Contains(address) }) {
			return true
		}
	}
	return false
}
