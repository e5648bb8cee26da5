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

// writer is the sending side of a session. A decision is written by Post itself as far as the
// socket takes it at once: waking the session's goroutine first costs more than the write. What
// remains, and every other message, is written by that goroutine, which then owns the connection:
// until it has yielded, Post only queues.
type writer struct {
	try *nonblocking // nil: the connection has none, and Post leaves every write to the goroutine

	// Guarded by Announcer.mu. The owner keeps it set.
	owned bool
	// Used by Post under Announcer.mu while not owned, by the session's goroutine while owned:
	rest    []byte  // changes that were encoded and not written yet
	flight  flight  // of the changes in rest
	failure error   // of a write in Post
	changes changes // to encode
	buf     []byte  // of encoded changes
	// Used by the session's goroutine only:
	trailer []byte // follows changes in one write
	failed  bool   // a write failed: nothing more can be sent
}

// flight is the decision that a write completes.
type flight struct {
	cause    time.Time
	revision uint64
	routes   bool // there were changes of routes
	sent     [len(vip.Families)]int
}

func newWriter(conn net.Conn) writer { return writer{try: newNonblocking(conn)} }

// takePosted takes the changes that were posted, and reports whether any batch was. The caller
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

// post writes what was posted if the socket takes it at once. It reports whether nothing is left
// for the session's goroutine. The caller holds Announcer.mu.
func (s *session) post() bool {
	if s.owned {
		return true // the owner continues with what was posted
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

// own makes the session's goroutine the owner and writes what a Post could not.
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

// yield writes what was posted meanwhile, and lets Post write from then on.
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

// send writes a message, and what was posted.
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

// written records that the peer was sent everything up to a decision. The caller holds mu.
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

// write sends b in chunks, each with its own timeout: BIRD makes progress from one to the next. The
// caller is the owner.
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
			return err // without a deadline, whose timer would wake the process
		}
		b = b[n:]
	}
	if err := s.conn.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := s.conn.Write(b); err != nil {
		return err
	}
	return s.conn.SetWriteDeadline(time.Time{}) // try fails after a deadline
}

// nonblocking writes to a socket without waiting.
type nonblocking struct {
	conn  syscall.RawConn
	write func(fd uintptr) bool

	// Of the current write:
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
	w.write = func(fd uintptr) bool { // created once: a closure for each write would be garbage
		for {
			if w.n, w.err = unix.Write(int(fd), w.b); w.err != unix.EINTR {
				return true // also for EAGAIN: the caller does not wait
			}
		}
	}
	return w
}

// Write writes as much of b as the socket takes at once. It is not safe for concurrent use.
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
