package replypath

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// peersModel computes the expected peers from all reads.
type peersModel struct {
	restricted bool
	addresses  map[netip.Addr]string // last link-layer address of each entry
}

func (m *peersModel) expect(learned map[uint32]learned, entries []rtnetlink.Neighbor) (list []Peer, shares []uint32) {
	addresses, valid := map[netip.Addr]string{}, map[string]bool{}
	if m.restricted && m.addresses != nil {
		addresses = maps.Clone(m.addresses)
	}
	for _, n := range entries {
		if mac := n.MAC.String(); mac != "" {
			addresses[n.Addr], valid[mac] = mac, true
		} else if mac := m.addresses[n.Addr]; mac != "" {
			addresses[n.Addr] = mac
		}
	}
	m.addresses = addresses
	add := func(mac string, mark uint32, seen, live bool) {
		p := Peer{MAC: mac, FWMark: mark, Seen: seen, Live: live}
		for a, owner := range addresses {
			if owner == mac {
				p.Addresses = append(p.Addresses, a)
			}
		}
		slices.SortFunc(p.Addresses, netip.Addr.Compare)
		list = append(list, p)
	}
	anySeen, anyLive := map[string]bool{}, false
	for mark, l := range learned {
		if l.left <= time.Hour {
			continue
		}
		live := valid[l.mac.String()] || l.left > 24*time.Hour-3*time.Second
		anySeen[l.mac.String()], anyLive = true, anyLive || live
		add(l.mac.String(), mark, true, live)
	}
	for mac := range valid {
		if hw, _ := net.ParseMAC(mac); !anySeen[mac] && (!anyLive || m.restricted) {
			add(mac, fwmark(hw), false, true)
		}
	}
	for _, wanted := range []func(Peer) bool{
		func(p Peer) bool { return valid[p.MAC] }, func(p Peer) bool { return p.Live }, func(Peer) bool { return true },
	} {
		for _, p := range list {
			if wanted(p) {
				shares = append(shares, p.FWMark)
			}
		}
		if len(shares) > 0 {
			break
		}
	}
	return list, shares
}

// The peers, and their shares of flows that the application opens, follow from the peers map and
// the neighbors.
func TestPeersModel(t *testing.T) {
	const seed = 1
	random := rand.New(rand.NewPCG(seed, seed))
	lefts := []time.Duration{
		24 * time.Hour, 24*time.Hour - 2*time.Second, 24*time.Hour - 3*time.Second, 24*time.Hour - 4*time.Second,
		2 * time.Hour, time.Hour + time.Millisecond, time.Hour, time.Minute,
	}
	sorted := cmpopts.SortSlices(func(a, b Peer) bool { return a.MAC < b.MAC })
	numbers := cmpopts.SortSlices(func(a, b uint32) bool { return a < b })
	for history := range 200 {
		restricted := history%2 == 1
		p, m := &peers{restricted: restricted}, &peersModel{restricted: restricted}
		for step := range 10 {
			p.learned = map[uint32]learned{}
			for i := range 4 {
				if random.IntN(2) == 0 {
					p.learned[fwmark(mac(i))] = learned{mac: mac(i), left: lefts[random.IntN(len(lefts))]}
				}
			}
			var entries []rtnetlink.Neighbor
			for i := range 6 {
				n := rtnetlink.Neighbor{
					Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), State: unix.NUD_STALE, MAC: mac(random.IntN(5)),
				}
				switch random.IntN(4) {
				case 0:
					continue
				case 1, 2:
					n.State, n.MAC = unix.NUD_FAILED, nil
				}
				entries = append(entries, n)
			}
			p.update(entries)
			list, shares := m.expect(p.learned, entries)
			diff := cmp.Diff(list, p.list, sorted, cmpopts.EquateComparable(netip.Addr{})) + cmp.Diff(shares, p.live(), numbers)
			if diff != "" {
				t.Fatalf("history %d, step %d: %+v, neighbors %+v:\n%s", history, step, p.learned, entries, diff)
			}
		}
	}
}

