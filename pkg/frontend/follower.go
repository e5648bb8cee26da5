package frontend

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/frontend/orders"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/vip"
)

// follower passes configuration to gate, kernel and BIRD, and updates health and metrics.
type follower struct {
	*process

	pulse    task.Pulse
	departed map[vip.VIP]time.Time // VIPs that were in force, with the ends of their source routing
	release  *time.Timer           // at the first of them
	leave    *time.Timer           // ends the drain of leaving VIPs

	drained   orders.Orders // applied last
	drainsEnd *time.Timer   // see followDrains

	// Last shown.
	shownFamilies   map[vip.Family]bool
	identityProblem string
	cached          bool // SVID in use
	routingProblem  string
	announcerLost   bool
	shownBIRD       bird.State
	shownStale      bool
	shownAttraction [len(vip.Families)]bool

	removed  int       // removed routes that BIRD was already asked to restore
	exported time.Time // time of the last such request
	// exportDue ends the wait for the next one; nil without a wait.
	exportDue    <-chan time.Time
	removalNoted time.Time // time of the last event of removed routes
	warned       bool      // logged that lb and frontend share a SPIFFE ID

	started, advertised bool
	startBy             time.Time // end of ReadyTimeout; zero while it does not run
}

// refreshInterval is the interval of updates without a change of an input. Ages in the status grow
// even if BIRD does not answer; otherwise each poll changes its state.
const refreshInterval = 2 * time.Second

func (f *follower) String() string { return "follower" }

// Overdue implements task.Loop.
func (f *follower) Overdue() time.Duration { return f.pulse.Overdue() }

// Run updates the other components until ctx ends.
func (f *follower) Run(ctx context.Context) error {
	refresh := time.After(tick.Until(time.Now(), refreshInterval))
	f.release, f.leave, f.drainsEnd = time.NewTimer(0), time.NewTimer(0), time.NewTimer(0)
	defer f.release.Stop()
	defer f.leave.Stop()
	f.leave.Stop()
	defer f.drainsEnd.Stop()
	f.pulse.Next(0)
	defer f.pulse.End()
	var err error // of an action of the loop
	loaded, configChanged := f.Source.Value().Get()
	if loaded.Generation > 0 { // otherwise keep the source routing of an earlier run
		if err = f.configure(ctx, loaded); err != nil {
			return err
		}
	} else {
		f.release.Stop()
	}
	for {
		// Get the channels before updating: a change after a Get closes its channel.
		birdState, birdChanged := f.bird.State().Get()
		routed, routedChanged := f.kernel.Confirmed().Get()
		announced, announcedChanged := f.announcer.State().Get()
		attracted, attractionChanged := f.attractor.current.Get()
		lb, lbChanged := f.observer.lb.Get()
		stale, staleChanged := f.Source.Stale().Get()
		vips, vipsChanged := f.observer.state.changed.Get()
		var ownChanged <-chan struct{}
		if f.Identity != nil {
			_, ownChanged = f.Identity.Status().Get()
		}
		f.health.CheckLoops()
		f.showConfiguration(loaded)
		f.showStale(stale)
		f.showIdentity()
		f.showBIRD(birdState)
		f.showAnnouncer()
		f.showStatic(attracted)
		f.showRouting(routed)
		f.exportRoutes(routed)
		// BIRD's supervisor polls faster until the sessions export this number.
		f.bird.Expect(announced.Announced4, announced.Announced6)
		if f.source != nil {
			f.health.Report(Stream, f.streamProblem(lb))
			f.health.Report(HeldTargets, heldTargets(lb))
		}
		f.showStart(loaded, lb)
		// Status watchers are notified last, because they read all of the state above.
		f.changed.Update(func(uint64) uint64 { return vips })
		f.pulse.Next(refreshInterval)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-configChanged:
			was := loaded
			loaded, configChanged = f.Source.Value().Get()
			f.metrics.Reload(loaded.Err == nil)
			f.observer.note(f.reloadDetail(loaded))
			held := loaded.Held.ID != was.Held.ID
			if held {
				f.observer.note("held removals: " + cmp.Or(loaded.Held.Problem(), "none any longer"))
			}
			// A refused configuration replaces the value, but not the generation.
			if held || loaded.Generation != was.Generation {
				err = f.configure(ctx, loaded)
			}
		case <-staleChanged:
		case <-f.leave.C:
			err = f.endLeaving(ctx)
		case <-f.drainsEnd.C:
			err = f.followDrains(ctx)
		case <-f.drains.Changed():
			err = f.followDrains(ctx)
		case left := <-f.immediate:
			left <- f.InForce.Load().Leaving()
			if err = f.endLeaving(ctx); err == nil {
				f.bird.ApplyNow() // until the next Configure
			}
		case <-f.release.C:
			f.route()
		case <-birdChanged:
		case <-routedChanged:
		case <-f.exportDue:
		// These inputs change with a decision, so their bookkeeping waits for the UPDATE.
		case <-announcedChanged:
			f.observer.queue.Settle(ctx, journal.UpdateDelay) // the loop checks ctx
		case <-attractionChanged:
			f.observer.queue.Settle(ctx, journal.UpdateDelay)
		case <-lbChanged:
			f.observer.queue.Settle(ctx, journal.UpdateDelay)
		case <-vipsChanged:
		case <-ownChanged:
		case <-refresh:
			refresh = time.After(tick.Until(time.Now(), refreshInterval))
		}
		if err != nil {
			return err
		}
	}
}

