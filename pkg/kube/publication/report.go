package publication

import (
	"slices"
	"strings"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxVIPs is how many VIPs a report names; it has only counts of more. The object stays far below
// the 1.5 MiB that etcd takes, and is written every [renewInterval].
const maxVIPs = 500

// noStream is the reason of a VIP that no stream serves: it does not count.
const noStream = "NoStream"

// Report is what the frontend of one pod advertises, in the TrenchReport of the Pod.
type Report struct {
	// Renewed is when the report was last written, by the clock of the pod. Readers compare it with
	// earlier ones of the same pod only.
	Renewed time.Time `json:"renewed"`
	// Time is since when the rest is so, by the clock of the pod.
	Time time.Time `json:"time"`
	// Problem is why the frontend's state is not known. Nothing counts as advertised then.
	Problem string `json:"problem,omitempty"`
	// Advertised and Total count VIPs that a stream serves.
	Advertised int `json:"advertised"`
	Total      int `json:"total"`
	// VIPs are all VIPs in order; none above [maxVIPs].
	VIPs []VIPReport `json:"vips,omitempty"`
}

// VIPReport is what a frontend does with a VIP.
type VIPReport struct {
	VIP        vip.VIP `json:"vip"`
	Advertised bool    `json:"advertised"`
	// Reason is why it is not advertised in one word in CamelCase; Message explains it.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Targets is why a target of the VIP fails, as `lb status` has it; "" if none does.
	Targets string `json:"targets,omitempty"`
}

// reportOf returns the report of a frontend with that status, without Time.
func reportOf(s *frontendv1.Status) Report {
	var r Report
	for _, v := range s.GetVips() {
		parsed, err := vip.Parse(v.GetVip())
		if err != nil {
			continue // of a newer frontend
		}
		one := VIPReport{VIP: parsed, Targets: failing(v.GetReadiness())}
		switch v.GetAdvertisement() {
		case readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED, readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
			one.Advertised = true
		default:
			one.Reason, one.Message = why(v)
		}
		if one.Advertised {
			r.Advertised++
		}
		if one.Reason != noStream {
			r.Total++
		}
		r.VIPs = append(r.VIPs, one)
	}
	slices.SortFunc(r.VIPs, func(a, b VIPReport) int { return vip.Compare(a.VIP, b.VIP) })
	if len(r.VIPs) > maxVIPs {
		r.VIPs = nil
	}
	return r
}

// why returns why a VIP is not advertised: the load balancer's reason if the load balancer decided.
func why(v *frontendv1.VipStatus) (reason, message string) {
	if r := v.GetReadiness(); r != nil &&
		v.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY {
		return camelCase(r.GetReason().String(), "VIP_REASON_"), status.Explain(r.GetReason()).Short
	}
	return camelCase(v.GetReason().String(), "ADVERTISEMENT_REASON_"), status.Explain(v.GetReason()).Short
}

// failing returns why a target of a VIP fails. A target that was not checked yet fails nothing.
func failing(r *readinessv1.VipReadiness) string {
	switch r.GetReason() {
	case readinessv1.VipReason_VIP_REASON_TARGETS_READY, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY,
		readinessv1.VipReason_VIP_REASON_SUSPECT, readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE:
		return r.GetDetail()
	}
	return ""
}

// camelCase returns the name of an enum's value as the reason of a condition: NO_TARGETS is
// NoTargets.
func camelCase(name, prefix string) string {
	var b strings.Builder
	for word := range strings.SplitSeq(strings.TrimPrefix(name, prefix), "_") {
		if word == "LB" {
			b.WriteString(word)
		} else if word != "" {
			b.WriteString(word[:1] + strings.ToLower(word[1:]))
		}
	}
	if name[0] >= '0' && name[0] <= '9' { // a value of a newer program
		return "Reason" + name
	}
	return b.String()
}

// equal reports whether the reports differ in nothing but their times.
func (r Report) equal(o Report) bool {
	return r.Problem == o.Problem && r.Advertised == o.Advertised && r.Total == o.Total && slices.Equal(r.VIPs, o.VIPs)
}
