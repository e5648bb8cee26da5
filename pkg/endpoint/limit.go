package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
)

// Connections that a listener holds: of a port for probes or scrapes, and of the
// readiness socket; and of the registry, where every application has one.
const (
	MaxConnections         = 128
	MaxRegistryConnections = 2048
)

// Descriptors that a listener takes: a 32nd of RLIMIT_NOFILE, so that all
// listeners of a process leave the most of them to checks, sessions and netlink.
const (
	descriptorShare = 32
	minConnections  = 8
)

// ListenTCP listens on addr, "host:port". With loopback, a host that is neither
// loopback nor unspecified is joined by 127.0.0.1, where `kubectl port-forward`
// connects to. The listeners are limited to most connections each; see [Limit].
func ListenTCP(ctx context.Context, addr string, most int, loopback bool) ([]net.Listener, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	listeners := []net.Listener{Limit(l, most)}
	if at := l.Addr().(*net.TCPAddr); loopback && !at.IP.IsLoopback() && !at.IP.IsUnspecified() {
		second, err := config.Listen(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", at.Port))
		if err != nil {
			return nil, errors.Join(err, l.Close())
		}
		listeners = append(listeners, Limit(second, most))
	}
	return listeners, nil
}

// Limit returns l with at most so many open connections, and fewer when
// RLIMIT_NOFILE is low. One more closes the oldest of the source address that has
// the most, so that a flood from one address neither shuts out others nor, as
// long as they are quick, other clients at that address. A connection whose peer
// is authenticated is not closed (see identity.ServerCredentials); with nothing
// else to close, the new connection is.
func Limit(l net.Listener, most int) net.Listener {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil {
		most = int(min(uint64(most), max(minConnections, files.Cur/descriptorShare)))
	}
	return &limited{Listener: l, most: most}
}

type limited struct {
	net.Listener
	most int

	mu   sync.Mutex
	open []*connection // oldest first
}

// Accept returns the next connection.
func (l *limited) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: raw, of: l}
	if at, ok := raw.RemoteAddr().(*net.TCPAddr); ok {
		c.source = at.IP.String()
	}
	if victim := l.add(c); victim != nil {
		// It may have ended in this moment.
		_ = victim.Close()
	}
	return c, nil
}

// add adds a connection and returns the one that is to be closed, or nil.
func (l *limited) add(c *connection) (victim *connection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = append(l.open, c)
	if len(l.open) <= l.most {
		return nil
	}
	held := map[string]int{} // not authenticated
	for _, c := range l.open {
		if !c.authenticated {
			held[c.source]++
		}
	}
	for _, c := range l.open {
		if !c.authenticated && (victim == nil || held[c.source] > held[victim.source]) {
			victim = c
		}
	}
	return victim
}

// connection is an open connection of a limited listener.
type connection struct {
	net.Conn
	of            *limited
	source        string // "" on a unix socket
	authenticated bool   // guarded by of.mu
}

// Authenticated exempts the connection from being closed for a newer one.
func (c *connection) Authenticated() {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	c.authenticated = true
}

// Close closes the connection.
func (c *connection) Close() error {
	c.of.mu.Lock()
	c.of.open = slices.DeleteFunc(c.of.open, func(o *connection) bool { return o == c })
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// SyscallConn implements syscall.Conn, for SO_PEERCRED.
func (c *connection) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(syscall.Conn).SyscallConn()
}
