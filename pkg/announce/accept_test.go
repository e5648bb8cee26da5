package announce

import (
	"net"
	"net/netip"
	"testing"
	"time"

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

// A listening announcer takes connections of its peer only, of which the newest wins.
func TestListeningAnnouncer(t *testing.T) {
	probe, addr := listen(t)
	harness.Must(t, probe.Close())
	o := testOptions()
	o.Local, o.Listen, o.Password, o.HoldTime = addr.Addr(), addr, NewPassword(), time.Minute
	o.Peer = netip.AddrPortFrom(randomLoopback(), 0)
	a := New(o)
	a.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1})
	run(t, a)
	connect := func() *peer {
		t.Helper()
		deadline := time.Now().Add(waitLimit)
		for {
			conn, err := dialFrom(t, o.Peer.Addr(), addr, o.Password)
			if err == nil {
				return newPeer(t, conn)
			}
			if time.Now().After(deadline) {
				t.Fatal(err)
			}
		}
	}
	first := connect()
	first.establish(60)
	first.expectUpdates(1, advertisements{vipA: Announced})

	// The peer has lost the first session, which the announcer has not noticed.
	second := connect()
	second.establish(60)
	second.expectUpdates(1, advertisements{vipA: Announced})
	if sessions := awaitState(t, a, "second", func(s State) bool { return s.Established }).Sessions; sessions != 2 {
		t.Errorf("%d sessions", sessions)
	}

	if _, err := dialFrom(t, o.Peer.Addr(), addr, ""); err == nil {
		t.Error("a connection without the key is accepted")
	}
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
