package readiness

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Update holds the merged messages since the last Take (newest wins) and the current state of the
// streams.
type Update struct {
	// Position is the position of the returned state. Its instance is the newest synced instance of
	// the load balancer. It is zero before the first synced state.
	Position Position
	// Service is the name of the gRPC service that supplied the state; empty before the first.
	Service string
	// Complete reports whether Changed is a complete state: a VIP that is absent from it is not
	// ready. Otherwise Changed and Removed are changes to the previous state.
	Complete bool
	// Changed and Removed contain no duplicates and keep the order of arrival. The caller owns them.
	Changed []VIPReadiness
	Removed []vip.VIP
	// ReceivedAt is the receipt of the oldest merged message with a change; zero without a change.
	ReceivedAt time.Time

	// Open reports whether an open stream has received a message, synced or not.
	Open bool
	// Synced reports whether a synced stream of the instance in Position is open: the state is
	// valid until LeaseEnd, the latest receipt plus lease over those streams.
	Synced   bool
	LeaseEnd time.Time
	// LastMessage is the receipt of the newest message on those streams. EndedAt is the end of the
	// last of them; zero while Synced.
	LastMessage, EndedAt time.Time
	// StaleGrace is the time for which the data plane of that instance forwards without its process.
	StaleGrace time.Duration
	// GoingAway reports whether that instance is stopping; it forwards until DrainEnd.
	GoingAway bool
	DrainEnd  time.Time

	// Err is the reason why no stream is open; nil while a stream is open, and before the first
	// attempt has failed.
	Err error
}

// updateMerger merges the events of all streams into one Update. Its methods do not block.
type updateMerger struct {
	changed chan struct{} // holds a token: Take may return changes
	consume func() bool   // see WatcherOptions.Consume

	mu      sync.Mutex
	streams uint64 // streams on which a message arrived
	open    map[*streamState]struct{}
	pending Update // includes the current state of the streams
	// merged replaces the changes of pending if several events arrive before Take.
	merged  *mergedChanges
	renewed time.Time // receipt of the newest message that notified the consumer
	// newest is the sequence number of the newest stream that supplied the state. A stream of another
	// instance replaces the state only if it is newer.
	newest uint64
}

// streamState is the state of one stream.
type streamState struct {
	seq        uint64 // sequence number, assigned by the first message
	instance   string
	service    string // of the load balancer
	synced     bool   // a synced snapshot arrived
	staleGrace time.Duration
	goingAway  bool
	drainEnd   time.Time
}

func newUpdateMerger() *updateMerger {
	return &updateMerger{changed: make(chan struct{}, 1), open: make(map[*streamState]struct{})}
}

func (m *updateMerger) take() Update {
	m.mu.Lock()
	defer m.mu.Unlock()
	u := m.pending.Take()
	if m.merged != nil {
		u.Changed, u.Removed = m.merged.split()
		m.merged = nil
	}
	if u.Complete {
		u.Removed = nil // absent from Changed
	}
	return u
}

// Take returns u and removes the changes from it.
func (u *Update) Take() Update {
	taken := *u
	u.Complete, u.Changed, u.Removed, u.ReceivedAt = false, nil, nil, time.Time{}
	return taken
}

// merge applies an event of a stream that was received at the given time. After an error the stream
// must end.
func (m *updateMerger) merge(s *streamState, e event, at time.Time) error {
	notify, err := m.apply(s, e, at)
	if err != nil || !notify {
		return err
	}
	// A pending token announces earlier changes, which may exceed MaxInline.
	inline := e.kind == kindDelta && len(e.changed)+len(e.removed) <= MaxInline && len(m.changed) == 0
	if !inline || m.consume == nil || !m.consume() {
		latest.Wake(m.changed)
	}
	return nil
}

