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
	families  [len(vip.Families)]bool // that the peer has
	announced bool                    // the whole table was sent; later writes contain only changes

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

func newSession(announcer *Announcer, encoder *encoder, conn net.Conn) *session {
	return &session{
		a: announcer, encoder: encoder, conn: conn, writer: writer{try: newNonblocking(conn)},
		hold: announcer.options.HoldTime, keepaliveDue: true, families: [...]bool{vip.IPv4: true, vip.IPv6: true},
		in: make(chan received), done: make(chan struct{}), drained: make(chan struct{}),
	}
}

// peer returns the peer's name in messages.
func (session *session) peer() string { return session.a.options.Speaker }

// run serves the session until it fails or ctx ends, and closes the connection.
func (session *session) run(ctx context.Context) error {
	go session.read()
	// The hold timer starts before the OPEN exchange: a silent peer is dropped after the offered time.
	session.holdTimer = time.NewTimer(session.hold)
	session.extendHold(time.Now())
	session.keepaliveTimer = time.NewTimer(0)
	session.keepaliveTimer.Stop()

	err := session.serve(ctx)
	session.leave()
	notified := err == nil || session.notifyPeer(err)
	close(session.done)
	if notified {
		session.linger()
	}
	session.conn.Close() // its error is irrelevant: the session has ended
	<-session.drained
	return err
}

// read forwards messages until the connection ends. The hold timer and the close in run bound it.
func (session *session) read() {
	defer close(session.drained)
	reader := bufio.NewReader(session.conn)
	// A close with unread input sends a reset, which could overtake the last message.
	defer func() { _, _ = io.Copy(io.Discard, reader) }()
	for {
		message, err := readMessage(reader)
		if conn, ok := session.conn.(*acceptedConn); ok && err == nil {
			conn.heard.Store(int64(time.Since(conn.opened))) // a stranger's bytes may reach the session, too
		}
		select {
		case session.in <- received{message, time.Now(), err}:
		case <-session.done:
			return
		}
		if err != nil {
			return
		}
	}
}

func (session *session) serve(ctx context.Context) error {
	if err := session.send(session.encoder.open); err != nil {
		return err
	}
	for {
		var err error
		select {
		case <-ctx.Done():
			return session.stop()
		case <-session.a.wake:
			if err = session.send(nil); err == nil {
				err = session.sendKeepaliveAndTable()
			}
		case <-session.keepaliveTimer.C:
			session.setTimers(time.Now())
			session.keepaliveDue = true
			err = session.sendKeepaliveAndTable()
		case received := <-session.in:
			err = session.receive(received)
		case <-session.holdTimer.C:
			err = session.expire()
		}
		if err != nil {
			return err
		}
	}
}

// sendKeepaliveAndTable sends all that requires a fresh heartbeat: KEEPALIVEs and the whole table.
func (session *session) sendKeepaliveAndTable() error {
	if session.phase == openSent || !session.a.heartbeatIsFresh() {
		return nil
	}
	if session.keepaliveDue {
		if err := session.send(session.encoder.keepalive); err != nil {
			return err
		}
		session.keepaliveDue = false
	}
	if session.phase == established && !session.announced {
		session.a.established()
		return session.announceAll()
	}
	return nil
}

func (session *session) receive(received received) error {
	if received.err != nil {
		if errors.Is(received.err, io.EOF) {
			return fmt.Errorf("in state %s: %s closed the connection", session.phase, session.peer())
		}
		return fmt.Errorf("in state %s: failed to read: %w", session.phase, received.err)
	}
	session.extendHold(received.at)
	switch body := received.message.Body.(type) {
	case *bgp.BGPNotification:
		return fmt.Errorf("%s sent NOTIFICATION %s", session.peer(),
			bgp.NewNotificationErrorCode(body.ErrorCode, body.ErrorSubcode))
	case *bgp.BGPOpen:
		if session.phase == openSent {
			return session.handleOpen(body)
		}
	case *bgp.BGPKeepAlive:
		if session.phase != openSent {
			session.phase = established
			return session.sendKeepaliveAndTable()
		}
	case *bgp.BGPUpdate:
		if session.phase == established {
			return nil
		}
	case *bgp.BGPRouteRefresh:
		if session.phase == established {
			return session.refresh(body)
		}
	}
	// RFC 6608: the subcode identifies the state.
	return bgp.NewMessageError(bgp.BGP_ERROR_FSM_ERROR, uint8(session.phase)+1, nil,
		fmt.Sprintf("%s sent a message of type %d in state %s", session.peer(), received.message.Header.Type, session.phase))
}

// setTimers restarts keepaliveTimer, and holdTimer if the hold time expires first.
func (session *session) setTimers(now time.Time) {
	next := tick.Until(now, session.hold/3) // RFC 4271 section 4.4
	session.keepaliveTimer.Reset(next)
	if left := session.holdDue.Sub(now); left <= next && !session.extended {
		session.holdTimer.Reset(left)
	}
}

