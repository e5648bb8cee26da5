package publication

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/vipgate/vipgate/pkg/vip"
)

// AdvertisedElsewhere returns the VIPs that pods other than the given one advertise and do not
// de-prefer, according to the reports. Pods that leave do not count. A report with counts only
// counts if it advertises all of its VIPs.
func AdvertisedElsewhere(input Input, pod string, leaves func(*corev1.Pod) bool) vip.Set {
	var others []*corev1.Pod
	for _, sibling := range input.Siblings {
		if sibling.Name != pod && !leaves(sibling) {
			others = append(others, sibling)
		}
	}
	vips := vip.Set{}
	for _, report := range readReports(others, input.Reports) {
		for _, v := range report.candidates(input) {
			if state, known := report.of(v); known && state.Advertised && state.Reason == "" {
				vips[v] = struct{}{}
			}
		}
	}
	return vips
}

// LastAdvertised returns the VIPs that a pod advertises and no other pod that stays does.
func LastAdvertised(input Input, pod string, leaves func(*corev1.Pod) bool) (vips []string) {
	elsewhere := AdvertisedElsewhere(input, pod, leaves)
	for _, report := range readReports(input.Siblings, input.Reports) {
		if report.pod != pod {
			continue
		}
		for _, v := range report.candidates(input) {
			// A VIP of a report with counts only may be advertised.
			if state, known := report.of(v); (!known || state.Advertised) && !elsewhere.Has(v) {
				vips = append(vips, address(v))
			}
		}
	}
	return vips
}

// candidates returns the VIPs that the pod may advertise: those of the report, or of the Trench if
// the report has counts only.
func (report podReport) candidates(input Input) (vips []vip.VIP) {
	if len(report.VIPs) == 0 && input.Result.Config != nil {
		return input.Result.Config.Attractor.VIPs
	}
	for _, v := range report.VIPs {
		vips = append(vips, v.VIP)
	}
	return vips
}
