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
func (p *Path) Flows(ctx context.Context) (map[string]int, error) {
	s, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	peers, err := readPeers(s)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	flows := map[string]int{}
	var m nlmsg.Messages
	m.Begin(unix.NFNL_SUBSYS_CTNETLINK<<8|conntrackGet, unix.NLM_F_DUMP, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	_, err = s.Socket.Dump(&m, func(data []byte) {
		b := nlmsg.Netfilter(data)
		mark := b.Uint32BE(ctaMark)
		if mark == 0 || !p.o.hasAddress(b.Get(ctaTupleOrig, ctaTupleIP)) {
			return
		}
		name := fmt.Sprintf("fwmark %#x", mark)
		if l, ok := peers[mark]; ok {
			name = l.mac.String()
		}
		flows[name]++
	})
	if err = errors.Join(err, s.Close(), ctx.Err()); err != nil && !errors.Is(err, nlmsg.ErrInterrupted) {
		return nil, fmt.Errorf("failed to list connection tracking entries: %w", err)
	}
	return flows, nil
}

// hasAddress reports whether an address of the flow is in the pool.
func (o Options) hasAddress(tuple nlmsg.Attributes) bool {
	for kind := uint16(1); kind <= ctaLastAddr; kind++ {
		a := tuple.Addr(kind)
		if slices.ContainsFunc(o.Pool, func(p netip.Prefix) bool { return p.Contains(a) }) {
			return true
		}
	}
	return false
}
