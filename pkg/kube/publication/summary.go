package publication

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxListed is the maximum number of VIPs, objects or pods in a message.
const maxListed = 5

// reports lists the reports of the trench's pods, sorted by name.
type reports []podReport

type podReport struct {
	pod string
	Report
	missing string // reason why the report is missing or unusable; "" if it is valid
	vips    map[vip.VIP]vipReport
}

// readReports returns the reports of the pods that are neither terminating nor finished.
func readReports(pods []*corev1.Pod, written map[types.UID]Reported) reports {
	var all reports
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		report := podReport{pod: pod.Name, vips: map[vip.VIP]vipReport{}}
		switch reported, ok := written[pod.UID]; {
		case !ok:
			report.missing, report.Problem = "NoReport", "no report yet"
		case reported.Invalid:
			report.missing, report.Problem = "InvalidReport", "its report cannot be read"
		case reported.Old:
			report.missing, report.Problem = "OldReport", "its report is no longer renewed: the pod, or its kube, does not run"
		case reported.Problem != "":
			report.missing, report.Report = "FrontendAway", reported.Report
		default:
			report.Report = reported.Report
		}
		for _, v := range report.VIPs {
			report.vips[v.VIP] = v
		}
		all = append(all, report)
	}
	slices.SortFunc(all, func(a, b podReport) int { return cmp.Compare(a.pod, b.pod) })
	return all
}

// of returns the state of a VIP in a pod. known is false if a report with counts only hides it.
func (report podReport) of(v vip.VIP) (r vipReport, known bool) {
	if report.missing != "" {
		return vipReport{VIP: v, Reason: report.missing, Message: report.Problem}, true
	}
	r, ok := report.vips[v]
	switch {
	case ok:
		return r, true
	case len(report.vips) > 0 || report.Total == 0:
		return vipReport{VIP: v, Reason: "NotConfigured", Message: "not in the frontend's trench file yet"}, true
	case report.Advertised == report.Total:
		return vipReport{VIP: v, Advertised: true}, true
	case report.Advertised == 0:
		return vipReport{VIP: v, Reason: "NothingAdvertised", Message: "no VIP is advertised; see `frontend status`"}, true
	default:
		return vipReport{VIP: v}, false
	}
}

// served returns the VIPs in the reports that a stream serves.
func (all reports) served() vip.Set {
	vips := vip.Set{}
	for _, report := range all {
		for _, v := range report.VIPs {
			if v.Reason != noStream {
				vips[v.VIP] = struct{}{}
			}
		}
	}
	return vips
}

// advertised returns the condition Advertised, without type, for VIPs. It is true if each VIP is
// advertised by at least one pod.
func (all reports) advertised(vips []vip.VIP) metav1.Condition {
	if len(all) == 0 {
		return metav1.Condition{
			Status: metav1.ConditionFalse, Reason: "NoPods",
			Message: "no pod of the trench runs: check the workload whose pods have the label " + v1alpha1.TrenchPodLabel,
		}
	}
	if len(vips) == 0 {
		return metav1.Condition{Status: metav1.ConditionUnknown, Reason: "NoVIPs", Message: "no stream has a VIP"}
	}
	var (
		everywhere int
		lines      []string
		reasons    = map[string]int{}
		unknown    bool
	)
	// Only VIPs that not all pods advertise are listed, because the message is limited.
	for _, v := range vips {
		sum := all.sum(v)
		switch {
		case sum.advertised == len(all):
			everywhere++
			continue
		case sum.advertised > 0: // advertised by a part of the pods
		case sum.unknown > 0:
			unknown = true
		default:
			reasons[sum.reason]++
		}
		lines = append(lines, sum.String())
	}
	// A VIP without any pod outweighs unknown ones: it is dark for certain.
	condition := metav1.Condition{Status: metav1.ConditionTrue, Reason: "PartlyAdvertised", Message: listed(lines)}
	switch {
	case everywhere == len(vips):
		condition.Reason = "AllAdvertised"
		condition.Message = fmt.Sprintf("%[1]d of %[1]d VIPs by %[2]d of %[2]d pods", len(vips), len(all))
	case len(reasons) > 0:
		condition.Status, condition.Reason = metav1.ConditionFalse, mostFrequent(reasons)
	case unknown:
		condition.Status, condition.Reason = metav1.ConditionUnknown, "OnlyCounts"
	}
	return condition
}

