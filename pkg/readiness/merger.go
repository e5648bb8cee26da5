package readiness

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Update holds the merged messages since the last Take (newest wins) and the current state of the
// streams.
type Update struct {
	// Position is the position of the returned state, of the newest instance of the load balancer
	// that was synced. Zero before the first.
	Position Position
	// Complete reports whether Changed is a whole state: a VIP that is absent from it is not ready.
	// Otherwise Changed and Removed are changes to the previous state.
	Complete bool
	// Changed and Removed are owned by the caller.
	Changed map[vip.VIP]VIPReadiness
	Removed vip.Set
	// ReceivedAt is the receipt of the oldest merged message that changed anything; zero if none
	// did.
	ReceivedAt time.Time

	// Open reports whether a stream is open on which a message arrived, synced or not.
	Open bool
	// Synced reports whether a stream that renews the lease of Position is open: the state is valid
	// until LeaseEnd.
	Synced bool
	// LeaseEnd is the latest receipt plus lease over the synced streams of the instance in
	// Position.
	LeaseEnd time.Time
	// LastMessage is the receipt of the newest message on those streams.
	LastMessage time.Time
	// EndedAt is when the last of those streams ended; zero while Synced.
	EndedAt time.Time
	// StaleGrace is how long the data plane of that instance forwards without its process.
	StaleGrace time.Duration
	// GoingAway reports whether that instance is stopping; it forwards until DrainEnd.
	GoingAway bool
	DrainEnd  time.Time

	// Err is the error for operators why no stream is open; nil while one is, and before the first
	// attempt has failed.
	Err error
}

// updateMerger merges the events of all streams into one Update. Its methods do not block.
type updateMerger struct {
	changed chan struct{} // holds one token: Take has a change

	mu      sync.Mutex
	streams uint64 // streams on which a message arrived
	open    map[*streamState]struct{}
	pending Update // includes the current state of the streams
	// known is the set of VIPs of the state in pending.Position.
	known vip.Set
	// newest is the newest stream that supplied the state: a stream of another instance replaces
	// the state only if it is newer.
	newest uint64
}

// streamState is the state of one stream.
type streamState struct {
	seq        uint64 // order of the first messages; 0 before
	instance   string
	synced     bool // a synced snapshot arrived
	staleGrace time.Duration
	goingAway  bool
	drainEnd   time.Time
}

func newUpdateMerger() *updateMerger {
	return &updateMerger{changed: make(chan struct{}, 1), open: make(map[*streamState]struct{})}
}

// take returns the pending update and resets it to the current state of the streams.
func (m *updateMerger) take() Update {
	m.mu.Lock()
	defer m.mu.Unlock()
	u := m.pending
	m.pending.Complete, m.pending.Changed, m.pending.Removed, m.pending.ReceivedAt = false, nil, nil, time.Time{}
	return u
}

func (m *updateMerger) wake() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// merge applies an event of a stream, received at the given time. On an error the stream must end.
func (m *updateMerger) merge(h *streamState, s event, at time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.first {
		m.streams++
		h.seq, h.instance, h.staleGrace = m.streams, s.position.InstanceID, s.staleGrace
		m.open[h] = struct{}{}
		m.pending.Open, m.pending.Err = true, nil
	}
	if s.kind == kindGoingAway {
		h.goingAway, h.drainEnd = true, s.drainEnd
	}
	var err error
	switch {
	case s.kind == kindSnapshot && s.synced:
		err = m.snapshot(h, s, at)
	case s.kind == kindDelta && h.synced && m.isCurrent(h):
		err = m.delta(s, at)
	}
	if err != nil {
		return err
	}
	if h.synced && m.isCurrent(h) {
		m.renew(h, s, at)
	}
	m.wake()
	return nil
}

// isCurrent reports whether the stream belongs to the instance of the merged state.
func (m *updateMerger) isCurrent(h *streamState) bool {
	return h.instance == m.pending.Position.InstanceID
}

// renew extends the lease by a message of a synced stream of the current instance.
func (m *updateMerger) renew(h *streamState, s event, at time.Time) {
	p := &m.pending
	p.Synced, p.EndedAt, p.StaleGrace = true, time.Time{}, h.staleGrace
	if end := at.Add(s.lease); end.After(p.LeaseEnd) {
		p.LeaseEnd = end
	}
	if at.After(p.LastMessage) {
		p.LastMessage = at
	}
	if h.goingAway && !p.GoingAway {
		p.GoingAway, p.DrainEnd = true, h.drainEnd
		m.markChanged(at)
	}
}

// markChanged records that the pending update contains a change received at the given time.
func (m *updateMerger) markChanged(at time.Time) {
	if p := &m.pending; p.ReceivedAt.IsZero() || at.Before(p.ReceivedAt) {
		p.ReceivedAt = at
	}
}

// snapshot applies a synced snapshot.
func (m *updateMerger) snapshot(h *streamState, s event, at time.Time) error {
	p := &m.pending
	if !m.isCurrent(h) {
		if h.seq < m.newest {
			return nil // of an instance that was replaced by a newer one
		}
		*p = Update{Open: p.Open, Err: p.Err, ReceivedAt: p.ReceivedAt}
	} else if p.Synced && s.position.Revision <= p.Position.Revision {
		// Another stream has supplied a newer state. The next delta of this stream starts at a
		// position that was applied, so it fits as soon as it is newer.
		h.synced, m.newest = true, max(m.newest, h.seq)
		return nil
	} else if s.position.Revision < p.Position.Revision {
		return fmt.Errorf("the revision of instance %q went back from %d to %d", h.instance, p.Position.Revision,
			s.position.Revision)
	}
	h.synced, m.newest = true, max(m.newest, h.seq)
	p.Position = s.position
	p.Complete, p.Changed, p.Removed = true, s.changed, nil
	m.known = s.known
	m.markChanged(at)
	return nil
}

// delta applies a delta of the current instance. It starts at a position of its stream that was
// applied or is older than an applied one: what it repeats is unchanged, and what it adds is newer.
func (m *updateMerger) delta(s event, at time.Time) error {
	p := &m.pending
	if s.position.Revision <= p.Position.Revision {
		return nil
	}
	for v := range s.changed {
		m.known[v] = struct{}{}
	}
	for v := range s.removed {
		delete(m.known, v)
	}
	if len(m.known) > MaxVIPs {
		// The stream ends, and the next one starts with a snapshot.
		return fmt.Errorf("the load balancer sent more than %d VIPs", MaxVIPs)
	}
	if len(p.Changed)+len(p.Removed)+len(s.removed) > 2*MaxVIPs {
		return fmt.Errorf("the load balancer replaced its VIPs faster than the frontend reads them")
	}
	p.Position = s.position
	m.markChanged(at)
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

// end handles the end of a stream or a failed attempt to open one.
func (m *updateMerger) end(h *streamState, at time.Time, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.open, h)
	p := &m.pending
	p.Open = len(m.open) > 0
	if !p.Open {
		p.Err = err
	}
	synced := false
	for o := range m.open {
		synced = synced || (o.synced && m.isCurrent(o))
	}
	if p.Synced && !synced {
		p.Synced, p.EndedAt = false, at
		m.markChanged(at)
	}
	m.wake()
}
