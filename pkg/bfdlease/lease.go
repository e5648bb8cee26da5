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
	// Timeout is the timeout of set elements. It equals the default hold time of the loopback session.
	Timeout = 3 * time.Second
	// Interval is the time between two refreshes.
	Interval = time.Second
	// freshness is the maximum age of an order that is refreshed; the sender of an older one hangs.
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
	refresh func(content) error         // refreshes the elements of the attracting families
	write   func(content) error         // writes the table
	intact  func(content) (bool, error) // reports whether the table has its content
	version func() (uint32, error)      // returns the generation of the ruleset
	remove  func() error                // removes the table

	// Owned by Run.
	gateways   []netip.Addr
	written    bool      // the table contains the gateways and State.Attract
	sessions   bool      // the last write had gateways
	refreshed  time.Time // last write or refresh with the full Timeout
	generation uint32    // of the ruleset with an intact table; 0 after a write
}

// change replaces the gateways; done receives the result.
type change struct {
	gateways []netip.Addr
	done     chan error
}

// New returns a Lease that is idle until Run.
func New(log *slog.Logger) *Lease {
	lease := &Lease{
		log: log, began: time.Now().Add(-time.Nanosecond), changes: make(chan change),
		refresh: refreshTable, write: writeTable, intact: intact, version: generation, remove: removeTable,
	}
	_, _ = rand.Read(lease.token[:]) // crypto/rand never fails
	return lease
}

// String implements task.Task.
func (lease *Lease) String() string { return "BFD lease" }

// State returns the state of the lease in the kernel.
func (lease *Lease) State() *latest.Value[State] { return &lease.state }

// Attract orders the families that attract traffic. It does not block. Each call is also a
// heartbeat: the lease of an order older than a second is not refreshed.
func (lease *Lease) Attract(now time.Time, families Families) {
	heard := int64(now.Sub(lease.began))
	// After a stall Run may have found the last order too old, and retries after the elements expired.
	late := heard-lease.heard.Swap(heard) > int64(freshness)
	if late || lease.ordered.Load() != families {
		lease.ordered.Set(families)
	}
}

// Settled reports whether the kernel permits BFD packets only for the ordered families.
func (lease *Lease) Settled() bool {
	ordered, state := lease.ordered.Load(), lease.state.Load()
	for family := range ordered {
		if state.Attract[family] && !ordered[family] {
			return false
		}
	}
	return true
}

// Gateways replaces the addresses of static gateways and returns after they are written to the
// kernel. Without addresses the table is removed. Run must be running.
func (lease *Lease) Gateways(ctx context.Context, addresses []netip.Addr) error {
	change := change{addresses, make(chan error, 1)}
	select {
	case lease.changes <- change:
		return <-change.done // bounded by the netlink timeout
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run maintains the table until ctx ends, in the network namespace of the calling thread. It then
// writes the table without attracting families. Without gateways an order does not wake Run: with
// a single VIP every flip is an order, and BIRD would answer the poll that a change of State
// triggers before it reads the UPDATE of the flip.
func (lease *Lease) Run(ctx context.Context) error {
	timer := time.After(0)
	failures := backoff.Backoff{Min: 50 * time.Millisecond, Max: Interval}
	_, changed := lease.ordered.Get()
	for {
		reordered := changed
		if len(lease.gateways) == 0 {
			reordered = nil
		}
		var done chan error
		select {
		case <-ctx.Done():
			lease.apply(time.Now(), Families{})
			return nil
		case change := <-lease.changes:
			lease.written = lease.written && slices.Equal(lease.gateways, change.gateways)
			lease.gateways, done = slices.Clone(change.gateways), change.done
		case <-reordered:
		case <-timer:
		}
		// Before apply reads the time of the order: an order during apply wakes the next pass.
		var ordered Families
		ordered, changed = lease.ordered.Get()
		err := lease.apply(time.Now(), ordered)
		wait := Interval
		if err != nil {
			wait = failures.Next()
		} else {
			failures.Reset()
		}
		timer = time.After(wait)
		if err == nil && len(lease.gateways) == 0 {
			timer = nil // without gateways no element needs a refresh
		}
		if done != nil {
			done <- err
		}
	}
}

// apply reconciles the table with the ordered families and updates State.
func (lease *Lease) apply(now time.Time, ordered Families) error {
	state := lease.state.Load()
	heard := lease.heard.Load()
	fresh := heard != 0 && now.Sub(lease.began)-time.Duration(heard) <= freshness
	rest := Timeout - now.Sub(lease.refreshed)
	var attract Families
	for family := range ordered {
		// Without a fresh order the elements expire instead of being removed: a frontend that was
		// briefly starved of CPU time must not lose its sessions.
		attract[family] = len(lease.gateways) > 0 && ordered[family] &&
			(fresh || state.Attract[family] && rest >= time.Millisecond) // with 0 ms it would not expire
	}
	if fresh {
		rest = Timeout
	}
	content := content{lease.gateways, attract, rest, lease.token}
	if err := lease.ensure(now, content, fresh && attract != Families{}, state.Attract); err != nil {
		if state.Err == nil || state.Err.Error() != err.Error() {
			lease.log.Error("failed to write the lease of BFD sessions; static gateways may stay attracted", "error", err)
			state.Err = err
			lease.state.Set(state)
		}
		return err
	}
	since := now
	if !lease.sessions {
		since = time.Time{} // the order precedes the first gateway
	}
	lease.sessions = len(lease.gateways) > 0
	if state.Err != nil || state.Attract != attract {
		for family := range attract {
			if state.Attract[family] != attract[family] {
				state.Since[family] = since
			}
		}
		if state.Err != nil {
			lease.log.Info("lease of BFD sessions written again")
		}
		state.Attract, state.Err = attract, nil
		lease.state.Set(state)
	}
	return nil
}

// ensure refreshes the lease if a refresh is due. It writes the table if the content has changed
// since the last write, or another process changed the table.
func (lease *Lease) ensure(now time.Time, content content, refresh bool, before Families) error {
	if len(content.gateways) == 0 {
		if lease.written {
			return nil
		}
		err := lease.remove()
		lease.written = err == nil
		return err
	}
	generation, err := lease.version()
	unchanged := lease.written && before == content.attract && err == nil
	if unchanged && generation != lease.generation {
		// Nearly all transactions change other tables.
		unchanged, err = lease.intact(content)
		unchanged, lease.generation = unchanged && err == nil, generation
	}
	if unchanged {
		// A timer tick may be slightly early.
		if !refresh || now.Sub(lease.refreshed) < Interval-Interval/10 {
			return nil
		}
		err := lease.refresh(content)
		if err == nil {
			lease.refreshed = now
			return nil
		}
		lease.log.Warn("failed to refresh the lease of BFD sessions, writing its table again", "error", err)
	}
	lease.written = false
	if err := lease.write(content); err != nil {
		return err
	}
	lease.written, lease.generation = true, 0
	if content.rest == Timeout {
		lease.refreshed = now
	}
	return nil
}
