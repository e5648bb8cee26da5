package readiness

import (
	"fmt"
	"iter"
	"slices"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// reportsPerPart limits the VIPs of a sent part of a report. Parts are large, because each part
// wakes the goroutines that wait for Server.Report, but fit 32 KiB; see vipsPerPart.
const reportsPerPart = 400

// messages yields the messages of the report for a watch.
func (delta ReportDelta) messages(watchID string) iter.Seq[*reportRequest] {
	return func(yield func(*reportRequest) bool) {
		families := FamiliesProto(delta.Families)
		rest := delta.VIPs
		for last := false; !last; {
			part := rest[:min(len(rest), reportsPerPart)]
			rest = rest[len(part):]
			last = len(rest) == 0
			message := &reportRequest{WatchId: watchID, Families: families, Groups: groupReports(part)}
			if last {
				// The position marks the report as complete. The last part always has one, even the zero
				// position, and no other part has one.
				message.Applied = &readinessv1.Position{InstanceId: delta.Applied.InstanceID, Revision: delta.Applied.Revision}
			}
			if !yield(message) {
				return
			}
		}
	}
}

func groupReports(reports []ReportedVIP) (messages []*readinessv1.AdvertisementGroup) {
	byReport := groups[VIPReport]{most: len(reports)}
	for _, reported := range reports {
		byReport.add(reported.VIP.String(), reported.VIPReport, func() *[]string {
			group := &readinessv1.AdvertisementGroup{Advertisement: reported.Proto()}
			messages = append(messages, group)
			return &group.Vips
		})
	}
	return messages
}

// Proto returns the report as a message.
func (r VIPReport) Proto() *readinessv1.VipAdvertisement {
	return &readinessv1.VipAdvertisement{Advertisement: r.Advertisement, Reason: r.Reason, Unconfirmed: r.Unconfirmed}
}

// decodeReport decodes a message of a report. complete reports whether the message has a position
// and therefore is the last part.
func decodeReport(message *reportRequest) (delta ReportDelta, complete bool, err error) {
	position := message.GetApplied()
	if length := len(position.GetInstanceId()); length > maxNameBytes {
		return delta, false, fmt.Errorf("applied: the instance_id has %d bytes, more than %d", length, maxNameBytes)
	}
	delta.Applied = Position{position.GetInstanceId(), position.GetRevision()}
	if len(message.GetFamilies()) > 0 {
		delta.Families = make(map[vip.Family]bool)
	}
	for _, connectivity := range message.GetFamilies() {
		family := slices.Index(wireFamilies, connectivity.GetFamily())
		if family < 0 {
			return delta, false, fmt.Errorf("families: unknown family %d", connectivity.GetFamily())
		}
		delta.Families[vip.Family(family)] = connectivity.GetUp()
	}
	// Check the limit before the texts are parsed.
	count := 0
	for _, group := range message.GetGroups() {
		count += len(group.GetVips())
	}
	if count > MaxVIPsPerMessage {
		return delta, false, fmt.Errorf("the report holds %d VIPs, more than %d", count, MaxVIPsPerMessage)
	}
	delta.VIPs = make([]ReportedVIP, 0, count)
	for _, group := range message.GetGroups() {
		report, err := reportFromProto(group.GetAdvertisement())
		if err != nil {
			return delta, false, fmt.Errorf("VIPs %v: %w", group.GetVips(), err)
		}
		for _, name := range group.GetVips() {
			v, err := vip.Parse(name)
			if err != nil {
				return delta, false, err
			}
			delta.VIPs = append(delta.VIPs, ReportedVIP{v, report})
		}
	}
	return delta, position != nil, nil
}

// reportFromProto returns the report that the VIPs of a group share.
func reportFromProto(message *readinessv1.VipAdvertisement) (report VIPReport, err error) {
	report = VIPReport{message.GetAdvertisement(), message.GetReason(), message.GetUnconfirmed()}
	if _, known := readinessv1.Advertisement_name[int32(report.Advertisement)]; !known || report.Advertisement == 0 {
		return report, fmt.Errorf("unknown advertisement %d", report.Advertisement)
	}
	// A reason added by a newer version does not invalidate the report.
	if _, known := readinessv1.AdvertisementReason_name[int32(report.Reason)]; !known {
		report.Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED
	}
	return report, nil
}
