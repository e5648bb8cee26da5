package readiness

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// response is one message of a watch.
type response = readinessv1.WatchReadinessResponse

// The wire values of states and families.
var (
	wireStates = []readinessv1.VipState{
		vip.NotReady: readinessv1.VipState_VIP_STATE_NOT_READY,
		vip.Ready:    readinessv1.VipState_VIP_STATE_READY,
		vip.Draining: readinessv1.VipState_VIP_STATE_DRAINING,
	}
	wireFamilies = []readinessv1.IpFamily{
		vip.IPv4: readinessv1.IpFamily_IP_FAMILY_IPV4,
		vip.IPv6: readinessv1.IpFamily_IP_FAMILY_IPV6,
	}
)

// FamiliesProto returns the connectivity of address families as messages.
func FamiliesProto(up map[vip.Family]bool) (list []*readinessv1.FamilyConnectivity) {
	for _, f := range vip.Families {
		if u, configured := up[f]; configured {
			list = append(list, &readinessv1.FamilyConnectivity{Family: wireFamilies[f], Up: u})
		}
	}
	return list
}

// Proto returns the position as a message; nil for the zero Position.
func (p Position) Proto() *readinessv1.Position {
	if p == (Position{}) {
		return nil
	}
	return &readinessv1.Position{InstanceId: p.InstanceID, Revision: p.Revision}
}

// Proto returns the readiness as a message. The remaining drain time is relative to now.
func (r VIPReadiness) Proto(now time.Time) *readinessv1.VipReadiness {
	m := &readinessv1.VipReadiness{
		Vip: r.VIP.String(), State: wireStates[r.State], Reason: r.Reason, Detail: r.Detail,
		ReadyTargets: r.ReadyTargets, TotalTargets: r.TotalTargets,
	}
	if r.State == vip.Draining {
		m.DrainFor = drainFor(r.DrainEnd, now)
	}
	if !r.Since.IsZero() {
		m.Since = timestamppb.New(r.Since)
	}
	return m
}

// drainFor returns the remaining drain time, at most what a receiver accepts.
func drainFor(end, now time.Time) *durationpb.Duration {
	return durationpb.New(min(max(0, end.Sub(now)), maxStaleGrace))
}

// readinessFromProto decodes the readiness of a VIP. The drain time counts from at, the receipt.
func readinessFromProto(m *readinessv1.VipReadiness, at time.Time) (VIPReadiness, error) {
	v, err := vip.Parse(m.GetVip())
	if err != nil {
		return VIPReadiness{}, err
	}
	state := slices.Index(wireStates, m.GetState())
	if state < 0 {
		return VIPReadiness{}, fmt.Errorf("VIP %s has the unknown state %d", v, m.GetState())
	}
	r := VIPReadiness{
		VIP: v, State: vip.State(state), Reason: m.GetReason(), Detail: cleanDetail(m.GetDetail()),
		ReadyTargets: m.GetReadyTargets(), TotalTargets: m.GetTotalTargets(),
	}
	if r.State == vip.Draining {
		left, err := durationFromProto(m.GetDrainFor(), "drain_for", 0, maxStaleGrace)
		if err != nil {
			return VIPReadiness{}, fmt.Errorf("VIP %s: %w", v, err)
		}
		r.DrainEnd = at.Add(left)
	}
	// A reason added by a newer version does not invalidate the state.
	if _, known := readinessv1.VipReason_name[int32(r.Reason)]; !known {
		r.Reason = readinessv1.VipReason_VIP_REASON_UNSPECIFIED
	}
	if s := m.GetSince(); s != nil && s.IsValid() {
		r.Since = s.AsTime()
	}
	return r, nil
}

// durationFromProto decodes a duration within bounds; an absent one is zero.
func durationFromProto(m *durationpb.Duration, field string, least, most time.Duration) (time.Duration, error) {
	if m != nil {
		if err := m.CheckValid(); err != nil {
			return 0, fmt.Errorf("%s: %w", field, err)
		}
	}
	d := m.AsDuration()
	if d < least || d > most {
		return 0, fmt.Errorf("%s is %v, outside %v…%v", field, d, least, most)
	}
	return d, nil
}

// cleanDetail returns s as one line of valid UTF-8 of at most MaxDetailBytes: details contain
// errors of external systems and are written to logs, terminals and proto strings.
func cleanDetail(s string) string {
	if s == "" {
		return ""
	}
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s[:min(len(s), MaxDetailBytes+utf8.UTFMax)])
	for len(s) > MaxDetailBytes {
		_, size := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-size]
	}
	return strings.TrimSpace(s)
}

// decoder decodes the messages of one watch, assembles parts and rejects violations of the
// protocol. Its memory is bounded by MaxVIPs.
type decoder struct {
	watchID  string // empty before the first message
	position Position
	synced   bool
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
	changed map[vip.VIP]VIPReadiness
	removed vip.Set
	known   vip.Set // snapshot: the keys of changed

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
			d.complete(&e)
		}
	case *readinessv1.WatchReadinessResponse_Delta:
		if revision == d.position.Revision {
			return e, fmt.Errorf("a delta did not advance the revision %d", revision)
		}
		err = d.stage(kindDelta, revision, delta.GetChanged(), delta.GetRemoved(), at)
		if err == nil && delta.GetLast() {
			d.complete(&e)
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
		d.staged = event{kind: k, changed: make(map[vip.VIP]VIPReadiness, len(changed)), removed: vip.Set{}}
	}
	for _, m := range changed {
		r, err := readinessFromProto(m, at)
		if err == nil {
			err = d.checkUnique(r.VIP)
		}
		if err != nil {
			return err
		}
		d.staged.changed[r.VIP] = r
	}
	for _, text := range removed {
		v, err := vip.Parse(text)
		if err == nil {
			err = d.checkUnique(v)
		}
		if err != nil {
			return err
		}
		d.staged.removed[v] = struct{}{}
	}
	return nil
}

// checkUnique checks that the staged state does not contain v and has room for it.
func (d *decoder) checkUnique(v vip.VIP) error {
	if _, twice := d.staged.changed[v]; twice || d.staged.removed.Has(v) {
		return fmt.Errorf("VIP %s is named twice in revision %d", v, d.stagedAt)
	}
	if len(d.staged.changed)+len(d.staged.removed) >= MaxVIPs {
		return fmt.Errorf("revision %d names more than %d VIPs", d.stagedAt, MaxVIPs)
	}
	return nil
}

// complete moves the staged state to e. Data of a load balancer that is not synced are discarded.
func (d *decoder) complete(e *event) {
	e.kind = d.staged.kind
	d.position.Revision = d.stagedAt
	if d.synced {
		e.changed, e.removed = d.staged.changed, d.staged.removed
		if e.kind == kindSnapshot { // collected here, outside of the merger's lock
			e.known = vip.NewSet(slices.Collect(maps.Keys(e.changed))...)
		}
	}
	d.staged, d.stagedAt = event{}, 0
}