func (f *follower) showIdentity() {
	if f.Identity == nil {
		return
	}
	own := f.Identity.Status().Load()
	// The own ID is unknown until the first SVID arrives. Users of one host are shared on purpose.
	if !f.warned && !own.NotAfter.IsZero() && slices.Contains(f.LoadBalancers, own.ID) {
		f.warned = true
		f.Log.Warn("lb and frontend share a SPIFFE ID: each container with it can act as either; "+
			"see docs/operations.md for container selectors", "spiffe_id", own.ID.String())
	}
	problem := own.Problem()
	// Here and below the event comes first: who sees the condition finds it.
	if (problem == "") != (f.identityProblem == "") || own.Cached != f.cached {
		usable := "SVID usable"
		if own.Cached {
			usable = "cached SVID in use: " + logs.Text(own.RenewalErr)
		}
		f.observer.note("identity: " + cmp.Or(problem, usable))
	}
	f.identityProblem, f.cached = problem, own.Cached
	f.health.Report(Identity, problem)
	f.metrics.Identity(own.ID.String(), own.NotAfter)
}

const (
	// exportInterval is the least time between exports, if another process keeps removing routes: one
	// that flushes tables does so for one family after the other.
	exportInterval = 200 * time.Millisecond
	birdSettles    = 5 * time.Second // in which a new BIRD removes the routes of its predecessor
	// removalNotes is the least time between two events of removed routes.
	removalNotes = 10 * time.Second
)

// exportRoutes makes BIRD restore routes that another process removed.
func (f *follower) exportRoutes(routed kernel.Confirmed) {
	f.exportDue = nil
	if routed.Removed == f.removed {
		return
	}
	if wait := exportInterval - time.Since(f.exported); wait > 0 {
		f.exportDue = time.After(wait)
		return
	}
	f.removed, f.exported = routed.Removed, time.Now()
	f.bird.ExportRoutes()
	// A new BIRD removes the routes of its predecessor, so that is not a foreign change.
	if time.Since(f.shownBIRD.Since) > birdSettles && time.Since(f.removalNoted) >= removalNotes {
		f.removalNoted = time.Now()
		what := fmt.Sprintf("another process removed routes from table %d; BIRD exports them again", f.Kernel.TableID)
		f.Log.Warn(what)
		f.observer.note(what)
	}
}

func (f *follower) showRouting(routed kernel.Confirmed) {
	problem := logs.Text(routed.Err)
	select {
	case <-f.kernel.Ready():
	default: // before the first installation the error can be nil
		f.health.Report(Routing, cmp.Or(problem, "source routing not installed yet"))
		return
	}
	switch {
	case problem != "" && f.routingProblem == "":
		f.observer.note("source routing: " + problem)
	case problem == "" && f.routingProblem != "":
		f.observer.note("source routing restored")
	}
	f.routingProblem = problem
	f.health.Report(Routing, problem)
	families := f.families()
	for _, family := range vip.Families {
		name := fmt.Sprintf("%s/%s", Routing, family)
		if _, configured := families[family]; configured {
			f.health.Report(name, logs.Text(routed.Family[family]))
		} else {
			// A family without VIPs needs no source routing.
			f.health.Remove(name)
		}
	}
}

