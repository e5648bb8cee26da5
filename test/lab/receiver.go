package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"
)

// ReceiverConfig describes a Receiver.
type ReceiverConfig struct {
	// Local are the addresses that it listens on, one session each. A session
	// is of the family of its address.
	Local []netip.Addr
	Port  uint16 // BGPPort when 0
	AS    uint32 // GatewayAS when 0
	// RouterID is the first IPv4 address of Local, or GatewayA4, when not set.
	RouterID netip.Addr
	// HoldSeconds is the offered hold time; the constant HoldSeconds when 0.
	HoldSeconds int
	// Default is true when it announces a default route on each session.
	Default bool
}

// ReceiverA listens where the usual gateway does, and sends default routes.
func ReceiverA() ReceiverConfig {
	return ReceiverConfig{Local: []netip.Addr{GatewayA4, GatewayA6}, Default: true}
}

// Attributes are the path attributes of the prefixes that an UPDATE announced.
type Attributes struct {
	ASPath      []uint32 // the numbers of all segments in order
	Communities []uint32 // RFC 1997
	LocalPref   uint32   // iBGP only
	MED         uint32   // 0 without one
}

// GracefulShutdown reports whether 65535:0 (RFC 8326) was among the communities.
func (a *Attributes) GracefulShutdown() bool {
	if a != nil {
		for _, c := range a.Communities {
			if c == 0xffff0000 {
				return true
			}
		}
	}
	return false
}

// PrefixUpdate is one prefix of one UPDATE.
type PrefixUpdate struct {
	// At is the time when the last bytes of the message were read, with a reading of the monotonic
	// clock.
	At        time.Time
	Prefix    netip.Prefix
	Withdrawn bool
	// Lost is true if the session ended, and no UPDATE withdrew the prefix.
	Lost bool
	// Attributes belong to all announcements of one UPDATE; nil when withdrawn.
	// They must not be changed.
	Attributes *Attributes
}

// SessionEvent is the begin or the end of a session.
type SessionEvent struct {
	At    time.Time // as in PrefixUpdate
	Local netip.Addr
	// Up is true for the state Established (RFC 4271 section 8.2.2): OPEN and the first KEEPALIVE
	// were read.
	Up bool
	// Reason is why a session ended.
	Reason error
}

// Receiver is a passive BGP speaker that records received updates with their time of arrival. It
// replaces a gateway in measurements and shares no code with the BGP speakers under test. Its
// methods may be called from any goroutine.
//
// It only measures times: it does not forward, and of the path attributes it decodes only the
// fields of Attributes.
type Receiver struct {
	config ReceiverConfig
	ns     *NetNS
	tasks  sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	listeners []net.Listener
	conns     map[*speaker]struct{} // every open connection
	current   map[netip.Addr]*speaker
	first     int // the mark of updates[0]
	updates   []PrefixUpdate
	events    []SessionEvent
	held      int       // prefixes held, over all sessions
	heldAt    time.Time // when held changed last
	changed   chan struct{}
}

// StartReceiver listens in a namespace. The caller closes the receiver.
func StartReceiver(ns *NetNS, c ReceiverConfig) (*Receiver, error) {
	if c.Port == 0 {
		c.Port = BGPPort
	}
	if c.AS == 0 {
		c.AS = GatewayAS
	}
	if c.HoldSeconds == 0 {
		c.HoldSeconds = HoldSeconds
	}
	for _, a := range c.Local {
		if !c.RouterID.IsValid() && a.Is4() {
			c.RouterID = a
		}
	}
	if !c.RouterID.IsValid() {
		c.RouterID = GatewayA4
	}
	r := &Receiver{config: c, ns: ns, conns: map[*speaker]struct{}{}, current: map[netip.Addr]*speaker{}}
	return r, r.Listen()
}

// Listen accepts connections again after Refuse.
func (r *Receiver) Listen() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || len(r.listeners) > 0 {
		return nil
	}
	for _, a := range r.config.Local {
		l, err := r.ns.Listen("tcp", netip.AddrPortFrom(a, r.config.Port).String())
		if err != nil {
			for _, l := range r.listeners {
				err = errors.Join(err, l.Close())
			}
			r.listeners = nil
			return fmt.Errorf("receiver in %s: %w", r.ns.Name(), err)
		}
		r.listeners = append(r.listeners, l)
		r.tasks.Go(func() { r.accept(l, a) })
	}
	return nil
}

// Refuse closes the listeners, so that new connections are refused. Sessions stay.
func (r *Receiver) Refuse() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, l := range r.listeners {
		errs = append(errs, l.Close())
	}
	r.listeners = nil
	return errors.Join(errs...)
}

// accept serves one address until its listener is closed.
func (r *Receiver) accept(l net.Listener, local netip.Addr) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		s := &speaker{r: r, conn: conn, local: local, table: map[netip.Prefix]*Attributes{}}
		r.mu.Lock()
		if r.closed {
			r.mu.Unlock()
			conn.Close()
			return
		}
		r.conns[s] = struct{}{}
		r.tasks.Go(s.run)
		r.mu.Unlock()
	}
}

// Reset ends every session with a NOTIFICATION (Cease, Administrative Reset: RFC 4486) and
// closes the connections. New ones are accepted immediately.
func (r *Receiver) Reset() { r.closeConns(ceaseReset) }

