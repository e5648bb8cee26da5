package frontend

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// follower carries configuration to those who need it and keeps health and
// metrics up to date. It may lag behind the controller, never hold it up.
type follower struct {
	process *process
	ready   chan struct{}

	families   map[vip.Family]bool // as reported last
	configured vip.Set
	release    *time.Timer // removed VIPs lose their source routing

	identityProblem string     // as shown last
	routingProblem  error      // as shown last
	bird            bird.State // as shown last
	removed         int        // removals of routes that BIRD was asked to restore
	exported        time.Time  // when it was asked last
	warned          bool       // that lb and frontend share a SPIFFE ID

	started, advertised bool
	startBy             time.Time // Readiness no longer waits; zero: not counted down
}

func (f *follower) String() string         { return "follower" }
func (f *follower) Ready() <-chan struct{} { return f.ready }

// Run follows until ctx ends.
func (f *follower) Run(ctx context.Context) error {
	p := f.process
	tick := time.NewTicker(time.Second) // ages in the status
	defer tick.Stop()
	f.release = time.NewTimer(0)
	defer f.release.Stop()
	loaded, configChanged := p.config.Value().Get()
	if loaded.Generation > 0 { // otherwise the source routing of an earlier run stays
		if err := f.configure(ctx, loaded.Config); err != nil {
			return err
		}
	} else {
		f.release.Stop()
	}
	close(f.ready)
	birdState, birdChanged := p.bird.State().Get()
	routed, routedChanged := p.kernel.Confirmed().Get()
	announced, announcedChanged := p.announcer.State().Get()
	lb, lbChanged := p.observer.lb.Get()
	vips, vipsChanged := p.observer.state.changed.Get()
	var ownChanged <-chan struct{}
	if p.Identity != nil {
		_, ownChanged = p.Identity.Status().Get()
	}
	for {
		f.showLiveness()
		f.showConfiguration(loaded)
		f.showIdentity()
		f.showBIRD(birdState)
		f.showRouting(routed)
		f.exportRoutes(routed)
		p.metrics.Announcer(announced.Sessions)
		p.metrics.Routing(uint64(routed.Repairs))
		p.bird.Expect(announced.Announced4, announced.Announced6)
		if p.speaker != nil {
			problem := p.streamProblem(lb)
			p.health.Set(Stream, problem == "", problem)
		}
		f.showStart(loaded, lb)
		p.changed.Update(func(uint64) uint64 { return vips })
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-configChanged:
			was := loaded
			loaded, configChanged = p.config.Value().Get()
			p.metrics.Reload(loaded.Err == nil)
			p.observer.remark(reloadWords(loaded))
			if loaded.Generation != was.Generation {
				if err := f.configure(ctx, loaded.Config); err != nil {
					return err
				}
			}
		case <-birdChanged:
			birdState, birdChanged = p.bird.State().Get()
		case <-routedChanged:
			routed, routedChanged = p.kernel.Confirmed().Get()
		case <-announcedChanged:
			announced, announcedChanged = p.announcer.State().Get()
		case <-lbChanged:
			lb, lbChanged = p.observer.lb.Get()
		case <-vipsChanged:
			vips, vipsChanged = p.observer.state.changed.Get()
		case <-ownChanged:
			_, ownChanged = p.Identity.Status().Get()
		case <-f.release.C:
			p.kernel.Configure(f.configured.Sorted())
		case <-tick.C:
		}
	}
}

// configure hands a configuration to gate, kernel and BIRD. What leaves the
// configuration is withdrawn at once, but keeps its source routing until the
// gateways had time to hear of it: answers of its last flows still come.
func (f *follower) configure(ctx context.Context, c *trench.Config) error {
	p := f.process
	routed := vip.NewSet(c.Attractor.VIPs...)
	for v := range f.configured {
		routed[v] = struct{}{}
	}
	p.kernel.Configure(routed.Sorted())
	if err := p.controller.Do(ctx, func(g *gate.Gate, _ time.Time) { g.Configure(c.Attractor.VIPs) }); err != nil {
		return err
	}
	p.bird.Configure(c.Attractor.Gateways, c.Attractor.VIPs)
	f.configured = vip.NewSet(c.Attractor.VIPs...)
	f.release.Reset(confirmTimeout + p.Settle)
	return nil
}

// hungAfter is how long the gate may be silent before the process should be
// restarted. BIRD has withdrawn everything long before: its hold time is 3 s.
const hungAfter = 10 * time.Second

func (f *follower) showLiveness() {
	select {
	case <-f.process.controller.Ready():
		idle := f.process.controller.idle()
		f.process.health.Set(Liveness, idle < hungAfter, fmt.Sprintf("the gate last decided %v ago", idle.Round(time.Second)))
	default: // still starting
	}
}

func reloadWords(l trench.Loaded) string {
	switch {
	case l.Err != nil && l.Generation == 0:
		return "the trench file was refused, there are no VIPs: " + l.Err.Error()
	case l.Err != nil:
		return "the trench file was refused, the old one stays in force: " + l.Err.Error()
	}
	return "the trench file was read again"
}