// A map that is three quarters full is evicted down to half its size: least recently seen peers
// first, never a peer with a valid neighbor entry, and not twice in a row.
func TestPeersToEvict(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for _, used := range []int{0, 767, 768, 900, 1024} {
		for _, neighbors := range []int{0, 100, 512, 700, 1024} {
			p, entries := &peers{learned: map[uint32]learned{}}, []rtnetlink.Neighbor(nil)
			alive, now := map[uint32]bool{}, time.Now()
			for i := range used {
				mark := fwmark(mac(i))
				p.learned[mark] = learned{mac: mac(i), left: time.Duration(random.Int64N(int64(peerTimeout)))}
				if i%8 == 0 { // expires soon
					p.learned[mark] = learned{mac: mac(i), left: 4 * time.Second}
				}
				if i < neighbors {
					alive[mark] = true
					a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
					entries = append(entries, rtnetlink.Neighbor{Addr: a, MAC: mac(i), State: unix.NUD_STALE})
				}
			}
			p.update(entries)
			var candidates []time.Duration
			for mark, l := range p.learned {
				if !alive[mark] && l.left > 5*time.Second {
					candidates = append(candidates, l.left)
				}
			}
			slices.Sort(candidates)
			want := candidates[:min(len(candidates), max(0, used-512))]
			if used < 768 {
				want = nil
			}
			var got []time.Duration
			for _, mark := range p.gone(now) {
				got = append(got, p.learned[mark].left)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%d peers, %d neighbors: evicted %d, want %d", used, neighbors, len(got), len(want))
			}
			p.lastEvicted = now
			if list := p.gone(now.Add(499 * time.Millisecond)); len(list) > 0 {
				t.Errorf("%d peers: %d evicted again", used, len(list))
			}
			if list := p.gone(now.Add(500 * time.Millisecond)); len(list) != len(want) {
				t.Errorf("%d peers: %d evicted later, want %d", used, len(list), len(want))
			}
		}
	}
}

// If more neighbor entries exist than one batch can probe, all are probed in turn, at most every
// three seconds. Entries that the kernel is already probing are skipped.
func TestProbes(t *testing.T) {
	const hosts = maxProbes*2 + 50
	p := &peers{learned: map[uint32]learned{}}
	states := []uint16{unix.NUD_STALE, unix.NUD_REACHABLE, unix.NUD_FAILED, unix.NUD_DELAY}
	var entries []rtnetlink.Neighbor
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
	for i := range hosts {
		p.learned[fwmark(mac(i))] = learned{mac: mac(i), left: peerTimeout}
		entries = append(entries, rtnetlink.Neighbor{Addr: addr(i), MAC: mac(i), State: unix.NUD_REACHABLE})
	}
	p.update(entries)
	for i := range entries { // FAILED entries have no link-layer address
		if entries[i].State = states[i%len(states)]; entries[i].State == unix.NUD_FAILED {
			entries[i].MAC = nil
		}
	}
	for i, state := range []uint16{unix.NUD_PERMANENT, unix.NUD_INCOMPLETE, unix.NUD_PROBE} {
		entries = append(entries, rtnetlink.Neighbor{Addr: addr(hosts + i), MAC: mac(i), State: state})
	}
	entries = append(entries, rtnetlink.Neighbor{Addr: addr(hosts + 3), MAC: mac(hosts), State: unix.NUD_STALE}) // no peer
	p.update(entries)
	last, now := map[string]time.Time{}, time.Now()
	for range 4 * 3 { // seconds
		list := p.probes(entries, now)
		if len(list) > maxProbes {
			t.Errorf("%d probes in a second", len(list))
		}
		for _, q := range list {
			object := fmt.Sprint(q)
			if was, probed := last[object]; probed && now.Sub(was) < 3*time.Second {
				t.Errorf("%s probed after %v", object, now.Sub(was))
			}
			last[object] = now
		}
		now = now.Add(time.Second)
	}
	if len(last) != hosts {
		t.Errorf("%d of %d neighbors were probed", len(last), hosts)
	}
}

// A neighbor that never sent to the pool receives flows that the application opens. It is seen
// only after its first packet.
func TestNeighborBecomesPeer(t *testing.T) {
	x := newFixture(t, 1)
	p, _ := x.start(x.options())
	x.serve("80")
	x.complete(p)
	x.openTCP(x.pods[0], "172.16.0.1", "172.16.0.100:80").mustEcho(1)
	await.True(t, "neighbor in the map", func() bool { return x.peersInKernel() == 1 })
	for began, repairs := time.Now(), 0; repairs < 2; repairs++ { // it is read again
		x.sh(x.target, "nft flush chain inet vipgate-target output")
		await.True(t, "repair", func() bool { s := p.Status(); return s.Repairs > uint64(repairs) && s.Complete })
		if y := peer(p, podMAC(2, 0)); y.Seen || !y.Live {
			t.Errorf("after %v: %+v, want live and not seen", time.Since(began), y)
		}
	}
	x.open("tcp", "20.0.0.1:80").mustEcho(1)
	await.True(t, "seen peer", func() bool { return peer(p, podMAC(2, 0)).Seen })
}