// targets returns the condition TargetsReady, without type, for VIPs of a Service with the given
// number of targets. It is false while any pod reports a failing target for one of the VIPs.
func (all reports) targets(vips []vip.VIP, targets int) metav1.Condition {
	pods, known := map[string][]string{}, false // by message
	for _, report := range all {
		for _, v := range vips {
			r, ok := report.vips[v]
			known = known || ok
			if r.Targets != "" && !slices.Contains(pods[r.Targets], report.pod) {
				pods[r.Targets] = append(pods[r.Targets], report.pod)
			}
		}
	}
	var lines []string
	for _, message := range slices.Sorted(maps.Keys(pods)) {
		if names := pods[message]; len(names) < len(all) {
			message += " (" + listedBy(names, ", ") + ")"
		}
		lines = append(lines, message)
	}
	switch {
	case len(lines) > 0:
		return metav1.Condition{Status: metav1.ConditionFalse, Reason: checkFailed, Message: listed(lines)}
	case targets == 0:
		return metav1.Condition{Status: metav1.ConditionFalse, Reason: "NoTargets", Message: "the Service has no target"}
	case !known:
		return metav1.Condition{
			Status: metav1.ConditionUnknown, Reason: "NotReported", Message: "no pod of the trench reports the targets",
		}
	}
	return metav1.Condition{Status: metav1.ConditionTrue, Reason: "NoneFails", Message: "no target fails its checks"}
}

// checkFailed is the reason while a target fails its checks.
const checkFailed = "CheckFailed"

// sum aggregates the reports of all pods on one VIP.
type sum struct {
	vip                       vip.VIP
	advertised, unknown, pods int
	reason                    string              // the most frequent reason
	pod                       map[string][]string // names of pods that do not advertise, by message
}

func (all reports) sum(v vip.VIP) sum {
	s := sum{vip: v, pods: len(all), pod: map[string][]string{}}
	reasons, missing := map[string]int{}, map[string]int{}
	for _, report := range all {
		switch r, known := report.of(v); {
		case !known:
			s.unknown++
			message := fmt.Sprintf("the pod advertises %d of %d VIPs, too many to name", report.Advertised, report.Total)
			s.pod[message] = append(s.pod[message], report.pod)
		case r.Advertised:
			s.advertised++
		case report.missing != "":
			missing[r.Reason]++
			s.pod[r.Message] = append(s.pod[r.Message], report.pod)
		default:
			reasons[r.Reason]++
			s.pod[r.Message] = append(s.pod[r.Message], report.pod)
		}
	}
	// The reason of a frontend is more specific than a missing report.
	s.reason = cmp.Or(mostFrequent(reasons), mostFrequent(missing))
	return s
}

// String returns a text such as "2000::1: advertised by 0 of 2 pods: no targets". It names pods
// if not all have the same message.
func (sum sum) String() string {
	var why []string
	for _, message := range slices.Sorted(maps.Keys(sum.pod)) {
		if names := sum.pod[message]; len(names) < sum.pods {
			message += " (" + listedBy(names, ", ") + ")"
		}
		why = append(why, message)
	}
	count := strconv.Itoa(sum.advertised)
	if sum.unknown > 0 {
		count = "at least " + count
	}
	return fmt.Sprintf("%s: advertised by %s of %d pods: %s", address(sum.vip), count, sum.pods, strings.Join(why, ", "))
}

// mostFrequent returns the key with the highest count, or "" for an empty map. Among equal counts
// it returns the first key in alphabetical order.
func mostFrequent(counts map[string]int) (most string) {
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		if counts[key] > counts[most] {
			most = key
		}
	}
	return most
}

func listed(lines []string) string { return listedBy(lines, "; ") }

// listedBy joins at most [maxListed] lines, and counts the rest.
func listedBy(lines []string, separator string) string {
	if more := len(lines) - maxListed; more > 0 {
		lines = append(slices.Clone(lines[:maxListed]), fmt.Sprintf("%d more", more))
	}
	return strings.Join(lines, separator)
}

// address formats a VIP, without the prefix length if it is a single address.
func address(v vip.VIP) string {
	if prefix := v.Prefix(); prefix.IsSingleIP() {
		return prefix.Addr().String()
	}
	return v.String()
}