// showConfiguration shows whether the trench file on disk is the one in force.
// What BIRD makes of it is a condition of its own.
func (f *follower) showConfiguration(l trench.Loaded) {
	p := f.process
	valid := l.Err == nil && l.Generation > 0
	p.health.Set(Configuration, valid, cmp.Or(errorText(l.Err), "the trench file was not read yet"))
	p.health.Set(NSPCli, valid, "see "+Configuration)
	p.metrics.Configuration(valid)
}

func (f *follower) showIdentity() {
	p := f.process
	if p.Identity == nil {
		return
	}
	own := p.Identity.Status().Load()
	if !f.warned && slices.Contains(p.LoadBalancers, own.ID) {
		f.warned = true
		p.Log.Warn("lb and frontend share a SPIFFE ID: any container with it can be either; see docs/operations.md for container selectors", "spiffe_id", own.ID.String())
	}
	problem := own.Problem()
	p.health.Set(Identity, problem == "", problem)
	if (problem == "") != (f.identityProblem == "") {
		what := "identity: there is a usable SVID"
		if problem != "" {
			what = "identity: " + problem
		}
		p.observer.remark(what)
	}
	f.identityProblem = problem
	p.metrics.Identity(own.ID.String(), own.NotAfter)
}

// exportInterval is the shortest time between two exports of the gateways' routes, so
// that another process that removes them all the time does not keep BIRD busy.
const exportInterval = time.Second

// birdSettles is how long removals are taken for those of a new BIRD.
const birdSettles = 5 * time.Second

// exportRoutes has BIRD restore routes that another process removed.
func (f *follower) exportRoutes(routed kernel.Confirmed) {
	if routed.Removed == f.removed || time.Since(f.exported) < exportInterval {
		return
	}
	f.removed, f.exported = routed.Removed, time.Now()
	f.process.bird.ExportRoutes()
	// A BIRD that has just started removes what the one before left.
	if time.Since(f.bird.Since) > birdSettles {
		what := fmt.Sprintf("another process removed routes from table %d; BIRD writes them again", f.process.Kernel.TableID)
		f.process.Log.Warn(what)
		f.process.observer.remark(what)
	}
}

// showRouting shows whether source routing stands. No error is not enough: at
// the start there is none yet.
func (f *follower) showRouting(routed kernel.Confirmed) {
	p := f.process
	select {
	case <-p.kernel.Ready():
		p.health.Set(Routing, routed.Err == nil, errorText(routed.Err))
		switch {
		case routed.Err != nil && f.routingProblem == nil:
			p.observer.remark("source routing: " + routed.Err.Error())
		case routed.Err == nil && f.routingProblem != nil:
			p.observer.remark("source routing stands again")
		}
		f.routingProblem = routed.Err
	default:
		p.health.Set(Routing, false, cmp.Or(errorText(routed.Err), "source routing is being set up"))
	}
}

// showBIRD shows the process and the sessions, each family by itself.
func (f *follower) showBIRD(s bird.State) {
	p := f.process
	p.health.Set(BIRD, s.Alive, birdProblem(s))
	p.health.Set(BIRDConfig, s.ConfigErr == nil, configProblem(s))
	for _, e := range sessionEvents(f.bird, s) {
		p.observer.remember(e)
	}
	f.bird = s
	up := gateways(s, false).Up
	p.health.Set(Egress, up[vip.IPv4] || up[vip.IPv6], egressProblem(s, vip.Families[:]...))
	families := p.families()
	changed := len(families) != len(f.families)
	for family, isUp := range families {
		p.health.Set(fmt.Sprintf("%s/%s", Egress, family), isUp, egressProblem(s, family))
		p.health.Set(fmt.Sprintf("%s/%s", RouteBack, family), !routeMissing(s, family, time.Now()), noRoute)
		if was, known := f.families[family]; !known || was != isUp {
			changed = true
		}
	}
	for _, family := range vip.Families {
		if _, configured := families[family]; !configured {
			p.health.Remove(fmt.Sprintf("%s/%s", Egress, family))
			p.health.Remove(fmt.Sprintf("%s/%s", RouteBack, family))
		}
	}
	// Not before the first VIPs were reported: the load balancer would take a
	// report without VIPs for "nothing is advertised".
	if changed && p.reported.Load() {
		p.watcher.Report(readiness.ReportDelta{Families: families})
		f.families = families
	}
	shown := metrics.BIRD{
		Up: s.Alive, Restarts: uint64(s.Restarts), Configures: s.Configures, Configured: s.ConfigErr == nil, Refusals: s.ConfigFailures,
	}
	for _, g := range s.Gateways {
		shown.Gateways = append(shown.Gateways, metrics.Gateway{
			Name: g.Name, Family: g.Family.String(), Up: g.Up && s.Alive, Since: g.Since, Imported: g.Imported, Exported: g.Exported,
		})
	}
	p.metrics.BIRD(shown)
}

