package announce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// LocalAS is the announcer's private AS (RFC 6996). It is rejected as a gateway's AS.
	LocalAS = 4200000000
	// DefaultHoldTime is the minimum of RFC 4271 section 4.2.
	DefaultHoldTime = 3 * time.Second
	// MaxHeartbeatAge is the maximum age of a heartbeat for which the gate counts as live.
	MaxHeartbeatAge = time.Second

	// A signed SYN to a port without the key is dropped, so a dial times out until BIRD is
	// configured.
	dialTimeout = 100 * time.Millisecond
	minBackoff  = 20 * time.Millisecond
	maxBackoff  = 250 * time.Millisecond
	// After a session of this length the next attempt starts with minBackoff.
	stableSession = time.Second
)

// Options configure an Announcer.
type Options struct {
	Local    netip.Addr     // IPv4 source address and BGP identifier; 127.0.0.2 when zero
	Peer     netip.AddrPort // IPv4 address and port of BIRD
	PeerAS   uint32         // BIRD's AS in this session, not LocalAS
	Password string         // TCP-MD5 key (RFC 2385), at most 80 bytes; "" disables signing. See NewPassword, ProbeMD5
	HoldTime time.Duration  // offered hold time in whole seconds, 3 s to 65535 s; DefaultHoldTime when zero
	Log      *slog.Logger   // nil discards logs

	// OnWritten, when set, is called right after every write of routes with the oldest Cause of the
	// written batches, the time of the write, and the revision that was sent. Cause is zero for the
	// full announcement of a new session. It runs in the goroutine of Post or of Run, one call at a
	// time, before State is updated. It must not block, nor call the Announcer.
	OnWritten func(cause, at time.Time, revision uint64)
}

func (o Options) withDefaults() Options {
	o.Local = cmp.Or(o.Local, netip.AddrFrom4([4]byte{127, 0, 0, 2}))
	o.HoldTime, o.Log = cmp.Or(o.HoldTime, DefaultHoldTime), cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	return o
}

func (o Options) validate() error {
	switch {
	case !o.Local.Is4() || o.Local.IsUnspecified():
		return fmt.Errorf("local address %s is not a non-zero IPv4 address", o.Local)
	case !o.Peer.Addr().Is4() || o.Peer.Port() == 0:
		return fmt.Errorf("peer %s is not an IPv4 address with a port", o.Peer)
	case o.PeerAS == 0 || o.PeerAS == LocalAS:
		return fmt.Errorf("peer AS %d must differ from 0 and from the local AS %d", o.PeerAS, LocalAS)
	case len(o.Password) > maxPassword:
		return fmt.Errorf("password has %d bytes; TCP-MD5 supports at most %d", len(o.Password), maxPassword)
	case o.HoldTime < 3*time.Second || o.HoldTime > 65535*time.Second || o.HoldTime%time.Second != 0:
		return fmt.Errorf("hold time %s must be whole seconds from 3 s to 65535 s", o.HoldTime)
	}
	return nil
}

// State is the state of the session.
type State struct {
	Established bool
	Since       time.Time // when Established last changed; zero until the first session
	// The following are zero without a session.
	Written                uint64    // revision of the newest batch that was sent
	WrittenAt              time.Time // when it was sent
	Announced4, Announced6 int       // announced VIPs, including de-preferred ones
	Attempts               uint64    // connections tried
	Sessions               uint64    // sessions established
	LastError              error     // why the last attempt or session ended; nil before, and with a session
}

// Announcer is the BGP speaker. It implements task.Task.
type Announcer struct {
	options Options
	dial    func(context.Context) (net.Conn, error)
	state   *latest.Value[State]
	up      *latest.Value[gate.Announcer]

	// wake holds a token when the session's goroutine has work: an awaited heartbeat arrived, or
	// Post left bytes to write.
	wake chan struct{}

	mu        sync.Mutex
	heartbeat time.Time
	awaited   bool // a heartbeat wakes the session's goroutine
	table     table
	session   *session // receives changes; nil until a session has taken the whole table
}

// New returns an announcer that is idle until Run. Run reports invalid options.
func New(o Options) *Announcer {
	a := &Announcer{
		options: o.withDefaults(), state: latest.New(State{}),
		up: latest.New(gate.Announcer{}), table: newTable(), wake: make(chan struct{}, 1),
	}
	a.dial = a.dialTCP
	return a
}

// State returns the session's state.
func (a *Announcer) State() *latest.Value[State] { return a.state }

// Up returns whether the session is established. Unlike State it does not change with each write.
func (a *Announcer) Up() *latest.Value[gate.Announcer] { return a.up }

// String implements task.Task.
func (a *Announcer) String() string { return "announcer" }

