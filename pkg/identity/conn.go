package identity

import (
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// mutualConn is a connection that ends with the certificates of its handshake.
type mutualConn struct {
	net.Conn
	timer *time.Timer
	// ownID is the SPIFFE ID that a client presented; zero on the server.
	ownID    spiffeid.ID
	received atomic.Bool // data arrived after the handshake
}

// Close closes the connection.
func (c *mutualConn) Close() error {
	c.timer.Stop()
	return c.Conn.Close()
}

// Read reads from the peer. A TLS 1.3 client finishes its handshake before the server has verified
// its certificate, so a rejection appears here.
func (c *mutualConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.ownID.IsZero() {
		c.received.Store(true)
	}
	if err == nil || c.ownID.IsZero() || c.received.Load() {
		return n, err
	}
	switch classify(err) {
	case ReasonRefusedByPeer, ReasonGone:
		return n, fmt.Errorf("the server closed the connection after the handshake: it probably rejected the SVID %s; "+
			"check the server's log: %w", c.ownID, err)
	}
	return n, err
}
