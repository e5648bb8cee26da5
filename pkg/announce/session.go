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

	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	writeTimeout        = time.Second            // per chunk; a peer that does not read is hung
	notificationTimeout = 100 * time.Millisecond // for a NOTIFICATION on a failed session
	lingerTimeout       = 250 * time.Millisecond // for the peer to close after the last NOTIFICATION
	// A hold timer that fires late indicates CPU starvation, which may also delay the reader: the
	// hold time is extended once.
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

// session is one connection, served by one goroutine; a second goroutine only reads. After the
// whole table was sent, Post writes changes as well; see writer.
type session struct {
	a       *Announcer
	encoder *encoder
	conn    net.Conn
	writer
	in      chan received
	done    chan struct{} // closed when in has no receiver
	drained chan struct{} // closed when read has ended

	phase     phase
	announced bool // the whole table was sent; later writes contain only changes

	hold      time.Duration
	holdTimer *time.Timer
	holdDue   time.Time
	extended  bool // holdTimer was extended once since the last message

	// keepaliveTimer fires at each third of hold, once the peer's OPEN was received.
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
		a: a, encoder: e, conn: conn, writer: newWriter(conn), hold: a.options.HoldTime, keepaliveDue: true,
		in: make(chan received), done: make(chan struct{}), drained: make(chan struct{}),
	}
}

// run serves the session until it fails or ctx ends, and closes the connection.
func (s *session) run(ctx context.Context) error {
	go s.read()
	// The hold timer starts before the OPEN exchange: a silent peer is dropped after the offered
	// hold time.
	s.holdTimer = time.NewTimer(s.hold)
	s.extendHold(time.Now())
	s.keepaliveTimer = time.NewTimer(0)
	s.keepaliveTimer.Stop()

	err := s.serve(ctx)
	s.leave()
	notified := err == nil || s.notifyPeer(err)
	close(s.done)
	if notified {
		s.linger()
	}
	s.conn.Close() // its error is irrelevant: the session has ended
	<-s.drained
	return err
}

