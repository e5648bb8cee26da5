package publication

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/kube/frontendstatus"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxVIPs is the maximum number of VIPs that a report lists; for more it has only counts. The
// object is written every [renewInterval], and stays far below etcd's limit of 1.5 MiB.
const maxVIPs = 500

// noStream is the reason of a VIP that no stream serves. Such VIPs are not counted.
const noStream = "NoStream"

// Report lists the VIPs that a pod's frontend advertises. It is stored in the Pod's TrenchReport.
type Report struct {
	// Renewed is the time of the last write, by the clock of the pod. Readers compare it only with
	// earlier values of the same pod.
	Renewed time.Time `json:"renewed"`
	// Time is the time of the last change of the fields below, by the clock of the pod.
	Time time.Time `json:"time"`
	// Problem is why the frontend's state is unknown. No VIP counts as advertised then.
	Problem string `json:"problem,omitempty"`
	// Held describes the removals that the frontend and the load balancer hold until they are
	// confirmed: their identifiers, a colon and the rest, separated by "; ".
	Held string `json:"held,omitempty"`
	// Advertised and Total count VIPs that a stream serves.
	Advertised int `json:"advertised"`
	Total      int `json:"total"`
	// VIPs lists all VIPs, sorted. It is empty if there are more than [maxVIPs].
	VIPs []vipReport `json:"vips,omitempty"`
}

// vipReport is the state of a VIP in a frontend.
type vipReport struct {
	VIP        vip.VIP `json:"vip"`
	Advertised bool    `json:"advertised"`
	// Reason is why the VIP is withdrawn or de-preferred, one word in CamelCase; Message explains it.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Targets is why a target of the VIP fails, as in `lb status`; "" if no target fails.
	Targets string `json:"targets,omitempty"`
}

// reportOf returns the report for the status of a frontend, without times.
func reportOf(s *frontendv1.Status) Report {
	report := Report{Held: heldRemovals(s)}
	for _, v := range s.GetVips() {
		parsed, err := vip.Parse(v.GetVip())
		if err != nil {
			continue // the format of a newer frontend
		}
		one := vipReport{VIP: parsed, Targets: failing(v.GetReadiness())}
		announced := v.GetAdvertisement() == readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
		one.Advertised = announced || v.GetAdvertisement() == readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
		if one.Advertised {
			report.Advertised++
		}
		if !announced {
			one.Reason, one.Message = why(v)
		}
		if one.Reason != noStream {
			report.Total++
		}
		report.VIPs = append(report.VIPs, one)
	}
	slices.SortFunc(report.VIPs, func(a, b vipReport) int { return vip.Compare(a.VIP, b.VIP) })
	// Truncate after counting: the counts cover all VIPs.
	if len(report.VIPs) > maxVIPs {
		report.VIPs = nil
	}
	return report
}

// why returns why a VIP is not advertised or de-preferred: the load balancer's reason if it is not ready, or else
// the frontend's reason.
func why(v *frontendv1.VipStatus) (reason, message string) {
	if readiness := v.GetReadiness(); readiness != nil &&
		v.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY {
		return camelCase(readiness.GetReason().String(), "VIP_REASON_"), status.Explain(readiness.GetReason()).Short
	}
	return camelCase(v.GetReason().String(), "ADVERTISEMENT_REASON_"), status.Explain(v.GetReason()).Short
}

// failing returns why a target of a VIP fails its checks, or "". A target that was not checked
// yet does not count as failed.
func failing(readiness *readinessv1.VipReadiness) string {
	switch readiness.GetReason() {
	case readinessv1.VipReason_VIP_REASON_TARGETS_READY, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY,
		readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE:
		return readiness.GetDetail()
	}
	return ""
}

// camelCase converts the name of an enum value to a condition reason: NO_TARGETS to NoTargets.
func camelCase(name, prefix string) string {
	var builder strings.Builder
	for word := range strings.SplitSeq(strings.TrimPrefix(name, prefix), "_") {
		if word == "LB" {
			builder.WriteString(word)
		} else if word != "" {
			builder.WriteString(word[:1] + strings.ToLower(word[1:]))
		}
	}
	if name[0] >= '0' && name[0] <= '9' { // a number is a value of a newer version
		return "Reason" + name
	}
	return builder.String()
}

// equal reports whether the reports are equal except for their times.
func (report Report) equal(o Report) bool {
	return report.Problem == o.Problem && report.Held == o.Held && report.Advertised == o.Advertised &&
		report.Total == o.Total && slices.Equal(report.VIPs, o.VIPs)
}

// probeInterval is the interval of the probes that detect a hanging frontend.
const probeInterval = 10 * time.Second

// frontend follows the status of the frontend in the same pod.
type frontend struct {
	socket string
	probe  time.Duration // interval of probes
	log    *slog.Logger
	report *latest.Value[Report] // Time is zero before the first attempt
}

// run follows the frontend until ctx ends.
func (frontend *frontend) run(ctx context.Context) error {
	return frontendstatus.Follow(ctx, frontend.socket, frontend.probe, func(status *frontendv1.Status, err error) {
		switch {
		case err == nil:
			if frontend.set(reportOf(status)) {
				frontend.log.Debug("frontend status changed")
			}
		case frontend.set(Report{Problem: "frontend does not answer: " + health.Reason(err)}):
			frontend.log.Warn("frontend status lost, retrying", "error", err)
		}
	})
}

// set replaces the report if it differs, and reports whether it does.
func (frontend *frontend) set(report Report) (differs bool) {
	if last := frontend.report.Load(); !last.Time.IsZero() && last.equal(report) {
		return false
	}
	report.Time = time.Now().UTC().Truncate(time.Second)
	frontend.report.Set(report)
	return true
}
