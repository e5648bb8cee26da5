package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
)

// Maximum connections of a listener.
const (
	MaxConnections         = 128  // of a port for probes or scrapes and of the readiness socket
	MaxRegistryConnections = 2048 // of the registry, one for each application

	// A listener may use 1/32 of RLIMIT_NOFILE, so that the listeners of a process leave most file
	// descriptors to checks, sessions and netlink.
	descriptorShare = 32
	minConnections  = 8
)

// ListenTCP listens on addr, "host:port". With loopback, it also listens on 127.0.0.1 for
// `kubectl port-forward`, unless the host is loopback or unspecified. Each listener is limited to
// most connections; see [Limit].
func ListenTCP(ctx context.Context, addr string, most int, loopback bool) ([]net.Listener, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, explainListen(addr, err)
	}
	listeners := []net.Listener{Limit(l, most)}
	if at := l.Addr().(*net.TCPAddr); loopback && !at.IP.IsLoopback() && !at.IP.IsUnspecified() {
		local := fmt.Sprintf("127.0.0.1:%d", at.Port)
		second, err := config.Listen(ctx, "tcp", local)
		if err != nil {
			return nil, errors.Join(explainListen(local, err), l.Close())
		}
		listeners = append(listeners, Limit(second, most))
	}
	return listeners, nil
}

// Limit limits the open connections of l to most, or to fewer if RLIMIT_NOFILE is low. A further
// connection closes the oldest connection of the source address that has the most. Thus a flood
// from one address excludes neither other addresses nor fast clients at that address.
// Authenticated connections are never closed (see identity.NewCredentials); if all are
// authenticated, the new connection is closed.
func Limit(l net.Listener, most int) net.Listener {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil {
		most = int(min(uint64(most), max(minConnections, files.Cur/descriptorShare)))
	}
	return &limited{Listener: l, max: most}
}

type limited struct {
	net.Listener
	max int

	mu   sync.Mutex
	open []*connection // oldest first
}

// Accept returns the next connection.
func (l *limited) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: raw, listener: l}
	if at, ok := raw.RemoteAddr().(*net.TCPAddr); ok {
		c.source = at.IP.String()
	}
	// Close outside of the lock, which Close takes.
	if victim := l.add(c); victim != nil {
		// The error is ignored, because the connection may have ended already.
		_ = victim.Close()
	}
	return c, nil
}

// add adds a connection and returns the connection to close, or nil.
func (l *limited) add(c *connection) (victim *connection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = append(l.open, c)
	if len(l.open) <= l.max {
		return nil
	}
	counts := map[string]int{} // unauthenticated connections by source
	for _, c := range l.open {
		if !c.authenticated {
			counts[c.source]++
		}
	}
	for _, c := range l.open {
		if !c.authenticated && (victim == nil || counts[c.source] > counts[victim.source]) {
			victim = c
		}
	}
	return victim
}

// connection is an open connection of a limited listener.
type connection struct {
	net.Conn
	listener      *limited
	source        string // "" on a unix socket
	authenticated bool   // guarded by listener.mu
}

// Authenticated protects the connection from being closed in favor of a newer one.
func (c *connection) Authenticated() {
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	c.authenticated = true
}

// Close closes the connection.
func (c *connection) Close() error {
	c.listener.mu.Lock()
	c.listener.open = slices.DeleteFunc(c.listener.open, func(o *connection) bool { return o == c })
	c.listener.mu.Unlock()
	return c.Conn.Close()
}

// SyscallConn implements syscall.Conn, for SO_PEERCRED.
func (c *connection) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(syscall.Conn).SyscallConn()
}

// Except returns a listener that closes connections to a local address for which refused returns
// true. It returns l if refused is nil.
func Except(l net.Listener, refused func(netip.Addr) bool) net.Listener {
	if refused == nil {
		return l
	}
	return except{l, refused}
}

type except struct {
	net.Listener
	refused func(netip.Addr) bool
}

// Accept returns the next connection that is not refused.
func (l except) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at, ok := c.LocalAddr().(*net.TCPAddr)
		if !ok || !l.refused(at.AddrPort().Addr().Unmap()) {
			return c, nil
		}
		_ = c.Close() // nothing was read or written
	}
}