// apply merges an event and reports whether to notify the consumer.
func (m *updateMerger) apply(s *streamState, e event, at time.Time) (notify bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.first {
		m.streams++
		s.seq, s.instance, s.staleGrace = m.streams, e.position.InstanceID, e.staleGrace
		m.open[s] = struct{}{}
		m.pending.Open, m.pending.Err = true, nil
	}
	if e.kind == kindGoingAway {
		s.goingAway, s.drainEnd = true, e.drainEnd
	}
	switch {
	case e.kind == kindSnapshot && e.synced:
		err = m.snapshot(s, e, at)
	case e.kind == kindDelta && s.synced && m.isCurrent(s):
		err = m.delta(e, at)
	}
	if err != nil {
		return false, err
	}
	if s.synced && m.isCurrent(s) {
		m.renew(s, e, at)
	}
	// A part that does not complete a state only renews the lease. Throttle these notifications.
	if e.kind == kindNone && !e.first && at.Sub(m.renewed) < e.lease/partRenewals {
		return false, nil
	}
	m.renewed = at
	return true, nil
}

// partRenewals limits the notifications for incomplete states per lease: a decision about 10 000
// VIPs has 50 parts, which arrive within milliseconds.
const partRenewals = 10

// isCurrent reports whether the stream belongs to the current instance, which supplied the state.
func (m *updateMerger) isCurrent(s *streamState) bool {
	return s.instance == m.pending.Position.InstanceID
}

// renew extends the lease for a message of a synced stream of the current instance.
func (m *updateMerger) renew(s *streamState, e event, at time.Time) {
	p := &m.pending
	p.Synced, p.EndedAt, p.StaleGrace = true, time.Time{}, s.staleGrace
	if end := at.Add(e.lease); end.After(p.LeaseEnd) {
		p.LeaseEnd = end
	}
	if at.After(p.LastMessage) {
		p.LastMessage = at
	}
	if s.goingAway && !p.GoingAway {
		p.GoingAway, p.DrainEnd = true, s.drainEnd
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
func (m *updateMerger) snapshot(s *streamState, e event, at time.Time) error {
	p := &m.pending
	if !m.isCurrent(s) {
		if s.seq < m.newest {
			return nil // the instance was replaced by a newer one
		}
		*p = Update{Open: p.Open, Err: p.Err, ReceivedAt: p.ReceivedAt}
	} else if p.Synced && e.position.Revision <= p.Position.Revision {
		// Another stream of the instance has supplied this state or a newer one. Deltas of this stream
		// continue from an applied position, so they apply as soon as they are newer.
		s.synced, m.newest = true, max(m.newest, s.seq)
		return nil
	} else if e.position.Revision < p.Position.Revision {
		return fmt.Errorf("the revision of instance %q went back from %d to %d", s.instance, p.Position.Revision,
			e.position.Revision)
	}
	s.synced, m.newest = true, max(m.newest, s.seq)
	p.Position, p.Service = e.position, s.service
	p.Complete, p.Changed, p.Removed, m.merged = true, e.changed, nil, nil
	m.markChanged(at)
	return nil
}

// delta applies a delta of the current instance. The delta starts at or before an applied position.
// It may repeat applied changes, which has no effect, but it skips none.
func (m *updateMerger) delta(e event, at time.Time) error {
	p := &m.pending
	if e.position.Revision <= p.Position.Revision {
		return nil
	}
	switch {
	case m.merged == nil && len(p.Changed)+len(p.Removed) == 0:
		p.Changed, p.Removed = e.changed, e.removed
	case len(e.changed)+len(e.removed) > 0:
		if m.merged == nil {
			m.merged = newMergedChanges(p.Changed, p.Removed)
			p.Changed, p.Removed = nil, nil
		}
		if len(m.merged.changed)+len(e.removed) > 2*MaxVIPs {
			return errors.New("the load balancer replaced its VIPs faster than the frontend reads them")
		}
		m.merged.add(e.changed, e.removed)
	}
	p.Position = e.position
	m.markChanged(at)
	return nil
}

// goingAway reports whether the load balancer has sent GoingAway on a stream.
func (m *updateMerger) goingAway(s *streamState) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return s.goingAway
}

// end handles the end of a stream or a failed attempt to open one.
func (m *updateMerger) end(s *streamState, at time.Time, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.open, s)
	p := &m.pending
	p.Open = len(m.open) > 0
	if !p.Open {
		p.Err = err
	}
	renews := func(o *streamState) bool { return o.synced && m.isCurrent(o) }
	if p.Synced && !slices.ContainsFunc(slices.Collect(maps.Keys(m.open)), renews) {
		p.Synced, p.EndedAt = false, at
		m.markChanged(at)
	}
	latest.Wake(m.changed)
}
