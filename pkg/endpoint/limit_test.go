package endpoint

import (
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// pair holds both ends of a connection.
type pair struct{ client, server net.Conn }

// limitedListener returns a listener of n connections and a function that connects from an
// address.
func limitedListener(t *testing.T, n int) func(source string) pair {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	l := Limit(inner, n)
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

func TestLimitKeepsAuthenticatedConnections(t *testing.T) {
	connect := limitedListener(t, 8)
	var peers []pair
	for range 7 {
		p := connect("127.0.0.2")
		p.server.(interface{ Authenticated() }).Authenticated()
		peers = append(peers, p)
	}
	for range 20 {
		last := connect("127.0.0.3")
		wantOpen(t, true, append(peers, last)...)
	}
	p := connect("127.0.0.2")
	p.server.(interface{ Authenticated() }).Authenticated()
	peers = append(peers, p)
	wantOpen(t, false, connect("127.0.0.3"))
	// A closed connection is not counted any more.
	peers[0].server.Close()
	wantOpen(t, true, append(peers[1:], connect("127.0.0.3"))...)
}

func TestLimitFollowsDescriptors(t *testing.T) {
	var old syscall.Rlimit
	harness.Must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old))
	t.Cleanup(func() { syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old) })
	for files, want := range map[uint64]int{64: 8, 1024: 32, 20_000: 128} {
		harness.Must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: files, Max: old.Max}))
		if got := Limit(nil, MaxConnections).(*limited).max; got != want {
			t.Errorf("%d connections of %d descriptors, want %d", got, files, want)
		}
	}
}
