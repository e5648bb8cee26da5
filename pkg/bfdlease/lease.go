package bfdlease

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// Timeout is the timeout of set elements. It equals the hold time of the loopback session.
	Timeout = 3 * time.Second
	// Interval is the time between two refreshes.
	Interval = time.Second
	// freshness is the maximum age of an order that is refreshed; an older order means that its
	// sender hangs.
	freshness = time.Second
)

// Families is a set of address families.
type Families [len(vip.Families)]bool

// State is the state of the lease in the kernel.
type State struct {
	// Attract holds the families whose BFD packets leave; empty without a gateway.
	Attract Families
	// Since is when Attract last changed, by family; zero if it changed with the first gateway.
	Since [len(vip.Families)]time.Time
	// Err is the error of the last write of the table; nil if it succeeded.
	Err error
}

// Lease keeps the table in the kernel. It implements task.Task.
type Lease struct {
	log     *slog.Logger
	ordered latest.Value[Families]
	began   time.Time
	heard   atomic.Int64 // time of the last order, since began; 0 before the first
	state   latest.Value[State]
	changes chan change
	token   token
	// Kernel operations; tests replace them.
	refresh func(content) error    // refreshes the elements of the attracting families
	write   func(content) error    // writes the table
	version func() (uint32, error) // returns the generation of the ruleset
	remove  func() error           // removes the table

	// Owned by Run.
	gateways   []netip.Addr
	written    bool      // the table contains the gateways and State.Attract
	sessions   bool      // the last write had gateways
	refreshed  time.Time // last write or refresh with the full Timeout
	generation uint32    // of the ruleset after the last write; 0 if unknown
}

// change replaces the gateways; done receives the result.
type change struct {
	gateways []netip.Addr
	done     chan error
}

// New returns a Lease that is idle until Run.
func New(log *slog.Logger) *Lease {
	l := &Lease{
		log: log, began: time.Now().Add(-time.Nanosecond), changes: make(chan change),
		refresh: refreshTable, write: writeTable, version: generation, remove: removeTable,
	}
	_, _ = rand.Read(l.token[:]) // crypto/rand never fails
	return l
}

// String implements task.Task.
func (l *Lease) String() string { return "BFD lease" }

// State returns the state of the lease in the kernel.
func (l *Lease) State() *latest.Value[State] { return &l.state }

// Attract orders the families that attract traffic. It does not block. Each call is also a
// heartbeat: the lease of an order older than a second is not refreshed.
func (l *Lease) Attract(now time.Time, families Families) {
	l.heard.Store(int64(now.Sub(l.began)))
	if l.ordered.Load() != families {
		l.ordered.Set(families)
	}
}

// Settled reports whether the kernel permits BFD packets only for the ordered families.
func (l *Lease) Settled() bool {
	ordered, st := l.ordered.Load(), l.state.Load()
	for f := range ordered {
		if st.Attract[f] && !ordered[f] {
			return false
		}
	}
	return true
}

// Gateways replaces the addresses of static gateways and returns after they are written to the
// kernel. Without addresses the table is removed. Run must be running.
func (l *Lease) Gateways(ctx context.Context, addresses []netip.Addr) error {
	c := change{addresses, make(chan error, 1)}
	select {
	case l.changes <- c:
		return <-c.done // bounded by the netlink timeout
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run maintains the table until ctx ends, in the network namespace of the calling thread. It then
// writes the table without attracting families. Without gateways an order does not wake Run: with
// a single VIP every flip is an order, and BIRD would answer the poll that a change of State
// triggers before it reads the UPDATE of the flip.
func (l *Lease) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failures := backoff.Backoff{Min: 50 * time.Millisecond, Max: Interval}
	for {
		_, reordered := l.ordered.Get()
		if len(l.gateways) == 0 {
			reordered = nil
		}
		var done chan error
		select {
		case <-ctx.Done():
			l.apply(time.Now(), Families{})
			return nil
		case c := <-l.changes:
			l.written = l.written && slices.Equal(l.gateways, c.gateways)
			l.gateways, done = slices.Clone(c.gateways), c.done
		case <-reordered:
		case <-timer.C:
		}
		err := l.apply(time.Now(), l.ordered.Load())
		wait := Interval
		if err != nil {
			wait = failures.Next()
		} else {
			failures.Reset()
		}
		if timer.Reset(wait); err == nil && len(l.gateways) == 0 {
			timer.Stop() // without gateways no element needs a refresh
		}
		if done != nil {
			done <- err
		}
	}
}

// apply reconciles the table with the ordered families and updates State.
func (l *Lease) apply(now time.Time, ordered Families) error {
	st := l.state.Load()
	heard := l.heard.Load()
	fresh := heard != 0 && now.Sub(l.began)-time.Duration(heard) <= freshness
	rest := Timeout - now.Sub(l.refreshed)
	var attract Families
	for f := range ordered {
		// Without a fresh order the elements expire instead of being removed: a frontend that was
		// briefly starved of CPU time must not lose its sessions.
		attract[f] = len(l.gateways) > 0 && ordered[f] && (fresh || st.Attract[f] && rest > 0)
	}
	if fresh {
		rest = Timeout
	}
	c := content{l.gateways, attract, rest, l.token}
	if err := l.ensure(now, c, fresh && attract != Families{}, st.Attract); err != nil {
		if st.Err == nil || st.Err.Error() != err.Error() {
			l.log.Error("failed to write the lease of BFD sessions; static gateways may stay attracted", "error", err)
			st.Err = err
			l.state.Set(st)
		}
		return err
	}
	since := now
	if !l.sessions {
		since = time.Time{} // the order precedes the first gateway
	}
	l.sessions = len(l.gateways) > 0
	if st.Err != nil || st.Attract != attract {
		for f := range attract {
			if st.Attract[f] != attract[f] {
				st.Since[f] = since
			}
		}
		if st.Err != nil {
			l.log.Info("lease of BFD sessions written again")
		}
		st.Attract, st.Err = attract, nil
		l.state.Set(st)
	}
	return nil
}

// ensure refreshes the lease if a refresh is due. It writes the table if the content or the
// ruleset has changed since the last write.
func (l *Lease) ensure(now time.Time, c content, refresh bool, before Families) error {
	if len(c.gateways) == 0 {
		if l.written {
			return nil
		}
		err := l.remove()
		l.written = err == nil
		return err
	}
	generation, err := l.version()
	if err != nil {
		generation = 0 // unknown: forces a write
	}
	unchanged := l.written && before == c.attract && generation != 0 && generation == l.generation
	if unchanged {
		// A timer tick may be slightly early.
		if !refresh || now.Sub(l.refreshed) < Interval-Interval/10 {
			return nil
		}
		err := l.refresh(c)
		if err == nil {
			l.refreshed = now
			return nil
		}
		l.log.Warn("failed to refresh the lease of BFD sessions, writing its table again", "error", err)
	}
	l.written = false
	if err := l.write(c); err != nil {
		return err
	}
	l.written, l.generation = true, 0
	if c.rest == Timeout {
		l.refreshed = now
	}
	// Only the write itself may separate the two generations: a concurrent transaction of another
	// process may have changed the table.
	if after, err := l.version(); err == nil && after == generation+1 {
		l.generation = after
	}
	return nil
}
