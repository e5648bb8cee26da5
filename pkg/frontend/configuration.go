package frontend

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

// reloadDetail returns the event of a new state of the configuration.
func (p *process) reloadDetail(l trench.Loaded) string {
	switch {
	case l.Err != nil && l.Generation == 0:
		return "no VIPs configured: " + l.Err.Error()
	case l.Partial:
		return p.SourceName + " reloaded, except for: " + strings.ReplaceAll(l.Err.Error(), "\n", "; ")
	case l.Err != nil:
		return p.SourceName + " refused, keeping the previous one: " + l.Err.Error()
	}
	return p.SourceName + " reloaded"
}

// showConfiguration shows whether the newest configuration of the source is completely in force.
func (f *follower) showConfiguration(l trench.Loaded) {
	valid := l.Err == nil && l.Generation > 0
	f.health.Set(Configuration, valid, cmp.Or(logs.Text(l.Err), f.SourceName+" not read yet"))
	f.metrics.Configuration(valid)
	f.health.Report(Held, l.Held.Problem())
	f.metrics.Held(l.Held.Count())
}

func (f *follower) showStale(s *trench.Stale) {
	now := time.Now()
	problem := s.Problem(now)
	if is := problem != ""; is != f.shownStale {
		f.shownStale = is
		f.observer.note("configuration " + cmp.Or(problem, "refreshed again"))
	}
	f.health.Report(f.StaleCondition, problem)
	f.metrics.Stale(s.Age(now))
}

// configure puts a configuration in force. It de-prefers removed VIPs for the drain time, as at a
// stop; BIRD's supervisor drains removed gateways. The load balancer, which may read the same
// trench file, keeps forwarding these VIPs.
func (f *follower) configure(ctx context.Context, loaded trench.Loaded) error {
	before, wanted := f.InForce.Load(), vip.NewSet(loaded.Config.Attractor.VIPs...)
	leaving := vip.Set{}
	begin := func(g *gate.Gate, now time.Time) {
		for _, v := range before.Attractor.VIPs {
			switch {
			// A VIP that returns during its drain rises again.
			case wanted.Has(v):
				if before.Kept[v] == change.Leaving {
					g.Undrain(v)
				}
			// A withdrawn VIP attracts no traffic and needs no drain.
			case f.Gate.DrainTime > 0 && g.Decision(v).Advertisement != gate.Withdrawn:
				leaving[v] = struct{}{}
				g.Drain(now, v) // has no effect on a VIP that already leaves
			}
		}
		// The controller owns the attractor, so change it in the same step as the gate.
		f.attractor.leave(leaving.Sorted())
	}
	if err := f.controller.Do(ctx, begin); err != nil {
		return err
	}
	// A newer configuration replaces the one that waits for the end of the drain.
	if f.leave.Stop(); len(leaving) > 0 {
		// Until gateways have confirmed the withdrawal, also for VIPs that return soon.
		f.leave.Reset(f.Gate.DrainTime + confirmTimeout)
		f.observer.note(fmt.Sprintf("%d VIPs left the configuration: de-preferred for %v, then withdrawn", len(leaving),
			f.Gate.DrainTime))
	}
	return f.apply(ctx, before.Next(loaded, leaving, !f.Gate.Ungated))
}

// endLeaving removes the VIPs that left the configuration.
func (f *follower) endLeaving(ctx context.Context) error {
	inForce := f.InForce.Load()
	if f.leave.Stop(); len(inForce.Leaving()) == 0 {
		return nil
	}
	return f.apply(ctx, inForce.Next(inForce.Loaded, nil, !f.Gate.Ungated))
}

// apply passes the VIPs in force to gate, kernel and BIRD.
func (f *follower) apply(ctx context.Context, inForce *change.InForce) error {
	// Targets answer flows of a removed VIP until gateways have applied the withdrawal.
	end := time.Now().Add(confirmTimeout + f.Settle)
	for _, v := range f.InForce.Load().Attractor.VIPs {
		f.departed[v] = end // unless it is still in force, see routed
	}
	f.setInForce(inForce)
	a := inForce.Attractor
	// Install source routing first: a new VIP attracts traffic as soon as it is advertised.
	f.route()
	policies, err := policy.New(a.Policies, f.encoding())
	if err != nil {
		return err
	}
	err = f.controller.Do(ctx, func(g *gate.Gate, now time.Time) {
		f.controller.setPolicies(policies, a.VIPs, now)
		g.Configure(a.VIPs)
		f.attractor.leave(inForce.Leaving())
	})
	if err != nil {
		return err
	}
	// BIRD may end the sessions of removed gateways, so it is configured after the gate.
	f.bird.Configure(a)
	f.warnStatic(a.Gateways)
	return nil
}

// route installs source routing for the VIPs in force, and for departed VIPs until their time
// expires.
func (f *follower) route() {
	now := time.Now()
	routed, next := f.routed(now)
	f.kernel.ConfigureSet(routed)
	if f.release.Stop(); !next.IsZero() {
		f.release.Reset(next.Sub(now))
	}
}

// routed returns the VIPs that have source routing, and until when they are the same.
func (f *follower) routed(now time.Time) (routed vip.Set, next time.Time) {
	routed = vip.NewSet(f.InForce.Load().Attractor.VIPs...)
	for v, end := range f.departed {
		if routed.Has(v) || !now.Before(end) {
			delete(f.departed, v)
			continue
		}
		routed[v] = struct{}{}
		if next.IsZero() || end.Before(next) {
			next = end
		}
	}
	return routed, next
}
