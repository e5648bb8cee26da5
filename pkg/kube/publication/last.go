package publication

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// LastAdvertised returns the VIPs that a pod advertises and no other pod that stays does, according
// to the reports. Reports without a list of VIPs count if they advertise all of them.
func LastAdvertised(input Input, pod string, leaves func(*corev1.Pod) bool) (vips []string) {
	var own podReport
	stay := slices.DeleteFunc(slices.Clone(input.Siblings), leaves)
	others := readReports(stay, input.Reports)
	for _, report := range readReports(input.Siblings, input.Reports) {
		if report.pod == pod {
			own = report
		}
	}
	for _, v := range own.VIPs {
		elsewhere := slices.ContainsFunc(others, func(other podReport) bool {
			state, known := other.of(v.VIP)
			return other.pod != pod && known && state.Advertised
		})
		if v.Advertised && !elsewhere {
			vips = append(vips, address(v.VIP))
		}
	}
	return vips
}
