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

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// Maximum connections of a listener.
const (
	MaxConnections         = 128  // of a port for probes or scrapes and of the readiness socket
	MaxRegistryConnections = 2048 // of the registry, one for each application

	// A listener may use 1/32 of RLIMIT_NOFILE, so that the listeners of a process leave most file
	// descriptors to checks, sessions and netlink.
	descriptorShare = 32
	minConnections  = 8

	// handshakeShare is the share of the limit that authenticated connections leave to others.
	handshakeShare = 8
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
	listeners := []net.Listener{Limit(l, most, nil)}
	if at := l.Addr().(*net.TCPAddr); loopback && !at.IP.IsLoopback() && !at.IP.IsUnspecified() {
		local := fmt.Sprintf("127.0.0.1:%d", at.Port)
		second, err := config.Listen(ctx, "tcp", local)
		if err != nil {
			return nil, errors.Join(explainListen(local, err), l.Close())
		}
		listeners = append(listeners, Limit(second, most, nil))
	}
	return listeners, nil
}

// Limit limits the open connections of l to most, or to fewer if RLIMIT_NOFILE is low, of any peers
// and of authenticated ones (see identity.NewCredentials). A further connection closes the oldest
// connection of the source address that has the most, and a further authenticated one that of the
// ID that has the most, or its own. Thus a flood from one address or by one ID excludes neither
// others nor fast clients of its own. Connections of exempt IDs are not counted and never closed;
// nil exempts none. An eighth more is for handshakes beside most authenticated connections.
func Limit(l net.Listener, most int, exempt func(spiffeid.ID) bool) net.Listener {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil {
		most = int(min(uint64(most), max(minConnections, files.Cur/descriptorShare)))
	}
	return &limited{Listener: l, max: most, exempt: exempt}
}

type limited struct {
	net.Listener
	max    int
	exempt func(spiffeid.ID) bool

	mu   sync.Mutex
	open []*connection // oldest first, without exempt IDs
}

// Accept returns the next connection.
func (l *limited) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: raw, listener: l}
	if at, ok := raw.RemoteAddr().(*net.TCPAddr); ok {
		c.owner = at.IP.String()
	}
	// Close outside of the lock, which Close takes.
	if victim := l.add(c); victim != nil {
		// The error is ignored, because the connection may have ended already.
		_ = victim.Close()
	}
	return c, nil
}

// add adds a connection and returns the connection to close, or nil.
func (l *limited) add(c *connection) *connection {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = append(l.open, c)
	if len(l.open) <= l.max {
		return nil
	}
	victim, _, total := l.oldestOfMost(false)
	if authenticated := len(l.open) - total; total <= max(l.max-authenticated, l.max/handshakeShare, 1) {
		return nil
	}
	return victim
}

// authenticate counts a connection for its ID and returns the connection to close, or nil.
func (l *limited) authenticate(c *connection, id spiffeid.ID) *connection {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.exempt != nil && l.exempt(id) {
		l.remove(c)
		return nil
	}
	c.owner, c.authenticated = id.String(), true
	if len(l.open) <= l.max {
		return nil // without a walk at each handshake
	}
	victim, counts, total := l.oldestOfMost(true)
	if total <= l.max {
		return nil
	}
	// At its share an ID replaces its own connections: many IDs with one each keep theirs.
	if counts[victim.owner] == counts[c.owner] {
		own := func(o *connection) bool { return o.authenticated && o.owner == c.owner }
		victim = l.open[slices.IndexFunc(l.open, own)]
	}
	return victim
}

// oldestOfMost returns the oldest connection, authenticated or not, of the owner that has the most,
// and the numbers of such connections by owner and of all.
func (l *limited) oldestOfMost(authenticated bool) (oldest *connection, counts map[string]int, total int) {
	counts = map[string]int{}
	for _, c := range l.open {
		if c.authenticated == authenticated {
			counts[c.owner]++
			total++
		}
	}
	for _, c := range l.open {
		if c.authenticated == authenticated && (oldest == nil || counts[c.owner] > counts[oldest.owner]) {
			oldest = c
		}
	}
	return oldest, counts, total
}

func (l *limited) remove(c *connection) {
	l.open = slices.DeleteFunc(l.open, func(o *connection) bool { return o == c })
}

type connection struct {
	net.Conn
	listener *limited
	// guarded by listener.mu
	owner         string // SPIFFE ID, or source address before authentication: "" on a unix socket
	authenticated bool
}

// Authenticated counts the connection for its ID, no longer for its source address.
func (c *connection) Authenticated(id spiffeid.ID) {
	if victim := c.listener.authenticate(c, id); victim != nil {
		_ = victim.Close() // it may be c, whose handshake then fails
	}
}

// Close closes the connection.
func (c *connection) Close() error {
	c.listener.mu.Lock()
	c.listener.remove(c)
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
