package lb

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/vipgate/vipgate/pkg/serving"
)

const (
	// stopMargin is what the frontend gets beyond the drain time to withdraw, to see it confirmed and
	// to report it (docs/architecture.md#stopping).
	stopMargin = 2 * time.Second
)

// stop tells the frontend that we go away and waits until every VIP was
// reported withdrawn, or the drain time plus stopMargin is over, or no
// frontend has been connected for serving.FrontendGone. Checks, heartbeats and the data plane
// go on meanwhile. A receive from again ends the wait.
func (p *process) stop(ctx context.Context, again <-chan struct{}) {
	start := time.Now()
	p.stopping.Set(true)
	p.health.Set(Serving, false, "stopping")
	p.table.GoAway(p.DrainTime)
	away := p.table.State()
	p.Log.Info("going away: waiting for the frontend to withdraw", "drain_for", p.DrainTime, "at_most", p.DrainTime+stopMargin)
	limit := time.NewTimer(p.DrainTime + stopMargin)
	defer limit.Stop()
	alone := time.NewTimer(serving.FrontendGone)
	defer alone.Stop()
	report, changed := p.server.Report().Get()
	for {
		switch {
		case report.Complete && report.Advertised == 0 && (report.Connected || report.At.After(start)) && (!away.Synced || serving.Applied(report, away.Position)):
			// A frontend that stops with us may be gone before we look; what it
			// said last still counts.
			p.Log.Info("every VIP is withdrawn; stopping", "after", time.Since(start).Round(time.Millisecond))
			return
		case report.Connected:
			alone.Stop()
		default:
			alone.Reset(serving.FrontendGone)
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

func isClosed(err error) bool { return errors.Is(err, net.ErrClosed) }
