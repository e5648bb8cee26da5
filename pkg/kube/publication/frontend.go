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

func newFrontend(socket string, log *slog.Logger) *frontend {
	return &frontend{socket, probeInterval, log, latest.New(Report{})}
}

// run follows the frontend until ctx ends.
func (f *frontend) run(ctx context.Context) error {
	return frontendstatus.Follow(ctx, f.socket, f.probe, func(s *frontendv1.Status, err error) {
		switch {
		case err == nil:
			if f.set(reportOf(s)) {
				f.log.Debug("frontend status changed")
			}
		case f.set(Report{Problem: "frontend does not answer: " + health.Reason(err)}):
			f.log.Warn("frontend status lost, retrying", "error", err)
		}
	})
}

// set replaces the report if it differs, and reports whether it does.
func (f *frontend) set(r Report) (differs bool) {
	if last := f.report.Load(); !last.Time.IsZero() && last.equal(r) {
		return false
	}
	r.Time = time.Now().UTC().Truncate(time.Second)
	f.report.Set(r)
	return true
}
