package lb

import (
	"context"
	"log/slog"
	"time"

	"github.com/vipgate/vipgate/pkg/serving"
)

// stopMargin is what the frontend gets beyond the drain time to withdraw, to see it confirmed and to
// report it (docs/architecture.md#stopping).
const stopMargin = 2 * time.Second

// stop announces the end to the frontend and waits until every VIP was reported withdrawn, or the
// drain time plus stopMargin is over, or no frontend has been connected for serving.FrontendGone.
// Checks, heartbeats and the data plane continue meanwhile. A receive from again ends the wait.
func (p *process) stop(ctx context.Context, again <-chan struct{}) {
	start := time.Now()
	p.stopping.Set(true)
	p.condition(Serving, "stopping")
	p.table.GoAway(p.DrainTime)
	away := p.table.State()
	p.Log.Info("going away: waiting for the frontend to withdraw", "drain_for", p.DrainTime, "at_most", p.DrainTime+stopMargin)
	limit := time.After(p.DrainTime + stopMargin)
	alone := time.NewTimer(serving.FrontendGone)
	defer alone.Stop()
	after := func() slog.Attr { return slog.Duration("after", time.Since(start).Round(time.Millisecond)) }
	for {
		report, changed := p.server.Report().Get()
		applied := !away.Synced || serving.Applied(report, away.Position)
		// A frontend that stops at the same time may be gone already; its last report still counts.
		current := report.Connected || report.At.After(start)
		switch {
		case report.Complete && report.Advertised == 0 && current && applied:
			p.Log.Info("every VIP is withdrawn; stopping", after())
			return
		case report.Connected:
			alone.Stop()
		default:
			alone.Reset(serving.FrontendGone)
		}
		select {
		case <-changed:
		case <-alone.C:
			p.Log.Info("no frontend is connected; stopping", after())
			return
		case <-limit:
			p.Log.Warn("the frontend did not withdraw in time; stopping", "advertised", report.Advertised, after())
			return
		case <-again:
			p.Log.Warn("second signal; stopping without waiting", "advertised", report.Advertised)
			return
		case <-ctx.Done():
			return
		}
	}
}
