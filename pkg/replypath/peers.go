package replypath

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

const (
	// probeInterval is the period of neighbor verification. The entry of a failed trench pod is
	// FAILED three seconds after a probe (ucast_solicit, retrans_time_ms).
	probeInterval = 3 * time.Second
	// maxProbes limits the probes per second.
	maxProbes = 100
	// recently is the time for which a packet proves that its sender is alive.
	recently = 5 * time.Second
	// evictionSize is the number of peers that starts the eviction of peers without a valid
	// neighbor entry. Eviction stops at evictedSize peers.
	evictionSize, evictedSize = maxPeers * 3 / 4, maxPeers / 2
	// expiring is the remaining lifetime up to which a peer is not evicted, because it may expire
	// first.
	expiring = 5 * time.Second
)

// learned is an element of the peers map.
type learned struct {
	mac net.HardwareAddr
	// left is the time until the element expires.
	left time.Duration
}

// seen reports whether the peer sent a packet to the pool. Elements of silent neighbors have at
// most neighborTimeout left.
func (l learned) seen() bool { return l.left > neighborTimeout }

// readPeers reads the peers map. A dump in several messages can miss elements, because the kernel
// resumes it by the number of elements, and packets add some in between. Then the expected peers
// that the dump lacks are read by key.
func readPeers(conn *nft.Conn, expected ...uint32) (map[uint32]learned, error) {
	list := map[uint32]learned{}
	add := func(e nft.Element) {
		list[binary.NativeEndian.Uint32(e.Key)] = learned{mac: bytes.Clone(e.Data), left: e.Timeout}
	}
	messages, err := conn.Elements(netdev, peersMap, add)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return list, nil // not installed
	}
	for _, fwmark := range expected {
		if _, found := list[fwmark]; found || messages <= 1 || err != nil {
			continue
		}
		var e *nft.Element
		if e, err = conn.Element(netdev, peersMap, native(fwmark)); err == nil && e != nil {
			add(*e)
		}
	}
	return list, err
}

// peers holds the hosts that may receive replies, and the probe times of their neighbor entries.
type peers struct {
	learned map[uint32]learned
	list    []Peer
	// macs holds the last link-layer address of each neighbor: a FAILED entry has none.
	macs   map[netip.Addr]string
	probed map[netip.Addr]time.Time
	// valid holds the link-layer addresses of valid neighbor entries.
	valid       map[string]bool
	evicted     uint64 // peers since the start
	lastEvicted time.Time
}

// neighborOf reports whether a neighbor entry belongs to a host on the link.
func neighborOf(n rtnetlink.Neighbor, link int) bool {
	return n.Link == link && n.State&unix.NUD_NOARP == 0 && n.Addr.IsValid() && !n.Addr.IsMulticast() &&
		!slices.Equal(n.MAC, placeholderMAC())
}

// update computes the list from the peers map and the neighbor table.
func (p *peers) update(entries []rtnetlink.Neighbor) {
	macs, valid := map[netip.Addr]string{}, map[string]bool{}
	for _, n := range entries {
		mac := n.MAC.String()
		if mac == "" {
			mac = p.macs[n.Addr]
		} else {
			valid[mac] = true
		}
		if mac != "" {
			macs[n.Addr] = mac
		}
	}
	p.macs, p.valid, p.list = macs, valid, nil
	live := false
	for mark, l := range p.learned {
		if l.seen() {
			mac := l.mac.String()
			x := Peer{MAC: mac, FWMark: mark, Seen: true, Live: valid[mac] || peerTimeout-l.left < recently}
			live = live || x.Live
			p.list = append(p.list, x)
		}
	}
	for mac := range valid {
		if live || len(p.list) == maxPeers {
			break // senders to the pool suffice, or the map is full
		}
		listed := slices.ContainsFunc(p.list, func(x Peer) bool { return x.MAC == mac })
		if hw, err := net.ParseMAC(mac); err == nil && !listed {
			p.list = append(p.list, Peer{MAC: mac, FWMark: fwmark(hw), Live: true})
		}
	}
	for i := range p.list {
		for a, mac := range macs {
			if mac == p.list[i].MAC {
				p.list[i].Addresses = append(p.list[i].Addresses, a)
			}
		}
		slices.SortFunc(p.list[i].Addresses, netip.Addr.Compare)
	}
	slices.SortFunc(p.list, func(a, b Peer) int { return cmp.Compare(a.MAC, b.MAC) })
}