// Post stores a decision and writes it without blocking; the session's goroutine writes the bytes
// that do not fit the socket buffer. It is safe for concurrent use. Pending batches are merged;
// the newest advertisement of each VIP wins. Post does not retain b.Changes.
func (a *Announcer) Post(b Batch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.table.post(b, a.session != nil)
	if a.session != nil && !a.session.post() {
		latest.Wake(a.wake)
	}
}

// Heartbeat records that the gate's loop was alive at t. It does not block and is safe for
// concurrent use; the newest time wins. Call it at least every second, at the instants of package
// tick: a KEEPALIVE that is due waits for it if the one before is older than [MaxHeartbeatAge].
func (a *Announcer) Heartbeat(t time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.After(a.heartbeat) {
		a.heartbeat = t
	}
	if a.awaited && a.isFresh() {
		a.awaited = false
		latest.Wake(a.wake)
	}
}

// heartbeatIsFresh reports whether the gate is live. If it is not, the next heartbeat wakes the
// session's goroutine.
func (a *Announcer) heartbeatIsFresh() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.awaited = !a.isFresh()
	return !a.awaited
}

func (a *Announcer) isFresh() bool {
	return !a.heartbeat.IsZero() && time.Since(a.heartbeat) < MaxHeartbeatAge
}

// Run keeps the session up until ctx ends. It then writes pending changes, ends the session with
// a Cease NOTIFICATION, and returns nil. It fails only for invalid options.
func (a *Announcer) Run(ctx context.Context) error {
	enc, err := newEncoder(a.options)
	if err := cmp.Or(a.options.validate(), err); err != nil {
		return fmt.Errorf("failed to start the announcer for %s: %w", a.options.Peer, err)
	}
	delay := backoff.Backoff{Min: minBackoff, Max: maxBackoff}
	for a.awaitHeartbeat(ctx) {
		err := a.attempt(ctx, enc)
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		s := a.state.Load()
		if s.Established && time.Since(s.Since) >= stableSession {
			delay.Reset()
		}
		a.down(err)
		_ = delay.Wait(ctx) // awaitHeartbeat checks ctx
	}
	return nil
}

// awaitHeartbeat waits for a fresh heartbeat. It returns false when ctx ended first.
func (a *Announcer) awaitHeartbeat(ctx context.Context) bool {
	for !a.heartbeatIsFresh() {
		select {
		case <-a.wake:
		case <-ctx.Done():
			return false
		}
	}
	return ctx.Err() == nil
}

// attempt connects once and serves the session until it ends.
func (a *Announcer) attempt(ctx context.Context, enc *encoder) error {
	a.state.Update(func(s State) State { s.Attempts++; return s })
	conn, err := a.dial(ctx)
	if err != nil {
		return fmt.Errorf("failed to connect to BIRD at %s: %w", a.options.Peer, err)
	}
	if err := newSession(a, enc, conn).run(ctx); err != nil {
		return fmt.Errorf("session with BIRD at %s: %w", a.options.Peer, err)
	}
	return nil
}

func (a *Announcer) established() {
	now := time.Now()
	a.state.Update(func(s State) State {
		s.Established, s.Since, s.LastError = true, now, nil
		s.Sessions++
		return s
	})
	a.up.Set(gate.Announcer{Up: true, Since: now})
	a.options.Log.Info("session with BIRD established", "peer", a.options.Peer)
}

// down records the end of an attempt or a session; err is nil when Run was stopped.
func (a *Announcer) down(err error) {
	was := a.state.Load()
	is := was
	if was.Established {
		is = State{Since: time.Now(), Attempts: was.Attempts, Sessions: was.Sessions, LastError: was.LastError}
	}
	if err != nil {
		is.LastError = err
	}
	a.state.Set(is)
	if was.Established {
		a.up.Set(gate.Announcer{Since: is.Since})
	}
	switch {
	case err == nil && was.Established:
		a.options.Log.Info("session with BIRD closed", "peer", a.options.Peer)
	case err == nil:
	case was.Established:
		a.options.Log.Warn("session with BIRD lost", "peer", a.options.Peer, "error", err)
	case was.LastError == nil || was.LastError.Error() != err.Error():
		a.options.Log.Info("connection to BIRD failed, retrying", "peer", a.options.Peer, "attempts", was.Attempts,
			"error", err)
	}
}

func (a *Announcer) dialTCP(ctx context.Context) (net.Conn, error) {
	d := net.Dialer{
		Timeout:   dialTimeout,
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(a.options.Local, 0)),
		KeepAlive: -1, // BGP has its own KEEPALIVE
	}
	// MPTCP and TCP_MD5SIG exclude each other.
	d.SetMultipathTCP(false)
	if a.options.Password != "" {
		d.Control = signWith(a.options.Password, a.options.Peer.Addr())
	}
	conn, err := d.DialContext(ctx, "tcp4", a.options.Peer.String())
	if err != nil && a.options.Password != "" && errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("%w (the peer does not listen or has another TCP-MD5 key)", err)
	}
	return conn, err
}
