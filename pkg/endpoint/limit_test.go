package endpoint

import (
	"io"
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/test/harness"
)

var frontendID = spiffeid.RequireFromString("spiffe://example.org/frontend")

// pair holds both ends of a connection.
type pair struct{ client, server net.Conn }

// limitedListener returns a listener of n connections and a function that connects from an
// address.
func limitedListener(t *testing.T, n int) func(source string) pair {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	l := Limit(inner, n, func(id spiffeid.ID) bool { return id == frontendID })
	t.Cleanup(func() { l.Close() })
	return func(source string) pair {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
		client, err := d.DialContext(t.Context(), "tcp", inner.Addr().String())
		harness.Must(t, err)
		server, err := l.Accept()
		harness.Must(t, err)
		t.Cleanup(func() { client.Close(); server.Close() })
		return pair{client, server}
	}
}

// open reports whether a connection still carries a byte.
func (p pair) open(t *testing.T) bool {
	t.Helper()
	if _, err := p.server.Write([]byte("x")); err != nil {
		return false
	}
	_ = p.client.SetReadDeadline(time.Now().Add(30 * time.Second))
	_, err := io.ReadFull(p.client, make([]byte, 1))
	return err == nil
}

func wantOpen(t *testing.T, want bool, pairs ...pair) {
	t.Helper()
	for i, p := range pairs {
		if p.open(t) != want {
			t.Errorf("connection %d is open: %t, want %t", i, !want, want)
		}
	}
}

func TestLimitClosesOldestOfBusiestSource(t *testing.T) {
	connect := limitedListener(t, 10)
	kubelet := []pair{connect("127.0.0.2"), connect("127.0.0.2")}
	var flood []pair
	for range 100 {
		flood = append(flood, connect("127.0.0.3"))
	}
	wantOpen(t, true, kubelet...)
	wantOpen(t, false, flood[:92]...)
	wantOpen(t, true, flood[92:]...)
	// A connection of a third source replaces one of the busiest source.
	wantOpen(t, true, connect("127.0.0.4"))
	wantOpen(t, false, flood[92])
	wantOpen(t, true, append(kubelet, flood[93:]...)...)
}

func TestLimitLetsNewClientsOfBusySourceIn(t *testing.T) {
	connect := limitedListener(t, 8)
	for range 50 {
		wantOpen(t, true, connect("127.0.0.2"))
	}
}

// authenticated connects from 127.0.0.2 as an ID of the test trust domain.
func authenticated(connect func(string) pair, id string) pair {
	p := connect("127.0.0.2")
	p.server.(*connection).Authenticated(spiffeid.RequireFromString("spiffe://example.org/" + id))
	return p
}

func TestLimitKeepsAuthenticatedConnections(t *testing.T) {
	connect := limitedListener(t, 8)
	var peers []pair
	for range 8 {
		peers = append(peers, authenticated(connect, "a"))
		for range 20 {
			wantOpen(t, true, append(peers, connect("127.0.0.3"))...)
		}
	}
}

// An ID that fills the listener excludes neither another ID nor a handshake.
func TestLimitSharesAmongIDs(t *testing.T) {
	for _, limit := range []int{8, 9, 64} {
		t.Run(strconv.Itoa(limit), func(t *testing.T) {
			connect := limitedListener(t, limit)
			var greedy []pair
			for range limit + 5 {
				greedy = append(greedy, authenticated(connect, "greedy"))
			}
			wantOpen(t, false, greedy[:5]...) // it takes turns with itself
			wantOpen(t, true, greedy[5:]...)
			wantOpen(t, true, connect("127.0.0.3"))
			var others []pair
			for i := range limit - 1 {
				others = append(others, authenticated(connect, "app"+strconv.Itoa(i)))
			}
			wantOpen(t, false, greedy[:len(greedy)-1]...)
			wantOpen(t, true, append(others, greedy[len(greedy)-1])...)

			// With one connection for each ID the newest ID is refused.
			wantOpen(t, false, authenticated(connect, "last"))
			// An ID at its share replaces its own connection.
			second := authenticated(connect, "app0")
			wantOpen(t, false, others[0])
			wantOpen(t, true, append(others[1:], second)...)
		})
	}
}

func TestLimitOfIDs(t *testing.T) {
	for _, tt := range []struct {
		name   string
		held   []string // of a limit of 8, oldest first
		next   string
		closed int // index in held; 8: next; -1: none
	}{
		{"below the limit", strings.Fields("a a a a a a a"), "b", -1},
		{"at the limit", strings.Fields("a a a a a a b"), "b", -1},
		{"above the limit", strings.Fields("b a a a a a a a"), "b", 1},
		{"own oldest", strings.Fields("b a a a a b b b"), "a", 1},
		{"own oldest at an equal share", strings.Fields("a a a a b b b c"), "b", 4},
		{"largest of three", strings.Fields("c b b a a a d d"), "e", 3},
		{"one for each ID", strings.Fields("a b c d e f g h"), "i", 8},
		{"frontends are not counted", strings.Fields("frontend a a a a a a frontend"), "b", -1},
		{"frontend at the limit", strings.Fields("a b c d e f g h"), "frontend", -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			connect := limitedListener(t, 8)
			var pairs []pair
			for _, id := range append(tt.held, tt.next) {
				pairs = append(pairs, authenticated(connect, id))
			}
			for i, p := range pairs {
				if want := i != tt.closed; p.open(t) != want {
					t.Errorf("connection %d is open: %t, want %t", i, !want, want)
				}
			}
		})
	}
}

func TestLimitFollowsDescriptors(t *testing.T) {
	var old syscall.Rlimit
	harness.Must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old))
	t.Cleanup(func() { syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old) })
	for files, want := range map[uint64]int{64: 8, 1024: 32, 20_000: 128} {
		harness.Must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: files, Max: old.Max}))
		if got := Limit(nil, MaxConnections, nil).(*limited).max; got != want {
			t.Errorf("%d connections of %d descriptors, want %d", got, files, want)
		}
	}
}