// showBIRD shows BIRD and its sessions, by family.
func (f *follower) showBIRD(s bird.State) {
	f.observer.journal.Add(append(changeEvents(f.shownBIRD, s), sessionEvents(f.shownBIRD, s)...)...)
	f.shownBIRD = s
	f.health.Report(BIRD, birdProblem(s))
	f.health.Report(BIRDConfig, configProblem(s))
	f.health.Report(Imports, importsProblem(s))
	f.health.Report(GatewayChange, changeProblem(s))
	families, now := f.families(), time.Now()
	// Egress needs a session only; RouteBack below shows a missing route.
	up := gateways(s, false).Up
	connected := up[vip.IPv4] || up[vip.IPv6]
	f.health.Set(Egress, connected, egressProblem(s, vip.Families[:]...))
	if f.Connected != nil {
		f.Connected.Set(connected)
	}
	for _, family := range vip.Families {
		egress, routeBack := fmt.Sprintf("%s/%s", Egress, family), fmt.Sprintf("%s/%s", RouteBack, family)
		if isUp, configured := families[family]; configured {
			f.health.Set(egress, isUp, egressProblem(s, family))
			f.health.Set(routeBack, !routeMissing(s, family, now), noRoute)
		} else {
			f.health.Remove(egress)
			f.health.Remove(routeBack)
		}
	}
	// Wait for the first report of VIPs: the load balancer would read a report without VIPs as
	// "no VIP is advertised".
	if !maps.Equal(families, f.shownFamilies) && f.reported.Load() {
		f.watcher.Report(readiness.ReportDelta{Families: families})
		f.shownFamilies = families
	}
}

// showAnnouncer shows whether BIRD accepts VIPs.
func (f *follower) showAnnouncer() {
	problem := f.announcerProblem(time.Now())
	if lost := problem != ""; f.started && lost != f.announcerLost {
		f.announcerLost = lost
		f.observer.note(cmp.Or(problem, f.speakerName()+" accepts VIPs again"))
	}
	f.health.Report(Announcer, problem)
}

// heldTargets returns the removals of targets that a load balancer holds, with the remedy.
func heldTargets(lb lbState) string {
	if !lb.Open || lb.Held == "" {
		return ""
	}
	id, _, _ := strings.Cut(lb.Held, ":")
	return fmt.Sprintf("%s; correct the configuration of the load balancer to cancel, or confirm with `lb confirm %s`",
		lb.Held, id)
}

// sessionEvents returns the events of BIRD and of the gateway sessions between two states.
func sessionEvents(was, is bird.State) []*adminv1.Event {
	var list []*adminv1.Event
	note := func(detail string) { list = append(list, &adminv1.Event{Detail: detail}) }
	session := func(gateway string, up bool, detail string) {
		event := &adminv1.Event{Object: gateway, From: "up", To: "down", Detail: detail}
		if up {
			event.From, event.To = event.GetTo(), event.GetFrom()
		}
		list = append(list, event)
	}
	switch {
	case is.ConfigErr != nil && was.ConfigErr == nil:
		note("BIRD " + configProblem(is))
	case is.ConfigErr == nil && was.ConfigErr != nil:
		note("BIRD loaded the desired configuration")
	}
	// Several restores between two states are one event.
	if is.Restores > was.Restores {
		note("another process configured BIRD; it is configured again")
	}
	switch {
	// Between two states BIRD may have been replaced: only the PID shows it.
	case is.Name != "" && is.Alive && !was.Alive:
		note("the speaker is " + is.Version)
	case is.Name != "" && !is.Alive && was.Alive:
		note("the speaker: " + birdProblem(is))
	case is.Alive && (!was.Alive || was.PID != is.PID):
		note(fmt.Sprintf("BIRD %s runs with pid %d, restarts: %d", is.Version, is.PID, is.Restarts))
	case !is.Alive && was.Alive:
		note("BIRD: " + birdProblem(is))
	}
	type key struct {
		name   string
		family vip.Family
	}
	before := map[key]bird.GatewayState{}
	for _, g := range was.Gateways {
		// While BIRD does not answer, its last list of sessions is outdated.
		g.Up = g.Up && was.Alive
		before[key{g.Name, g.Family}] = g
	}
	for _, g := range is.Gateways {
		old, up := before[key{g.Name, g.Family}], g.Up && is.Alive
		switch {
		// A session that came back within one poll differs only in its start.
		case old.Up && up && !old.Since.Equal(g.Since):
			session(g.Name, false, strings.TrimSpace("session lost and re-established "+g.LastError))
		case old.Up && !up:
			session(g.Name, false, cmp.Or(birdProblem(is), gatewayDetail(g)))
		}
		if up && (!old.Up || !old.Since.Equal(g.Since)) {
			session(g.Name, true, g.Peer())
		}
		switch {
		case up && g.Short && !old.Short:
			session(g.Name, true, g.ExportsProblem())
		case up && !g.Short && old.Short:
			session(g.Name, true, "receives every advertised VIP")
		}
	}
	return list
}

