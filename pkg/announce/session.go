package announce

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// writeTimeout bounds a write: a peer that does not read hangs, and when the session ends BIRD
	// withdraws everything by itself.
	writeTimeout = time.Second
	// writeChunk is the size that must fit into the socket within writeTimeout. A decision of up to
	// about 15 000 VIPs is one chunk; a larger full announcement gets the deadline per chunk,
	// because BIRD then makes progress.
	writeChunk = 256 << 10
	// notificationTimeout bounds the write of a NOTIFICATION on a failed session.
	notificationTimeout = 100 * time.Millisecond
	// lingerTimeout is the wait for the peer to close after the Cease: closing with unread input
	// would send a reset, which can overtake it.
	lingerTimeout = 250 * time.Millisecond
	// A timer that fires later than starvedAfter means that this process was starved, and the
	// peer's KEEPALIVE may be waiting to be read: the hold time is extended by starvedGrace.
	starvedAfter = 50 * time.Millisecond
	starvedGrace = 250 * time.Millisecond
)

type phase uint8

// The states of RFC 4271 section 8.2.2 after the connection is open.
const (
	openSent phase = iota
	openConfirm
	established
)

func (p phase) String() string { return [...]string{"OpenSent", "OpenConfirm", "Established"}[p] }

// session is one connection, served by one goroutine; a second one only reads.
type session struct {
	a       *Announcer
	encoder *encoder
	conn    net.Conn
	in      chan received
	done    chan struct{} // closed when in has no receiver any more

	phase         phase
	keepaliveSent bool // the first KEEPALIVE was sent
	announced     bool // the whole table was sent; from then on only changes
	writeFailed   bool // a write failed: nothing more can be sent

	hold      time.Duration
	holdTimer *time.Timer
	holdDue   time.Time
	extended  bool // holdTimer was extended once since the last message

	interval       time.Duration // between KEEPALIVEs
	keepaliveTimer *time.Timer
	keepaliveDue   bool
}

type received struct {
	message *bgp.BGPMessage
	at      time.Time
	err     error
}

func newSession(a *Announcer, e *encoder, conn net.Conn) *session {
	return &session{
		a: a, encoder: e, conn: conn, hold: a.options.HoldTime, in: make(chan received), done: make(chan struct{}),
	}
}

// run serves the session until it fails or ctx ends, which is not an error, and closes the
// connection.
func (s *session) run(ctx context.Context) error {
	readerEnded := make(chan struct{})
	go func() {
		defer close(readerEnded)
		s.read()
	}()
	// Armed at once: a peer that accepts the connection and stays silent is dropped after the
	// offered hold time.
	s.holdTimer = time.NewTimer(s.hold)
	s.extendHold(time.Now())
	s.keepaliveTimer = time.NewTimer(0)
	s.keepaliveTimer.Stop()

	err := s.serve(ctx)
	notified := err == nil || s.notifyPeer(err)
	s.holdTimer.Stop()
	s.keepaliveTimer.Stop()
	close(s.done)
	if notified {
		s.linger(readerEnded)
	}
	s.conn.Close() // its error is irrelevant: the session has ended
	<-readerEnded
	return err
}

// read forwards messages until the connection ends. It needs no deadline: the hold timer and the
// close at the end of run bound it.
func (s *session) read() {
	r := bufio.NewReader(s.conn)
	// Drain to the end: a close with unread input sends a reset, which could overtake the last
	// message.
	defer func() { _, _ = io.Copy(io.Discard, r) }()
	for {
		m, err := readMessage(r)
		select {
		case s.in <- received{m, time.Now(), err}:
		case <-s.done:
			return
		}
		if err != nil {
			return
		}
	}
}

