package healthcheck

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

var loopback4, loopback6 = netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()

// connecting returns a connector that is stopped at the end of the test.
func connecting(t *testing.T) *connector {
	t.Helper()
	k, err := newConnector()
	harness.Must(t, err)
	t.Cleanup(func() {
		if _, err := k.stop(); err != nil {
			t.Error(err)
		}
	})
	return k
}

func probing(a netip.Addr, port uint16, change func(*trench.Check)) probe {
	check := testCheck
	check.TCP.Port, check.Timeout = port, patience
	if change != nil {
		change(&check)
	}
	e := &entry{Health: Health{Key: Key{Addr: a}}, plan: newPlan(check)}
	return probe{path: e.path(nil), entry: e, began: time.Now(), plan: e.plan}
}

// conclude makes one check.
func conclude(t *testing.T, k *connector, p probe) (result outcome) {
	t.Helper()
	result, ended := k.start(p)
	end := time.After(2 * patience)
	for !ended {
		arrived, err := k.answers()
		harness.Must(t, err)
		if len(k.busy) == 0 {
			t.Fatal("nothing runs, and nothing was reported")
		}
		select {
		case <-arrived:
		case <-time.After(time.Until(k.busy[0].due)):
		case <-end:
			t.Fatal("a check never ended")
		}
		k.collect(time.Now(), func(q probe, o outcome) {
			if q.entry != p.entry {
				t.Errorf("reported %v, started %v", q.entry.Addr, p.entry.Addr)
			}
			result, ended = o, true
		})
	}
	return result
}

// hole is a listener that answers no more: its queue is full.
func hole(t *testing.T) (port uint16) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	harness.Must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	harness.Must(t, errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback4.As4()}), unix.Listen(fd, 0)))
	name, err := unix.Getsockname(fd)
	harness.Must(t, err)
	port = uint16(name.(*unix.SockaddrInet4).Port)
	for range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		conn, err := path{}.dial(ctx, "tcp", netip.AddrPortFrom(loopback4, port).String())
		cancel()
		if err != nil {
			return port
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Fatal("the queue of a listener is never full")
	return 0
}

func TestConnectOutcomes(t *testing.T) {
	open := serve(t, "127.0.0.1:0").port()
	open6 := serve(t, "[::1]:0").port()
	closed := serve(t, "127.0.0.3:0")
	refusing := closed.port()
	closed.close()
	full := hole(t)
	k := connecting(t)
	short := func(c *trench.Check) { c.Timeout = 30 * time.Millisecond }
	for range 3 { // sockets are used again, whatever became of them before
		for _, tt := range []struct {
			what  string
			probe probe
			want  outcome
		}{
			{"IPv4", probing(loopback4, open, nil), outcome{}},
			{"IPv6", probing(loopback6, open6, nil), outcome{}},
			{
				"no listener", probing(netip.MustParseAddr("127.0.0.3"), refusing, nil),
				outcome{verdict: failed, reason: "port " + portString(refusing) + ": connection refused", refused: true},
			},
			{
				"no answer", probing(loopback4, full, short),
				outcome{verdict: failed, silent: true, reason: "port " + portString(full) + ": no answer in 30ms"},
			},
			{
				"a missing source address",
				probing(loopback4, open, func(c *trench.Check) { c.Sources[0] = netip.MustParseAddr("192.0.2.1") }),
				outcome{verdict: notRun, reason: "check not run: source address: cannot assign requested address"},
			},
			{
				"a missing IPv6 source address",
				probing(loopback6, open6, func(c *trench.Check) { c.Sources[0] = netip.MustParseAddr("2001:db8::1") }),
				outcome{verdict: notRun, reason: "check not run: source address: cannot assign requested address"},
			},
			{"an IPv6 source", probing(loopback6, open6, func(c *trench.Check) { c.Sources[0] = loopback6 }), outcome{}},
		} {
			if got := conclude(t, k, tt.probe); got != tt.want {
				t.Errorf("%s: got %+v, want %+v", tt.what, got, tt.want)
			}
		}
	}
}

func TestChecksUseTheirSourceAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer l.Close()
	k := connecting(t)
	// The sources alternate: a socket is reused only for its own source.
	for _, source := range []string{"127.0.0.77", "", "127.0.0.78", "127.0.0.77", ""} {
		want := loopback4
		p := probing(loopback4, uint16(l.Addr().(*net.TCPAddr).Port), func(c *trench.Check) {
			if source != "" {
				want = netip.MustParseAddr(source)
				c.Sources[0] = want
			}
		})
		if got := conclude(t, k, p); got.verdict != succeeded {
			t.Fatalf("got %+v", got)
		}
		conn, err := l.Accept()
		harness.Must(t, err)
		if got := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != want {
			t.Errorf("checked from %v, want %v", got, want)
		}
		_ = conn.Close()
	}
	if len(k.sockets) != 3 {
		t.Errorf("%d sockets for 3 sources", len(k.sockets))
	}
}

// A peer that resets immediately has accepted the connection, however late the check reads the
// event.
func TestImmediateResetIsAnswer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer l.Close()
	k := connecting(t)
	p := probing(loopback4, uint16(l.Addr().(*net.TCPAddr).Port), nil)
	if _, ended := k.start(p); ended {
		t.Fatal("connected at once")
	}
	conn, err := l.Accept()
	harness.Must(t, err)
	harness.Must(t, errors.Join(conn.(*net.TCPConn).SetLinger(0), conn.Close()))
	var reported []outcome
	await.True(t, "an outcome", func() bool {
		k.collect(time.Now(), func(_ probe, o outcome) { reported = append(reported, o) })
		return len(reported) > 0
	})
	if len(reported) != 1 || reported[0] != (outcome{}) {
		t.Errorf("got %+v", reported)
	}
}

func TestUnusedSocketsAreClosed(t *testing.T) {
	k := connecting(t)
	for range 3 {
		s, err := k.open(origin{family: vip.IPv4})
		harness.Must(t, err)
		k.release(s)
	}
	newest := k.idle[2]
	newest.since = newest.since.Add(time.Millisecond)
	k.collect(newest.since.Add(idleTime), nil)
	if len(k.idle) != 1 || k.idle[0] != newest || len(k.sockets) != 1 {
		t.Errorf("%d idle sockets of %d", len(k.idle), len(k.sockets))
	}
	k.collect(newest.since.Add(idleTime+1), nil)
	if len(k.idle) != 0 || len(k.sockets) != 0 {
		t.Errorf("%d idle sockets of %d", len(k.idle), len(k.sockets))
	}
}

func TestSocketsAreReused(t *testing.T) {
	port := serve(t, "127.0.0.1:0").port()
	k := connecting(t)
	for range 1000 {
		if got := conclude(t, k, probing(loopback4, port, nil)); got != (outcome{}) {
			t.Fatalf("got %+v", got)
		}
	}
	if len(k.sockets) != 1 {
		t.Errorf("%d sockets for one check at a time", len(k.sockets))
	}
	// After many concurrent checks at most maxIdle sockets stay open.
	for range 3 * maxIdle {
		if o, ended := k.start(probing(loopback4, port, nil)); ended {
			t.Fatalf("got %+v", o)
		}
	}
	await.True(t, "the outcomes of all", func() bool {
		k.collect(time.Now(), func(_ probe, o outcome) {
			if o != (outcome{}) {
				t.Errorf("got %+v", o)
			}
		})
		return len(k.busy) == 0
	})
	if len(k.idle) > maxIdle || len(k.sockets) != len(k.idle) { // fewer if this took more than idleTime
		t.Errorf("%d sockets and %d idle ones, want %d at most", len(k.sockets), len(k.idle), maxIdle)
	}
}