// extendHold restarts the hold time from the receipt of a message. Once keepaliveTimer runs, it
// does not reset holdTimer: the Go runtime would also wake the process at previous expiries.
func (session *session) extendHold(from time.Time) {
	session.holdDue, session.extended = from.Add(session.hold), false
	if session.phase == openSent {
		session.holdTimer.Reset(time.Until(session.holdDue))
	}
}

func (session *session) handleOpen(open *bgp.BGPOpen) error {
	hold, families, err := checkOpen(open, session.a.options)
	if err != nil {
		return err
	}
	session.families = families
	session.hold, session.phase = hold, openConfirm
	now := time.Now()
	session.extendHold(now)
	session.setTimers(now)
	return session.sendKeepaliveAndTable()
}

// expire ends the session when the peer was silent for the hold time.
func (session *session) expire() error {
	select {
	case received := <-session.in: // a message was waiting to be handled
		return session.receive(received)
	default:
	}
	if time.Now().Before(session.holdDue) {
		return nil // a message extended the hold time; setTimers restarts holdTimer
	}
	if !session.extended && time.Since(session.holdDue) > starvedAfter {
		session.extended = true
		session.holdTimer.Reset(starvedGrace)
		return nil
	}
	return bgp.NewMessageError(bgp.BGP_ERROR_HOLD_TIMER_EXPIRED, 0, nil,
		fmt.Sprintf("in state %s: %s was silent for its hold time of %s", session.phase, session.peer(), session.hold))
}

// announceAll sends the whole table and registers the session, so that Post sends later changes.
func (session *session) announceAll() error {
	if err := session.own(writeTimeout); err != nil {
		return err
	}
	session.a.mu.Lock()
	session.changes.reset()
	table := &session.a.table
	table.takeAll(&session.changes)
	session.flight = flight{revision: table.revision, sent: table.sent}
	session.a.session = session
	session.a.mu.Unlock()
	session.announced = true
	if err := session.writeChanges(writeTimeout); err != nil {
		return err
	}
	return session.yield()
}

// refresh answers a ROUTE-REFRESH (RFC 2918); other families are ignored.
func (session *session) refresh(message *bgp.BGPRouteRefresh) error {
	family := slices.Index(codecFamily[:], bgp.NewFamily(message.AFI, message.SAFI))
	if family < 0 || !session.announced { // announceAll will send the whole table
		return nil
	}
	if err := session.own(writeTimeout); err != nil {
		return err
	}
	session.a.mu.Lock()
	session.changes.reset()
	session.a.table.repeat(vip.Family(family), &session.changes)
	session.a.mu.Unlock()
	if err := session.write(session.encode(), writeTimeout); err != nil {
		return err
	}
	return session.yield()
}

// stop writes posted changes and a Cease, upon which the peer withdraws all routes.
func (session *session) stop() error {
	cease, err := notification(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, nil)
	if err != nil {
		return fmt.Errorf("failed to encode NOTIFICATION: %w", err)
	}
	if err := session.own(writeTimeout); err != nil {
		return err
	}
	session.a.mu.Lock()
	posted := session.takePosted()
	session.a.mu.Unlock()
	if !posted {
		return session.write(cease, writeTimeout)
	}
	session.trailer = cease
	return session.writeChanges(writeTimeout)
}

// leave makes the session's goroutine own the connection for good and discards queued changes.
func (session *session) leave() {
	session.a.mu.Lock()
	defer session.a.mu.Unlock()
	session.owned = true
	if session.a.session == session {
		session.a.session = nil
		session.a.table.endSession()
	}
}

// notifyPeer sends the NOTIFICATION for a protocol error of the peer and reports whether it did.
func (session *session) notifyPeer(cause error) bool {
	if problem, is := errors.AsType[*bgp.MessageError](cause); is && !session.failed {
		message, err := notification(problem.TypeCode, problem.SubTypeCode, problem.Data)
		if err == nil && session.own(notificationTimeout) == nil && session.write(message, notificationTimeout) == nil {
			return true
		}
	}
	// A reset discards unsent data, so that a hung peer does not read stale routes when it recovers.
	if connection, ok := session.conn.(interface{ SetLinger(seconds int) error }); ok && session.failed {
		_ = connection.SetLinger(0) // fails only on a connection that has failed
	}
	return false
}

// linger lets the peer read the last message before the connection closes.
func (session *session) linger() {
	connection, ok := session.conn.(interface{ CloseWrite() error })
	if !ok || connection.CloseWrite() != nil {
		return
	}
	select {
	case <-session.drained:
	case <-time.After(lingerTimeout):
	}
}
