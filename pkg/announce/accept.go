package announce

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/logs"
)

// accept waits for a connection of the peer, instead of a dial. The first call opens the listener,
// which stays open until ctx ends.
func (announcer *Announcer) accept(ctx context.Context) (net.Conn, error) {
	if announcer.acceptor == nil {
		if err := announcer.listen(ctx); err != nil {
			return nil, fmt.Errorf("cannot accept connections: %w", err)
		}
	}
	select {
	case conn := <-announcer.acceptor.accepted:
		return conn, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (announcer *Announcer) listen(ctx context.Context) error {
	options := announcer.options
	config := net.ListenConfig{KeepAlive: -1} // BGP has its own KEEPALIVE
	config.SetMultipathTCP(false)             // MPTCP and TCP_MD5SIG exclude each other
	if options.Password != "" {
		config.Control = signWith(options.Password, options.Peer.Addr())
	}
	listener, err := config.Listen(ctx, "tcp", options.Listen.String())
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { listener.Close() }) // ends acceptAll
	announcer.acceptor = &acceptor{
		options: options, accepted: make(chan net.Conn, 1), awaiting: &announcer.accepting,
	}
	announcer.accepting.Go(func() { announcer.acceptor.acceptAll(ctx, listener) })
	return nil
}

const (
	maxPending = 4 // connections beside the current one
	// openTimeout bounds the wait for the OPEN, which a speaker sends as soon as it has connected.
	openTimeout = 3 * time.Second
	// aliveInterval is the poll interval of the last read of the current connection.
	aliveInterval = time.Second
)

// acceptor selects the connection of the session. A second connection is that of a peer that lost
// the first, even if no packet said so, or of any process that can use the peer's address. It
// replaces the first only after a valid OPEN, once the first has ended or was silent for half of
// the hold time. A live peer sends a KEEPALIVE each third of it. Of several, the newest does.
type acceptor struct {
	options  Options
	accepted chan net.Conn // the current connection, until the session takes it
	awaiting *sync.WaitGroup
	throttle logs.Throttle

	mu      sync.Mutex
	current *acceptedConn   // has the session, or is in accepted
	pending []*acceptedConn // oldest first
}

// acceptAll accepts connections of the peer until ctx ends.
func (acceptor *acceptor) acceptAll(ctx context.Context, listener net.Listener) {
	for {
		conn, err := listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			acceptor.mu.Lock()
			defer acceptor.mu.Unlock()
			select { // the session closes its own connection, after its last message
			case conn := <-acceptor.accepted:
				conn.Close()
			default:
			}
			return
		case err != nil: // out of file descriptors
			_ = backoff.Sleep(ctx, minBackoff) // the end of ctx closes the listener
			continue
		}
		from := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if from.WithZone("") != acceptor.options.Peer.Addr().WithZone("") {
			conn.Close()
			continue
		}
		newer := &acceptedConn{
			TCPConn: conn.(*net.TCPConn), reader: bufio.NewReaderSize(conn, bgp.BGP_MAX_MESSAGE_LENGTH),
			opened: time.Now(), ended: make(chan struct{}),
		}
		if !acceptor.admit(newer) {
			acceptor.awaiting.Go(func() { acceptor.await(ctx, newer) })
		}
	}
}

// admit makes a connection the current one if there is none, and a pending one otherwise.
func (acceptor *acceptor) admit(conn *acceptedConn) (current bool) {
	acceptor.mu.Lock()
	defer acceptor.mu.Unlock()
	if acceptor.current == nil || acceptor.current.hasEnded() {
		acceptor.serve(conn)
		return true
	}
	if len(acceptor.pending) == maxPending {
		// The oldest without a valid OPEN, else the oldest.
		i := max(slices.IndexFunc(acceptor.pending, func(c *acceptedConn) bool { return !c.valid }), 0)
		acceptor.pending[i].Close()
		acceptor.pending = slices.Delete(acceptor.pending, i, i+1)
	}
	acceptor.pending = append(acceptor.pending, conn)
	return false
}

// serve makes a connection the current one. The caller holds mu.
func (acceptor *acceptor) serve(conn *acceptedConn) {
	if acceptor.current != nil {
		acceptor.current.replaced.Store(true)
		acceptor.current.Close()
	}
	select { // one that waits is closed now
	case <-acceptor.accepted:
	default:
	}
	acceptor.current = conn
	acceptor.accepted <- conn
}

