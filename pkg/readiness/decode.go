package readiness

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

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
	names    nameTable
	// header is the current message without its snapshot or delta.
	header response
	// Caches of the last decoded values, which many VIPs of a message share.
	sharedDetail detail
	sharedSince  since
	// staged is the incomplete state whose parts are being received, stagedAt its revision. Its kind
	// is kindNone between states.
	staged   event
	stagedAt uint64
	known    int // size of names when the first part arrived
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

// decode decodes a message in wire format that was received at the given time. It does not retain
// data.
func (d *decoder) decode(data []byte, at time.Time) (event, error) {
	e := event{}
	k, content, err := d.split(data)
	m := &d.header
	if err == nil {
		e.lease, err = durationFromProto(m.GetLease(), "lease", minLease, MaxLease)
	}
	if err == nil {
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
		var synced, last bool
		synced, last, err = d.stage(k, revision, content, at)
		if err == nil && k == kindSnapshot && d.synced && !synced {
			return e, errors.New("unsynced snapshot after a synced one")
		}
		if err == nil && last {
			if k == kindSnapshot {
				d.synced = synced
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

// split decodes a message into header. It returns a snapshot or delta undecoded.
func (d *decoder) split(data []byte) (k kind, content []byte, err error) {
	proto.Reset(&d.header)
	for len(data) > 0 {
		field, wireType, tagSize := protowire.ConsumeTag(data)
		size := protowire.ConsumeFieldValue(field, wireType, data[max(0, tagSize):])
		switch {
		case tagSize < 0:
			return k, nil, protowire.ParseError(tagSize)
		case size < 0:
			return k, nil, protowire.ParseError(size)
		case wireType != protowire.BytesType || (field != fieldSnapshot && field != fieldDelta):
			// A single encoded field is a valid message, so fields can be merged one by one.
			if err = mergeFields.Unmarshal(data[:tagSize+size], &d.header); err != nil {
				return k, nil, err
			}
		case k != kindNone:
			return k, nil, errSeveralEvents
		default:
			k = kindDelta
			if field == fieldSnapshot {
				k = kindSnapshot
			}
			content, _ = protowire.ConsumeBytes(data[tagSize:])
		}
		data = data[tagSize+size:]
	}
	var other kind
	switch d.header.GetEvent().(type) {
	case *readinessv1.WatchReadinessResponse_Heartbeat:
		other = kindHeartbeat
	case *readinessv1.WatchReadinessResponse_GoingAway:
		other = kindGoingAway
	}
	if k != kindNone && other != kindNone {
		return k, nil, errSeveralEvents
	}
	return max(k, other), content, nil
}

var (
	mergeFields      = proto.UnmarshalOptions{Merge: true}
	errSeveralEvents = errors.New("message has several events")
)

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
func (d *decoder) stage(k kind, revision uint64, content []byte, at time.Time) (synced, last bool, err error) {
	if d.staged.kind == kindNone {
		d.stagedAt, d.known = revision, d.names.size()
		d.staged = event{kind: k}
		d.names.begin(revision, k == kindSnapshot)
	}
	var f field
	for len(content) > 0 {
		content, err = f.consume(content)
		switch {
		case err != nil:
		case f.is(fieldChanged, protowire.BytesType):
			if staged := d.staged.changed; len(staged) == cap(staged) {
				// Estimate the number of remaining VIPs from the length of this one.
				more := 1 + len(content)/max(len(f.bytes), leastVIPBytes)
				d.staged.changed = growStaged(staged, more, d.known)
			}
			d.staged.changed = append(d.staged.changed, VIPReadiness{})
			err = d.vipReadiness(&d.staged.changed[len(d.staged.changed)-1], f.bytes, at)
		case k == kindDelta && f.is(fieldRemoved, protowire.BytesType):
			var v vip.VIP
			v, err = d.names.name(f.bytes, true)
			d.staged.removed = append(d.staged.removed, v)
		case k == kindSnapshot && f.is(fieldSynced, protowire.VarintType):
			synced = protowire.DecodeBool(f.varint)
		case f.is(fieldLast, protowire.VarintType):
			last = protowire.DecodeBool(f.varint)
		}
		if err != nil {
			return false, false, err
		}
	}
	return synced, last, nil
}

// leastVIPBytes is the minimum size of an encoded VIP with a state.
const leastVIPBytes = 16

// growStaged returns staged with capacity for more VIPs. It grows in few steps, the last of which
// is the number of VIPs that the watch has named before, because decisions about all VIPs are
// common.
func growStaged(staged []VIPReadiness, more, known int) []VIPReadiness {
	need := len(staged) + more // an estimate
	size := max(need, min(4*cap(staged), MaxVIPs))
	if need-need/8 <= known {
		size = min(size, max(need, known))
	}
	return append(make([]VIPReadiness, 0, size), staged...)
}

// complete moves the staged state to e. It discards the VIPs of an unsynced load balancer.
func (d *decoder) complete(e *event) error {
	if d.names.live > MaxVIPs {
		// The error ends the stream. The next stream starts with a snapshot.
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