// live returns the fwmarks of the peers with a valid neighbor entry. Without such peers it returns
// all live peers, and without live peers all peers.
func (p *peers) live() []uint32 {
	var valid, live, all []uint32
	for _, x := range p.list {
		all = append(all, x.FWMark)
		if x.Live {
			live = append(live, x.FWMark)
		}
		if p.valid[x.MAC] {
			valid = append(valid, x.FWMark)
		}
	}
	for _, marks := range [][]uint32{valid, live} {
		if len(marks) > 0 {
			return marks
		}
	}
	return all
}

// full reports whether the kernel cannot learn another peer.
func (p *peers) full() bool { return len(p.learned) >= maxPeers }

// gone returns the peers to evict from a map that is three quarters full, at most twice per
// interval. It selects peers without a valid neighbor entry, least recently seen first. A trench
// pod has a valid entry, because it resolves the target's address. The next packet of an evicted
// host adds it again.
func (p *peers) gone(now time.Time) (gone []uint32) {
	if len(p.learned) < evictionSize || now.Sub(p.lastEvicted) < interval/2 {
		return nil
	}
	for mark, l := range p.learned {
		if !p.valid[l.mac.String()] && l.left > expiring {
			gone = append(gone, mark)
		}
	}
	slices.SortFunc(gone, func(a, b uint32) int { return cmp.Compare(p.learned[a].left, p.learned[b].left) })
	return gone[:min(len(gone), len(p.learned)-evictedSize)]
}

// evict removes the peers returned by gone from the map.
func (p *peers) evict(conn *nft.Conn, now time.Time) error {
	gone := p.gone(now)
	var keys []nft.Element
	for _, fwmark := range gone {
		keys = append(keys, nft.Element{Key: native(fwmark)})
	}
	t := nft.Transaction{Table: netdev}
	t.DeleteElements(peersMap, keys)
	err := conn.Commit(&t, nil)
	if errors.Is(err, unix.ENOENT) {
		return nil // another process removed a peer
	}
	if err == nil && len(gone) > 0 {
		p.lastEvicted, p.evicted = now, p.evicted+uint64(len(gone))
	}
	return err
}

// addNeighbors adds neighbors that never sent a packet to the pool to the peers map, because flows
// that the application opens may use them.
func (p *peers) addNeighbors(conn *nft.Conn) error {
	// Without the check for existing elements Linux 6.12 would shorten the lifetime of a peer whose
	// first packet arrived since the map was read.
	t := nft.Transaction{Table: netdev, New: true}
	for _, x := range p.list {
		l, known := p.learned[x.FWMark]
		if x.Seen || known && l.left > neighborTimeout/2 {
			continue
		}
		hw, err := net.ParseMAC(x.MAC)
		if err != nil {
			return err
		}
		e := []nft.Element{{Key: native(x.FWMark), Data: hw, Timeout: neighborTimeout}}
		if known { // before Linux 6.12 a timeout cannot be updated
			t.DeleteElements(peersMap, []nft.Element{{Key: e[0].Key}})
		}
		t.AddElements(peersMap, e)
	}
	err := conn.Commit(&t, nil)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENFILE) {
		return nil // expired, peer sent a packet, or map full, which reconcile reports
	}
	return err
}

// probes returns the requests that verify the neighbor entries of the peers, least recently probed
// first.
func (p *peers) probes(entries []rtnetlink.Neighbor, now time.Time) (list []rtnetlink.Request) {
	wanted := map[string]bool{}
	for _, x := range p.list {
		wanted[x.MAC] = true
	}
	probed := map[netip.Addr]time.Time{}
	var due []rtnetlink.Neighbor
	const pending = unix.NUD_PERMANENT | unix.NUD_INCOMPLETE | unix.NUD_PROBE
	for _, n := range entries {
		if !wanted[p.macs[n.Addr]] {
			continue
		}
		probed[n.Addr] = p.probed[n.Addr]
		if n.State&pending == 0 && now.Sub(probed[n.Addr]) >= probeInterval {
			due = append(due, n)
		}
	}
	p.probed = probed
	slices.SortFunc(due, func(a, b rtnetlink.Neighbor) int { return probed[a.Addr].Compare(probed[b.Addr]) })
	for _, n := range due[:min(len(due), maxProbes)] {
		probed[n.Addr] = now
		if n.State&unix.NUD_FAILED != 0 {
			list = append(list, n.Probe())
		} else {
			list = append(list, n.Verify())
		}
	}
	return list
}
