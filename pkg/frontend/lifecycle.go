package frontend

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// showStart updates Started and Advertised. Readiness waits for Started, because Kubernetes may
// delete another pod of the frontend once this pod is ready.
func (f *follower) showStart(l trench.Loaded, lb lbState) {
	if f.advertised {
		return
	}
	problem := "no configuration accepted yet: " + logs.Text(l.Err)
	if l.Generation > 0 {
		problem = f.startProblem(l.Config, lb)
	}
	f.advertised = problem == ""
	f.health.Set(Advertised, f.advertised, problem)
	if f.started {
		return
	}
	// The timeout runs only while all other conditions hold: BIRD or a gateway may still start.
	others := !slices.ContainsFunc(f.health.Conditions(), func(c *adminv1.Condition) bool {
		return !c.GetServing() && slices.Contains(f.parts, c.GetName())
	})
	switch now := time.Now(); {
	case l.Generation == 0 || !others:
		f.startBy = time.Time{}
	case f.startBy.IsZero():
		f.startBy = now.Add(f.ReadyTimeout)
	case !f.advertised && !now.Before(f.startBy):
		f.started = true
		f.Log.Warn("ready after --ready-timeout, although VIPs are not advertised",
			"timeout", f.ReadyTimeout, "problem", problem)
		f.observer.note("ready after --ready-timeout, although " + problem)
	}
	f.started = f.started || f.advertised
	f.health.Set(Started, f.started, problem)
	if f.started && f.Options.Started != nil {
		f.Options.Started()
	}
}

// startProblem returns the unmet condition of the start, or "". Every VIP must be reported, and
// every ready VIP advertised and exported.
func (p *process) startProblem(c *trench.Config, lb lbState) string {
	// The decisions on the load balancer's snapshot must be in p.observer.state.
	if !p.Gate.Ungated && (!lb.Synced || p.applied.Load().InstanceID != lb.Position.InstanceID) {
		return "load balancer has not reported the VIPs yet"
	}
	var announced [len(vip.Families)]int
	// What BIRD exports may be newer than the gate's decisions.
	birdState := p.bird.State().Load()
	listed := withExports(gate.Gateways{}, birdState).Exported
	s := p.observer.state
	s.mu.RLock()
	defer s.mu.RUnlock()
	unknown := &vipState{} // without a decision and a report
	for _, v := range c.Attractor.VIPs {
		st := cmp.Or(s.vips.Get(v), unknown)
		if st.Decision.Advertisement != gate.Withdrawn {
			announced[v.Family()]++
		}
		switch {
		// The order is the order of the start: reported, judged, advertised.
		case !p.Gate.Ungated && !st.Reported:
			return fmt.Sprintf("load balancer has not reported VIP %s", v)
		case !p.Gate.Ungated && st.Readiness.Reason == readinessv1.VipReason_VIP_REASON_NOT_CHECKED:
			return fmt.Sprintf("VIP %s is not judged yet: its targets wait for their first verdict", v)
		// A VIP without ready targets, or one that an operator drained, must not block the start.
		case st.Decision.Reason == gate.Drained:
		case !p.Gate.Ungated && st.Readiness.State != vip.Ready:
		case !st.Decision.Advertised():
			return p.notAdvertised(v, st.Decision.Reason)
		case listed[v.Family()] != nil && !listed[v.Family()].Has(v):
			return p.notAdvertised(v, gate.NotExported)
		}
	}
	// An advertised VIP attracts traffic only once BIRD has exported it.
	for _, f := range vip.Families {
		if announced[f] > 0 && listed[f] == nil && !exported(birdState, f, announced[f]) {
			return fmt.Sprintf("%s has not exported every %s VIP to a gateway yet", p.speakerName(), f)
		}
	}
	return ""
}

// notAdvertised returns why a ready VIP is not advertised.
func (p *process) notAdvertised(v vip.VIP, r gate.Reason) string {
	return strings.TrimSuffix(
		fmt.Sprintf("VIP %s is ready and not advertised, %s: %s", v, r, p.reasonDetail(r, v.Family())), ": ")
}

// exported reports whether a gateway of a family receives n VIPs or needs no routes.
func exported(s bird.State, f vip.Family, n int) bool {
	return slices.ContainsFunc(s.Gateways, func(g bird.GatewayState) bool {
		return g.Family == f && g.Up && (isStatic(g) || g.Exported >= n)
	})
}

// Bounds of the stages of a stop, on top of the drain time (docs/architecture.md).
const (
	withdrawMargin = 500 * time.Millisecond // for the gate to withdraw after the drain time
	reportMargin   = 300 * time.Millisecond // to report it, after confirmTimeout and the settle time
)

// drain moves all traffic away. A receive from again skips to the end.
func (p *process) drain(ctx context.Context, again <-chan struct{}) {
	if err := p.withdraw(ctx, again); err != nil {
		p.Log.Warn("stopping although traffic may still arrive", "error", err)
	}
}

// withdraw de-prefers, drains, withdraws, confirms and reports all VIPs.
func (p *process) withdraw(ctx context.Context, again <-chan struct{}) error {
	start := time.Now()
	// Readiness and status show the stop before traffic moves.
	p.stopping.Store(true)
	p.health.Set(Stopping, false, "frontend is stopping")
	p.Log.Info("stopping: moving traffic away", "drain_time", p.Gate.DrainTime)
	p.observer.note("frontend is stopping")

	ctx, cancel := task.WithAwakeTimeout(ctx,
		p.Gate.DrainTime+withdrawMargin+confirmTimeout+p.detectionTime()+p.Settle+reportMargin)
	// The goroutine ends with this call: it must not use the controller after the tasks end.
	skipped := make(chan struct{})
	go func() {
		defer close(skipped)
		select {
		case <-again:
			p.Log.Warn("second signal; withdrawing at once")
			// The error is ignored: the stages below observe the withdrawal or end at their deadline.
			_ = p.controller.Do(ctx, func(g *gate.Gate, now time.Time) { g.SkipDrains(now) })
			cancel()
		case <-ctx.Done():
		}
	}()
	defer func() { cancel(); <-skipped }()

	if err := p.controller.Do(ctx, func(g *gate.Gate, now time.Time) { g.Stop(now) }); err != nil {
		return fmt.Errorf("failed to stop the gate: %w", err)
	}
	// The gate withdraws after the drain time. BIRD must run until gateways have the UPDATE.
	if err := p.observer.waitWithdrawn(ctx); err != nil {
		return fmt.Errorf("not all VIPs were withdrawn: %w", err)
	}
	if err := p.reporter.Flush(ctx); err != nil {
		return fmt.Errorf("withdrawal was not confirmed: %w", err)
	}
	if p.watcher != nil {
		// The load balancer stops forwarding after this report, and not before its own limit without it.
		flush, cancelFlush := task.WithAwakeTimeout(ctx, reportMargin)
		defer cancelFlush()
		// A missing acknowledgement is not an error, because the load balancer may have stopped first.
		if err := p.watcher.Reported(flush); err != nil {
			p.Log.Info("final report not acknowledged by the load balancer", "error", err)
		}
	}
	p.Log.Info("every VIP is withdrawn and reported", "after", time.Since(start).Round(time.Millisecond))
	return nil
}
