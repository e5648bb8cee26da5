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

func newWriter(conn net.Conn) writer { return writer{try: newNonblocking(conn)} }

// takePosted moves posted changes to s.changes and reports whether a batch was posted. The caller
// holds Announcer.mu and may use writer.
func (s *session) takePosted() bool {
	t := &s.a.table
	if s.a.session != s || !t.posted {
		return false
	}
	s.flight = flight{cause: t.cause}
	s.changes.reset()
	t.takeChanges(&s.changes)
	s.flight.revision, s.flight.sent = t.revision, t.sent
	return true
}

// encode encodes changes. The result is valid until the next call.
func (s *session) encode() []byte {
	s.buf = s.encoder.appendUpdates(s.buf[:0], &s.changes)
	return s.buf
}

// post writes the posted changes without blocking. It reports false if the session's goroutine
// must be woken to write the rest. The caller holds Announcer.mu.
func (s *session) post() bool {
	if s.owned {
		return true // the owner writes the posted changes before it yields
	}
	if s.try == nil || !s.takePosted() {
		return false
	}
	b := s.encode()
	s.flight.routes = len(b) > 0
	n := 0
	if s.flight.routes {
		n, s.failure = s.try.Write(b)
	}
	if n < len(b) || s.failure != nil {
		s.owned, s.rest = true, b[n:]
		return false
	}
	s.a.written(s.flight)
	return true
}

// own makes the session's goroutine the owner and writes the bytes that Post left.
func (s *session) own(timeout time.Duration) error {
	s.a.mu.Lock()
	s.owned = true
	s.a.mu.Unlock()
	if s.failure != nil {
		s.failed = true
		return fmt.Errorf("in state %s: failed to write: %w", s.phase, s.failure)
	}
	if len(s.rest) == 0 {
		return nil
	}
	return s.writeRest(timeout)
}

// yield writes the changes posted during ownership, then returns the connection to Post.
// Ownership ends under the lock that found no posted batch, so no batch is left unwritten.
func (s *session) yield() error {
	for {
		s.a.mu.Lock()
		posted := s.takePosted()
		s.owned = posted
		s.a.mu.Unlock()
		if !posted {
			return nil
		}
		if err := s.writeChanges(writeTimeout); err != nil {
			return err
		}
	}
}

// send writes a message, preceded by the bytes that Post left and followed by posted changes.
func (s *session) send(message []byte) error {
	if err := s.own(writeTimeout); err != nil {
		return err
	}
	if err := s.write(message, writeTimeout); err != nil {
		return err
	}
	return s.yield()
}

// writeChanges writes the changes, followed by trailer, in one write.
func (s *session) writeChanges(timeout time.Duration) error {
	s.rest = s.encode()
	s.flight.routes = len(s.rest) > 0
	s.rest = append(s.rest, s.trailer...)
	return s.writeRest(timeout)
}

func (s *session) writeRest(timeout time.Duration) error {
	if err := s.write(s.rest, timeout); err != nil {
		return err
	}
	s.rest = nil
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	s.a.written(s.flight)
	return nil
}

// written records that all changes up to a decision were sent. The caller holds mu.
func (a *Announcer) written(f flight) {
	now := time.Now()
	if f.routes && a.options.OnWritten != nil {
		a.options.OnWritten(f.cause, now, f.revision)
	}
	a.state.Update(func(st State) State {
		st.Written, st.WrittenAt = f.revision, now
		st.Announced4, st.Announced6 = f.sent[vip.IPv4], f.sent[vip.IPv6]
		return st
	})
}

// write sends b in chunks, each with its own timeout, so that a large write does not time out
// while BIRD makes progress. The caller is the owner.
func (s *session) write(b []byte, timeout time.Duration) error {
	for chunk := range slices.Chunk(b, writeChunk) {
		if err := s.writeChunk(chunk, timeout); err != nil {
			s.failed = true
			return fmt.Errorf("in state %s: failed to write %d bytes: %w", s.phase, len(chunk), err)
		}
	}
	return nil
}

func (s *session) writeChunk(b []byte, timeout time.Duration) error {
	if s.try != nil {
		n, err := s.try.Write(b)
		if err != nil || n == len(b) {
			return err // the fast path sets no deadline: its timer would wake the process
		}
		b = b[n:]
	}
	if err := s.conn.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := s.conn.Write(b); err != nil {
		return err
	}
	return s.conn.SetWriteDeadline(time.Time{}) // s.try.Write fails after an expired deadline
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
	c, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil
	}
	w := &nonblocking{conn: raw}
	w.write = func(fd uintptr) bool { // created once: a closure per write would allocate
		for {
			if w.n, w.err = unix.Write(int(fd), w.b); w.err != unix.EINTR {
				return true // also for EAGAIN: false would wait until the socket is writable
			}
		}
	}
	return w
}

// Write writes as much of b as fits the socket buffer. It is not safe for concurrent use.
func (w *nonblocking) Write(b []byte) (int, error) {
	w.b = b
	err := w.conn.Write(w.write)
	w.b = nil
	switch {
	case err != nil:
		return 0, err
	case w.err == unix.EAGAIN:
		return 0, nil
	case w.err != nil:
		return 0, w.err
	}
	return w.n, nil
}
