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
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// LocalAS is the private AS of the announcer (RFC 6996).
	LocalAS = 4200000000
	// DefaultHoldTime is the minimum of RFC 4271 section 4.2.
	DefaultHoldTime = 3 * time.Second
	// MaxHeartbeatAge is the maximum age of a heartbeat for which the gate counts as live.
	MaxHeartbeatAge = time.Second

	// A signed SYN to a port without the key is dropped, so a dial times out until BIRD is configured.
	dialTimeout    = 100 * time.Millisecond
	minBackoff     = 20 * time.Millisecond
	defaultSpeaker = "BIRD"
	maxBackoff     = 250 * time.Millisecond
	// After a session of this length the next attempt starts with minBackoff.
	stableSession = time.Second
)

// Options configure an Announcer.
type Options struct {
	Local    netip.Addr     // source address; 127.0.0.2 when zero
	ID       netip.Addr     // BGP identifier; Local when zero
	Peer     netip.AddrPort // address and port of the peer, of Local's family
	PeerAS   uint32         // the peer's AS in this session
	LocalAS  uint32         // the announcer's AS; LocalAS when zero, PeerAS for iBGP
	Password string         // TCP-MD5 key (RFC 2385), at most 80 bytes; "" disables signing. See NewPassword, ProbeMD5
	HoldTime time.Duration  // offered hold time in whole seconds, 3 s to 65535 s; DefaultHoldTime when zero
	Log      *slog.Logger   // nil discards logs

	// Listen, when set, is the announcer's address and port: it accepts the peer's connections and does
	// not connect itself. The port of Peer is then unused.
	Listen netip.AddrPort
	// NextHops of the VIPs of each family; when zero, Local for its own family, 100::1 for IPv6.
	NextHops [len(vip.Families)]netip.Addr
	// Speaker is the peer's name in messages; "BIRD" when empty. Any other peer may lack a family,
	// whose VIPs it does not get.
	Speaker string

	// OnWritten, when set, is called right after every write of routes with the oldest Cause of the
	// written batches, the time of the write, and the revision that was sent. Cause is zero for the
	// full announcement of a new session. It runs in the goroutine of Post or of Run, one call at a
	// time, before State is updated. It must not block, nor call the Announcer.
	OnWritten func(cause, at time.Time, revision uint64)
}

func (options Options) withDefaults() Options {
	options.Local = cmp.Or(options.Local, netip.AddrFrom4([4]byte{127, 0, 0, 2}))
	options.ID = cmp.Or(options.ID, options.Local)
	options.LocalAS = cmp.Or(options.LocalAS, LocalAS)
	options.Speaker = cmp.Or(options.Speaker, defaultSpeaker)
	for _, family := range vip.Families {
		if local := options.Local; local.Is4() == (family == vip.IPv4) {
			options.NextHops[family] = cmp.Or(options.NextHops[family], local)
		}
	}
	options.NextHops[vip.IPv6] = cmp.Or(options.NextHops[vip.IPv6], nextHop6)
	options.HoldTime = cmp.Or(options.HoldTime, DefaultHoldTime)
	options.Log = cmp.Or(options.Log, slog.New(slog.DiscardHandler))
	return options
}

