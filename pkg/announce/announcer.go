package announce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Defaults of [Options].
const (
	DefaultLocalAS  = 4200000000      // private use (RFC 6996), refused as a gateway's AS
	DefaultHoldTime = 3 * time.Second // the least that RFC 4271 section 4.2 allows
)

// MaxBeatAge is how old a beat may be for the announcer to speak on the gate's behalf.
const MaxBeatAge = time.Second

const (
	// A signed SYN to a port without the key is dropped, not refused, so that
	// a dial to a BIRD that is not there yet looks like silence.
	dialTimeout = 100 * time.Millisecond
	minBackoff  = 20 * time.Millisecond
	maxBackoff  = 250 * time.Millisecond
	// A session that lasted this long was a good one; the next attempt starts
	// from minBackoff again.
	goodSession = time.Second
)

// Options says whom to speak to and as whom.
type Options struct {
	Local    netip.Addr     // the address to dial from, IPv4; 127.0.0.2 when zero
	Peer     netip.AddrPort // where BIRD listens, IPv4
	LocalAS  uint32         // our AS; DefaultLocalAS when zero; never PeerAS
	PeerAS   uint32         // BIRD's AS on this session
	RouterID netip.Addr     // our BGP identifier, IPv4; Local when zero
	Password string         // TCP-MD5 key (RFC 2385), at most 80 bytes; "" signs nothing. See NewPassword, ProbeMD5
	HoldTime time.Duration  // offered hold time, whole seconds, 3 s to 65535 s; DefaultHoldTime when zero
	Log      *slog.Logger   // nil logs nothing

	// OnWritten, when set, hears of every write of routes, right after it: the
	// oldest Cause among the batches that it carried, when the write was done,
	// and the revision that the peer has been sent with it. Cause is zero for
	// the full announcement at a session's start, which no single decision
	// caused. It is called in the announcer's goroutine, before State tells
	// of the write, and must not block.
	OnWritten func(cause, at time.Time, revision uint64)
}

