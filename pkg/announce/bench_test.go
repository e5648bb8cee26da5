package announce

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// manyVIPs returns n VIPs of alternating families.
func manyVIPs(n int) []vip.VIP {
	vips := make([]vip.VIP, n)
	for i := range vips {
		vips[i] = numbered(i)
	}
	return vips
}

// toAll returns changes of manyVIPs(n) to one advertisement.
func toAll(n int, a Advertisement) []Change {
	changes := make([]Change, 0, n)
	for _, v := range manyVIPs(n) {
		changes = append(changes, Change{v, Route{Advertisement: a}})
	}
	return changes
}

func numbered(i int) vip.VIP {
	p := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
	if i%2 == 1 {
		p = netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}), 128)
	}
	v, err := vip.FromPrefix(p)
	if err != nil {
		panic(err) // a bug in this function
	}
	return v
}

// benchSession returns an announcer with n VIPs and an established and announced session over TCP
// to a peer that only reads.
func benchSession(b *testing.B, n int) (*Announcer, *session) {
	b.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	harness.Must(b, err)
	defer l.Close()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.Copy(io.Discard, conn)
	}()
	conn, err := net.Dial("tcp4", l.Addr().String())
	harness.Must(b, err)
	b.Cleanup(func() { conn.Close(); <-drained })
	a := New(Options{Peer: netip.MustParseAddrPort("127.0.0.1:1790"), PeerAS: 8103})
	e, err := newEncoder(a.options)
	harness.Must(b, err)
	a.Post(Batch{Changes: toAll(n, Announced), Revision: 1})
	s := newSession(a, e, conn)
	s.phase = established
	harness.Must(b, s.announceAll())
	return a, s
}

// BenchmarkFlip measures a change of one VIP among n: store, encode, write. On a core of an AMD
// EPYC it takes 2 to 3 µs for 1, 1 000 and 50 000.
func BenchmarkFlip(b *testing.B) {
	for _, n := range []int{1, 1000, 50000} {
		b.Run(fmt.Sprintf("vips=%d", n), func(b *testing.B) {
			a, s := benchSession(b, n)
			v := numbered(0)
			cause := time.Now()
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				to := Withdrawn
				if i%2 == 1 {
					to = Announced
				}
				a.Post(Batch{Changes: []Change{{v, Route{Advertisement: to}}}, Revision: uint64(i), Cause: cause})
				if s.owned {
					b.Fatal("the socket did not take the change")
				}
			}
		})
	}
}

// BenchmarkFullAnnouncement measures the full announcement of n VIPs: 17 ms for 50 000 on the
// same machine, most of it to sort them.
func BenchmarkFullAnnouncement(b *testing.B) {
	for _, n := range []int{1, 1000, 50000} {
		b.Run(fmt.Sprintf("vips=%d", n), func(b *testing.B) {
			_, s := benchSession(b, n)
			b.ReportAllocs()
			for b.Loop() {
				harness.Must(b, s.announceAll())
			}
		})
	}
}

// BenchmarkPost measures Post.
func BenchmarkPost(b *testing.B) {
	for _, n := range []int{1, 1000, 50000} {
		b.Run(fmt.Sprintf("vips=%d", n), func(b *testing.B) {
			a := New(Options{})
			batch := Batch{Changes: toAll(n, Announced), Revision: 1}
			b.ReportAllocs()
			for b.Loop() {
				a.Post(batch)
			}
		})
	}
}
