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

// maxListed is how many VIPs, objects or pods a message names.
const maxListed = 5

// reports are those of the pods of the trench, in the order of their names.
type reports []podReport

type podReport struct {
	pod string
	Report
	missing string // reason why there is no report; "" with one
	vips    map[vip.VIP]VIPReport
}

// readReports returns the reports of the pods that are neither terminating nor finished.
func readReports(pods []*corev1.Pod, written map[types.UID]Reported) reports {
	var all reports
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		p := podReport{pod: pod.Name, vips: map[vip.VIP]VIPReport{}}
		switch r, ok := written[pod.UID]; {
		case !ok:
			p.missing, p.Problem = "NoReport", "no report yet"
		case r.Invalid:
			p.missing, p.Problem = "InvalidReport", "its report cannot be read"
		case r.Old:
			p.missing, p.Problem = "OldReport", "its report is no longer renewed: the pod, or its kube, does not run"
		case r.Problem != "":
			p.missing, p.Report = "FrontendAway", r.Report
		default:
			p.Report = r.Report
		}
		for _, v := range p.VIPs {
			p.vips[v.VIP] = v
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b podReport) int { return cmp.Compare(a.pod, b.pod) })
	return all
}

// of returns what a pod does with a VIP. known is false if the pod's report has only counts.
func (p podReport) of(v vip.VIP) (r VIPReport, known bool) {
	if p.missing != "" {
		return VIPReport{VIP: v, Reason: p.missing, Message: p.Problem}, true
	}
	r, ok := p.vips[v]
	switch {
	case ok:
		return r, true
	case len(p.vips) > 0 || p.Total == 0:
		return VIPReport{VIP: v, Reason: "NotConfigured", Message: "not in the frontend's trench file yet"}, true
	case p.Advertised == p.Total:
		return VIPReport{VIP: v, Advertised: true}, true
	case p.Advertised == 0:
		return VIPReport{VIP: v, Reason: "NothingAdvertised", Message: "no VIP is advertised; see `frontend status`"}, true
	default:
		return VIPReport{VIP: v}, false
	}
}

// served returns the VIPs that a stream serves, as far as reports name them.
func (all reports) served() vip.Set {
	vips := vip.Set{}
	for _, p := range all {
		for _, v := range p.VIPs {
			if v.Reason != noStream {
				vips[v.VIP] = struct{}{}
			}
		}
	}
	return vips
}

// advertised returns the condition Advertised, without type, for VIPs. It is true if at least one
// pod advertises each of them.
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
	for _, v := range vips {
		s := all.sum(v)
		switch {
		case s.advertised == len(all):
			everywhere++
			continue
		case s.advertised > 0: // by some
		case s.unknown > 0:
			unknown = true
		default:
			reasons[s.reason]++
		}
		lines = append(lines, s.String())
	}
	c := metav1.Condition{Status: metav1.ConditionTrue, Reason: "PartlyAdvertised", Message: listed(lines)}
	switch {
	case everywhere == len(vips):
		c.Reason = "AllAdvertised"
		c.Message = fmt.Sprintf("%[1]d of %[1]d VIPs by %[2]d of %[2]d pods", len(vips), len(all))
	case len(reasons) > 0:
		c.Status, c.Reason = metav1.ConditionFalse, mostFrequent(reasons)
	case unknown:
		c.Status, c.Reason = metav1.ConditionUnknown, "OnlyCounts"
	}
	return c
}

// targets returns the condition TargetsReady, without type, for VIPs whose Service has so many
// targets. It is false while a target of one of them fails in a pod.
func (all reports) targets(vips []vip.VIP, targets int) metav1.Condition {
	pods, known := map[string][]string{}, false // by message
	for _, p := range all {
		for _, v := range vips {
			r, ok := p.vips[v]
			known = known || ok
			if r.Targets != "" && !slices.Contains(pods[r.Targets], p.pod) {
				pods[r.Targets] = append(pods[r.Targets], p.pod)
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

// sum is what the pods together do with one VIP.
type sum struct {
	vip                       vip.VIP
	advertised, unknown, pods int
	reason                    string              // the one of most pods that report one
	pod                       map[string][]string // names of these pods by message
}

func (all reports) sum(v vip.VIP) sum {
	s := sum{vip: v, pods: len(all), pod: map[string][]string{}}
	reasons, missing := map[string]int{}, map[string]int{}
	for _, p := range all {
		switch r, known := p.of(v); {
		case !known:
			s.unknown++
			message := fmt.Sprintf("the pod advertises %d of %d VIPs, too many to name", p.Advertised, p.Total)
			s.pod[message] = append(s.pod[message], p.pod)
		case r.Advertised:
			s.advertised++
		case p.missing != "":
			missing[r.Reason]++
			s.pod[r.Message] = append(s.pod[r.Message], p.pod)
		default:
			reasons[r.Reason]++
			s.pod[r.Message] = append(s.pod[r.Message], p.pod)
		}
	}
	s.reason = cmp.Or(mostFrequent(reasons), mostFrequent(missing))
	return s
}

// String returns such as "2000::1: advertised by 0 of 2 pods: no targets". It names the pods where
// they differ.
func (s sum) String() string {
	var why []string
	for _, message := range slices.Sorted(maps.Keys(s.pod)) {
		if names := s.pod[message]; len(names) < s.pods {
			message += " (" + listedBy(names, ", ") + ")"
		}
		why = append(why, message)
	}
	count := strconv.Itoa(s.advertised)
	if s.unknown > 0 {
		count = "at least " + count
	}
	return fmt.Sprintf("%s: advertised by %s of %d pods: %s", address(s.vip), count, s.pods, strings.Join(why, ", "))
}

// mostFrequent returns the key with the highest count, of several the first in order; "" without
// one.
func mostFrequent(counts map[string]int) (most string) {
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		if counts[key] > counts[most] {
			most = key
		}
	}
	return most
}

func listed(lines []string) string { return listedBy(lines, "; ") }

// listedBy joins lines, at most [maxListed] of them.
func listedBy(lines []string, separator string) string {
	if more := len(lines) - maxListed; more > 0 {
		lines = append(slices.Clone(lines[:maxListed]), fmt.Sprintf("%d more", more))
	}
	return strings.Join(lines, separator)
}

// address returns a VIP of one address without the length of its prefix.
func address(v vip.VIP) string {
	if p := v.Prefix(); p.IsSingleIP() {
		return p.Addr().String()
	}
	return v.String()
}
