package readiness

import (
	"fmt"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// decoder decodes the messages of one watch, assembles parts and rejects violations of the
// protocol. Its memory is bounded by MaxVIPs.
type decoder struct {
	watchID  string // empty before the first message
	position Position
	synced   bool

	// The parts received so far; kindNone when there are none.
	staged   kind
	stagedAt uint64 // their revision
	changed  map[vip.VIP]VIPReadiness
	removed  vip.Set
	// known holds the VIPs of a snapshot; the merger owns it after the last part.
	known vip.Set
}

// event is a decoded message.
type event struct {
	kind  kind // kindNone: a part that is not the last
	lease time.Duration
	// position is the position of the newest complete state.
	position Position
	synced   bool

	// Only in the first message of a watch.
	first      bool
	watchID    string
	staleGrace time.Duration

	// Only in a synced snapshot or a delta of a synced watch. The receiver owns them.
	changed map[vip.VIP]VIPReadiness
	removed vip.Set
	known   vip.Set // snapshot: the keys of changed

	drainEnd time.Time // kindGoingAway
}

// decode decodes a message received at the given time.
func (d *decoder) decode(m *readinessv1.WatchReadinessResponse, at time.Time) (event, error) {
	s := event{}
	var err error
	if s.lease, err = durationFromProto(m.GetLease(), "lease", minLease, MaxLease); err != nil {
		return s, err
	}
	if err := d.checkPosition(m.GetPosition()); err != nil {
		return s, err
	}
	revision := m.GetPosition().GetRevision()
	if d.watchID == "" {
		if err := d.decodeFirst(m, &s); err != nil {
			return s, err
		}
	}
	if d.staged != kindNone && (revision != d.stagedAt || kindOf(m) != d.staged) {
		return s, fmt.Errorf("the last part of revision %d is missing", d.stagedAt)
	}
	switch e := m.GetEvent().(type) {
	case *readinessv1.WatchReadinessResponse_Snapshot:
		err = d.snapshot(e.Snapshot, revision, at, &s)
	case *readinessv1.WatchReadinessResponse_Delta:
		err = d.delta(e.Delta, revision, at, &s)
	case *readinessv1.WatchReadinessResponse_Heartbeat:
		s.kind, err = kindHeartbeat, d.checkSameRevision(revision)
	case *readinessv1.WatchReadinessResponse_GoingAway:
		var left time.Duration
		if err = d.checkSameRevision(revision); err == nil {
			left, err = durationFromProto(e.GoingAway.GetDrainFor(), "drain_for", 0, maxStaleGrace)
		}
		s.kind, s.drainEnd = kindGoingAway, at.Add(left)
	default:
		err = fmt.Errorf("message has no known event")
	}
	s.position, s.synced = d.position, d.synced
	return s, err
}

func kindOf(m *readinessv1.WatchReadinessResponse) kind {
	switch m.GetEvent().(type) {
	case *readinessv1.WatchReadinessResponse_Snapshot:
		return kindSnapshot
	case *readinessv1.WatchReadinessResponse_Delta:
		return kindDelta
	}
	return kindNone
}

// checkPosition compares the position with the previous one.
func (d *decoder) checkPosition(p *readinessv1.Position) error {
	switch id, revision := p.GetInstanceId(), p.GetRevision(); {
	case id == "" || len(id) > maxNameBytes:
		return fmt.Errorf("the instance_id has %d bytes, outside 1…%d", len(id), maxNameBytes)
	case revision == 0:
		return fmt.Errorf("the revision is 0 or absent")
	case d.position.InstanceID != "" && d.position.InstanceID != id:
		return fmt.Errorf("the instance_id changed from %q to %q", d.position.InstanceID, id)
	case revision < d.position.Revision:
		return fmt.Errorf("the revision went back from %d to %d", d.position.Revision, revision)
	}
	return nil
}

// decodeFirst decodes the fields that only the first message has.
func (d *decoder) decodeFirst(m *readinessv1.WatchReadinessResponse, s *event) error {
	if kindOf(m) != kindSnapshot {
		return fmt.Errorf("the first message is not a snapshot")
	}
	id := m.GetWatchId()
	if id == "" || len(id) > maxNameBytes {
		return fmt.Errorf("the watch_id has %d bytes, outside 1…%d", len(id), maxNameBytes)
	}
	grace, err := durationFromProto(m.GetStaleGrace(), "stale_grace", 0, maxStaleGrace)
	if err != nil {
		return err
	}
	d.watchID = id
	d.position.InstanceID = m.GetPosition().GetInstanceId()
	s.first, s.watchID, s.staleGrace = true, id, grace
	return nil
}

// checkSameRevision checks a message that does not complete a new state.
func (d *decoder) checkSameRevision(revision uint64) error {
	if revision != d.position.Revision {
		return fmt.Errorf("the revision moved from %d to %d without a delta", d.position.Revision, revision)
	}
	return nil
}

func (d *decoder) snapshot(m *readinessv1.Snapshot, revision uint64, at time.Time, s *event) error {
	if d.synced && !m.GetSynced() {
		return fmt.Errorf("unsynced snapshot after a synced one")
	}
	d.stage(kindSnapshot, revision, len(m.GetVips()))
	if err := d.put(m.GetVips(), at); err != nil {
		return err
	}
	if !m.GetLast() {
		return nil
	}
	d.synced = m.GetSynced()
	d.complete(s)
	return nil
}

func (d *decoder) delta(m *readinessv1.Delta, revision uint64, at time.Time, s *event) error {
	if revision == d.position.Revision {
		return fmt.Errorf("a delta did not advance the revision %d", revision)
	}
	d.stage(kindDelta, revision, len(m.GetChanged()))
	if err := d.put(m.GetChanged(), at); err != nil {
		return err
	}
	for _, text := range m.GetRemoved() {
		v, err := vip.Parse(text)
		if err != nil {
			return err
		}
		if err := d.checkUnique(v); err != nil {
			return err
		}
		if d.removed == nil {
			d.removed = make(vip.Set, len(m.GetRemoved()))
		}
		d.removed[v] = struct{}{}
	}
	if m.GetLast() {
		d.complete(s)
	}
	return nil
}

// stage starts a state unless its parts are being collected already.
func (d *decoder) stage(k kind, revision uint64, n int) {
	if d.staged != kindNone {
		return
	}
	d.staged, d.stagedAt = k, revision
	d.changed = make(map[vip.VIP]VIPReadiness, n)
	if k == kindSnapshot {
		d.known = make(vip.Set, n)
	}
}

func (d *decoder) put(vips []*readinessv1.VipReadiness, at time.Time) error {
	for _, m := range vips {
		r, err := readinessFromProto(m, at)
		if err != nil {
			return err
		}
		if err := d.checkUnique(r.VIP); err != nil {
			return err
		}
		d.changed[r.VIP] = r
		if d.staged == kindSnapshot {
			d.known[r.VIP] = struct{}{}
		}
	}
	return nil
}

// checkUnique checks that the staged state does not contain v and has room for it.
func (d *decoder) checkUnique(v vip.VIP) error {
	if _, twice := d.changed[v]; twice || d.removed.Has(v) {
		return fmt.Errorf("VIP %s is named twice in revision %d", v, d.stagedAt)
	}
	if len(d.changed)+len(d.removed) >= MaxVIPs {
		return fmt.Errorf("revision %d names more than %d VIPs", d.stagedAt, MaxVIPs)
	}
	return nil
}

// complete moves the staged state to e. Data of a load balancer that is not synced are discarded.
func (d *decoder) complete(s *event) {
	s.kind = d.staged
	d.position.Revision = d.stagedAt
	if d.synced {
		s.changed, s.removed, s.known = d.changed, d.removed, d.known
	}
	d.staged, d.stagedAt = kindNone, 0
	d.changed, d.removed, d.known = nil, nil, nil
}
