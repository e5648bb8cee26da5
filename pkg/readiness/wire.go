package readiness

import (
	"fmt"
	"iter"
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

// Messages of a watch and of a report.
type (
	response      = readinessv1.WatchReadinessResponse
	reportRequest = readinessv1.ReportAdvertisementRequest
)

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
	for _, family := range vip.Families {
		if isUp, configured := up[family]; configured {
			list = append(list, &readinessv1.FamilyConnectivity{Family: wireFamilies[family], Up: isUp})
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

// Proto returns the readiness as a message. The remaining drain time is relative to
// now.
func (r *VIPReadiness) Proto(now time.Time) *readinessv1.VipReadiness {
	m := &readinessv1.VipReadiness{
		State: wireStates[r.State], Reason: r.Reason, Detail: r.Detail,
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

// drainFor returns the remaining drain time, limited to the maximum that a receiver accepts.
func drainFor(end, now time.Time) *durationpb.Duration {
	return durationpb.New(min(max(0, end.Sub(now)), maxStaleGrace))
}

// groups assigns the VIPs of a message to groups by the value that they share.
type groups[V comparable] struct {
	names map[V]*[]string
	last  V // of the previous VIP, which most VIPs share
	list  *[]string
	most  int // bounds the size of the first group, which most VIPs share
}

// add adds a VIP to the group of its value. create adds the group to the message and returns its
// list of names.
func (g *groups[V]) add(v vip.VIP, value V, create func() *[]string) {
	if g.list == nil || value != g.last {
		g.last, g.list = value, g.names[value]
	}
	if g.list == nil {
		g.list = create()
		if g.names == nil {
			g.names = make(map[V]*[]string)
			*g.list = make([]string, 0, g.most)
		}
		g.names[value] = g.list
	}
	*g.list = append(*g.list, v.String())
}

// readinessGroups groups VIPs by equal readiness.
type readinessGroups struct {
	groups[VIPReadiness]
	messages []*readinessv1.ReadinessGroup
	now      time.Time
}

func (g *readinessGroups) add(r *VIPReadiness) {
	shared := *r
	shared.VIP = vip.VIP{}
	g.groups.add(r.VIP, shared, func() *[]string {
		m := &readinessv1.ReadinessGroup{Readiness: r.Proto(g.now)}
		g.messages = append(g.messages, m)
		return &m.Vips
	})
}

// Limits of a sent part of a snapshot or delta. A frontend decodes 200 VIPs in less than 100 µs,
// while the load balancer encodes the next part. A part with 64 groups, each with the longest
// detail, still fits 32 KiB, a size class of gRPC's buffer pool. The next class is 1 MiB (grpc 1.85)
// and would cost 8 MiB for a frontend with 10 000 VIPs.
const vipsPerPart, groupsPerPart = 200, 64

// messages yields the messages of a batch. Each part is built when it is needed, so that the first
// is sent before the last is built.
func (b batch) messages() iter.Seq[*response] {
	return func(yield func(*response) bool) {
		switch b.kind {
		case kindHeartbeat:
			yield(&response{Event: &readinessv1.WatchReadinessResponse_Heartbeat{Heartbeat: &readinessv1.Heartbeat{}}})
			return
		case kindGoingAway:
			goingAway := &readinessv1.GoingAway{DrainFor: drainFor(b.drainEnd, time.Now())}
			yield(&response{Event: &readinessv1.WatchReadinessResponse_GoingAway{GoingAway: goingAway}})
			return
		}
		for last := false; !last; {
			changed, removed := b.nextPart()
			last = len(b.entries) == 0
			m := &response{Event: &readinessv1.WatchReadinessResponse_Delta{
				Delta: &readinessv1.Delta{Changed: changed, Removed: removed, Last: last},
			}}
			if b.kind == kindSnapshot { // which has no removed VIPs
				m.Event = &readinessv1.WatchReadinessResponse_Snapshot{
					Snapshot: &readinessv1.Snapshot{Groups: changed, Synced: b.synced, Last: last},
				}
			}
			if !yield(m) {
				return
			}
		}
	}
}

// nextPart removes the entries of a part from the batch and returns their VIPs.
func (b *batch) nextPart() (changed []*readinessv1.ReadinessGroup, removed []string) {
	byReadiness := readinessGroups{groups: groups[VIPReadiness]{most: min(vipsPerPart, len(b.entries))}, now: time.Now()}
	for count := 0; count < vipsPerPart && len(byReadiness.messages) < groupsPerPart && len(b.entries) > 0; {
		e := b.entries[0]
		b.entries = b.entries[1:]
		switch {
		case e.record == nil:
			continue
		case e.removed:
			removed = append(removed, e.VIP.String())
		default:
			byReadiness.add(&e.VIPReadiness)
		}
		count++
	}
	return byReadiness.messages, removed
}

// readinessFromProto returns the readiness that the VIPs of a group share. The drain time counts
// from the receipt.
func readinessFromProto(m *readinessv1.VipReadiness, at time.Time) (r VIPReadiness, err error) {
	known := slices.Index(wireStates, m.GetState())
	if known < 0 {
		return r, fmt.Errorf("unknown state %d", m.GetState())
	}
	r = VIPReadiness{
		State: vip.State(known), Reason: m.GetReason(), Detail: cleanDetail(m.GetDetail()),
		ReadyTargets: m.GetReadyTargets(), TotalTargets: m.GetTotalTargets(),
	}
	if r.State == vip.Draining {
		left, err := durationFromProto(m.GetDrainFor(), "drain_for", 0, maxStaleGrace)
		if err != nil {
			return r, err
		}
		r.DrainEnd = at.Add(left)
	}
	if since := m.GetSince(); since.IsValid() {
		r.Since = since.AsTime()
	}
	// A reason added by a newer version does not invalidate the state.
	if _, known := readinessv1.VipReason_name[int32(r.Reason)]; !known {
		r.Reason = readinessv1.VipReason_VIP_REASON_UNSPECIFIED
	}
	return r, nil
}

// durationFromProto decodes a duration and checks its bounds. An absent duration is zero.
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

// isClean reports whether s is printable ASCII that cleanDetail would not change, as most details
// are.
func isClean(s string) bool {
	if len(s) > MaxDetailBytes || strings.TrimSpace(s) != s {
		return false
	}
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// cleanDetail returns s as one line of valid UTF-8 of at most MaxDetailBytes. Details contain
// errors of external systems and are written to logs, terminals and protobuf strings.
func cleanDetail(s string) string {
	if isClean(s) {
		return s
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