// A peer that sends for the first time while the rules are repaired is known afterwards.
func TestRepairKeepsNewPeers(t *testing.T) {
	x, w := wireFixture(t)
	was := afterStep
	defer func() { afterStep = was }()
	x.must(x.target.Do(func() error {
		k, err := dial(x.options())
		if err != nil {
			return err
		}
		for _, damage := range []string{
			"true", "nft flush chain netdev vipgate-target egress", "nft flush chain inet vipgate-target output",
			"nft delete table arp vipgate-target", "nft add set netdev vipgate-target foreign '{ type mark; }'",
		} {
			x.sh(x.target, damage)
			n := x.peersInKernel()
			afterStep = func(step string) {
				if step != stepRead || damage == "true" {
					return
				}
				etherType, b := echoRequest(netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr(vips[0]))
				w.send(w.target, mac(n), etherType, b)
				await.True(t, "new peer", func() bool { return x.peersInKernel() == n+1 })
			}
			if missing, problems := k.reconcile(true); len(problems) > 0 || len(missing) == 0 {
				t.Errorf("%s: missing %v, problems %v", damage, missing, problems)
			}
			afterStep = was
			if missing, problems := k.reconcile(false); len(missing)+len(problems) > 0 {
				t.Errorf("%s: left %v, problems %v", damage, missing, problems)
			}
			if got := x.peersInKernel(); damage != "true" && got != n+1 {
				t.Errorf("%s: %d peers, want %d", damage, got, n+1)
			}
			if strings.Contains(x.sh(x.target, "nft list ruleset"), "foreign") {
				t.Errorf("%s: a foreign set is left", damage)
			}
		}
		return k.close()
	}))
}

// wireFixture returns a target whose link ends at a wire.
func wireFixture(t *testing.T) (*fixture, *wire) {
	x := &fixture{TB: t, target: lab.NewNetNS(t, lab.WithoutDAD)}
	other := lab.NewNetNS(t, lab.WithoutDAD)
	x.must(lab.Veth(x.target, link, other, "wire"))
	x.must(x.target.IP("link", "set", link, "address", "02:00:00:00:04:00"))
	x.must(x.target.Addr(link, "172.16.0.100/16", "fd00:2::100/64"))
	return x, newWire(t, other, "wire", net.HardwareAddr{2, 0, 0, 0, 4, 0})
}

// While packets add peers and the kernel resizes the map, a dump in several messages misses up to a
// quarter of the peers. Expected peers are read nevertheless.
func TestReadPeersOfGrowingMap(t *testing.T) {
	x, w := wireFixture(t)
	var s *nft.Conn
	x.must(x.target.Do(func() error {
		_, err := Install(t.Context(), x.options())
		x.must(err)
		s, err = nft.Dial()
		return err
	}))
	defer s.Close()
	for round := range 40 {
		sent := make(chan struct{})
		go func() { defer close(sent); w.forge(round * 1100 % 20000) }()
		known := map[uint32]learned{}
		for sending := true; sending; {
			select {
			case <-sent:
				sending = false
			default:
			}
			list, err := readPeers(s, slices.Collect(maps.Keys(known))...)
			x.must(err)
			for mark := range known {
				if _, found := list[mark]; !found {
					<-sent
					t.Fatalf("round %d: peer %#x is missing in a list of %d, after one of %d", round, mark, len(list), len(known))
				}
			}
			known = list
		}
		// The kernel shrinks the map, so that it grows again in the next round.
		x.sh(x.target, "nft flush map netdev vipgate-target peers")
	}
}

// A neighbor whose first packet arrives while it is added to the map has the lifetime of a sender.
func TestPacketDuringAdditionOfNeighbor(t *testing.T) {
	x, w := wireFixture(t)
	defer func(was func(string)) { afterStep = was }(afterStep)
	x.must(x.target.Do(func() error {
		k, err := dial(x.options())
		if err != nil {
			return err
		}
		k.reconcile(true)
		x.must(x.target.Batch("neigh add 172.16.0.7 lladdr " + mac(7).String() + " dev " + link + " nud permanent"))
		afterStep = func(step string) {
			if step == stepRead {
				etherType, b := echoRequest(netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr(vips[0]))
				w.send(w.target, mac(7), etherType, b)
				await.True(t, "the sender in the map", func() bool { return x.peersInKernel() == 1 })
				afterStep = func(string) {}
			}
		}
		k.reconcile(true)
		if _, problems := k.reconcile(false); len(problems) > 0 {
			t.Error(problems)
		}
		if list := k.peers.list; len(list) != 1 || !list[0].Seen {
			t.Errorf("peers %+v, want the sender", list)
		}
		return k.close()
	}))
}
