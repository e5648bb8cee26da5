package replypath

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"maps"
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
	// FAILED three seconds after a probe (ucast_solicit, retrans_time_ms). A peer that has just
	// become silent is probed after interval: TCP sends a lost answer again after 6.2 s, and must
	// not send it to a dead pod then.
	probeInterval = 3 * time.Second
	solicitTicks  = int(probeInterval / interval)
	// maxSolicited limits the addresses in the subnets: they occupy the node's neighbor table.
	maxSolicited = 256
	// maxProbes limits the probes per second.
	maxProbes = 100
	// recently is the time for which a packet proves that its sender is alive.
	recently = 3 * time.Second
	// evictionSize is the number of peers that starts the eviction of peers without a valid
	// neighbor entry. Eviction stops at evictedSize peers.
	evictionSize, evictedSize = maxPeers * 3 / 4, maxPeers / 2
	// expiring is the remaining lifetime up to which a peer is not evicted: it may expire first.
	expiring = 5 * time.Second
)

// learned is an element of the peers map.
type learned struct {
	mac net.HardwareAddr
	// left is the time until the element expires.
	left time.Duration
}

// silence is the time since the last packet of a peer that was seen.
func (peer learned) silence() time.Duration { return peerTimeout - peer.left }

// seen reports whether the peer sent a packet to the pool. Elements of silent neighbors have at
// most neighborTimeout left.
func (peer learned) seen() bool { return peer.left > neighborTimeout }

// readPeers reads the peers map. A dump in several messages can miss elements, because the kernel
// resumes it by the number of elements, and packets add some in between. Then the expected peers
// that the dump lacks are read by key.
func readPeers(conn *nft.Conn, expected ...uint32) (map[uint32]learned, error) {
	list := map[uint32]learned{}
	add := func(element nft.Element) {
		list[binary.NativeEndian.Uint32(element.Key)] = learned{mac: bytes.Clone(element.Data), left: element.Timeout}
	}
	messages, err := conn.Elements(netdev, peersMap, add)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return list, nil // not installed
	}
	for _, fwmark := range expected {
		if _, found := list[fwmark]; found || messages <= 1 || err != nil {
			continue
		}
		var element *nft.Element
		if element, err = conn.Element(netdev, peersMap, native(fwmark)); err == nil && element != nil {
			add(*element)
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
	restricted  bool // neighbors alone become peers; macs has the last host of each address
	ticks       int  // calls of probe
}

// neighborOf reports whether a neighbor entry belongs to a host on the link, and in one of the
// subnets unless there are none.
func neighborOf(neighbor rtnetlink.Neighbor, link int, subnets []netip.Prefix) bool {
	return neighbor.Link == link && neighbor.State&unix.NUD_NOARP == 0 && neighbor.Addr.IsValid() &&
		!neighbor.Addr.IsMulticast() && !slices.Equal(neighbor.MAC, placeholderMAC()) &&
		(len(subnets) == 0 || slices.ContainsFunc(subnets, func(subnet netip.Prefix) bool {
			return subnet.Contains(neighbor.Addr)
		}))
}

// update computes the list from the peers map and the neighbor table.
func (peers *peers) update(entries []rtnetlink.Neighbor) {
	macs, valid := map[netip.Addr]string{}, map[string]bool{}
	if peers.restricted {
		maps.Copy(macs, peers.macs)
	}
	for _, entry := range entries {
		mac := entry.MAC.String()
		if mac == "" {
			// A FAILED entry has no link-layer address.
			mac = peers.macs[entry.Addr]
		} else {
			valid[mac] = true
		}
		if mac != "" {
			macs[entry.Addr] = mac
		}
	}
	peers.macs, peers.valid, peers.list = macs, valid, nil
	// Hosts that sent packets precede hosts that only have a neighbor entry.
	live := false
	for mark, entry := range peers.learned {
		if entry.seen() {
			mac := entry.mac.String()
			peer := Peer{MAC: mac, FWMark: mark, Seen: true, Live: valid[mac] || entry.silence() < recently}
			live = live || peer.Live
			peers.list = append(peers.list, peer)
		}
	}
	for mac := range valid {
		if live && !peers.restricted || len(peers.list) == maxPeers {
			break // senders to the pool suffice, or the map is full
		}
		address, err := net.ParseMAC(mac)
		if err == nil && !peers.learned[fwmark(address)].seen() {
			peers.list = append(peers.list, Peer{MAC: mac, FWMark: fwmark(address), Live: true})
		}
	}
	addresses := map[string][]netip.Addr{}
	for address, mac := range macs {
		addresses[mac] = append(addresses[mac], address)
	}
	for index := range peers.list {
		peers.list[index].Addresses = slices.SortedFunc(slices.Values(addresses[peers.list[index].MAC]), netip.Addr.Compare)
	}
	slices.SortFunc(peers.list, func(address, b Peer) int { return cmp.Compare(address.MAC, b.MAC) })
}

// live returns the fwmarks of the peers with a valid neighbor entry. Without such peers it returns
// all live peers, and without live peers all peers.
func (peers *peers) live() []uint32 {
	var valid, live, all []uint32
	for _, peer := range peers.list {
		all = append(all, peer.FWMark)
		if peer.Live {
			live = append(live, peer.FWMark)
		}
		if peers.valid[peer.MAC] {
			valid = append(valid, peer.FWMark)
		}
	}
	for _, marks := range [][]uint32{valid, live} {
		if len(marks) > 0 {
			return marks
		}
	}
	return all
}

// dead returns the fwmarks of the other peers, which get no flow.
func (peers *peers) dead() (dead []uint32) {
	for _, peer := range peers.list {
		if !peer.Live {
			dead = append(dead, peer.FWMark)
		}
	}
	if len(dead) == len(peers.list) {
		return nil
	}
	return dead
}

// full reports whether the kernel cannot learn another peer.
func (peers *peers) full() bool { return len(peers.learned) >= maxPeers }

// gone returns the peers to evict from a map that is three quarters full, at most twice per
// interval. It selects peers without a valid neighbor entry, least recently seen first. A trench
// pod has a valid entry, because it resolves the target's address. The next packet of an evicted
// host adds it again. With subnets gone selects the hosts that are not the last one of an address,
// once trench pods among the peers of an earlier start had the time to answer.
func (peers *peers) gone(now time.Time) (gone []uint32) {
	if peers.restricted {
		last := slices.Collect(maps.Values(peers.macs))
		for mark, peer := range peers.learned {
			stranger := !slices.Contains(last, peer.mac.String()) && peer.left > expiring
			if stranger && peers.ticks > solicitTicks {
				gone = append(gone, mark)
			}
		}
		return gone
	}
	if len(peers.learned) < evictionSize || now.Sub(peers.lastEvicted) < interval/2 {
		return nil
	}
	for mark, peer := range peers.learned {
		if !peers.valid[peer.mac.String()] && peer.left > expiring {
			gone = append(gone, mark)
		}
	}
	slices.SortFunc(gone, func(a, b uint32) int { return cmp.Compare(peers.learned[a].left, peers.learned[b].left) })
	return gone[:min(len(gone), len(peers.learned)-evictedSize)]
}

// evict removes the peers returned by gone from the map.
func (peers *peers) evict(conn *nft.Conn, now time.Time) error {
	gone := peers.gone(now)
	var keys []nft.Element
	for _, fwmark := range gone {
		keys = append(keys, nft.Element{Key: native(fwmark)})
	}
	transaction := nft.Transaction{Table: netdev}
	transaction.DeleteElements(peersMap, keys)
	err := conn.Commit(&transaction, nil)
	if errors.Is(err, unix.ENOENT) {
		return nil // another process removed a peer
	}
	if err == nil && len(gone) > 0 {
		peers.lastEvicted, peers.evicted = now, peers.evicted+uint64(len(gone))
	}
	return err
}

// addNeighbors adds neighbors that never sent a packet to the pool to the peers map, because flows
// that the application opens may use them.
func (peers *peers) addNeighbors(conn *nft.Conn) error {
	// Without the check for existing elements Linux 6.12 would shorten the lifetime of a peer whose
	// first packet arrived since the map was read.
	transaction := nft.Transaction{Table: netdev, New: true}
	for _, peer := range peers.list {
		last, known := peers.learned[peer.FWMark]
		if peer.Seen || known && last.left > neighborTimeout/2 {
			continue
		}
		address, err := net.ParseMAC(peer.MAC)
		if err != nil {
			return err
		}
		element := []nft.Element{{Key: native(peer.FWMark), Data: address, Timeout: neighborTimeout}}
		if known { // before Linux 6.12 a timeout cannot be updated
			transaction.DeleteElements(peersMap, []nft.Element{{Key: element[0].Key}})
		}
		transaction.AddElements(peersMap, element)
	}
	err := conn.Commit(&transaction, nil)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENFILE) {
		return nil // expired, peer sent a packet, or map full, which reconcile reports
	}
	return err
}