// sessionEvents are what happened to BIRD and to the gateways' sessions between
// two looks. A session that was lost and came back in between tells of both.
func sessionEvents(was, is bird.State) []event {
	var made []event
	switch {
	case is.ConfigErr != nil && was.ConfigErr == nil:
		made = append(made, event{Detail: "BIRD " + configProblem(is)})
	case is.ConfigErr == nil && was.ConfigErr != nil:
		made = append(made, event{Detail: "BIRD has the wanted configuration again"})
	}
	switch {
	case is.Alive && (!was.Alive || was.PID != is.PID):
		made = append(made, event{Detail: fmt.Sprintf("BIRD %s runs with pid %d, restarts: %d", is.Version, is.PID, is.Restarts)})
	case !is.Alive && was.Alive:
		made = append(made, event{Detail: "BIRD: " + birdProblem(is)})
	}
	before := map[string]bird.GatewayState{}
	for _, g := range was.Gateways {
		g.Up = g.Up && was.Alive
		before[g.Name] = g
	}
	for _, g := range is.Gateways {
		old, up := before[g.Name], g.Up && is.Alive
		switch {
		case old.Up && up && !old.Since.Equal(g.Since):
			made = append(made, event{Gateway: g.Name, Detail: strings.TrimSpace("the session was lost for a moment " + g.LastError)}, event{Gateway: g.Name, GatewayUp: true, Detail: g.Address.String()})
		case up && !old.Up:
			made = append(made, event{Gateway: g.Name, GatewayUp: true, Detail: g.Address.String()})
		case old.Up && !is.Alive:
			made = append(made, event{Gateway: g.Name, Detail: birdProblem(is)})
		case old.Up && !up:
			made = append(made, event{Gateway: g.Name, Detail: gatewayWords(g)})
		}
	}
	return made
}

// why says what is behind a reason: the gateways that are down, or what is wrong
// with the load balancer or the kernel.
func (p *process) why(r gate.Reason, f vip.Family) string {
	switch r {
	case gate.NoGateway:
		s := p.bird.State().Load()
		if !s.Alive {
			return birdProblem(s)
		}
		if gateways(s, false).Up[f] {
			return noRoute + " (--require-route)"
		}
		return strings.Join(gatewaysDown(s, f), "; ")
	case gate.LBLost, gate.LBStale:
		return p.streamProblem(p.observer.lb.Load())
	case gate.LBNeverSeen:
		if p.directory != nil {
			return p.streamProblem(p.observer.lb.Load())
		}
		return errorText(p.observer.lb.Load().Err)
	case gate.NoSourceRouting:
		return errorText(p.kernel.Confirmed().Load().Family[f])
	}
	return ""
}

// RouteBack is a health service with one part for each family. It is not part of
// Readiness: other pods have the same gateways.
const RouteBack = "RouteBack"

// firstRoutes is how long a gateway may take to send its first routes.
const firstRoutes = 2 * time.Second

// routeMissing reports whether gateways of a family are up and none gives a route.
func routeMissing(s bird.State, family vip.Family, now time.Time) (missing bool) {
	if !s.Alive || gateways(s, true).Up[family] {
		return false
	}
	return slices.ContainsFunc(s.Gateways, func(g bird.GatewayState) bool {
		return g.Family == family && g.Up && now.Sub(g.Since) > firstRoutes
	})
}

// noRoute says that packets from VIPs meet the blackhole.
const noRoute = "no gateway gives a route back to clients"

func birdProblem(s bird.State) string {
	if s.Alive {
		return ""
	}
	if s.Err != nil {
		return s.Err.Error()
	}
	return "BIRD does not run"
}

// birdWords says what is wrong with BIRD, also while it answers.
func birdWords(s bird.State) string {
	if s.Alive {
		return configProblem(s)
	}
	return birdProblem(s)
}

func configProblem(s bird.State) string {
	if s.ConfigErr == nil {
		return ""
	}
	return "keeps an older configuration: " + s.ConfigErr.Error()
}

// egressProblem says why no gateway of the families is up.
func egressProblem(s bird.State, families ...vip.Family) string {
	if !s.Alive {
		return birdProblem(s)
	}
	return cmp.Or(strings.Join(gatewaysDown(s, families...), "; "), "no gateway is configured, or none was looked at yet")
}

// gatewaysDown says of each gateway of the families that is down how it is.
func gatewaysDown(s bird.State, families ...vip.Family) []string {
	var problems []string
	for _, g := range s.Gateways {
		if slices.Contains(families, g.Family) && !g.Up {
			problems = append(problems, g.Name+": "+gatewayWords(g))
		}
	}
	return problems
}

// gatewayWords says how a gateway's session is, with its last error.
func gatewayWords(g bird.GatewayState) string {
	switch {
	case g.Problem != "":
		return g.Problem
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
		return fmt.Sprintf("the load balancer is connected but has said nothing for %v: is it stopped, or starved of CPU?", time.Since(lastMessage).Round(time.Second))
	case lb.InstanceID == "":
		return "the load balancer has not said anything synced yet"
	}
	return "the load balancer's word is " + lb.Freshness.String()
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
