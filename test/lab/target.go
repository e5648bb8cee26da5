package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
)

// Target is an application endpoint: it accepts TCP connections on one address
// of a namespace and closes them.
type Target struct {
	ns   *NetNS
	addr netip.AddrPort

	mu       sync.Mutex
	listener net.Listener
	wg       sync.WaitGroup
}

// NewTarget returns a target that does not listen yet.
func NewTarget(ns *NetNS, addr netip.AddrPort) *Target { return &Target{ns: ns, addr: addr} }

// Up makes the target accept connections.
func (t *Target) Up() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.listener != nil {
		return nil
	}
	listener, err := t.ns.Listen("tcp", t.addr.String())
	if err != nil {
		return fmt.Errorf("target %s: %w", t.addr, err)
	}
	t.listener = listener
	t.wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				conn.Close()
			}
		}
	})
	return nil
}

// Down makes the target refuse connections.
func (t *Target) Down() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.listener == nil {
		return nil
	}
	err := t.listener.Close()
	t.listener = nil
	t.wg.Wait()
	return err
}
