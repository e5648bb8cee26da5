package readiness

import (
	"fmt"
	"iter"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/logs"
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

// Proto returns the readiness as a message. The remaining drain time is relative to now.
func (r *VIPReadiness) Proto(now time.Time) *readinessv1.VipReadiness {
	message := &readinessv1.VipReadiness{
		State: wireStates[r.State], Reason: r.Reason, Detail: r.Detail,
		ReadyTargets: r.ReadyTargets, TotalTargets: r.TotalTargets, WarmingTenths: r.WarmingTenths,
	}
	if r.State == vip.Draining {
		message.DrainFor = drainFor(r.DrainEnd, now)
	}
	if !r.Since.IsZero() {
		message.Since = timestamppb.New(r.Since)
	}
	return message
}

// drainFor returns the remaining drain time, limited to the maximum that a receiver accepts.
func drainFor(end, now time.Time) *durationpb.Duration {
	return durationpb.New(min(max(0, end.Sub(now)), maxStaleGrace))
}

// groups assigns the VIPs of a message to groups by the value that they share.
type groups[Value comparable] struct {
	names map[Value]*[]string
	last  Value // of the previous VIP, which most VIPs share
	list  *[]string
	most  int // bounds the size of the first group, which most VIPs share
}

// add adds the text of a VIP to the group of its value. create adds the group to the message and
// returns its list of names.
func (groups *groups[Value]) add(text string, value Value, create func() *[]string) {
	// Comparing with the previous value is several times faster than hashing.
	if groups.list == nil || value != groups.last {
		groups.last, groups.list = value, groups.names[value]
	}
	if groups.list == nil {
		groups.list = create()
		if groups.names == nil { // the first group
			groups.names = make(map[Value]*[]string)
			*groups.list = make([]string, 0, groups.most)
		}
		groups.names[value] = groups.list
	}
	*groups.list = append(*groups.list, text)
}

type readinessGroups struct {
	groups[VIPReadiness]
	messages []*readinessv1.ReadinessGroup
	now      time.Time
}

func (groups *readinessGroups) add(text string, readiness *VIPReadiness) {
	shared := *readiness
	shared.VIP = vip.VIP{}
	groups.groups.add(text, shared, func() *[]string {
		group := &readinessv1.ReadinessGroup{Readiness: readiness.Proto(groups.now)}
		groups.messages = append(groups.messages, group)
		return &group.Vips
	})
}

// Limits of a sent part of a snapshot or delta. A frontend decodes 200 VIPs in less than 100 µs,
// while the load balancer encodes the next part. A part with 64 groups, each with the longest
// detail, still fits 32 KiB, a size class of gRPC's buffer pool. The next class is 1 MiB (grpc
// 1.85) and would cost 8 MiB for a frontend with 10 000 VIPs.
const vipsPerPart, groupsPerPart = 200, 64

// messages yields the messages of a batch. Each part is built when it is needed, so that the first
// is sent before the last is built.
func (batch batch) messages() iter.Seq[*response] {
	return func(yield func(*response) bool) {
		switch batch.kind {
		case kindHeartbeat:
			yield(&response{Event: &readinessv1.WatchReadinessResponse_Heartbeat{Heartbeat: &readinessv1.Heartbeat{}}})
			return
		case kindGoingAway:
			goingAway := &readinessv1.GoingAway{DrainFor: drainFor(batch.drainEnd, time.Now())}
			yield(&response{Event: &readinessv1.WatchReadinessResponse_GoingAway{GoingAway: goingAway}})
			return
		}
		for last := false; !last; {
			changed, removed := batch.nextPart()
			// The last part may be empty: a state takes effect with the part that is marked as the last.
			last = len(batch.entries) == 0
			message := &response{Event: &readinessv1.WatchReadinessResponse_Delta{
				Delta: &readinessv1.Delta{Changed: changed, Removed: removed, Last: last},
			}}
			if batch.kind == kindSnapshot { // which has no removed VIPs
				message.Event = &readinessv1.WatchReadinessResponse_Snapshot{
					Snapshot: &readinessv1.Snapshot{Groups: changed, Synced: batch.synced, Last: last},
				}
			}
			if !yield(message) {
				return
			}
		}
	}
}

// nextPart removes the entries of a part from the batch and returns their VIPs.
func (batch *batch) nextPart() (changed []*readinessv1.ReadinessGroup, removed []string) {
	byReadiness := readinessGroups{now: time.Now()}
	byReadiness.most = min(vipsPerPart, len(batch.entries))
	for count := 0; count < vipsPerPart && len(byReadiness.messages) < groupsPerPart && len(batch.entries) > 0; {
		entry := batch.entries[0]
		batch.entries = batch.entries[1:]
		switch {
		case entry.record == nil:
			continue
		case entry.removed:
			removed = append(removed, entry.text)
		default:
			byReadiness.add(entry.text, &entry.VIPReadiness)
		}
		count++
	}
	return byReadiness.messages, removed
}

// readinessFromProto returns the readiness of a group of VIPs. The drain time counts from receipt.
func readinessFromProto(message *readinessv1.VipReadiness, receivedAt time.Time) (readiness VIPReadiness, err error) {
	known := slices.Index(wireStates, message.GetState())
	if known < 0 {
		return readiness, fmt.Errorf("unknown state %d", message.GetState())
	}
	readiness = VIPReadiness{
		State: vip.State(known), Reason: message.GetReason(), Detail: cleanDetail(message.GetDetail()),
		ReadyTargets: message.GetReadyTargets(), TotalTargets: message.GetTotalTargets(),
		WarmingTenths: message.GetWarmingTenths(),
	}
	if readiness.State == vip.Draining {
		left, err := durationFromProto(message.GetDrainFor(), "drain_for", 0, maxStaleGrace)
		if err != nil {
			return readiness, err
		}
		readiness.DrainEnd = receivedAt.Add(left)
	}
	if since := message.GetSince(); since.IsValid() {
		readiness.Since = since.AsTime()
	}
	// A reason added by a newer version does not invalidate the state.
	if _, known := readinessv1.VipReason_name[int32(readiness.Reason)]; !known {
		readiness.Reason = readinessv1.VipReason_VIP_REASON_UNSPECIFIED
	}
	return readiness, nil
}

// durationFromProto decodes a duration and checks its bounds. An absent duration is zero.
func durationFromProto(message *durationpb.Duration, field string, least, most time.Duration) (time.Duration, error) {
	if message != nil {
		if err := message.CheckValid(); err != nil {
			return 0, fmt.Errorf("%s: %w", field, err)
		}
	}
	duration := message.AsDuration()
	if duration < least || duration > most {
		return 0, fmt.Errorf("%s is %v, outside %v…%v", field, duration, least, most)
	}
	return duration, nil
}

// cleanDetail returns text as one line of valid UTF-8 of at most MaxDetailBytes.
func cleanDetail(text string) string { return logs.Line(text, MaxDetailBytes) }
