package announce

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// listen opens a listener on its own loopback address.
func listen(t *testing.T) (*net.TCPListener, netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp4", netip.AddrPortFrom(randomLoopback(), 0).String())
	harness.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener), l.Addr().(*net.TCPAddr).AddrPort()
}

func accept(t *testing.T, l *net.TCPListener) *peer {
	t.Helper()
	harness.Must(t, l.SetDeadline(time.Now().Add(waitLimit)))
	conn, err := l.AcceptTCP()
	harness.Must(t, err)
	return newPeer(t, conn)
}

func TestStoppedReaderGetsReset(t *testing.T) {
	t.Parallel() // it waits for seconds
	l, addr := listen(t)
	o := testOptions()
	o.Peer, o.HoldTime = addr, 60*time.Second
	a := New(o)
	run(t, a)
	p := accept(t, l)
	// A small buffer, so that stale data stay on the announcer's side.
	harness.Must(t, p.conn.(*net.TCPConn).SetReadBuffer(4096))
	p.establish(60)
	awaitState(t, a, "established", func(s State) bool { return s.Established })

	flood := advertisements{}
	for i := range 100_000 {
		flood[numbered(i)] = Announced
	}
	for rev := uint64(1); ; rev++ {
		a.Post(Batch{Changes: flood.list(), Revision: rev})
		s := awaitState(t, a, "written or down", func(s State) bool { return s.Written == rev || !s.Established })
		if !s.Established {
			break
		}
		if rev > 100 {
			t.Fatal("the socket takes everything")
		}
		to := Advertisement(1 + rev%2)
		for v := range flood {
			flood[v] = to
		}
	}
	s := a.State().Load()
	var timeout net.Error
	if !errors.As(s.LastError, &timeout) || !timeout.Timeout() {
		t.Errorf("ended by %v, want the write deadline", s.LastError)
	}
	harness.Must(t, p.conn.SetReadDeadline(time.Now().Add(waitLimit)))
	for {
		if _, err := p.read(); err != nil {
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the peer reads %v at the end, want a reset", err)
			}
			break
		}
	}
	if len(p.table) == len(flood) {
		t.Error("the peer could read all that was stale")
	}
	// The peer gets a new session when it reads again.
	p = accept(t, l)
	p.establish(60)
	for len(p.table) < len(flood) {
		p.expect(bgp.BGP_MSG_UPDATE)
	}
}

func TestNotificationBeforeReset(t *testing.T) {
	l, addr := listen(t)
	o := testOptions()
	o.Peer = addr
	a := New(o)
	run(t, a)
	p := accept(t, l)
	p.expect(bgp.BGP_MSG_OPEN)
	// Input that the announcer has not read must not turn its close into a reset.
	p.sendBytes([]byte(strings.Repeat("garbage", 10_000)))
	awaitState(t, a, "it has hung up", func(s State) bool { return s.LastError != nil })
	p.expectEnd(bgp.BGP_ERROR_MESSAGE_HEADER_ERROR, bgp.BGP_ERROR_SUB_CONNECTION_NOT_SYNCHRONIZED)
}

func TestLocalAddress(t *testing.T) {
	l, addr := listen(t)
	o := testOptions()
	o.Local, o.Peer = randomLoopback(), addr
	run(t, New(o))
	p := accept(t, l)
	if got := p.conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != o.Local {
		t.Errorf("dialled from %s, want %s", got, o.Local)
	}
}

func TestRefusedConnectionIsRetried(t *testing.T) {
	l, addr := listen(t)
	l.Close()
	o := testOptions()
	o.Peer = addr
	a := New(o)
	run(t, a)
	s := awaitState(t, a, "several attempts", func(s State) bool { return s.Attempts >= 3 })
	if !errors.Is(s.LastError, syscall.ECONNREFUSED) {
		t.Errorf("got %v", s.LastError)
	}
	again, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(addr))
	harness.Must(t, err)
	defer again.Close()
	accept(t, again).establish(3)
	awaitState(t, a, "established", func(s State) bool { return s.Established })
}

func TestNewPassword(t *testing.T) {
	p, q := NewPassword(), NewPassword()
	if p == q {
		t.Error("two passwords are equal")
	}
	if len(p) < 20 || len(p) > maxPassword || strings.Trim(p, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") != "" {
		t.Errorf("a password of %d bytes that has others than letters and digits", len(p))
	}
}

func TestTCPMD5(t *testing.T) {
	if err := ProbeMD5(); err != nil {
		lab.Skip(t, "a kernel with TCP_MD5SIG: "+err.Error())
	}
	// A listener without the key: a signed SYN must get no answer.
	_, addr := listen(t)
	o := testOptions()
	o.Peer, o.Password = addr, NewPassword()
	a := New(o)
	run(t, a)
	s := awaitState(t, a, "an attempt failed", func(s State) bool { return s.LastError != nil })
	var timeout net.Error
	if !errors.As(s.LastError, &timeout) || !timeout.Timeout() {
		t.Fatalf("got %v, want silence", s.LastError)
	}
	if strings.Contains(s.LastError.Error(), o.Password) {
		t.Error("the error contains the password")
	}
}
