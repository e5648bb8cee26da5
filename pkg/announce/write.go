package announce

import (
	"fmt"
	"net"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// writeChunk is the size of a write with its own timeout, about 15 000 VIPs of IPv6.
const writeChunk = 256 << 10

// writer is the sending side of a session. Post writes a decision itself, without blocking,
// because waking the session's goroutine costs more than the write. The session's goroutine
// writes the remaining bytes and every other message. For that it owns the connection, and Post
// only queues changes until it yields.
type writer struct {
	try *nonblocking // nil without a socket: Post then leaves every write to the goroutine

	// Guarded by Announcer.mu. The owner keeps it set.
	owned bool
	// Used by Post under Announcer.mu while not owned, by the session's goroutine while owned:
	rest    []byte  // encoded changes that are not written yet
	flight  flight  // the decision in rest
	failure error   // error of a write in Post
	changes changes // changes to encode
	buf     []byte  // buffer for encoded changes
	// Used by the session's goroutine only:
	trailer []byte // appended to the changes in one write
	failed  bool   // a write failed, so the message stream is broken
}

// flight is the decision that a write completes.
type flight struct {
	cause    time.Time
	revision uint64
	routes   bool // the write contains UPDATEs
	sent     [len(vip.Families)]int
}

// takePosted moves posted changes to s.changes and reports whether a batch was posted. The caller
// holds Announcer.mu and may use writer.
func (session *session) takePosted() bool {
	table := &session.a.table
	if session.a.session != session || !table.posted {
		return false
	}
	session.flight = flight{cause: table.cause}
	session.changes.reset()
	table.takeChanges(&session.changes)
	session.flight.revision, session.flight.sent = table.revision, table.sent
	return true
}

// encode encodes changes. The result is valid until the next call.
func (session *session) encode() []byte {
	session.buf = session.encoder.appendUpdates(session.buf[:0], &session.changes, session.families)
	return session.buf
}

// post writes the posted changes without blocking. It reports false if the session's goroutine
// must be woken to write the rest. The caller holds Announcer.mu.
func (session *session) post() bool {
	if session.owned {
		return true // the owner writes the posted changes before it yields
	}
	if session.try == nil || !session.takePosted() {
		return false
	}
	encoded := session.encode()
	session.flight.routes = len(encoded) > 0
	written := 0
	if session.flight.routes {
		written, session.failure = session.try.Write(encoded)
	}
	if written < len(encoded) || session.failure != nil {
		session.owned, session.rest = true, encoded[written:]
		return false
	}
	session.a.written(session.flight)
	return true
}

// own makes the session's goroutine the owner and writes the bytes that Post left.
func (session *session) own(timeout time.Duration) error {
	session.a.mu.Lock()
	session.owned = true
	session.a.mu.Unlock()
	if session.failure != nil {
		session.failed = true
		return fmt.Errorf("in state %s: failed to write: %w", session.phase, session.failure)
	}
	// Post left nothing if its write fitted the socket buffer, as almost all do.
	if len(session.rest) == 0 {
		return nil
	}
	return session.writeRest(timeout)
}

// yield writes the changes posted during ownership, then returns the connection to Post.
// Ownership ends under the lock that found no posted batch, so no batch is left unwritten.
func (session *session) yield() error {
	for {
		session.a.mu.Lock()
		posted := session.takePosted()
		session.owned = posted
		session.a.mu.Unlock()
		if !posted {
			return nil
		}
		if err := session.writeChanges(writeTimeout); err != nil {
			return err
		}
	}
}

// send writes a message, preceded by the bytes that Post left and followed by posted changes.
func (session *session) send(message []byte) error {
	if err := session.own(writeTimeout); err != nil {
		return err
	}
	if err := session.write(message, writeTimeout); err != nil {
		return err
	}
	return session.yield()
}

// writeChanges writes the changes, followed by trailer, in one write.
func (session *session) writeChanges(timeout time.Duration) error {
	session.rest = session.encode()
	session.flight.routes = len(session.rest) > 0
	session.rest = append(session.rest, session.trailer...)
	return session.writeRest(timeout)
}

func (session *session) writeRest(timeout time.Duration) error {
	if err := session.write(session.rest, timeout); err != nil {
		return err
	}
	session.rest = nil
	session.a.mu.Lock()
	defer session.a.mu.Unlock()
	session.a.written(session.flight)
	return nil
}

// written records that all changes up to a decision were sent. The caller holds mu.
func (announcer *Announcer) written(flight flight) {
	now := time.Now()
	if flight.routes && announcer.options.OnWritten != nil {
		announcer.options.OnWritten(flight.cause, now, flight.revision)
	}
	announcer.state.Update(func(state State) State {
		state.Written, state.WrittenAt = flight.revision, now
		state.Announced4, state.Announced6 = flight.sent[vip.IPv4], flight.sent[vip.IPv6]
		return state
	})
}

// write sends b in chunks, each with its own timeout, so that a large write does not time out
// while BIRD makes progress. The caller is the owner.
func (session *session) write(message []byte, timeout time.Duration) error {
	for chunk := range slices.Chunk(message, writeChunk) {
		if err := session.writeChunk(chunk, timeout); err != nil {
			session.failed = true
			return fmt.Errorf("in state %s: failed to write %d bytes: %w", session.phase, len(chunk), err)
		}
	}
	return nil
}

func (session *session) writeChunk(chunk []byte, timeout time.Duration) error {
	if session.try != nil {
		written, err := session.try.Write(chunk)
		if err != nil || written == len(chunk) {
			return err // the fast path sets no deadline: its timer would wake the process
		}
		chunk = chunk[written:]
	}
	if err := session.conn.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := session.conn.Write(chunk); err != nil {
		return err
	}
	return session.conn.SetWriteDeadline(time.Time{}) // s.try.Write fails after an expired deadline
}

// nonblocking writes to a socket without waiting.
type nonblocking struct {
	conn  syscall.RawConn
	write func(fd uintptr) bool

	// State of the current write:
	b   []byte
	n   int
	err error
}

// newNonblocking returns nil for a connection that has no socket.
func newNonblocking(conn net.Conn) *nonblocking {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	opened := &nonblocking{conn: raw}
	opened.write = func(fd uintptr) bool { // created once: a closure per write would allocate
		for {
			if opened.n, opened.err = unix.Write(int(fd), opened.b); opened.err != unix.EINTR {
				return true // also for EAGAIN: false would wait until the socket is writable
			}
		}
	}
	return opened
}

// Write writes as much of b as fits the socket buffer. It is not safe for concurrent use.
func (socket *nonblocking) Write(b []byte) (int, error) {
	socket.b = b
	err := socket.conn.Write(socket.write)
	socket.b = nil
	switch {
	case err != nil:
		return 0, err
	case socket.err == unix.EAGAIN:
		return 0, nil
	case socket.err != nil:
		return 0, socket.err
	}
	return socket.n, nil
}
