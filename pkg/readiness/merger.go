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

// Update holds the merged messages since the last Take (newest wins) and the state of the streams.
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
	// Held describes the removals of targets that the load balancer holds until a confirmation.
	Held string

	// Err is why no stream is open; nil while one is open, and before the first attempt has failed.
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

func (merger *updateMerger) take() Update {
	merger.mu.Lock()
	defer merger.mu.Unlock()
	update := merger.pending.Take()
	if merger.merged != nil {
		update.Changed, update.Removed = merger.merged.split()
		merger.merged = nil
	}
	if update.Complete {
		update.Removed = nil // absent from Changed
	}
	return update
}

// Take returns u and removes the changes from it.
func (update *Update) Take() Update {
	taken := *update
	update.Complete, update.Changed, update.Removed, update.ReceivedAt = false, nil, nil, time.Time{}
	return taken
}

// merge applies an event of a stream, received at a given time. After an error the stream must end.
func (merger *updateMerger) merge(stream *streamState, event event, receivedAt time.Time) error {
	notify, err := merger.apply(stream, event, receivedAt)
	if err != nil || !notify {
		return err
	}
	// A pending token announces earlier changes, which may exceed MaxInline.
	inline := event.kind == kindDelta && len(event.changed)+len(event.removed) <= MaxInline && len(merger.changed) == 0
	if !inline || merger.consume == nil || !merger.consume() {
		latest.Wake(merger.changed)
	}
	return nil
}

// apply merges an event and reports whether to notify the consumer.
func (merger *updateMerger) apply(stream *streamState, event event, receivedAt time.Time) (notify bool, err error) {
	merger.mu.Lock()
	defer merger.mu.Unlock()
	if event.first {
		merger.streams++
		stream.seq, stream.instance, stream.staleGrace = merger.streams, event.position.InstanceID, event.staleGrace
		merger.open[stream] = struct{}{}
		merger.pending.Open, merger.pending.Err = true, nil
	}
	if event.kind == kindGoingAway {
		stream.goingAway, stream.drainEnd = true, event.drainEnd
	}
	switch {
	case event.kind == kindSnapshot && event.synced:
		err = merger.snapshot(stream, event, receivedAt)
	case event.kind == kindDelta && stream.synced && merger.isCurrent(stream):
		err = merger.delta(event, receivedAt)
	}
	if err != nil {
		return false, err
	}
	// A stream vouches for the state only if it belongs to the instance that supplied it.
	if stream.synced && merger.isCurrent(stream) {
		merger.renew(stream, event, receivedAt)
	}
	// A part that does not complete a state only renews the lease. Throttle these notifications.
	if event.kind == kindNone && !event.first && receivedAt.Sub(merger.renewed) < event.lease/partRenewals {
		return false, nil
	}
	merger.renewed = receivedAt
	return true, nil
}

// partRenewals limits the notifications for incomplete states per lease: a decision about 10 000
// VIPs has 50 parts, which arrive within milliseconds.
const partRenewals = 10

// isCurrent reports whether the stream belongs to the current instance, which supplied the state.
func (merger *updateMerger) isCurrent(stream *streamState) bool {
	return stream.instance == merger.pending.Position.InstanceID
}

// renew extends the lease for a message of a synced stream of the current instance.
func (merger *updateMerger) renew(stream *streamState, event event, receivedAt time.Time) {
	pending := &merger.pending
	pending.Synced, pending.EndedAt, pending.StaleGrace = true, time.Time{}, stream.staleGrace
	pending.Held = event.held
	if end := receivedAt.Add(event.lease); end.After(pending.LeaseEnd) {
		pending.LeaseEnd = end
	}
	if receivedAt.After(pending.LastMessage) {
		pending.LastMessage = receivedAt
	}
	if stream.goingAway && !pending.GoingAway {
		pending.GoingAway, pending.DrainEnd = true, stream.drainEnd
		merger.markChanged(receivedAt)
	}
}

// markChanged records that the pending update contains a change received at the given time.
func (merger *updateMerger) markChanged(receivedAt time.Time) {
	if pending := &merger.pending; pending.ReceivedAt.IsZero() || receivedAt.Before(pending.ReceivedAt) {
		pending.ReceivedAt = receivedAt
	}
}

// snapshot applies a synced snapshot.
func (merger *updateMerger) snapshot(stream *streamState, event event, receivedAt time.Time) error {
	pending := &merger.pending
	if !merger.isCurrent(stream) {
		if stream.seq < merger.newest {
			return nil // the instance was replaced by a newer one
		}
		// Drop the changes of the previous instance: the snapshot replaces its state.
		*pending = Update{Open: pending.Open, Err: pending.Err, ReceivedAt: pending.ReceivedAt}
	} else if pending.Synced && event.position.Revision <= pending.Position.Revision {
		// Another stream of the instance has supplied this state or a newer one. Deltas of this stream
		// continue from an applied position, so they apply as soon as they are newer.
		stream.synced, merger.newest = true, max(merger.newest, stream.seq)
		return nil
	} else if event.position.Revision < pending.Position.Revision {
		return fmt.Errorf("the revision of instance %q went back from %d to %d", stream.instance, pending.Position.Revision,
			event.position.Revision)
	}
	stream.synced, merger.newest = true, max(merger.newest, stream.seq)
	pending.Position, pending.Service = event.position, stream.service
	pending.Complete, pending.Changed, pending.Removed, merger.merged = true, event.changed, nil, nil
	merger.markChanged(receivedAt)
	return nil
}

// delta applies a delta of the current instance. The delta starts at or before an applied position.
// It may repeat applied changes, which has no effect, but it skips none.
func (merger *updateMerger) delta(event event, receivedAt time.Time) error {
	pending := &merger.pending
	if event.position.Revision <= pending.Position.Revision {
		return nil
	}
	switch {
	case merger.merged == nil && len(pending.Changed)+len(pending.Removed) == 0:
		pending.Changed, pending.Removed = event.changed, event.removed
	case len(event.changed)+len(event.removed) > 0:
		if merger.merged == nil {
			merger.merged = newMergedChanges(pending.Changed, pending.Removed)
			pending.Changed, pending.Removed = nil, nil
		}
		if len(merger.merged.changed)+len(event.removed) > 2*MaxVIPs {
			return errors.New("the load balancer replaced its VIPs faster than the frontend reads them")
		}
		merger.merged.add(event.changed, event.removed)
	}
	pending.Position = event.position
	merger.markChanged(receivedAt)
	return nil
}

// goingAway reports whether the load balancer has sent GoingAway on a stream.
func (merger *updateMerger) goingAway(stream *streamState) bool {
	merger.mu.Lock()
	defer merger.mu.Unlock()
	return stream.goingAway
}

// end handles the end of a stream or a failed attempt to open one.
func (merger *updateMerger) end(stream *streamState, at time.Time, err error) {
	merger.mu.Lock()
	defer merger.mu.Unlock()
	delete(merger.open, stream)
	pending := &merger.pending
	pending.Open = len(merger.open) > 0
	// While another stream is open the error of this one does not matter to the consumer.
	if !pending.Open {
		pending.Err = err
	}
	renews := func(other *streamState) bool { return other.synced && merger.isCurrent(other) }
	if pending.Synced && !slices.ContainsFunc(slices.Collect(maps.Keys(merger.open)), renews) {
		pending.Synced, pending.EndedAt = false, at
		merger.markChanged(at)
	}
	latest.Wake(merger.changed)
}
