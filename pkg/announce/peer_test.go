package announce

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// peer is BIRD's side of one connection, driven by the test.
type peer struct {
	t      *testing.T
	conn   net.Conn
	r      *bufio.Reader
	table  map[vip.VIP]Advertisement // received routes, including Withdrawn
	writes *atomic.Int64             // of the announcer, on this connection
}

func newPeer(t *testing.T, conn net.Conn) *peer {
	t.Cleanup(func() { conn.Close() })
	return &peer{
		t: t, conn: conn, r: bufio.NewReader(conn), table: make(map[vip.VIP]Advertisement),
		writes: new(atomic.Int64),
	}
}

// countedConn counts writes.
type countedConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countedConn) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// pipePeers replaces the dialer of an announcer with in-memory pipes whose other ends are sent to
// the channel, for use with simulated time.
func pipePeers(t *testing.T, a *Announcer) <-chan *peer {
	peers := make(chan *peer)
	a.dial = func(ctx context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		p := newPeer(t, theirs)
		select {
		case peers <- p:
			return countedConn{ours, p.writes}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return peers
}

// read returns the next message with its body decoded, or the error.
func (p *peer) read() (*bgp.BGPMessage, error) {
	header := make([]byte, bgp.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(p.r, header); err != nil {
		return nil, err
	}
	var h bgp.BGPHeader
	if err := h.DecodeFromBytes(header); err != nil {
		return nil, err
	}
	body := make([]byte, int(h.Len)-len(header))
	if _, err := io.ReadFull(p.r, body); err != nil {
		return nil, err
	}
	m, err := bgp.ParseBGPBody(&h, body)
	if err != nil {
		return nil, err
	}
	if u, ok := m.Body.(*bgp.BGPUpdate); ok {
		applyUpdate(p.t, p.table, u)
	}
	return m, nil
}

// expect reads the next message, which must be of that type.
func (p *peer) expect(kind uint8) *bgp.BGPMessage {
	p.t.Helper()
	harness.Must(p.t, p.conn.SetReadDeadline(time.Now().Add(waitLimit)))
	m, err := p.read()
	if err != nil {
		p.t.Fatalf("waiting for a message of type %d: %v", kind, err)
	}
	if m.Header.Type != kind {
		p.t.Fatalf("got a message of type %d (%+v), want %d", m.Header.Type, m.Body, kind)
	}
	return m
}

// noUpdates checks that only KEEPALIVEs arrive for d, and sends some itself.
func (p *peer) noUpdates(d time.Duration) {
	p.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); {
		harness.Must(p.t, p.conn.SetReadDeadline(end))
		m, err := p.read()
		var timeout net.Error
		switch {
		case errors.As(err, &timeout) && timeout.Timeout():
			return
		case err != nil:
			p.t.Fatal(err)
		case m.Header.Type != bgp.BGP_MSG_KEEPALIVE:
			p.t.Fatalf("got %+v, want nothing but KEEPALIVEs for %s", m.Body, d)
		}
		p.send(bgp.NewBGPKeepAliveMessage())
	}
}

// expectNotification reads a NOTIFICATION. Other messages before it are ignored.
func (p *peer) expectNotification(code, subcode uint8) {
	p.t.Helper()
	harness.Must(p.t, p.conn.SetReadDeadline(time.Now().Add(waitLimit)))
	for {
		m, err := p.read()
		if err != nil {
			p.t.Fatalf("the connection ended without NOTIFICATION %d/%d: %v", code, subcode, err)
		}
		if n, ok := m.Body.(*bgp.BGPNotification); ok {
			if n.ErrorCode != code || n.ErrorSubcode != subcode {
				p.t.Fatalf("got NOTIFICATION %d/%d, want %d/%d", n.ErrorCode, n.ErrorSubcode, code, subcode)
			}
			return
		}
	}
}

// expectEnd reads a NOTIFICATION and the end of the connection. Other messages before it are
// ignored.
func (p *peer) expectEnd(code, subcode uint8) {
	p.t.Helper()
	p.expectNotification(code, subcode)
	if m, err := p.read(); !errors.Is(err, io.EOF) {
		p.t.Fatalf("after NOTIFICATION came %+v, %v", m, err)
	}
}

func (p *peer) send(m *bgp.BGPMessage) {
	p.t.Helper()
	b, err := m.Serialize()
	harness.Must(p.t, err)
	p.sendBytes(b)
}

func (p *peer) sendBytes(b []byte) {
	p.t.Helper()
	harness.Must(p.t, p.conn.SetWriteDeadline(time.Now().Add(waitLimit)))
	if _, err := p.conn.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) open(hold uint16) {
	p.t.Helper()
	p.expect(bgp.BGP_MSG_OPEN)
	p.send(openMessage(p.t, 8103, hold, bgp.RF_IPv4_UC, bgp.RF_IPv6_UC))
}

// establish completes the handshake; the table follows if it is not empty.
func (p *peer) establish(hold uint16) {
	p.t.Helper()
	p.open(hold)
	p.expect(bgp.BGP_MSG_KEEPALIVE)
	p.send(bgp.NewBGPKeepAliveMessage())
}

// expectUpdates reads n UPDATEs without a KEEPALIVE and compares all routes received so far.
func (p *peer) expectUpdates(n int, want map[vip.VIP]Advertisement) {
	p.t.Helper()
	for range n {
		p.expect(bgp.BGP_MSG_UPDATE)
	}
	if !maps.Equal(p.table, want) {
		p.t.Fatalf("the peer received %v, want %v", p.table, want)
	}
}

func newMessage(kind uint8, body ...byte) []byte {
	n := bgp.BGP_HEADER_LENGTH + len(body)
	return append(append(bytes.Repeat([]byte{0xff}, 16), byte(n>>8), byte(n), kind), body...)
}
