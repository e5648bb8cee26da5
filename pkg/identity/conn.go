package identity

import (
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// mutualConn is a connection that ends with the certificates it began with.
type mutualConn struct {
	net.Conn
	timer *time.Timer
	// shown is the ID that a client showed to its server; zero on the server.
	shown spiffeid.ID
	heard atomic.Bool // the peer said something after the handshake
}

// Close closes the connection.
func (c *mutualConn) Close() error {
	c.timer.Stop()
	return c.Conn.Close()
}

// Read reads from the peer. A TLS 1.3 client has finished its handshake before the
// server has looked at its certificate, so a refusal shows up here.
func (c *mutualConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.shown.IsZero() {
		c.heard.Store(true)
	}
	if err == nil || c.shown.IsZero() || c.heard.Load() {
		return n, err
	}
	switch classify(err) {
	case ReasonRefusedByPeer, ReasonGone:
		return n, fmt.Errorf("the server ended the connection at once: it most likely refused our SVID %s, its log says why: %w", c.shown, err)
	}
	return n, err
}