// closeConns ends every connection.
func (r *Receiver) closeConns(cease byte) {
	r.mu.Lock()
	var open []*speaker
	for s := range r.conns {
		open = append(open, s)
	}
	r.mu.Unlock()
	for _, s := range open {
		s.end(cease, errClosedByReceiver)
	}
}

var errClosedByReceiver = errors.New("closed by the receiver")

// Close ends every session and waits for the receiver's goroutines. It can be called twice.
func (r *Receiver) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	err := r.Refuse()
	r.closeConns(ceaseDown)
	r.tasks.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wake()
	return err
}

// Mark returns the number of updates so far.
func (r *Receiver) Mark() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first + len(r.updates)
}

// Since returns the updates after a mark. It must not be changed.
func (r *Receiver) Since(mark int) []PrefixUpdate {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.since(mark)
}

func (r *Receiver) since(mark int) []PrefixUpdate {
	return r.updates[min(max(0, mark-r.first), len(r.updates)):len(r.updates):len(r.updates)]
}

// Forget frees the memory of all updates so far. Marks stay valid.
func (r *Receiver) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.first += len(r.updates)
	r.updates = nil
}

// Table returns the prefixes that are currently announced, on any session.
func (r *Receiver) Table() map[netip.Prefix]*Attributes {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[netip.Prefix]*Attributes{}
	for _, s := range r.current {
		maps.Copy(all, s.table)
	}
	return all
}

// Sessions returns all begins and ends of sessions so far.
func (r *Receiver) Sessions() []SessionEvent {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]SessionEvent(nil), r.events...)
}

// WaitFor waits for an update after a mark that satisfies a condition, which is called once for
// each update, in order. It does not poll.
func (r *Receiver) WaitFor(ctx context.Context, mark int, match func(PrefixUpdate) bool) (PrefixUpdate, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		more := r.since(mark)
		for _, received := range more {
			if match(received) {
				return received, nil
			}
		}
		mark = max(mark, r.first) + len(more)
		if err := r.sleep(ctx); err != nil {
			return PrefixUpdate{}, fmt.Errorf("no such update among %d: %w", r.first+len(r.updates), err)
		}
	}
}

// WaitCount waits until exactly n prefixes are announced, counted once for each session that
// holds them, and returns when the number became n.
func (r *Receiver) WaitCount(ctx context.Context, n int) (time.Time, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.held != n {
		if err := r.sleep(ctx); err != nil {
			return time.Time{}, fmt.Errorf("the receiver holds %d prefixes, not %d: %w", r.held, n, err)
		}
	}
	return r.heldAt, nil
}

// Established waits until a session is up on each address, and returns when the
// last of them came up.
func (r *Receiver) Established(ctx context.Context) (time.Time, error) {
	return r.waitSessions(ctx, len(r.config.Local))
}

// Down waits until no session is up, and returns when the last one ended.
func (r *Receiver) Down(ctx context.Context) (time.Time, error) { return r.waitSessions(ctx, 0) }

func (r *Receiver) waitSessions(ctx context.Context, n int) (time.Time, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.current) != n {
		if err := r.sleep(ctx); err != nil {
			return time.Time{}, fmt.Errorf("the receiver has %d sessions, not %d: %w", len(r.current), n, err)
		}
	}
	if len(r.events) == 0 {
		return time.Time{}, nil
	}
	return r.events[len(r.events)-1].At, nil
}

// sleep releases the lock, waits for a change, and takes the lock again.
func (r *Receiver) sleep(ctx context.Context) error {
	if r.closed {
		return errors.New("the receiver is closed")
	}
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	changed := r.changed
	r.mu.Unlock()
	defer r.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// wake wakes all waiters; the lock is held.
func (r *Receiver) wake() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// up records that a session is established. It rejects a second session from the same address
// (RFC 4271 section 6.8).
func (r *Receiver) up(s *speaker, at time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current[s.local] != nil {
		return false
	}
	r.current[s.local] = s
	r.events = append(r.events, SessionEvent{At: at, Local: s.local, Up: true})
	r.wake()
	return true
}

// down removes a connection and its routes.
func (r *Receiver) down(s *speaker, at time.Time, reason error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, s)
	if r.current[s.local] != s {
		return
	}
	delete(r.current, s.local)
	for p := range s.table {
		r.updates = append(r.updates, PrefixUpdate{At: at, Prefix: p, Withdrawn: true, Lost: true})
	}
	if len(s.table) > 0 {
		r.held, r.heldAt = r.held-len(s.table), at
	}
	s.table = nil
	r.events = append(r.events, SessionEvent{At: at, Local: s.local, Reason: reason})
	r.wake()
}

// store keeps the routes of UPDATEs that were read at the same time.
func (r *Receiver) store(s *speaker, at time.Time, routes []PrefixUpdate) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := len(s.table)
	for i := range routes {
		routes[i].At = at
		if routes[i].Withdrawn {
			delete(s.table, routes[i].Prefix)
		} else {
			s.table[routes[i].Prefix] = routes[i].Attributes
		}
	}
	r.updates = append(r.updates, routes...)
	if n := len(s.table); n != before {
		r.held, r.heldAt = r.held+n-before, at
	}
	r.wake()
}