// withDefaults returns the options with zero fields filled in.
func (o Options) withDefaults() Options {
	if !o.Local.IsValid() {
		o.Local = netip.AddrFrom4([4]byte{127, 0, 0, 2})
	}
	if o.LocalAS == 0 {
		o.LocalAS = DefaultLocalAS
	}
	if !o.RouterID.IsValid() {
		o.RouterID = o.Local
	}
	if o.HoldTime == 0 {
		o.HoldTime = DefaultHoldTime
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

func (o Options) validate() error {
	switch {
	case !o.Local.Is4():
		return fmt.Errorf("local address %s is not IPv4", o.Local)
	case !o.Peer.Addr().Is4() || o.Peer.Port() == 0:
		return fmt.Errorf("peer %s is not an IPv4 address with a port", o.Peer)
	case o.PeerAS == 0 || o.PeerAS == o.LocalAS:
		return fmt.Errorf("peer AS %d must be neither 0 nor our own, %d", o.PeerAS, o.LocalAS)
	case !o.RouterID.Is4() || o.RouterID.IsUnspecified():
		return fmt.Errorf("router id %s is not a non-zero IPv4 address", o.RouterID)
	case len(o.Password) > maxPassword:
		return fmt.Errorf("password has %d bytes, TCP-MD5 takes at most %d", len(o.Password), maxPassword)
	case o.HoldTime < 3*time.Second || o.HoldTime > 65535*time.Second || o.HoldTime%time.Second != 0:
		return fmt.Errorf("hold time %s is not whole seconds from 3 s to 65535 s", o.HoldTime)
	}
	return nil
}

// State is what is known of the session.
type State struct {
	Established bool
	Since       time.Time // when Established last changed; zero until the first session
	// Written is the revision of the newest batch that this session has been
	// sent, WrittenAt when that was done. Without a session it is 0, and the
	// peer has nothing from us.
	Written   uint64
	WrittenAt time.Time
	// Announced4 and Announced6 count the VIPs that the peer was told to
	// advertise, de-preferred ones included; 0 without a session.
	Announced4, Announced6 int
	Attempts               uint64 // connections tried
	Sessions               uint64 // sessions established
	LastError              error  // why the last attempt failed or the last session ended; nil before either
}

// Announcer is the BGP speaker. It implements task.Task.
type Announcer struct {
	options Options
	dial    func(context.Context) (net.Conn, error)
	state   *latest.Value[State]
	ready   chan struct{}
	isReady sync.Once

	mu      sync.Mutex
	pending pending
	beat    time.Time
	wake    chan struct{} // pending has something; conflating
	beaten  chan struct{} // a beat that had become too old was renewed; conflating

	table table // owned by Run's goroutine
}

// New returns an announcer that does nothing until Run. Options that make no
// sense are Run's error.
func New(o Options) *Announcer {
	a := &Announcer{
		options: o.withDefaults(),
		state:   latest.New(State{}),
		ready:   make(chan struct{}),
		wake:    make(chan struct{}, 1),
		beaten:  make(chan struct{}, 1),
		table:   newTable(),
	}
	a.dial = a.dialTCP
	return a
}

// State returns the session's state.
func (a *Announcer) State() *latest.Value[State] { return a.state }

// Ready is closed when the first session is established.
func (a *Announcer) Ready() <-chan struct{} { return a.ready }

// String implements task.Task.
func (a *Announcer) String() string { return "announcer" }

// Post hands over a decision. It never blocks and may be called from any
// goroutine. Batches that could not be written yet are merged, the newest
// advertisement of each VIP wins. The batch's map is not kept.
func (a *Announcer) Post(b Batch) {
	a.mu.Lock()
	a.pending.merge(b)
	a.mu.Unlock()
	notify(a.wake)
}

// Beat says that the gate's loop was alive at t. It never blocks and may be
// called from any goroutine; the newest beat counts. To let every KEEPALIVE
// leave in time, beat at least every [MaxBeatAge]/2.
func (a *Announcer) Beat(t time.Time) {
	a.mu.Lock()
	// Only a session that found the beat too old waits for one.
	awaited := !a.fresh()
	if t.After(a.beat) {
		a.beat = t
	}
	a.mu.Unlock()
	if awaited {
		notify(a.beaten)
	}
}

func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (a *Announcer) beatIsFresh() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.fresh()
}

// fresh tells whether the beat is young enough. The caller holds the mutex.
func (a *Announcer) fresh() bool { return !a.beat.IsZero() && time.Since(a.beat) < MaxBeatAge }

func (a *Announcer) take() pending {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.pending
	a.pending = pending{}
	return p
}

// Run keeps the session up until ctx ends. Then it writes what is still
// pending, ends the session with a Cease NOTIFICATION, and returns nil. It
// fails only for options that make no sense.
func (a *Announcer) Run(ctx context.Context) error {
	if err := a.options.validate(); err != nil {
		return fmt.Errorf("announcing to %s: %w", a.options.Peer, err)
	}
	enc, err := newEncoder(a.options)
	if err != nil {
		return fmt.Errorf("announcing to %s: %w", a.options.Peer, err)
	}
	backoff := minBackoff
	for a.awaitBeat(ctx) {
		err := a.attempt(ctx, enc)
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		s := a.state.Load()
		if s.Established && time.Since(s.Since) >= goodSession {
			backoff = minBackoff
		}
		a.down(err)
		if !sleep(ctx, backoff) {
			break
		}
		backoff = min(2*backoff, maxBackoff)
	}
	return nil
}

// awaitBeat waits for a fresh beat. It returns false when ctx ended first.
func (a *Announcer) awaitBeat(ctx context.Context) bool {
	for !a.beatIsFresh() {
		select {
		case <-a.beaten:
		case <-ctx.Done():
			return false
		}
	}
	return ctx.Err() == nil
}

// attempt connects once and serves the session until it ends.
func (a *Announcer) attempt(ctx context.Context, enc *encoder) error {
	a.state.Update(func(s State) State { s.Attempts++; return s })
	// What waits is bounded by the VIPs there are, however long BIRD is away.
	a.table.apply(a.take(), func(vip.VIP, Advertisement) {})
	conn, err := a.dial(ctx)
	if err != nil {
		return fmt.Errorf("connecting to BIRD at %s: %w", a.options.Peer, err)
	}
	if err := newSession(a, enc, conn).run(ctx); err != nil {
		return fmt.Errorf("session with BIRD at %s: %w", a.options.Peer, err)
	}
	return nil
}

func (a *Announcer) up() {
	a.state.Update(func(s State) State {
		s.Established, s.Since = true, time.Now()
		s.Sessions++
		return s
	})
	a.isReady.Do(func() { close(a.ready) })
	a.options.Log.Info("session with BIRD is up", "peer", a.options.Peer)
}

// down notes the end of an attempt or a session; err is nil when we stopped.
func (a *Announcer) down(err error) {
	before := a.state.Load()
	after := before
	if before.Established {
		after = State{Since: time.Now(), Attempts: before.Attempts, Sessions: before.Sessions, LastError: before.LastError}
	}
	if err != nil {
		after.LastError = err
	}
	a.state.Set(after)
	switch {
	case err == nil && before.Established:
		a.options.Log.Info("session with BIRD was ended by us", "peer", a.options.Peer)
	case err == nil:
	case before.Established:
		a.options.Log.Warn("session with BIRD was lost", "peer", a.options.Peer, "error", err)
	case before.LastError == nil || before.LastError.Error() != err.Error():
		a.options.Log.Info("no session with BIRD yet", "peer", a.options.Peer, "attempts", before.Attempts, "error", err)
	}
}

func (a *Announcer) dialTCP(ctx context.Context) (net.Conn, error) {
	d := net.Dialer{
		Timeout:   dialTimeout,
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(a.options.Local, 0)),
		KeepAlive: -1, // BGP has its own
	}
	// MPTCP and TCP_MD5SIG exclude each other.
	d.SetMultipathTCP(false)
	if a.options.Password != "" {
		d.Control = signWith(a.options.Password, a.options.Peer.Addr())
	}
	conn, err := d.DialContext(ctx, "tcp4", a.options.Peer.String())
	if err != nil && a.options.Password != "" && errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("%w (a peer that does not listen, or has another TCP-MD5 key, is silent)", err)
	}
	return conn, err
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