func (s *session) serve(ctx context.Context) error {
	if err := s.write(s.encoder.open); err != nil {
		return err
	}
	for {
		var err error
		select {
		case <-ctx.Done():
			return s.stop()
		case <-s.a.wake:
			err = s.flush(nil)
		case <-s.a.renewed:
			err = s.sendKeepaliveAndTable()
		case <-s.keepaliveTimer.C:
			s.keepaliveDue = true
			err = s.sendKeepaliveAndTable()
		case r := <-s.in:
			err = s.receive(r)
		case <-s.holdTimer.C:
			err = s.expire()
		}
		if err != nil {
			return err
		}
	}
}

// sendKeepaliveAndTable sends everything that needs a fresh heartbeat: the KEEPALIVE that opens the
// session, the whole table, and the periodic KEEPALIVEs. Nothing else renews the peer's hold timer.
func (s *session) sendKeepaliveAndTable() error {
	if s.phase == openSent || !s.a.heartbeatIsFresh() {
		return nil
	}
	if !s.keepaliveSent || s.keepaliveDue {
		if err := s.write(s.encoder.keepalive); err != nil {
			return err
		}
		s.keepaliveSent, s.keepaliveDue = true, false
		s.keepaliveTimer.Reset(s.interval)
	}
	if s.phase == established && !s.announced {
		s.a.up()
		return s.announceAll()
	}
	return nil
}

func (s *session) receive(r received) error {
	if r.err != nil {
		if errors.Is(r.err, io.EOF) {
			return fmt.Errorf("in state %s: BIRD closed the connection", s.phase)
		}
		return fmt.Errorf("in state %s: failed to read: %w", s.phase, r.err)
	}
	s.extendHold(r.at)
	switch m := r.message.Body.(type) {
	case *bgp.BGPNotification:
		return &Notification{Code: m.ErrorCode, Subcode: m.ErrorSubcode}
	case *bgp.BGPOpen:
		if s.phase == openSent {
			return s.handleOpen(m)
		}
	case *bgp.BGPKeepAlive:
		switch s.phase {
		case openConfirm:
			s.phase = established
			return s.sendKeepaliveAndTable()
		case established:
			return nil
		}
	case *bgp.BGPUpdate:
		if s.phase == established {
			return nil
		}
	case *bgp.BGPRouteRefresh:
		if s.phase == established {
			return s.refresh(m)
		}
	}
	// RFC 6608: the subcode is the state.
	return &protocolError{
		code: bgp.BGP_ERROR_FSM_ERROR, subcode: uint8(s.phase) + 1,
		reason: fmt.Sprintf("BIRD sent a message of type %d in state %s", r.message.Header.Type, s.phase),
	}
}

// extendHold restarts the hold timer from the receipt of a message.
func (s *session) extendHold(from time.Time) {
	s.holdDue, s.extended = from.Add(s.hold), false
	s.holdTimer.Reset(time.Until(s.holdDue))
}

func (s *session) handleOpen(m *bgp.BGPOpen) error {
	hold, err := checkOpen(m, s.a.options)
	if err != nil {
		return err
	}
	s.hold = hold
	s.interval = hold / 3 // RFC 4271 section 4.4
	s.extendHold(time.Now())
	s.phase = openConfirm
	return s.sendKeepaliveAndTable()
}

// expire ends the session when the peer was silent for the hold time.
func (s *session) expire() error {
	select {
	case r := <-s.in: // a message was waiting to be handled
		return s.receive(r)
	default:
	}
	if !s.extended && time.Since(s.holdDue) > starvedAfter {
		s.extended = true
		s.holdTimer.Reset(starvedGrace)
		return nil
	}
	return &protocolError{
		code:   bgp.BGP_ERROR_HOLD_TIMER_EXPIRED,
		reason: fmt.Sprintf("in state %s: BIRD was silent for its hold time of %s", s.phase, s.hold),
	}
}

