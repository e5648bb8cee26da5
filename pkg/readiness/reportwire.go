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
func (d ReportDelta) messages(watchID string) iter.Seq[*reportRequest] {
	return func(yield func(*reportRequest) bool) {
		families := FamiliesProto(d.Families)
		rest := d.VIPs
		for last := false; !last; {
			part := rest[:min(len(rest), reportsPerPart)]
			rest = rest[len(part):]
			last = len(rest) == 0
			m := &reportRequest{WatchId: watchID, Families: families, Groups: groupReports(part)}
			if last {
				// The position marks the report as complete. The last part always has one, even the zero
				// position, and no other part has one.
				m.Applied = &readinessv1.Position{InstanceId: d.Applied.InstanceID, Revision: d.Applied.Revision}
			}
			if !yield(m) {
				return
			}
		}
	}
}

// groupReports groups VIPs by equal reports.
func groupReports(reports []ReportedVIP) (messages []*readinessv1.AdvertisementGroup) {
	byReport := groups[VIPReport]{most: len(reports)}
	for _, r := range reports {
		byReport.add(r.VIP, r.VIPReport, func() *[]string {
			m := &readinessv1.AdvertisementGroup{Advertisement: r.Proto()}
			messages = append(messages, m)
			return &m.Vips
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
func decodeReport(m *reportRequest) (d ReportDelta, complete bool, err error) {
	position := m.GetApplied()
	if n := len(position.GetInstanceId()); n > maxNameBytes {
		return d, false, fmt.Errorf("applied: the instance_id has %d bytes, more than %d", n, maxNameBytes)
	}
	d.Applied = Position{position.GetInstanceId(), position.GetRevision()}
	if len(m.GetFamilies()) > 0 {
		d.Families = make(map[vip.Family]bool)
	}
	for _, f := range m.GetFamilies() {
		family := slices.Index(wireFamilies, f.GetFamily())
		if family < 0 {
			return d, false, fmt.Errorf("families: unknown family %d", f.GetFamily())
		}
		d.Families[vip.Family(family)] = f.GetUp()
	}
	count := 0
	for _, group := range m.GetGroups() {
		count += len(group.GetVips())
	}
	if count > MaxVIPsPerMessage {
		return d, false, fmt.Errorf("the report holds %d VIPs, more than %d", count, MaxVIPsPerMessage)
	}
	d.VIPs = make([]ReportedVIP, 0, count)
	for _, group := range m.GetGroups() {
		report, err := reportFromProto(group.GetAdvertisement())
		if err != nil {
			return d, false, fmt.Errorf("VIPs %v: %w", group.GetVips(), err)
		}
		for _, name := range group.GetVips() {
			v, err := vip.Parse(name)
			if err != nil {
				return d, false, err
			}
			d.VIPs = append(d.VIPs, ReportedVIP{v, report})
		}
	}
	return d, position != nil, nil
}

// reportFromProto returns the report that the VIPs of a group share.
func reportFromProto(m *readinessv1.VipAdvertisement) (r VIPReport, err error) {
	r = VIPReport{Advertisement: m.GetAdvertisement(), Reason: m.GetReason(), Unconfirmed: m.GetUnconfirmed()}
	if _, known := readinessv1.Advertisement_name[int32(r.Advertisement)]; !known || r.Advertisement == 0 {
		return r, fmt.Errorf("unknown advertisement %d", r.Advertisement)
	}
	// A reason added by a newer version does not invalidate the report.
	if _, known := readinessv1.AdvertisementReason_name[int32(r.Reason)]; !known {
		r.Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED
	}
	return r, nil
}