// probes returns the requests that verify the peers' neighbor entries, least recently probed first.
func (peers *peers) probes(entries []rtnetlink.Neighbor, now time.Time) (list []rtnetlink.Request) {
	wanted := map[string]time.Duration{} // the period of each peer
	for _, peer := range peers.list {
		wanted[peer.MAC] = probeInterval
		if silence := peers.learned[peer.FWMark].silence(); silence >= interval && silence < recently {
			wanted[peer.MAC] = interval
		}
	}
	probed := map[netip.Addr]time.Time{}
	var due []rtnetlink.Neighbor
	const pending = unix.NUD_PERMANENT | unix.NUD_INCOMPLETE | unix.NUD_PROBE
	for _, entry := range entries {
		period, found := wanted[peers.macs[entry.Addr]]
		if !found {
			continue
		}
		probed[entry.Addr] = peers.probed[entry.Addr]
		// The kernel is probing the remaining entries itself.
		if entry.State&pending == 0 && now.Sub(probed[entry.Addr]) >= period {
			due = append(due, entry)
		}
	}
	// Entries that left the table are forgotten.
	peers.probed = probed
	slices.SortFunc(due, func(a, b rtnetlink.Neighbor) int { return probed[a.Addr].Compare(probed[b.Addr]) })
	for _, entry := range due[:min(len(due), maxProbes)] {
		probed[entry.Addr] = now
		if entry.State&unix.NUD_FAILED != 0 {
			list = append(list, entry.Probe(0))
		} else {
			list = append(list, entry.Verify())
		}
	}
	return list
}