func TestConnectorStopLeaksNothing(t *testing.T) {
	port := hole(t)
	before := descriptors(t)
	k, err := newConnector()
	harness.Must(t, err)
	for range 500 {
		if o, ended := k.start(probing(loopback4, port, nil)); ended {
			t.Fatalf("got %+v", o)
		}
	}
	if _, err := k.answers(); err != nil {
		t.Fatal(err)
	}
	open, err := k.stop()
	if err != nil || len(open) != 500 {
		t.Errorf("%d of 500 checks were open, %v", len(open), err)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// exhaust takes all descriptors that the process may have until the returned
// function is called.
func exhaust(t *testing.T) (release func()) {
	t.Helper()
	var old unix.Rlimit
	harness.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	harness.Must(t, err)
	harness.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(null) + 64, Max: old.Max}))
	taken := []int{null}
	for {
		fd, err := unix.Dup(null)
		if err != nil {
			break
		}
		taken = append(taken, fd)
	}
	return func() {
		for _, fd := range taken {
			_ = unix.Close(fd)
		}
		harness.Check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old))
	}
}

func TestNoCheckWithoutDescriptors(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0") // that accepts nothing, for want of descriptors
	harness.Must(t, err)
	defer listener.Close()
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	k := connecting(t)
	release := exhaust(t)
	o, ended := k.start(probing(loopback4, port, nil))
	release()
	if want := (outcome{verdict: notRun, reason: "check not run: socket: too many open files"}); !ended || o != want {
		t.Errorf("got %+v, %v; want %+v", o, ended, want)
	}
	if got := conclude(t, k, probing(loopback4, port, nil)); got != (outcome{}) {
		t.Errorf("later: %+v", got)
	}
	// An idle socket that does not fit gives its descriptor to one that does.
	release = exhaust(t)
	got := conclude(t, k, probing(loopback4, port,
		func(c *trench.Check) { c.Sources[0] = netip.MustParseAddr("127.0.0.77") }))
	release()
	if got != (outcome{}) {
		t.Errorf("with an idle socket: %+v", got)
	}
}

func TestFailedDisconnectClosesSocket(t *testing.T) {
	k := connecting(t)
	s, err := k.open(origin{family: 0})
	harness.Must(t, err)
	fd := s.fd
	s.fd = -1 // every call fails
	k.release(s)
	if len(k.idle) != 0 {
		t.Error("a socket that has a connection is kept")
	}
	s.fd = fd
	k.close(s)
}

func TestManyChecksShareWakeUps(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		c.Configure([]trench.Stream{stream(5000, testCheck)})
		advance(5 * time.Second)
		before := len(n.dialed())
		advance(2 * time.Second)
		instants := make(map[time.Time]bool)
		dials := n.dialed()[before:]
		for _, d := range dials {
			instants[d.at] = true
		}
		if limit := int(2*time.Second/pace) + 1; len(dials) < 10_000 || len(instants) > limit {
			t.Errorf("%d checks were started at %d instants, want at most %d", len(dials), len(instants), limit)
		}
	})
}

// The end of the checker cancels hung checks immediately.
func TestStopEndsHungChecks(t *testing.T) {
	port := hole(t)
	before := descriptors(t)
	c, stop := start(t, Options{})
	check := testCheck
	check.TCP.Port, check.Timeout, check.Interval = port, time.Hour, time.Hour
	s := trench.Stream{Name: "s", Check: check}
	a := loopback4
	for range 200 {
		s.Targets = append(s.Targets, trench.Target{Name: a.String(), IPs: []netip.Addr{a}})
		a = a.Next()
	}
	c.Configure([]trench.Stream{s})
	await.True(t, "the start of checks", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.running > 0
	})
	stop()
	if c.running != 0 {
		t.Errorf("%d checks run", c.running)
	}
	if after := descriptors(t); after > before+2 /* the poller's own */ {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}