// flush writes what was posted, followed by trailer, in one write.
func (s *session) flush(trailer []byte) error {
	if !s.announced {
		// sendKeepaliveAndTable will send the whole table; pending stays.
		return s.write(trailer)
	}
	p := s.a.take()
	var c changes
	s.a.table.apply(p, c.add)
	updates, err := s.encoder.appendUpdates(nil, &c)
	if err != nil {
		return err
	}
	if err := s.write(append(updates, trailer...)); err != nil {
		return err
	}
	if p.posted {
		s.written(p.cause, len(updates) > 0)
	}
	return nil
}

func (s *session) announceAll() error {
	s.a.table.apply(s.a.take(), func(vip.VIP, Advertisement) {})
	n, err := s.announce(vip.Families[:]...)
	if err != nil {
		return err
	}
	s.announced = true
	s.written(time.Time{}, n > 0)
	return nil
}

func (s *session) announce(families ...vip.Family) (int, error) {
	var c changes
	n := 0
	for v, a := range s.a.table.adverts {
		if slices.Contains(families, v.Family()) {
			c.add(v, a)
			n++
		}
	}
	updates, err := s.encoder.appendUpdates(nil, &c)
	if err != nil {
		return 0, err
	}
	return n, s.write(updates)
}

// refresh answers a ROUTE-REFRESH (RFC 2918); other families are ignored.
func (s *session) refresh(m *bgp.BGPRouteRefresh) error {
	if !s.announced {
		return nil // the whole table is sent next
	}
	for _, f := range vip.Families {
		if codecFamily(f) == bgp.NewFamily(m.AFI, m.SAFI) {
			_, err := s.announce(f)
			return err
		}
	}
	return nil
}

// written records that the peer was sent the whole table; routes reports whether that took a write.
func (s *session) written(cause time.Time, routes bool) {
	now := time.Now()
	t := &s.a.table
	if routes && s.a.options.OnWritten != nil {
		s.a.options.OnWritten(cause, now, t.revision)
	}
	s.a.state.Update(func(st State) State {
		st.Written, st.WrittenAt = t.revision, now
		st.Announced4, st.Announced6 = t.count[vip.IPv4], t.count[vip.IPv6]
		return st
	})
}

// stop flushes and sends a Cease; the peer then withdraws everything.
func (s *session) stop() error {
	cease, err := notification(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, nil)
	if err != nil {
		return fmt.Errorf("failed to encode NOTIFICATION: %w", err)
	}
	return s.flush(cease)
}

// notifyPeer sends the NOTIFICATION for a protocol error of the peer. It reports whether it was
// sent.
func (s *session) notifyPeer(cause error) bool {
	var p *protocolError
	if errors.As(cause, &p) && !s.writeFailed {
		m, err := notification(p.code, p.subcode, p.data)
		if err == nil {
			err = s.conn.SetWriteDeadline(time.Now().Add(notificationTimeout))
		}
		if err == nil {
			_, err = s.conn.Write(m)
		}
		if err == nil {
			return true
		}
		s.writeFailed = true
	}
	// The unsent data are stale: a reset discards them, so that a hung peer does not read them when
	// it recovers.
	if c, ok := s.conn.(*net.TCPConn); ok && s.writeFailed {
		_ = c.SetLinger(0) // fails only on a connection that has failed
	}
	return false
}

// linger lets the peer read the last message before the connection closes.
func (s *session) linger(readerEnded <-chan struct{}) {
	c, ok := s.conn.(*net.TCPConn)
	if !ok || c.CloseWrite() != nil {
		return
	}
	t := time.NewTimer(lingerTimeout)
	defer t.Stop()
	select {
	case <-readerEnded:
	case <-t.C:
	}
}

func (s *session) write(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), writeChunk)
		if err := s.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			s.writeFailed = true
			return fmt.Errorf("in state %s: failed to set the write deadline: %w", s.phase, err)
		}
		if _, err := s.conn.Write(b[:n]); err != nil {
			s.writeFailed = true
			return fmt.Errorf("in state %s: failed to write %d bytes: %w", s.phase, n, err)
		}
		b = b[n:]
	}
	return nil
}
