package replypath

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/test/await"
)

// forge sends packets to a VIP from more link-layer addresses than the peers map can hold.
func (w *wire) forge(first int) {
	for i := range maxPeers + 76 {
		client := []string{"10.9.0.1", "fd09::1"}[i%2]
		etherType, b := packet(netip.MustParseAddr(client), netip.MustParseAddr(vips[i%2]), unix.IPPROTO_UDP, make([]byte, 8))
		w.send(w.target, mac(first+i), etherType, b)
	}
}

// answers reports whether the target answers echo requests from a link-layer address in both
// families.
func (w *wire) answers(from net.HardwareAddr) bool {
	w.Helper()
	for i, client := range []string{"10.9.0.2", "fd09::2"} {
		etherType, request := echoRequest(netip.MustParseAddr(client), netip.MustParseAddr(vips[i]))
		ownType, own := echoRequest(netip.MustParseAddr("172.16.9.9"), netip.MustParseAddr("172.16.0.100"))
		ask := func() {
			w.send(w.target, from, etherType, request)
			w.send(w.target, from, ownType, own) // the last request to be answered
		}
		ask()
		answered := false
		for began := time.Now(); ; {
			f, ok := w.receive()
			if !ok && time.Since(began) > await.Timeout {
				w.Fatal("no answer of an own address")
			}
			if !ok { // the queues were full of forged packets
				ask()
				continue
			}
			if !strings.Contains(string(f.payload), "vipgate") {
				continue
			}
			if f.etherType == unix.ETH_P_IP && slices.Equal(f.payload[12:16], []byte{172, 16, 0, 100}) {
				break
			}
			answered = answered || slices.Equal(f.to, from)
		}
		if !answered {
			return false
		}
	}
	return true
}

// Forged link-layer addresses displace trench pods only briefly, also after a restart. A map that
// remains full is reported.
func TestForgedLinkAddresses(t *testing.T) {
	x, w := wireFixture(t)
	x.must(x.target.Batch("neigh add 172.16.9.9 lladdr 02:00:00:09:ff:ff dev " + link))
	p, stop := x.start(x.options())
	x.complete(p)
	neighbors := func(verb string, first, n int) {
		t.Helper()
		var commands []string
		for i := first; i < first+n; i++ {
			commands = append(commands,
				fmt.Sprintf("neigh %s 172.16.%d.%d lladdr %s dev %s nud permanent", verb, i>>8, i&0xff, mac(i), link))
		}
		x.must(x.target.Batch(commands...))
	}
	wantAnswer := func(when string, from int) {
		t.Helper()
		await.True(t, when+": answer by a new trench pod", func() bool { return w.answers(mac(from)) })
	}

	const trenchPod = 30000
	neighbors("add", trenchPod, 2)
	wantAnswer("at first", trenchPod)
	await.True(t, "evicted peers", func() bool { w.forge(0); return p.Status().Evicted > 0 })
	wantAnswer("forged link addresses", trenchPod+1)
	if y := peer(p, mac(trenchPod).String()); !y.Seen || !w.answers(mac(trenchPod)) {
		t.Errorf("the trench pod was evicted: %+v", y)
	}
	stop()

	fill := func(first int) {
		t.Helper()
		await.True(t, "full map", func() bool { w.forge(first); return x.peersInKernel() == maxPeers })
	}
	fill(2000)
	if w.answers(mac(trenchPod + 2)) {
		t.Error("the map has room without a process")
	}
	p, stop = x.start(x.options())
	wantAnswer("start", trenchPod+2)
	x.complete(p)
	x.sh(x.target, "nft flush map netdev vipgate-target peers")
	await.True(t, "flushed map", func() bool {
		return !slices.ContainsFunc(p.Status().Peers, func(y Peer) bool { return y.Seen })
	})
	wantAnswer("flushed map", trenchPod+2)

	// All peers in the map have valid neighbor entries.
	neighbors("add", 4000, maxPeers)
	await.True(t, "report of a full map", func() bool {
		w.forge(4000)
		s := p.Status()
		return s.Full && !s.Complete && strings.Contains(s.Problems[0].Detail, "it is full")
	})
	neighbors("del", 4000, maxPeers)
	x.complete(p)
	wantAnswer("full map", trenchPod+3)
	stop()

	fill(6000)
	x.must(x.target.Do(func() error {
		_, err := Install(t.Context(), x.options())
		return err
	}))
	wantAnswer("--once", trenchPod+4)
}

// peersInKernel counts the elements of the peers map.
func (x *fixture) peersInKernel() (n int) {
	x.Helper()
	x.must(x.target.Do(func() error {
		s, err := nft.Dial()
		if err != nil {
			return err
		}
		list, err := readPeers(s)
		n = len(list)
		return errors.Join(err, s.Close())
	}))
	return n
}
