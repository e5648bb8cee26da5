package lb

import (
	"context"
	"log/slog"
	"time"

	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/task"
)

// unreportedWithdraw is the time in which a frontend of Meridio withdraws: it rewrites the
// configuration of BIRD and reloads it, without a report.
const unreportedWithdraw = 1500 * time.Millisecond

// drain announces the stop and waits until the frontend reported every VIP as withdrawn or is gone.
// For a frontend of Meridio it waits for the drain time, and at least for unreportedWithdraw.
func (p *process) drain(ctx context.Context, again <-chan struct{}) {
	start := time.Now()
	p.stopping.Set(true)
	p.health.Report(Serving, "stopping")
	p.table.GoAway(p.DrainTime)
	// GoAway advances the revision. Only a report that applied it counts: an older one may list VIPs
	// as withdrawn that were advertised afterwards.
	away := p.table.State()
	p.Log.Info("going away: waiting for the frontend to withdraw", "drain_for", p.DrainTime,
		"at_most", p.DrainTime+stopMargin)
	// Up to three long stalls of this process end no wait: the report of a withdrawal may wait to be read.
	timers := context.WithoutCancel(ctx)
	limit, endLimit := task.WithAwakeTimeout(timers, p.DrainTime+stopMargin)
	defer endLimit()
	withdrawal, endWithdrawal := task.WithAwakeTimeout(timers, max(p.DrainTime, unreportedWithdraw))
	defer endWithdrawal()
	drained, unreported := false, withdrawal.Done()
	var gone <-chan struct{} // not nil while no frontend is connected
	endGone := func() {}
	defer func() { endGone() }()
	after := func() slog.Attr { return slog.Duration("after", time.Since(start).Round(time.Millisecond)) }
	for {
		report, changed := p.server.Report().Get()
		watching, watchingChanged := p.availability.Watching().Get()
		// A frontend of Meridio does not report its withdrawals, so only time ends this wait.
		waits := watching > 0 && !drained
		applied := !away.Synced || serving.Applied(report, away.Position)
		// A frontend that stops at the same time may be gone already; its last report still counts.
		current := report.Connected || report.At.After(start)
		switch {
		case report.Complete && report.Advertised == 0 && current && applied && !waits:
			p.Log.Info("every VIP is withdrawn; stopping", after())
			return
		case drained && watching > 0 && !report.Connected:
			p.Log.Info("a frontend of Meridio had the time to withdraw; stopping", after())
			return
		case report.Connected || waits:
			endGone()
			gone = nil
		case gone == nil:
			var alone context.Context
			alone, endGone = task.WithAwakeTimeout(timers, serving.FrontendGone)
			gone = alone.Done()
		}
		select {
		case <-changed:
		case <-watchingChanged:
		case <-unreported:
			drained, unreported = true, nil
		case <-gone:
			p.Log.Info("no frontend is connected; stopping", after())
			return
		case <-limit.Done():
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
