package publication

import (
	"context"
	"log/slog"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/kube/frontendstatus"
	"github.com/vipgate/vipgate/pkg/latest"
)

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