// reasonDetail returns the cause of a reason, such as the gateways that are down.
func (p *process) reasonDetail(r gate.Reason, f vip.Family) string {
	switch r {
	case gate.NoGateway:
		s := p.bird.State().Load()
		if gateways(s, false).Up[f] {
			return noRoute + " (--require-route)"
		}
		return cmp.Or(birdProblem(s), strings.Join(gatewaysDown(s, f), "; "))
	case gate.NotAccepted:
		return p.announcerProblem(time.Now())
	case gate.NotExported:
		return strings.Join(short(p.bird.State().Load(), f), "; ")
	case gate.LBLost, gate.LBStale:
		return p.streamProblem(p.observer.lb.Load())
	case gate.LBNeverSeen:
		if p.directory != nil {
			return p.streamProblem(p.observer.lb.Load())
		}
		return logs.Text(p.observer.lb.Load().Err)
	case gate.NoSourceRouting:
		return logs.Text(p.kernel.Confirmed().Load().Family[f])
	}
	return ""
}

const (
	firstRoutes = 2 * time.Second // in which a gateway may send its first routes
	noRoute     = "no gateway gives a route back to clients; have one send a default route, or set --import-routes=all"
)

// routeMissing reports whether gateways of a family are up and none advertises a route.
func routeMissing(s bird.State, family vip.Family, now time.Time) bool {
	return s.Alive && !gateways(s, true).Up[family] && slices.ContainsFunc(s.Gateways, func(g bird.GatewayState) bool {
		return g.Family == family && g.Up && now.Sub(g.Since) > firstRoutes
	})
}

func birdProblem(s bird.State) string {
	if s.Alive {
		return ""
	}
	if s.Name != "" {
		return cmp.Or(logs.Text(s.Err), "the speaker's state is not read yet")
	}
	return cmp.Or(logs.Text(s.Err), "BIRD does not run")
}

func configProblem(s bird.State) string {
	if s.ConfigErr == nil {
		return ""
	}
	return "keeps an older configuration: " + s.ConfigErr.Error()
}

// importsProblem names the gateways that sent more routes than the import limit.
func importsProblem(s bird.State) string {
	var problems []string
	for _, g := range s.Gateways {
		if g.ImportsBlocked {
			problems = append(problems, g.Name+": "+g.Warning)
		}
	}
	return strings.Join(problems, "; ")
}

// egressProblem returns why no gateway of the families is up.
func egressProblem(s bird.State, families ...vip.Family) string {
	return cmp.Or(birdProblem(s), strings.Join(gatewaysDown(s, families...), "; "),
		"no gateway is configured, or none was observed yet")
}

// gatewaysDown returns the name and state of each gateway of the families that is down or drained.
func gatewaysDown(s bird.State, families ...vip.Family) []string {
	var problems []string
	for _, g := range s.Gateways {
		if slices.Contains(families, g.Family) && (!g.Up || g.Export == bird.ExportNone) {
			problems = append(problems, g.Name+": "+gatewayDetail(g))
		}
	}
	return problems
}

// gatewayDetail returns the state of a gateway's session, with its last error.
func gatewayDetail(g bird.GatewayState) string {
	switch {
	case g.Problem != "":
		return g.Problem
	case g.Up && g.Export == bird.ExportNone:
		return g.State + ", receives no VIP"
	case g.Up && g.Export == bird.ExportDepreferred:
		return g.State + ", all VIPs are de-preferred"
	case g.Held && !g.Usable:
		return "held down by the frontend, and dead: its BFD session was down before, and must come up once"
	case g.Held:
		return "held down by the frontend"
	case g.LastError != "" && !g.Up:
		return g.State + " (" + g.LastError + ")"
	}
	return g.State
}

func lbProblem(lb lbState, lastMessage time.Time) string {
	switch {
	case lb.Freshness == gate.Live:
		return ""
	case lb.Err != nil:
		return lb.Err.Error()
	case lb.Open && !lastMessage.IsZero():
		return fmt.Sprintf("load balancer is connected but silent for %v: stopped, or starved of CPU?",
			time.Since(lastMessage).Round(time.Second))
	case lb.Position.InstanceID == "":
		return "load balancer has sent no snapshot yet"
	}
	return "load balancer readiness is " + lb.Freshness.String()
}
