package readiness

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// decoder decodes the messages of one watch, assembles parts and rejects protocol violations. Its
// memory is bounded by MaxVIPs. Each part is decoded on arrival; the last part only hands over the
// staged state.
type decoder struct {
	watchID  string // empty before the first message
	position Position
	synced   bool
	// names maps the canonical text of each VIP of the newest state, and of those staged, to the VIP.
	// A decision about known VIPs parses and allocates nothing.
	names map[string]*namedVIP
	// staged is the incomplete state whose parts are being received, stagedAt its revision. Its kind
	// is kindNone between states.
	staged   event
	stagedAt uint64
	known    int // size of names when the first part arrived
}

// namedVIP is a VIP that the watch has named.
type namedVIP struct {
	vip      vip.VIP
	revision uint64 // newest revision that names it
}

// event is a decoded message.
type event struct {
	kind  kind // kindNone for a part that does not complete a state
	lease time.Duration
	// position is the position of the newest complete state.
	position Position
	synced   bool

	// Set only in the first message of a watch.
	first      bool
	watchID    string
	staleGrace time.Duration

	// Set only in a synced snapshot or a delta of a synced watch. The receiver owns them.
	changed []VIPReadiness
	removed []vip.VIP

	drainEnd time.Time // kindGoingAway
}

// decode decodes a message that was received at the given time.
func (d *decoder) decode(m *response, at time.Time) (event, error) {
	e := event{}
	k, content := contentOf(m)
	var err error
	if e.lease, err = durationFromProto(m.GetLease(), "lease", minLease, MaxLease); err == nil {
		err = d.checkPosition(m.GetPosition())
	}
	if err == nil && d.watchID == "" {
		err = d.decodeFirst(m, k, &e)
	}
	if err != nil {
		return e, err
	}
	revision := m.GetPosition().GetRevision()
	if d.staged.kind != kindNone && (revision != d.stagedAt || k != d.staged.kind) {
		return e, fmt.Errorf("the last part of revision %d is missing", d.stagedAt)
	}
	switch k {
	case kindSnapshot, kindDelta:
		if k == kindDelta && revision == d.position.Revision {
			return e, fmt.Errorf("a delta did not advance the revision %d", revision)
		}
		if k == kindSnapshot && d.synced && !content.synced {
			return e, errors.New("unsynced snapshot after a synced one")
		}
		err = d.stage(k, revision, content, at)
		if err == nil && content.last {
			if k == kindSnapshot {
				d.synced = content.synced
			}
			err = d.complete(&e)
		}
	case kindHeartbeat:
		e.kind, err = k, d.checkSameRevision(revision)
	case kindGoingAway:
		left, drainErr := durationFromProto(m.GetGoingAway().GetDrainFor(), "drain_for", 0, maxStaleGrace)
		e.kind, e.drainEnd, err = k, at.Add(left), cmp.Or(d.checkSameRevision(revision), drainErr)
	default:
		err = errors.New("message has no known event")
	}
	e.position, e.synced = d.position, d.synced
	return e, err
}

// content is the content of a snapshot or delta.
type content struct {
	changed      []*readinessv1.ReadinessGroup
	removed      []string
	synced, last bool
}

// contentOf returns the kind of a message, and the content of a snapshot or delta.
func contentOf(m *response) (kind, content) {
	switch e := m.GetEvent().(type) {
	case *readinessv1.WatchReadinessResponse_Snapshot:
		return kindSnapshot, content{e.Snapshot.GetGroups(), nil, e.Snapshot.GetSynced(), e.Snapshot.GetLast()}
	case *readinessv1.WatchReadinessResponse_Delta:
		return kindDelta, content{e.Delta.GetChanged(), e.Delta.GetRemoved(), false, e.Delta.GetLast()}
	case *readinessv1.WatchReadinessResponse_Heartbeat:
		return kindHeartbeat, content{}
	case *readinessv1.WatchReadinessResponse_GoingAway:
		return kindGoingAway, content{}
	}
	return kindNone, content{}
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

// decodeFirst decodes the additional fields of the first message.
func (d *decoder) decodeFirst(m *response, k kind, e *event) (err error) {
	if k != kindSnapshot {
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

// stage adds a part to the staged state. The first part starts a new state.
func (d *decoder) stage(k kind, revision uint64, part content, at time.Time) error {
	if d.staged.kind == kindNone {
		d.stagedAt, d.known = revision, len(d.names)
		d.staged = event{kind: k}
		if k == kindSnapshot {
			d.names = make(map[string]*namedVIP, d.known)
		}
	}
	count := 0
	for _, group := range part.changed {
		count += len(group.GetVips())
	}
	d.staged.changed = growStaged(d.staged.changed, count, d.known)
	for _, group := range part.changed {
		shared, err := readinessFromProto(group.GetReadiness(), at)
		if err != nil {
			return fmt.Errorf("VIPs %v: %w", group.GetVips(), err)
		}
		for _, name := range group.GetVips() {
			if shared.VIP, err = d.name(name); err != nil {
				return err
			}
			d.staged.changed = append(d.staged.changed, shared)
		}
	}
	for _, name := range part.removed {
		v, err := d.name(name)
		if err != nil {
			return err
		}
		d.staged.removed = append(d.staged.removed, v)
	}
	return nil
}

// name returns the VIP of a text and records that the staged revision names it. A second time in one
// revision is an error.
func (d *decoder) name(text string) (vip.VIP, error) {
	named := d.names[text]
	if named == nil {
		v, err := vip.Parse(text)
		if err != nil {
			return v, err
		}
		// Two texts of one VIP would pass the check for a second name.
		if v.String() != text {
			return v, fmt.Errorf("VIP %q is not canonical; use %s", text, v)
		}
		named = &namedVIP{vip: v}
		d.names[text] = named
	}
	switch {
	case named.revision == d.stagedAt:
		return named.vip, fmt.Errorf("VIP %s is named twice in revision %d", named.vip, d.stagedAt)
	case len(d.staged.changed)+len(d.staged.removed) >= MaxVIPs:
		return named.vip, fmt.Errorf("revision %d names more than %d VIPs", d.stagedAt, MaxVIPs)
	}
	named.revision = d.stagedAt
	return named.vip, nil
}

// growStaged returns staged with capacity for more VIPs. It grows in few steps, the last of which
// is the number of VIPs that the watch has named before, because decisions about all VIPs are
// common.
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

// complete moves the staged state to e. It discards the VIPs of an unsynced load balancer.
func (d *decoder) complete(e *event) error {
	for _, v := range d.staged.removed {
		delete(d.names, v.String())
	}
	if len(d.names) > MaxVIPs {
		// The error ends the stream. The next stream starts with a snapshot.
		return fmt.Errorf("the load balancer sent more than %d VIPs", MaxVIPs)
	}
	e.kind = d.staged.kind
	d.position.Revision = d.stagedAt
	if d.synced {
		e.changed, e.removed = d.staged.changed, d.staged.removed
	}
	d.staged, d.stagedAt = event{}, 0
	return nil
}
