package stall

import (
	"net"
	"sync"

	"github.com/vipgate/vipgate/pkg/latest"
)

// Listener is a listener that can be stalled, together with its connections.
type Listener struct {
	net.Listener
	stalled latest.Value[bool]
	closed  chan struct{}
	close   func() error
}

// Listen returns a Listener for l that is not stalled.
func Listen(l net.Listener) *Listener {
	s := &Listener{Listener: l, closed: make(chan struct{})}
	s.close = sync.OnceValue(func() error {
		close(s.closed)
		return l.Close()
	})
	return s
}

// Set stalls or resumes the listener and its connections.
func (l *Listener) Set(stalled bool) { l.stalled.Set(stalled) }

// wait blocks while the listener is stalled, until it is closed or end is closed.
func (l *Listener) wait(end <-chan struct{}) {
	for {
		stalled, changed := l.stalled.Get()
		if !stalled {
			return
		}
		select {
		case <-changed:
		case <-end:
			return
		case <-l.closed:
			return
		}
	}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.wait(nil)
	s := &conn{Conn: c, listener: l, closed: make(chan struct{})}
	s.close = sync.OnceValue(func() error {
		close(s.closed)
		return c.Close()
	})
	return s, nil
}

// Close implements net.Listener. Connections remain open and continue.
func (l *Listener) Close() error { return l.close() }

type conn struct {
	net.Conn
	listener *Listener
	closed   chan struct{}
	close    func() error
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.listener.wait(c.closed)
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	c.listener.wait(c.closed)
	return c.Conn.Write(b)
}

func (c *conn) Close() error { return c.close() }
