package announce

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/test/harness"
)

// dialFrom opens a connection from an address, with a TCP-MD5 key unless that is empty.
func dialFrom(t *testing.T, from netip.Addr, to netip.AddrPort, key string) (net.Conn, error) {
	t.Helper()
	dialer := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: time.Second,
	}
	dialer.SetMultipathTCP(false)
	if key != "" {
		dialer.Control = signWith(key, to.Addr())
	}
	return dialer.Dial("tcp", to.String())
}

// listening is a listening announcer with the session of its peer.
type listening struct {
	*Announcer
	addr  netip.AddrPort
	first *peer
}

// connect opens a connection from the peer's address.
func (l *listening) connect(t *testing.T) *peer {
	t.Helper()
	for deadline := time.Now().Add(waitLimit); ; {
		conn, err := dialFrom(t, l.options.Peer.Addr(), l.addr, l.options.Password)
		if err == nil {
			return newPeer(t, conn)
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// connectPending opens a connection beside the first and sends a valid OPEN, which is accepted.
func (l *listening) connectPending(t *testing.T) *peer {
	t.Helper()
	l.wantSessions(t, 1) // and thus the acceptor
	p := l.connect(t)
	p.sendOpen(8103)
	from, acceptor := p.conn.LocalAddr().String(), l.acceptor
	for deadline := time.Now().Add(waitLimit); ; runtime.Gosched() {
		acceptor.mu.Lock()
		accepted := slices.ContainsFunc(acceptor.pending, func(c *acceptedConn) bool {
			return c.valid && c.RemoteAddr().String() == from
		})
		acceptor.mu.Unlock()
		if accepted {
			return p
		}
		if time.Now().After(deadline) {
			t.Fatal("the OPEN is not accepted")
		}
	}
}

func newListening(t *testing.T, hold time.Duration, password string) *listening {
	t.Helper()
	probe, addr := listen(t)
	harness.Must(t, probe.Close())
	o := testOptions()
	o.Local, o.Listen, o.Password, o.HoldTime = addr.Addr(), addr, password, hold
	o.Peer = netip.AddrPortFrom(randomLoopback(), 0)
	l := &listening{Announcer: New(o), addr: addr}
	l.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1})
	run(t, l.Announcer)
	l.first = l.connect(t)
	return l
}

func (l *listening) establishFirst(t *testing.T) {
	t.Helper()
	l.first.establish(60)
	l.first.expectUpdates(1, advertisements{vipA: Announced})
}

// wantSessions checks that the announcer is in its n-th session.
func (l *listening) wantSessions(t *testing.T, n uint64) {
	t.Helper()
	if s := awaitState(t, l.Announcer, "a session", func(s State) bool { return s.Established }); s.Sessions != n {
		t.Errorf("%d sessions, want %d: %v", s.Sessions, n, s.LastError)
	}
}

// takeOver completes the handshake of a connection that waits for the end of another.
func (p *peer) takeOver() {
	p.t.Helper()
	p.expect(bgp.BGP_MSG_OPEN)
	p.expect(bgp.BGP_MSG_KEEPALIVE)
	p.send(bgp.NewBGPKeepAliveMessage())
	p.expectUpdates(1, advertisements{vipA: Announced})
}

func (p *peer) sendOpen(as uint32) {
	p.t.Helper()
	p.send(openMessage(p.t, as, 60, bgp.RF_IPv4_UC, bgp.RF_IPv6_UC))
}

// wantClosed waits until the announcer has closed the connection without a message.
func (p *peer) wantClosed() {
	p.t.Helper()
	harness.Must(p.t, p.conn.SetReadDeadline(time.Now().Add(waitLimit)))
	var timeout net.Error
	if n, err := p.conn.Read(make([]byte, 1)); n > 0 || errors.As(err, &timeout) && timeout.Timeout() {
		p.t.Errorf("the connection got %d bytes, %v; want its end", n, err)
	}
}

func TestListeningAnnouncer(t *testing.T) {
	l := newListening(t, 3*time.Second, NewPassword())
	l.establishFirst(t)

	// The peer has lost the first session, which the announcer has not noticed.
	second := l.connect(t)
	second.sendOpen(8103)
	second.takeOver()
	l.wantSessions(t, 2)

	if _, err := dialFrom(t, l.options.Peer.Addr(), l.addr, ""); err == nil {
		t.Error("a connection without the key is accepted")
	}
}

// A process that can use the peer's address does not end the peer's session.
func TestSecondConnectionIsRefused(t *testing.T) {
	for name, act := range map[string]func(l *listening, stranger *peer){
		"silent":       func(*listening, *peer) {},
		"no BGP":       func(_ *listening, stranger *peer) { stranger.sendBytes(make([]byte, 100)) },
		"no OPEN":      func(_ *listening, stranger *peer) { stranger.send(bgp.NewBGPKeepAliveMessage()) },
		"OPEN in part": func(_ *listening, stranger *peer) { stranger.sendBytes(bytes.Repeat([]byte{0xff}, 16)) },
		"another AS":   func(_ *listening, stranger *peer) { stranger.sendOpen(1) },
		"the peer lives": func(l *listening, stranger *peer) {
			stranger.sendOpen(8103)
			done := make(chan struct{})
			defer close(done)
			go func() {
				keepalive, _ := bgp.NewBGPKeepAliveMessage().Serialize()
				for {
					select {
					case <-done:
						return
					case <-time.After(10 * time.Millisecond):
						_, _ = l.first.conn.Write(keepalive)
					}
				}
			}()
			stranger.wantClosed()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newListening(t, time.Minute, "")
			l.establishFirst(t)
			stranger := l.connect(t)
			act(l, stranger)
			stranger.wantClosed()
			l.wantSessions(t, 1)
		})
	}
}

