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
	last  *namedVIP // that was named last
	// staged is the incomplete state whose parts are being received, stagedAt its revision. Its kind
	// is kindNone between states.
	staged   event
	stagedAt uint64
	known    int // size of names when the first part arrived
}

// namedVIP is a VIP that the watch has named.
type namedVIP struct {
	text     string // "" once it was removed
	vip      vip.VIP
	revision uint64 // newest revision that names it
	// next followed in an earlier revision. Revisions have the same order, so most VIPs are found
	// without a map lookup.
	next *namedVIP
}

type event struct {
	kind  kind // kindNone for a part that does not complete a state
	lease time.Duration
	// position is the position of the newest complete state.
	position Position
	synced   bool
	held     string

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
func (decoder *decoder) decode(message *response, receivedAt time.Time) (event, error) {
	decoded := event{held: cleanDetail(message.GetHeld())}
	kind, content := contentOf(message)
	var err error
	if decoded.lease, err = durationFromProto(message.GetLease(), "lease", minLease, MaxLease); err == nil {
		err = decoder.checkPosition(message.GetPosition())
	}
	if err == nil && decoder.watchID == "" {
		err = decoder.decodeFirst(message, kind, &decoded)
	}
	if err != nil {
		return decoded, err
	}
	// Nothing may come between the parts of a state: a state is applied whole or not at all.
	revision := message.GetPosition().GetRevision()
	if decoder.staged.kind != kindNone && (revision != decoder.stagedAt || kind != decoder.staged.kind) {
		return decoded, fmt.Errorf("the last part of revision %d is missing", decoder.stagedAt)
	}
	switch kind {
	case kindSnapshot, kindDelta:
		if kind == kindDelta && revision == decoder.position.Revision {
			return decoded, fmt.Errorf("a delta did not advance the revision %d", revision)
		}
		if kind == kindSnapshot && decoder.synced && !content.synced {
			return decoded, errors.New("unsynced snapshot after a synced one")
		}
		err = decoder.stage(kind, revision, content, receivedAt)
		if err == nil && content.last {
			if kind == kindSnapshot {
				decoder.synced = content.synced
			}
			err = decoder.complete(&decoded)
		}
	case kindHeartbeat:
		decoded.kind, err = kind, decoder.checkSameRevision(revision)
	case kindGoingAway:
		left, drainErr := durationFromProto(message.GetGoingAway().GetDrainFor(), "drain_for", 0, maxStaleGrace)
		decoded.kind, decoded.drainEnd = kind, receivedAt.Add(left)
		err = cmp.Or(decoder.checkSameRevision(revision), drainErr)
	default:
		err = errors.New("message has no known event")
	}
	decoded.position, decoded.synced = decoder.position, decoder.synced
	return decoded, err
}

type content struct {
	changed      []*readinessv1.ReadinessGroup
	removed      []string
	synced, last bool
}

// contentOf returns the kind of a message, and the content of a snapshot or delta.
func contentOf(message *response) (kind, content) {
	switch e := message.GetEvent().(type) {
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
func (decoder *decoder) checkPosition(position *readinessv1.Position) error {
	switch id, revision := position.GetInstanceId(), position.GetRevision(); {
	case id == "" || len(id) > maxNameBytes:
		return fmt.Errorf("the instance_id has %d bytes, outside 1…%d", len(id), maxNameBytes)
	case revision == 0:
		return errors.New("the revision is 0 or absent")
	case decoder.position.InstanceID != "" && decoder.position.InstanceID != id:
		return fmt.Errorf("the instance_id changed from %q to %q", decoder.position.InstanceID, id)
	case revision < decoder.position.Revision:
		return fmt.Errorf("the revision went back from %d to %d", decoder.position.Revision, revision)
	}
	return nil
}

// decodeFirst decodes the additional fields of the first message.
func (decoder *decoder) decodeFirst(message *response, kind kind, decoded *event) (err error) {
	if kind != kindSnapshot {
		return errors.New("the first message is not a snapshot")
	}
	id := message.GetWatchId()
	if id == "" || len(id) > maxNameBytes {
		return fmt.Errorf("the watch_id has %d bytes, outside 1…%d", len(id), maxNameBytes)
	}
	if decoded.staleGrace, err = durationFromProto(message.GetStaleGrace(), "stale_grace", 0, maxStaleGrace); err != nil {
		return err
	}
	decoder.watchID, decoder.position.InstanceID = id, message.GetPosition().GetInstanceId()
	decoded.first, decoded.watchID = true, id
	return nil
}

// checkSameRevision checks a message that does not complete a new state.
func (decoder *decoder) checkSameRevision(revision uint64) error {
	if revision != decoder.position.Revision {
		return fmt.Errorf("the revision moved from %d to %d without a delta", decoder.position.Revision, revision)
	}
	return nil
}

// stage adds a part to the staged state. The first part starts a new state.
func (decoder *decoder) stage(kind kind, revision uint64, part content, receivedAt time.Time) error {
	if decoder.staged.kind == kindNone {
		decoder.stagedAt, decoder.known = revision, len(decoder.names)
		decoder.staged = event{kind: kind}
		if kind == kindSnapshot {
			decoder.names, decoder.last = make(map[string]*namedVIP, decoder.known), nil
		}
	}
	// Count first, so that the staged VIPs are copied at most once per part.
	count := 0
	for _, group := range part.changed {
		count += len(group.GetVips())
	}
	decoder.staged.changed = growStaged(decoder.staged.changed, count, decoder.known)
	for _, group := range part.changed {
		shared, err := readinessFromProto(group.GetReadiness(), receivedAt)
		if err != nil {
			return fmt.Errorf("VIPs %v: %w", group.GetVips(), err)
		}
		for _, name := range group.GetVips() {
			if shared.VIP, err = decoder.name(name); err != nil {
				return err
			}
			decoder.staged.changed = append(decoder.staged.changed, shared)
		}
	}
	for _, name := range part.removed {
		v, err := decoder.name(name)
		if err != nil {
			return err
		}
		decoder.staged.removed = append(decoder.staged.removed, v)
	}
	return nil
}

// name returns the VIP of a text and records that the staged revision names it. A second time in
// one revision is an error.
func (decoder *decoder) name(text string) (vip.VIP, error) {
	var named *namedVIP
	if last := decoder.last; last != nil && last.next != nil && last.next.text == text && text != "" {
		named = last.next
	} else {
		named = decoder.names[text]
	}
	if named == nil {
		v, err := vip.Parse(text)
		if err != nil {
			return v, err
		}
		// Two texts of one VIP would pass the check for a second name.
		if v.String() != text {
			return v, fmt.Errorf("VIP %q is not canonical; use %s", text, v)
		}
		named = &namedVIP{text: text, vip: v}
		decoder.names[text] = named
	}
	if decoder.last != nil {
		decoder.last.next = named
	}
	decoder.last = named
	switch {
	case named.revision == decoder.stagedAt:
		return named.vip, fmt.Errorf("VIP %s is named twice in revision %d", named.vip, decoder.stagedAt)
	case len(decoder.staged.changed)+len(decoder.staged.removed) >= MaxVIPs:
		return named.vip, fmt.Errorf("revision %d names more than %d VIPs", decoder.stagedAt, MaxVIPs)
	}
	named.revision = decoder.stagedAt
	return named.vip, nil
}

// growStaged returns staged with capacity for more VIPs. It grows in few steps, the last of which
// is the number of VIPs that the watch named before: decisions about all VIPs are common.
func growStaged(staged []VIPReadiness, more, known int) []VIPReadiness {
	need := len(staged) + more
	if need <= cap(staged) {
		return staged
	}
	size := need // of a revision with one part
	if len(staged) > 0 {
		size = max(need, 4*cap(staged), maxRevisionVIPs)
	}
	if need <= known {
		size = min(size, known)
	}
	return append(make([]VIPReadiness, 0, size), staged...)
}

// complete moves the staged state to e. It discards the VIPs of an unsynced load balancer.
func (decoder *decoder) complete(completed *event) error {
	// Forget removed VIPs only now: their revision may not name them again.
	for _, v := range decoder.staged.removed {
		text := v.String()
		if named := decoder.names[text]; named != nil {
			named.text, named.next = "", nil // another VIP may still precede it
		}
		delete(decoder.names, text)
	}
	if len(decoder.names) > MaxVIPs {
		// The error ends the stream. The next stream starts with a snapshot.
		return fmt.Errorf("the load balancer sent more than %d VIPs", MaxVIPs)
	}
	completed.kind = decoder.staged.kind
	decoder.position.Revision = decoder.stagedAt
	if decoder.synced {
		completed.changed, completed.removed = decoder.staged.changed, decoder.staged.removed
	}
	decoder.staged, decoder.stagedAt = event{}, 0
	return nil
}