func (options Options) validate() error {
	switch {
	case options.Local.IsUnspecified():
		return fmt.Errorf("local address %s is unspecified", options.Local)
	case !options.ID.Is4() || options.ID.IsUnspecified():
		return fmt.Errorf("BGP identifier %s is not a non-zero IPv4 address", options.ID)
	case options.Peer.Addr().Is4() != options.Local.Is4() || options.Peer.Port() == 0 && !options.Listen.IsValid():
		return fmt.Errorf("peer %s is not an address of the family of %s with a port", options.Peer, options.Local)
	case options.PeerAS == 0 || options.PeerAS == options.LocalAS && options.Speaker == defaultSpeaker:
		return fmt.Errorf("peer AS %d must differ from 0 and from the local AS %d", options.PeerAS, options.LocalAS)
	case !options.NextHops[vip.IPv4].Is4():
		return fmt.Errorf("next hop of IPv4 VIPs %s is not an IPv4 address", options.NextHops[vip.IPv4])
	case len(options.Password) > maxPassword:
		return fmt.Errorf("password has %d bytes; TCP-MD5 supports at most %d", len(options.Password), maxPassword)
	case options.HoldTime < 3*time.Second || options.HoldTime > 65535*time.Second || options.HoldTime%time.Second != 0:
		return fmt.Errorf("hold time %s must be whole seconds from 3 s to 65535 s", options.HoldTime)
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
	options   Options
	dial      func(context.Context) (net.Conn, error)
	acceptor  *acceptor      // of a listening announcer; nil until it listens. It belongs to Run.
	accepting sync.WaitGroup // of acceptAll and await
	state     *latest.Value[State]
	up        *latest.Value[gate.Announcer]

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
func New(options Options) *Announcer {
	announcer := &Announcer{
		options: options.withDefaults(), state: latest.New(State{}),
		up: latest.New(gate.Announcer{}), table: newTable(), wake: make(chan struct{}, 1),
	}
	if announcer.dial = announcer.dialTCP; options.Listen.IsValid() {
		announcer.dial = announcer.accept
	}
	return announcer
}

// State returns the session's state.
func (announcer *Announcer) State() *latest.Value[State] { return announcer.state }

// Up returns whether the session is established. Unlike State it does not change with each write.
func (announcer *Announcer) Up() *latest.Value[gate.Announcer] { return announcer.up }

// String implements task.Task.
func (announcer *Announcer) String() string { return "announcer" }

// Post stores a decision and writes it without blocking; the session's goroutine writes the bytes
// that do not fit the socket buffer. It is safe for concurrent use. Pending batches are merged;
// the newest advertisement of each VIP wins. Post does not retain b.Changes.
func (announcer *Announcer) Post(batch Batch) {
	announcer.mu.Lock()
	defer announcer.mu.Unlock()
	announcer.table.post(batch, announcer.session != nil)
	if announcer.session != nil && !announcer.session.post() {
		latest.Wake(announcer.wake)
	}
}

// Heartbeat records that the gate's loop was alive at t. It does not block and is safe for
// concurrent use; the newest time wins. Call it at least every second, at the instants of package
// tick: a KEEPALIVE that is due waits for it if the one before is older than [MaxHeartbeatAge].
func (announcer *Announcer) Heartbeat(alive time.Time) {
	announcer.mu.Lock()
	defer announcer.mu.Unlock()
	if alive.After(announcer.heartbeat) {
		announcer.heartbeat = alive
	}
	// Most heartbeats find the session asleep until its next KEEPALIVE and need not wake it.
	if announcer.awaited && announcer.isFresh() {
		announcer.awaited = false
		latest.Wake(announcer.wake)
	}
}

// heartbeatIsFresh reports whether the gate is live. If not, the next heartbeat wakes the session.
func (announcer *Announcer) heartbeatIsFresh() bool {
	announcer.mu.Lock()
	defer announcer.mu.Unlock()
	announcer.awaited = !announcer.isFresh()
	return !announcer.awaited
}

func (announcer *Announcer) isFresh() bool {
	return !announcer.heartbeat.IsZero() && time.Since(announcer.heartbeat) < MaxHeartbeatAge
}

// Run keeps the session up until ctx ends. It then writes pending changes, ends the session with
// a Cease NOTIFICATION, and returns nil. It fails only for invalid options.
func (announcer *Announcer) Run(ctx context.Context) error {
	enc, err := newEncoder(announcer.options)
	if err := cmp.Or(announcer.options.validate(), err); err != nil {
		return fmt.Errorf("failed to start the announcer for %s: %w", announcer.options.Peer, err)
	}
	delay := backoff.Backoff{Min: minBackoff, Max: maxBackoff}
	defer announcer.accepting.Wait()
	for announcer.awaitHeartbeat(ctx) {
		err := announcer.attempt(ctx, enc)
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		state := announcer.state.Load()
		if state.Established && time.Since(state.Since) >= stableSession {
			delay.Reset()
		}
		announcer.down(err)
		_ = delay.Wait(ctx) // awaitHeartbeat checks ctx
	}
	return nil
}

// awaitHeartbeat waits for a fresh heartbeat. It returns false when ctx ended first.
func (announcer *Announcer) awaitHeartbeat(ctx context.Context) bool {
	for !announcer.heartbeatIsFresh() {
		select {
		case <-announcer.wake:
		case <-ctx.Done():
			return false
		}
	}
	return ctx.Err() == nil
}

// attempt connects once and serves the session until it ends.
func (announcer *Announcer) attempt(ctx context.Context, enc *encoder) error {
	announcer.state.Update(func(state State) State { state.Attempts++; return state })
	conn, err := announcer.dial(ctx)
	if err != nil {
		return fmt.Errorf("failed to connect to %s at %s: %w", announcer.options.Speaker, announcer.options.Peer, err)
	}
	if err := newSession(announcer, enc, conn).run(ctx); err != nil {
		return fmt.Errorf("session with %s at %s: %w", announcer.options.Speaker, announcer.options.Peer, err)
	}
	return nil
}

func (announcer *Announcer) established() {
	now := time.Now()
	announcer.state.Update(func(state State) State {
		state.Established, state.Since, state.LastError = true, now, nil
		state.Sessions++
		return state
	})
	announcer.up.Set(gate.Announcer{Up: true, Since: now})
	announcer.options.Log.Info("session with "+announcer.options.Speaker+" established", "peer", announcer.options.Peer)
}

// down records the end of an attempt or a session; err is nil when Run was stopped.
func (announcer *Announcer) down(err error) {
	was := announcer.state.Load()
	current := was
	if was.Established {
		current = State{Since: time.Now(), Attempts: was.Attempts, Sessions: was.Sessions, LastError: was.LastError}
	}
	if err != nil {
		current.LastError = err
	}
	announcer.state.Set(current)
	if was.Established {
		announcer.up.Set(gate.Announcer{Since: current.Since})
	}
	peer := announcer.options.Speaker
	// The peer may be away for long: log a failure once, until it changes.
	switch {
	case err == nil && was.Established:
		announcer.options.Log.Info("session with "+peer+" closed", "peer", announcer.options.Peer)
	case err == nil:
	case was.Established:
		announcer.options.Log.Warn("session with "+peer+" lost", "peer", announcer.options.Peer, "error", err)
	case was.LastError == nil || was.LastError.Error() != err.Error():
		announcer.options.Log.Info("connection to "+peer+" failed, retrying", "peer", announcer.options.Peer,
			"attempts", was.Attempts, "error", err)
	}
}

func (announcer *Announcer) dialTCP(ctx context.Context) (net.Conn, error) {
	dialer := net.Dialer{
		Timeout:   dialTimeout,
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(announcer.options.Local, 0)),
		KeepAlive: -1, // BGP has its own KEEPALIVE
	}
	// MPTCP and TCP_MD5SIG exclude each other.
	dialer.SetMultipathTCP(false)
	if announcer.options.Password != "" {
		dialer.Control = signWith(announcer.options.Password, announcer.options.Peer.Addr())
	}
	conn, err := dialer.DialContext(ctx, "tcp", announcer.options.Peer.String())
	if err != nil && announcer.options.Password != "" && errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("%w (the peer does not listen or has another TCP-MD5 key)", err)
	}
	return conn, err
}
