package healthcheck

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// patience is how long tests wait for what must happen.
const patience = 20 * time.Second

// follow evaluates at each wake-up and each 10 ms until cond holds.
func follow(t *testing.T, c *Checker, what string, cond func(Evaluation) bool) {
	t.Helper()
	timeout := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !cond(c.Evaluate(time.Now())) {
		select {
		case <-c.Changed():
		case <-tick.C:
		case <-timeout:
			t.Fatalf("%s did not happen in %v: %+v", what, patience, c.List())
		}
	}
}

// server accepts connections on the address and drops them, until closed.
type server struct {
	listener net.Listener
	done     chan struct{}
}

// serve listens on the address; on a given port it waits until that is free,
// since other processes of the machine use ports as well.
func serve(t *testing.T, address string) *server {
	t.Helper()
	var l net.Listener
	await.True(t, "listening on "+address, func() bool {
		var err error
		l, err = net.Listen("tcp", address)
		return err == nil
	})
	s := &server{listener: l, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	t.Cleanup(s.close)
	return s
}

func (s *server) close() {
	_ = s.listener.Close()
	<-s.done
}

func (s *server) port() uint16 { return uint16(s.listener.Addr().(*net.TCPAddr).Port) }

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	harness.Must(t, err)
	return len(entries)
}

func TestTargetsComeAndGo(t *testing.T) {
	// Two targets, one per family, with the same port.
	first := serve(t, "127.0.0.1:0")
	port := first.port()
	address6 := net.TCPAddr{IP: net.IPv6loopback, Port: int(port)}
	serve(t, address6.String())
	c, stop := start(t, Options{})
	defer stop()
	check := trench.Check{
		SingleCheck: trench.SingleCheck{
			TCP: trench.TCPCheck{Port: port}, Interval: 20 * time.Millisecond, Timeout: 20 * time.Millisecond, Rise: 2,
			Fall: 3,
		},
	}
	c.Configure([]trench.Stream{{Name: "s", Check: check, Targets: []trench.Target{
		{Name: "a", IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")}},
		{Name: "b", IPs: []netip.Addr{netip.MustParseAddr("127.0.0.99")}},
	}}})
	is := func(want ...State) func(Evaluation) bool {
		return func(e Evaluation) bool {
			var got []State
			for _, h := range c.List() {
				got = append(got, h.State)
			}
			return e.Synced && slices.Equal(got, want)
		}
	}
	follow(t, c, "two ready, one refused", is(Ready, Ready, NotReady))
	if got, want := c.List()[2].LastError, "port "+portString(port)+": connection refused"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	first.close()
	follow(t, c, "the fall of one", is(NotReady, Ready, NotReady))
	serve(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String())
	follow(t, c, "its return", is(Ready, Ready, NotReady))
	serve(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.99"), port).String())
	follow(t, c, "the rise of the other", is(Ready, Ready, Ready))
}

func portString(port uint16) string {
	_, s, _ := net.SplitHostPort(netip.AddrPortFrom(netip.IPv4Unspecified(), port).String())
	return s
}

// The server sees a reset, so that neither side keeps a socket in TIME_WAIT.
func TestCheckEndsWithReset(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer l.Close()
	c, stop := start(t, Options{})
	defer stop()
	address := l.Addr().(*net.TCPAddr)
	c.Configure([]trench.Stream{{Name: "s", Check: trench.Check{
		SingleCheck: trench.SingleCheck{
			TCP: trench.TCPCheck{Port: uint16(address.Port)}, Interval: time.Hour, Timeout: patience, Rise: 1, Fall: 1,
		},
	}, Targets: []trench.Target{{Name: "a", IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}}}})
	conn, err := l.Accept()
	harness.Must(t, err)
	defer conn.Close()
	harness.Must(t, conn.SetReadDeadline(time.Now().Add(patience)))
	_, err = conn.Read(make([]byte, 1))
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("the server read %v, want a reset", err)
	}
}

func TestChecksLeakNothing(t *testing.T) {
	s := serve(t, "127.0.0.1:0")
	before, goroutines := descriptors(t), runtime.NumGoroutine()
	c, stop := start(t, Options{})
	check := trench.Check{
		SingleCheck: trench.SingleCheck{
			TCP: trench.TCPCheck{Port: s.port()}, Interval: 10 * time.Millisecond, Timeout: 10 * time.Millisecond, Rise: 1,
			Fall: 100,
		},
	}
	streams := []trench.Stream{{Name: "s", Check: check}}
	a := netip.MustParseAddr("127.0.0.1")
	for range 50 {
		streams[0].Targets = append(streams[0].Targets, trench.Target{Name: a.String(), IPs: []netip.Addr{a}})
		a = a.Next()
	}
	for range 10 {
		c.Configure(streams)
		follow(t, c, "the first verdict", func(Evaluation) bool {
			return !slices.ContainsFunc(c.List(), func(h Health) bool { return h.State == Starting })
		})
		c.Configure(nil)
	}
	stop()
	// The server may still be busy with the last connections.
	await.True(t, "the end of all sockets and goroutines", func() bool {
		return descriptors(t) <= before+2 /* the poller's own */ && runtime.NumGoroutine() <= goroutines
	})
}