// read forwards messages until the connection ends. The hold timer and the close in run bound it.
func (s *session) read() {
	defer close(s.drained)
	r := bufio.NewReader(s.conn)
	// A close with unread input sends a reset, which could overtake the last message.
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
	if err := s.send(s.encoder.open); err != nil {
		return err
	}
	for {
		var err error
		select {
		case <-ctx.Done():
			return s.stop()
		case <-s.a.wake:
			if err = s.send(nil); err == nil {
				err = s.sendKeepaliveAndTable()
			}
		case <-s.keepaliveTimer.C:
			s.setTimers(time.Now())
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

// sendKeepaliveAndTable sends the messages that require a fresh heartbeat: KEEPALIVEs and the
// whole table.
func (s *session) sendKeepaliveAndTable() error {
	if s.phase == openSent || !s.a.heartbeatIsFresh() {
		return nil
	}
	if s.keepaliveDue {
		if err := s.send(s.encoder.keepalive); err != nil {
			return err
		}
		s.keepaliveDue = false
	}
	if s.phase == established && !s.announced {
		s.a.established()
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
		return fmt.Errorf("BIRD sent NOTIFICATION %s", bgp.NewNotificationErrorCode(m.ErrorCode, m.ErrorSubcode))
	case *bgp.BGPOpen:
		if s.phase == openSent {
			return s.handleOpen(m)
		}
	case *bgp.BGPKeepAlive:
		if s.phase != openSent {
			s.phase = established
			return s.sendKeepaliveAndTable()
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
	// RFC 6608: the subcode identifies the state.
	return bgp.NewMessageError(bgp.BGP_ERROR_FSM_ERROR, uint8(s.phase)+1, nil,
		fmt.Sprintf("BIRD sent a message of type %d in state %s", r.message.Header.Type, s.phase))
}

// setTimers restarts keepaliveTimer, and holdTimer if the hold time expires first.
func (s *session) setTimers(now time.Time) {
	next := tick.Until(now, s.hold/3) // RFC 4271 section 4.4
	s.keepaliveTimer.Reset(next)
	if left := s.holdDue.Sub(now); left <= next && !s.extended {
		s.holdTimer.Reset(left)
	}
}

// extendHold restarts the hold time from the receipt of a message. Once keepaliveTimer runs,
// extendHold does not reset holdTimer: the Go runtime would also wake the process at each
// previous expiry.
func (s *session) extendHold(from time.Time) {
	s.holdDue, s.extended = from.Add(s.hold), false
	if s.phase == openSent {
		s.holdTimer.Reset(time.Until(s.holdDue))
	}
}

func (s *session) handleOpen(m *bgp.BGPOpen) error {
	hold, err := checkOpen(m, s.a.options)
	if err != nil {
		return err
	}
	s.hold, s.phase = hold, openConfirm
	now := time.Now()
	s.extendHold(now)
	s.setTimers(now)
	return s.sendKeepaliveAndTable()
}

// expire ends the session when the peer was silent for the hold time.
func (s *session) expire() error {
	select {
	case r := <-s.in: // a message was waiting to be handled
		return s.receive(r)
	default:
	}
	if time.Now().Before(s.holdDue) {
		return nil // a message extended the hold time; setTimers restarts holdTimer
	}
	if !s.extended && time.Since(s.holdDue) > starvedAfter {
		s.extended = true
		s.holdTimer.Reset(starvedGrace)
		return nil
	}
	return bgp.NewMessageError(bgp.BGP_ERROR_HOLD_TIMER_EXPIRED, 0, nil,
		fmt.Sprintf("in state %s: BIRD was silent for its hold time of %s", s.phase, s.hold))
}

// announceAll sends the whole table and registers the session, so that Post sends later changes.
func (s *session) announceAll() error {
	if err := s.own(writeTimeout); err != nil {
		return err
	}
	s.a.mu.Lock()
	s.changes.reset()
	t := &s.a.table
	t.takeAll(&s.changes)
	s.flight = flight{revision: t.revision, sent: t.sent}
	s.a.session = s
	s.a.mu.Unlock()
	s.announced = true
	if err := s.writeChanges(writeTimeout); err != nil {
		return err
	}
	return s.yield()
}

// refresh answers a ROUTE-REFRESH (RFC 2918); other families are ignored.
func (s *session) refresh(m *bgp.BGPRouteRefresh) error {
	f := slices.Index(codecFamily[:], bgp.NewFamily(m.AFI, m.SAFI))
	if f < 0 || !s.announced { // announceAll will send the whole table
		return nil
	}
	if err := s.own(writeTimeout); err != nil {
		return err
	}
	s.a.mu.Lock()
	s.changes.reset()
	s.a.table.repeat(vip.Family(f), &s.changes)
	s.a.mu.Unlock()
	if err := s.write(s.encode(), writeTimeout); err != nil {
		return err
	}
	return s.yield()
}

// stop writes posted changes and a Cease, upon which the peer withdraws all routes.
func (s *session) stop() error {
	cease, err := notification(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, nil)
	if err != nil {
		return fmt.Errorf("failed to encode NOTIFICATION: %w", err)
	}
	if err := s.own(writeTimeout); err != nil {
		return err
	}
	s.a.mu.Lock()
	posted := s.takePosted()
	s.a.mu.Unlock()
	if !posted {
		return s.write(cease, writeTimeout)
	}
	s.trailer = cease
	return s.writeChanges(writeTimeout)
}

// leave makes the session's goroutine the permanent owner of the connection and discards queued
// changes.
func (s *session) leave() {
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	s.owned = true
	if s.a.session == s {
		s.a.session = nil
		s.a.table.endSession()
	}
}

// notifyPeer sends the NOTIFICATION for a protocol error of the peer and reports whether it was
// sent.
func (s *session) notifyPeer(cause error) bool {
	var p *bgp.MessageError
	if errors.As(cause, &p) && !s.failed {
		m, err := notification(p.TypeCode, p.SubTypeCode, p.Data)
		if err == nil && s.own(notificationTimeout) == nil && s.write(m, notificationTimeout) == nil {
			return true
		}
	}
	// A reset discards unsent data, so that a hung peer does not read stale routes when it recovers.
	if c, ok := s.conn.(*net.TCPConn); ok && s.failed {
		_ = c.SetLinger(0) // fails only on a connection that has failed
	}
	return false
}

// linger lets the peer read the last message before the connection closes.
func (s *session) linger() {
	c, ok := s.conn.(*net.TCPConn)
	if !ok || c.CloseWrite() != nil {
		return
	}
	select {
	case <-s.drained:
	case <-time.After(lingerTimeout):
	}
}
