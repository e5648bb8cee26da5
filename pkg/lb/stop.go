package lb

import (
	"context"
	"log/slog"
	"time"

	"github.com/vipgate/vipgate/pkg/serving"
)

// unreportedWithdraw is the time in which a frontend of Meridio withdraws: it rewrites the
// configuration of BIRD and reloads it, without a report.
const unreportedWithdraw = 1500 * time.Millisecond

// stopBeat is the time between two looks at the clock during a stop. Of more than twice as much
// only this time counts: the rest is a stall of this process, in which reports of a withdrawal wait
// to be read.
const stopBeat = 50 * time.Millisecond

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
	beat := time.NewTicker(stopBeat)
	defer beat.Stop()
	// The time since the start without stalls, and the part of it since the frontend was there.
	var ran, alone time.Duration
	last := start
	after := func() slog.Attr { return slog.Duration("after", time.Since(start).Round(time.Millisecond)) }
	for {
		report, changed := p.server.Report().Get()
		watching, watchingChanged := p.availability.Watching().Get()
		// A frontend of Meridio does not report its withdrawals, so only time ends this wait.
		drained := ran >= max(p.DrainTime, unreportedWithdraw)
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
			alone = 0
		case alone >= serving.FrontendGone:
			p.Log.Info("no frontend is connected; stopping", after())
			return
		}
		if ran >= p.DrainTime+stopMargin {
			p.Log.Warn("the frontend did not withdraw in time; stopping", "advertised", report.Advertised, after())
			return
		}
		select {
		case <-changed:
		case <-watchingChanged:
		case <-beat.C:
			now := time.Now()
			step := now.Sub(last)
			if step > 2*stopBeat { // later than on a busy machine
				step = stopBeat
			}
			ran, alone, last = ran+step, alone+step, now
		case <-again:
			p.Log.Warn("second signal; stopping without waiting", "advertised", report.Advertised)
			return
		case <-ctx.Done():
			return
		}
	}
}