// await lets a pending connection replace the current one, or closes it.
func (acceptor *acceptor) await(ctx context.Context, conn *acceptedConn) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err := conn.peekOpen(acceptor.options)
	stop()
	for opened := time.Now(); ; {
		older, wait, refused := acceptor.replace(ctx, conn, opened, err)
		if refused != nil {
			conn.Close()
		}
		if refused != nil && ctx.Err() == nil {
			acceptor.throttle.Log(acceptor.options.Log.Warn, "", "second connection from the address of "+
				acceptor.options.Speaker+" refused", "peer", acceptor.options.Peer, "error", refused)
		}
		if older == nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-conn.ended:
		case <-older.ended:
		case <-time.After(min(wait, aliveInterval)):
		}
	}
}

// replace lets a pending connection that received a valid OPEN, or failed to, replace the current
// one, and removes it if it failed. It returns the current one if that must first end or be silent.
func (acceptor *acceptor) replace(ctx context.Context, conn *acceptedConn, opened time.Time, err error) (
	older *acceptedConn, wait time.Duration, _ error,
) {
	acceptor.mu.Lock()
	defer acceptor.mu.Unlock()
	conn.valid = err == nil
	older = acceptor.current
	since := older.heard.Load() // 0 before the first message of the session
	heard := older.opened.Add(time.Duration(since))
	wait = time.Until(heard.Add(acceptor.options.HoldTime / 2))
	free := older.hasEnded() || since == 0 || wait <= 0
	isNewer := func(c *acceptedConn) bool { return c.valid && !c.hasEnded() && c.opened.After(conn.opened) }
	switch {
	case err == nil && (ctx.Err() != nil || conn.hasEnded()):
		err = net.ErrClosed
	case err == nil && free && (isNewer(older) || slices.ContainsFunc(acceptor.pending, isNewer)):
		err = errors.New("the peer has a newer connection")
	case err == nil && !free && heard.After(opened):
		err = errors.New("the peer sends on its first connection")
	case err == nil && !free:
		return older, wait, nil
	}
	acceptor.pending = slices.DeleteFunc(acceptor.pending, func(c *acceptedConn) bool { return c == conn })
	if err == nil {
		acceptor.serve(conn)
	}
	return nil, 0, err
}

// acceptedConn is a connection of the peer. Its first message may be read ahead.
type acceptedConn struct {
	*net.TCPConn
	reader *bufio.Reader
	opened time.Time
	heard  atomic.Int64 // nanoseconds from opened to the last message in the session; 0 before
	once   sync.Once
	ended  chan struct{} // closed by Close

	valid    bool        // has waited, with a valid OPEN; guarded by the acceptor's mu
	replaced atomic.Bool // closed for a newer connection
}

// Read reads what peekOpen left.
func (conn *acceptedConn) Read(b []byte) (int, error) {
	n, err := conn.reader.Read(b)
	if err != nil && conn.replaced.Load() {
		err = errors.New("replaced by a newer connection")
	}
	return n, err
}

// Close closes the connection.
func (conn *acceptedConn) Close() error {
	conn.once.Do(func() { close(conn.ended) })
	return conn.TCPConn.Close()
}

func (conn *acceptedConn) hasEnded() bool {
	select {
	case <-conn.ended:
		return true
	default:
		return false
	}
}

// peekOpen waits for a valid OPEN, which the session reads again.
func (conn *acceptedConn) peekOpen(options Options) error {
	if err := conn.SetReadDeadline(time.Now().Add(openTimeout)); err != nil {
		return err
	}
	data, err := conn.reader.Peek(bgp.BGP_HEADER_LENGTH)
	if err == nil {
		length := int(binary.BigEndian.Uint16(data[bgp.BGP_HEADER_LENGTH-3:]))
		data, err = conn.reader.Peek(min(length, bgp.BGP_MAX_MESSAGE_LENGTH))
	}
	if err != nil {
		return fmt.Errorf("no OPEN: %w", err)
	}
	message, err := readMessage(bufio.NewReader(bytes.NewReader(data)))
	if err != nil {
		return err
	}
	open, ok := message.Body.(*bgp.BGPOpen)
	if !ok {
		return fmt.Errorf("the first message has type %d", message.Header.Type)
	}
	if _, _, err = checkOpen(open, options); err != nil {
		return err
	}
	return conn.SetReadDeadline(time.Time{})
}
