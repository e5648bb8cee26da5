package readiness

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// decoder decodes the messages of one watch, assembles parts and rejects violations of the
// protocol. Its memory is bounded by MaxVIPs. All work on a part is done when it arrives: the last
// one only hands over what was staged.
type decoder struct {
	watchID  string // empty before the first message
	position Position
	synced   bool
	names    nameTable
	// staged is the state whose parts are being received, and its revision; its kind is kindNone
	// when there are none.
	staged   event
	stagedAt uint64
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
	changed []VIPReadiness
	removed []vip.VIP

	drainEnd time.Time // kindGoingAway
}

// decode decodes a message received at the given time.
func (d *decoder) decode(m *response, at time.Time) (event, error) {
	e := event{}
	var err error
	if e.lease, err = durationFromProto(m.GetLease(), "lease", minLease, MaxLease); err == nil {
		err = d.checkPosition(m.GetPosition())
	}
	if err == nil && d.watchID == "" {
		err = d.decodeFirst(m, &e)
	}
	if err != nil {
		return e, err
	}
	revision := m.GetPosition().GetRevision()
	snapshot, delta := m.GetSnapshot(), m.GetDelta()
	part := (d.staged.kind == kindSnapshot && snapshot != nil) || (d.staged.kind == kindDelta && delta != nil)
	if d.staged.kind != kindNone && (revision != d.stagedAt || !part) {
		return e, fmt.Errorf("the last part of revision %d is missing", d.stagedAt)
	}
	switch x := m.GetEvent().(type) {
	case *readinessv1.WatchReadinessResponse_Snapshot:
		if d.synced && !snapshot.GetSynced() {
			return e, errors.New("unsynced snapshot after a synced one")
		}
		err = d.stage(kindSnapshot, revision, snapshot.GetVips(), nil, at)
		if err == nil && snapshot.GetLast() {
			d.synced = snapshot.GetSynced()
			err = d.complete(&e)
		}
	case *readinessv1.WatchReadinessResponse_Delta:
		if revision == d.position.Revision {
			return e, fmt.Errorf("a delta did not advance the revision %d", revision)
		}
		err = d.stage(kindDelta, revision, delta.GetChanged(), delta.GetRemoved(), at)
		if err == nil && delta.GetLast() {
			err = d.complete(&e)
		}
	case *readinessv1.WatchReadinessResponse_Heartbeat:
		e.kind, err = kindHeartbeat, d.checkSameRevision(revision)
	case *readinessv1.WatchReadinessResponse_GoingAway:
		left, drainErr := durationFromProto(x.GoingAway.GetDrainFor(), "drain_for", 0, maxStaleGrace)
		e.kind, e.drainEnd, err = kindGoingAway, at.Add(left), cmp.Or(d.checkSameRevision(revision), drainErr)
	default:
		err = errors.New("message has no known event")
	}
	e.position, e.synced = d.position, d.synced
	return e, err
}

// checkPosition compares the position with the previous one.
func (d *decoder) checkPosition(p *readinessv1.Position) error {
	switch id, revision := p.GetInstanceId(), p.GetRevision(); {
	case id == "" || len(id) > maxNameBytes:
		return fmt.Errorf("the instance_id has %d bytes, outside 1…%d", len(id), maxNameBytes)
	case revision == 0:
		return errors.New("the revision is 0 or absent")
	case d.position.InstanceID != "" && d.position.InstanceID != id:
		return fmt.Errorf("the instance_id changed from %q to %q", d.position.InstanceID, id)
	case revision < d.position.Revision:
		return fmt.Errorf("the revision went back from %d to %d", d.position.Revision, revision)
	}
	return nil
}

// decodeFirst decodes the fields that only the first message has.
func (d *decoder) decodeFirst(m *response, e *event) (err error) {
	if m.GetSnapshot() == nil {
		return errors.New("the first message is not a snapshot")
	}
	id := m.GetWatchId()
	if id == "" || len(id) > maxNameBytes {
		return fmt.Errorf("the watch_id has %d bytes, outside 1…%d", len(id), maxNameBytes)
	}
	if e.staleGrace, err = durationFromProto(m.GetStaleGrace(), "stale_grace", 0, maxStaleGrace); err != nil {
		return err
	}
	d.watchID, d.position.InstanceID = id, m.GetPosition().GetInstanceId()
	e.first, e.watchID = true, id
	return nil
}

// checkSameRevision checks a message that does not complete a new state.
func (d *decoder) checkSameRevision(revision uint64) error {
	if revision != d.position.Revision {
		return fmt.Errorf("the revision moved from %d to %d without a delta", d.position.Revision, revision)
	}
	return nil
}

// stage adds a part to the staged state, or starts one.
func (d *decoder) stage(k kind, revision uint64, changed []*readinessv1.VipReadiness, removed []string,
	at time.Time,
) error {
	if d.staged.kind == kindNone {
		d.stagedAt = revision
		d.staged = event{kind: k}
		d.names.begin(revision, k == kindSnapshot)
	}
	d.staged.changed = growStaged(d.staged.changed, len(changed), d.names.size())
	for _, m := range changed {
		v, err := d.names.name(m.GetVip(), false)
		if err != nil {
			return err
		}
		r, err := readinessFromProto(v, m, at)
		if err != nil {
			return err
		}
		d.staged.changed = append(d.staged.changed, r)
	}
	for _, text := range removed {
		v, err := d.names.name(text, true)
		if err != nil {
			return err
		}
		d.staged.removed = append(d.staged.removed, v)
	}
	return nil
}

// growStaged returns staged with room for more. It grows in few steps, the last of which is the
// number of VIPs that the watch knows: a decision about all of them is common.
func growStaged(staged []VIPReadiness, more, known int) []VIPReadiness {
	need := len(staged) + more
	if need <= cap(staged) {
		return staged
	}
	size := max(need, 4*cap(staged))
	if need <= known {
		size = min(size, known)
	}
	return append(make([]VIPReadiness, 0, size), staged...)
}

// complete moves the staged state to e. Data of a load balancer that is not synced are discarded.
func (d *decoder) complete(e *event) error {
	if d.names.live > MaxVIPs {
		// The stream ends, and the next one starts with a snapshot.
		return fmt.Errorf("the load balancer sent more than %d VIPs", MaxVIPs)
	}
	d.names.compact()
	e.kind = d.staged.kind
	d.position.Revision = d.stagedAt
	if d.synced {
		e.changed, e.removed = d.staged.changed, d.staged.removed
	}
	d.staged, d.stagedAt = event{}, 0
	return nil
}
