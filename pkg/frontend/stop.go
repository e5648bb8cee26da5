package frontend

import (
	"context"
	"errors"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
)

// Bounds of the stages of a stop, on top of the drain time (design section 5).
const (
	// withdrawMargin is what the gate gets to withdraw after the drain time.
	withdrawMargin = 500 * time.Millisecond
	// reportMargin is what the withdrawal gets to be confirmed, to settle and to
	// be reported, on top of confirmTimeout and the settle time.
	reportMargin = 300 * time.Millisecond
)

// stop moves traffic away: de-prefer, wait for the drain, withdraw, confirm,
// report. Everything goes on running meanwhile. A receive from again skips to
// the end.
func (p *process) stop(ctx context.Context, again <-chan struct{}) error {
	start := time.Now()
	p.stopping.Set(true)
	p.health.Set(Stopping, false, "the frontend is stopping")
	p.Log.Info("stopping: moving traffic away", "drain_time", p.DrainTime)
	p.observer.remark("the frontend is stopping")

	ctx, cancel := context.WithTimeout(ctx, p.DrainTime+withdrawMargin+confirmTimeout+p.Settle+reportMargin)
	defer cancel()
	skipped := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(skipped)
		select {
		case <-again:
			p.Log.Warn("second signal; withdrawing at once")
			// The stages below see its effect; if the gate cannot answer, their
			// deadline ends them.
			_ = p.controller.Do(ctx, func(g *gate.Gate, now time.Time) { g.SkipDrains(now) })
			cancel()
		case <-done:
		}
	}()
	defer func() { close(done); <-skipped }()

	if err := p.controller.Do(ctx, func(g *gate.Gate, now time.Time) { g.Stop(now) }); err != nil {
		return errors.Join(errors.New("the gate did not take the stop"), err)
	}
	if err := p.observer.waitWithdrawn(ctx); err != nil {
		return errors.Join(errors.New("not every VIP was withdrawn"), err)
	}
	if err := p.reporter.Flush(ctx); err != nil {
		return errors.Join(errors.New("the withdrawal was not confirmed"), err)
	}
	if p.watcher != nil {
		flush, cancelFlush := context.WithTimeout(ctx, reportMargin)
		defer cancelFlush()
		// Nobody may be there to hear it any more.
		if err := p.watcher.Reported(flush); err != nil {
			p.Log.Info("the load balancer did not take the last report", "error", err)
		}
	}
	p.Log.Info("every VIP is withdrawn, and that reported to whoever listens", "after", time.Since(start).Round(time.Millisecond))
	return nil
}