func TestPendingConnectionsAreFew(t *testing.T) {
	for _, n := range []int{maxPending - 1, maxPending, maxPending + 1, 3 * maxPending} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			l := newListening(t, time.Minute, "")
			l.establishFirst(t)
			var pending []*peer
			for range n {
				pending = append(pending, l.connectPending(t))
			}
			for len(pending) > maxPending {
				pending[0].wantClosed()
				pending = pending[1:]
			}
			l.wantSessions(t, 1)
			// The newest has the session when the first ends.
			harness.Must(t, l.first.conn.Close())
			pending[len(pending)-1].takeOver()
			l.wantSessions(t, 2)
		})
	}
}

// Connections without an OPEN do not end the one of the peer that waits.
func TestPendingConnectionIsKept(t *testing.T) {
	l := newListening(t, time.Minute, "")
	l.establishFirst(t)
	second := l.connectPending(t)
	var strangers []*peer
	for range 2 * maxPending {
		strangers = append(strangers, l.connect(t))
	}
	for _, stranger := range strangers[:maxPending+1] {
		stranger.wantClosed()
	}
	harness.Must(t, l.first.conn.Close())
	second.takeOver()
	l.wantSessions(t, 2)
}

func TestPendingConnectionTakesOver(t *testing.T) {
	t.Run("end of the first", func(t *testing.T) {
		l := newListening(t, time.Minute, "")
		l.establishFirst(t)
		second := l.connect(t)
		second.sendOpen(8103)
		harness.Must(t, l.first.conn.Close())
		second.takeOver()
		l.wantSessions(t, 2)
	})
	t.Run("silence of the first since its start", func(t *testing.T) {
		l := newListening(t, time.Minute, "")
		l.first.sendBytes(bytes.Repeat([]byte{0xff}, 16)) // no message
		l.first.expect(bgp.BGP_MSG_OPEN)
		second := l.connect(t)
		second.sendOpen(8103)
		awaitState(t, l.Announcer, "the reason", func(s State) bool {
			return s.LastError != nil && strings.Contains(s.LastError.Error(), "replaced by a newer connection")
		})
		second.takeOver()
		l.wantSessions(t, 1)
	})
}

func TestListenerRefusesOthers(t *testing.T) {
	probe, addr := listen(t)
	harness.Must(t, probe.Close())
	o := testOptions()
	o.Local, o.Listen, o.Peer = addr.Addr(), addr, netip.AddrPortFrom(randomLoopback(), 0)
	a := New(o)
	stop := run(t, a)
	var conn net.Conn
	for deadline := time.Now().Add(waitLimit); conn == nil; {
		var err error
		if conn, err = dialFrom(t, randomLoopback(), addr, ""); err != nil && time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	defer conn.Close()
	harness.Must(t, conn.SetReadDeadline(time.Now().Add(waitLimit)))
	if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Error("a connection of another address got an OPEN")
	}

	// Nothing listens when Run has returned.
	stop()
	again, err := net.Listen("tcp", addr.String())
	harness.Must(t, err)
	harness.Must(t, again.Close())
}
