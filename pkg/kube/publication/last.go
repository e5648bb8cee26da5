package publication

import (
	"maps"
	"slices"

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
	vips, all := vip.Set{}, readReports(others, input.Reports)
	for v := range input.served(all) {
		for _, report := range all {
			if state, known := report.of(v); known && state.Advertised && state.Reason == "" {
				vips[v] = struct{}{}
			}
		}
	}
	return vips
}

// served returns the VIPs that a stream serves, by the reports or the trench file.
func (input Input) served(all reports) vip.Set {
	vips := all.served()
	if input.Result.Config != nil {
		for _, stream := range input.Result.Config.Streams {
			maps.Copy(vips, vip.NewSet(stream.VIPs...))
		}
	}
	return vips
}

// LastAdvertised returns the VIPs of streams that a pod may advertise, and no other pod that stays
// does. Without one it returns those that the pod does not advertise either, and dark is true.
// problem is why the report of the pod is unknown; "" if it is known.
func LastAdvertised(input Input, pod string, leaves func(*corev1.Pod) bool) (vips []string, problem string, dark bool) {
	elsewhere, all := AdvertisedElsewhere(input, pod, leaves), readReports(input.Siblings, input.Reports)
	var own podReport // of a terminating pod, which drains itself
	if i := slices.IndexFunc(all, func(report podReport) bool { return report.pod == pod }); i >= 0 {
		own = all[i]
	}
	var withdrawn []string
	for _, v := range input.served(all).Sorted() {
		// A VIP of a report with counts only may be advertised.
		switch state, known := own.of(v); {
		case elsewhere.Has(v):
		case known && !state.Advertised:
			withdrawn = append(withdrawn, address(v))
		default:
			vips = append(vips, address(v))
		}
	}
	if len(vips) == 0 {
		return withdrawn, own.Problem, true
	}
	return vips, own.Problem, false
}
