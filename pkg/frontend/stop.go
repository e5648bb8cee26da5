package frontend

import (
	"context"
	"fmt"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
)

// Bounds of the stages of a stop, on top of the drain time (docs/architecture.md).
const (
	withdrawMargin = 500 * time.Millisecond // for the gate to withdraw after the drain time
	reportMargin   = 300 * time.Millisecond // to report that, on top of confirmTimeout and the settle time
)

// stop moves traffic away: de-prefer, wait for the drain, withdraw, confirm, report. All components
// continue to run meanwhile. A receive from again skips to the end.
func (p *process) stop(ctx context.Context, again <-chan struct{}) error {
	start := time.Now()
	p.stopping.Store(true)
	p.health.Set(Stopping, false, "frontend is stopping")
	p.Log.Info("stopping: moving traffic away", "drain_time", p.Gate.DrainTime)
	p.observer.note("frontend is stopping")

	ctx, cancel := context.WithTimeout(ctx, p.Gate.DrainTime+withdrawMargin+confirmTimeout+p.Settle+reportMargin)
	defer cancel()
	skipped, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(skipped)
		select {
		case <-again:
			p.Log.Warn("second signal; withdrawing at once")
			// The stages below observe the effect; if the gate does not answer, they end at their
			// deadline.
			_ = p.controller.Do(ctx, func(g *gate.Gate, now time.Time) { g.SkipDrains(now) })
			cancel()
		case <-done:
		}
	}()
	defer func() { close(done); <-skipped }()

	if err := p.controller.Do(ctx, func(g *gate.Gate, now time.Time) { g.Stop(now) }); err != nil {
		return fmt.Errorf("failed to stop the gate: %w", err)
	}
	if err := p.observer.waitWithdrawn(ctx); err != nil {
		return fmt.Errorf("not all VIPs were withdrawn: %w", err)
	}
	if err := p.reporter.Flush(ctx); err != nil {
		return fmt.Errorf("withdrawal was not confirmed: %w", err)
	}
	if p.watcher != nil {
		flush, cancelFlush := context.WithTimeout(ctx, reportMargin)
		defer cancelFlush()
		// The load balancer may have stopped before.
		if err := p.watcher.Reported(flush); err != nil {
			p.Log.Info("final report not acknowledged by the load balancer", "error", err)
		}
	}
	p.Log.Info("every VIP is withdrawn and reported", "after", time.Since(start).Round(time.Millisecond))
	return nil
}
