package readiness

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Update is everything that a Watcher heard since the last Take, merged so that
// the newest wins, and what it knows at that moment.
type Update struct {
	// Position is the state that was handed over: that of the newest instance
	// of the load balancer that was synced. Zero before the first.
	Position Position
	// Complete says that Changed is a whole state: a VIP that is absent from it
	// is not ready. Otherwise Changed and Removed are to be applied to what was
	// handed over before.
	Complete bool
	// Changed and Removed belong to the caller.
	Changed map[vip.VIP]VIPReadiness
	Removed vip.Set
	// HeardAt is when the oldest message merged here came that said more than
	// "still alive"; zero if none did.
	HeardAt time.Time

	// Open says that a stream is open on which the load balancer has spoken,
	// synced or not.
	Open bool
	// Synced says that an open stream stands behind Position: what was handed
	// over holds until LeaseEnd.
	Synced bool
	// LeaseEnd is receipt plus lease of the message that is valid longest, over
	// the synced streams of the instance in Position.
	LeaseEnd time.Time
	// LastHeard is when the newest message came on those streams.
	LastHeard time.Time
	// EndedAt is when the last of those streams ended; zero while Synced.
	EndedAt time.Time
	// StaleGrace is how long the data plane of that instance goes on without it.
	StaleGrace time.Duration
	// GoingAway says that that instance stops; it forwards until DrainEnd.
	GoingAway bool
	DrainEnd  time.Time

	// Err says in words why no stream is open; nil while one is, and before the
	// first attempt has failed.
	Err error
}

// inbox merges what all streams say. Its methods never wait for anything.
type inbox struct {
	changed chan struct{} // holds one token: Take has something new

	mu      sync.Mutex
	opened  uint64 // streams ever spoken on
	open    map[*hearing]struct{}
	pending Update // also holds what is known at the moment
	// known is the set of VIPs of the state in pending.Position.
	known vip.Set
	// newest is the newest stream that the state came from: a stream of another
	// instance counts only if it is newer.
	newest uint64
}

// hearing is what the inbox knows of one stream.
type hearing struct {
	number     uint64 // in the order of the first messages; 0 before
	instance   string
	synced     bool // a synced snapshot came
	staleGrace time.Duration
	away       bool
	drainEnd   time.Time
}

func newInbox() *inbox {
	return &inbox{changed: make(chan struct{}, 1), open: make(map[*hearing]struct{})}
}

// take returns what is pending and leaves only what holds at the moment.
func (b *inbox) take() Update {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.pending
	b.pending.Complete, b.pending.Changed, b.pending.Removed, b.pending.HeardAt = false, nil, nil, time.Time{}
	return u
}

func (b *inbox) wake() {
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

// hear merges a message of a stream, received at the given time. An error means
// that the stream must end.
func (b *inbox) hear(h *hearing, s said, at time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.first {
		b.opened++
		h.number, h.instance, h.staleGrace = b.opened, s.position.InstanceID, s.staleGrace
		b.open[h] = struct{}{}
		b.pending.Open, b.pending.Err = true, nil
	}
	if s.kind == kindGoingAway {
		h.away, h.drainEnd = true, s.drainEnd
	}
	var err error
	switch {
	case s.kind == kindSnapshot && s.synced:
		err = b.snapshot(h, s, at)
	case s.kind == kindDelta && h.synced && b.counts(h):
		err = b.delta(s, at)
	}
	if err != nil {
		return err
	}
	if h.synced && b.counts(h) {
		b.vouched(h, s, at)
	}
	b.wake()
	return nil
}

// counts tells whether the stream belongs to the instance whose state was
// handed over.
func (b *inbox) counts(h *hearing) bool { return h.instance == b.pending.Position.InstanceID }

// vouched notes that a synced stream of the counted instance spoke.
func (b *inbox) vouched(h *hearing, s said, at time.Time) {
	p := &b.pending
	p.Synced, p.EndedAt, p.StaleGrace = true, time.Time{}, h.staleGrace
	if end := at.Add(s.lease); end.After(p.LeaseEnd) {
		p.LeaseEnd = end
	}
	if at.After(p.LastHeard) {
		p.LastHeard = at
	}
	if h.away && !p.GoingAway {
		p.GoingAway, p.DrainEnd = true, h.drainEnd
		b.said(at)
	}
}

// said notes that the pending update holds something new since the given time.
func (b *inbox) said(at time.Time) {
	if p := &b.pending; p.HeardAt.IsZero() || at.Before(p.HeardAt) {
		p.HeardAt = at
	}
}

// snapshot merges a synced snapshot.
func (b *inbox) snapshot(h *hearing, s said, at time.Time) error {
	p := &b.pending
	if !b.counts(h) {
		if h.number < b.newest {
			return nil // of an instance that a newer one has replaced
		}
		*p = Update{Open: p.Open, Err: p.Err, HeardAt: p.HeardAt}
	} else if p.Synced && s.position.Revision <= p.Position.Revision {
		// Another stream is ahead and stands behind the state. What this one
		// says next is relative to a position that was applied, so its deltas
		// fit as soon as they are newer.
		h.synced, b.newest = true, max(b.newest, h.number)
		return nil
	} else if s.position.Revision < p.Position.Revision {
		return fmt.Errorf("the revision of instance %q went back from %d to %d", h.instance, p.Position.Revision, s.position.Revision)
	}
	h.synced, b.newest = true, max(b.newest, h.number)
	p.Position = s.position
	p.Complete, p.Changed, p.Removed = true, s.changed, nil
	b.known = s.known
	b.said(at)
	return nil
}

// delta merges a delta of the counted instance. It starts at a position of its
// stream that was applied, or is older than one that was: what it repeats is the
// same, and what it adds is newer.
func (b *inbox) delta(s said, at time.Time) error {
	p := &b.pending
	if s.position.Revision <= p.Position.Revision {
		return nil
	}
	for v := range s.changed {
		b.known[v] = struct{}{}
	}
	for v := range s.removed {
		delete(b.known, v)
	}
	if len(b.known) > MaxVIPs {
		// The state is no longer ours to hand over whole; the stream ends, and
		// the next one brings a snapshot.
		return fmt.Errorf("the load balancer speaks of more than %d VIPs", MaxVIPs)
	}
	if len(p.Changed)+len(p.Removed)+len(s.removed) > 2*MaxVIPs {
		return fmt.Errorf("the load balancer replaced its VIPs faster than they could be taken over")
	}
	p.Position = s.position
	b.said(at)
	if p.Changed == nil && !p.Complete {
		p.Changed = s.changed
	} else {
		maps.Copy(p.Changed, s.changed)
	}
	if p.Complete {
		for v := range s.removed {
			delete(p.Changed, v)
		}
		return nil
	}
	for v := range s.changed {
		delete(p.Removed, v)
	}
	for v := range s.removed {
		delete(p.Changed, v)
	}
	if p.Removed == nil {
		p.Removed = s.removed
	} else {
		maps.Copy(p.Removed, s.removed)
	}
	return nil
}

// end notes that a stream ended, or that an attempt to open one failed.
func (b *inbox) end(h *hearing, at time.Time, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.open, h)
	p := &b.pending
	p.Open = len(b.open) > 0
	if !p.Open {
		p.Err = err
	}
	synced := false
	for o := range b.open {
		synced = synced || (o.synced && b.counts(o))
	}
	if p.Synced && !synced {
		p.Synced, p.EndedAt = false, at
		b.said(at)
	}
	b.wake()
}
