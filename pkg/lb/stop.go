package lb

import (
	"context"
	"errors"
	"net"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
)

const (
	// stopMargin is what the frontend gets beyond the drain time to withdraw,
	// to see it confirmed and to report it (design section 5).
	stopMargin = 2 * time.Second
	// reporterGone is how long no frontend may be connected before there is
	// nobody to wait for.
	reporterGone = 500 * time.Millisecond
)

// stop tells the frontend that we go away and waits until every VIP was
// reported withdrawn, or the drain time plus stopMargin is over, or nobody has
// been there to report for reporterGone. Checks, heartbeats and the data plane
// go on meanwhile. A receive from again ends the wait.
func (p *process) stop(ctx context.Context, again <-chan struct{}) {
	start := time.Now()
	p.stopping.Set(true)
	p.health.Set(Serving, false, "stopping")
	p.table.GoAway(p.DrainTime)
	p.Log.Info("going away: waiting for the frontend to withdraw", "drain_for", p.DrainTime, "at_most", p.DrainTime+stopMargin)
	limit := time.NewTimer(p.DrainTime + stopMargin)
	defer limit.Stop()
	alone := time.NewTimer(reporterGone)
	defer alone.Stop()
	report, changed := p.server.Report().Get()
	for {
		switch {
		case report.Complete && report.Advertised == 0 && (report.Connected || report.At.After(start)) && !p.frontendLags():
			// A frontend that stops with us may be gone before we look; what it
			// said last still counts.
			p.Log.Info("every VIP is withdrawn; stopping", "after", time.Since(start).Round(time.Millisecond))
			return
		case report.Connected:
			alone.Stop()
		default:
			alone.Reset(reporterGone)
		}
		select {
		case <-changed:
			report, changed = p.server.Report().Get()
		case <-alone.C:
			p.Log.Info("no frontend is connected; stopping", "after", time.Since(start).Round(time.Millisecond))
			return
		case <-limit.C:
			p.Log.Warn("the frontend did not withdraw in time; stopping", "advertised", report.Advertised, "after", time.Since(start).Round(time.Millisecond))
			return
		case <-again:
			p.Log.Warn("second signal; stopping without waiting", "advertised", report.Advertised)
			return
		case <-ctx.Done():
			return
		}
	}
}

// frontendLags tells whether the frontend's report is older than our last word:
// it calls a VIP not ready that is. Such a VIP may be announced at this moment,
// so that nothing reported as advertised does not mean that nothing is.
func (p *process) frontendLags() bool {
	reported := p.server.AllReported()
	for _, r := range p.table.State().VIPs {
		if r.State != readiness.Ready {
			continue
		}
		switch reported[r.VIP].Reason {
		case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY:
			return true
		}
	}
	return false
}

func isClosed(err error) bool { return errors.Is(err, net.ErrClosed) }
