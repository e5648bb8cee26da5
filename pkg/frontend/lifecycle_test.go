package frontend

import (
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/identity"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Started is called at the end of the start, even if a ready VIP is never advertised because its
// family has no gateway.
func TestEndOfStart(t *testing.T) {
	announced := changeOf(vipA, gate.Withdrawn, gate.Announced, gate.Ready)
	for name, advertised := range map[string]bool{"advertised": true, "ready timeout": false} {
		t.Run(name, func(t *testing.T) {
			p := afterDecision()
			p.Log, p.Gate.Ungated, p.ReadyTimeout = slog.New(slog.DiscardHandler), true, time.Nanosecond
			p.bird.State().Set(bird.State{Gateways: []bird.GatewayState{{Up: true, Exported: 1}}})
			calls := 0
			p.Options.Started = func() { calls++ }
			f := &follower{process: p}
			loaded := trench.Loaded{Generation: 1, Config: &trench.Config{Attractor: trench.Attractor{VIPs: []vip.VIP{vipA}}}}
			f.showStart(loaded, lbState{}) // the timeout runs
			if calls != 0 {
				t.Fatal("the start ended at once")
			}
			if advertised {
				p.observer.decided(decisions{Changes: []gate.Change{announced}})
				p.observer.drain()
			}
			f.showStart(loaded, lbState{})
			if calls != 1 {
				t.Errorf("called %d times at the end of the start", calls)
			}
			p.observer.decided(decisions{Changes: []gate.Change{announced}})
			p.observer.drain()
			f.showStart(loaded, lbState{})
			if f.showStart(loaded, lbState{}); calls != 1 || !f.advertised {
				t.Errorf("called %d times, advertised %t", calls, f.advertised)
			}
		})
	}
}

// Readiness depends on all of its parts and on no other condition.
func TestPartsOfReadiness(t *testing.T) {
	p, err := newProcess(Options{
		Settings: shell.Settings{Log: slog.New(slog.DiscardHandler)}, LBSocket: "/nowhere", StaleCondition: TrenchFile,
		Source: trenchfile.NewWatcher("/nowhere", trench.Defaults{}, &trench.Config{}, slog.New(slog.DiscardHandler)),
	})
	if err != nil {
		t.Fatal(err)
	}
	serving := func() bool {
		r, err := p.health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: Readiness})
		return err == nil && r.Status == healthv1.HealthCheckResponse_SERVING
	}
	parts := []string{Started, Identity, BIRD, BIRDConfig, Announcer, Egress, Stream, Stopping}
	for _, name := range parts {
		p.health.Report(name, "")
	}
	for _, name := range []string{
		Configuration, Routing, TrenchFile, Advertised, shell.AdminSocket, HealthSocket, Imports, RouteBack,
	} {
		if p.health.Report(name, "wrong"); !serving() {
			t.Errorf("%s is a part", name)
		}
	}
	for _, name := range parts {
		if p.health.Report(name, "wrong"); serving() {
			t.Errorf("%s is no part", name)
		}
		p.health.Report(name, "")
	}
}

// A start waits until the load balancer's snapshot is applied, every VIP is reported, and every
// ready VIP is advertised.
func TestStartProblem(t *testing.T) {
	up := changeOf(vipA, gate.Withdrawn, gate.Announced, gate.Ready)
	const ready, notReady, unknown = vip.Ready, vip.NotReady, vip.State(99)
	notExported := changeOf(vipA, gate.Withdrawn, gate.Announced, gate.NotExported)
	depreferred := changeOf(vipA, gate.Announced, gate.Depreferred, gate.Drained)
	withdrawn := changeOf(vipA, gate.Announced, gate.Withdrawn, gate.LBDraining)
	unsynced := lbState{Position: position("b")}
	const unreported = "has not reported the VIPs"
	for name, tt := range map[string]struct {
		lb       lbState
		applied  string
		a, b     vip.State
		decision gate.Change
		want     string
	}{
		"advertised":               {synced("b"), "b", ready, notReady, up, ""},
		"not synced":               {unsynced, "b", ready, notReady, up, unreported},
		"of an earlier instance":   {synced("b"), "a", ready, notReady, up, unreported},
		"one VIP is not reported":  {synced("b"), "b", ready, unknown, up, "has not reported VIP " + vipB.String()},
		"ready and not advertised": {synced("b"), "b", ready, ready, up, "VIP " + vipB.String() + " is ready"},
		"ready and not exported":   {synced("b"), "b", ready, notReady, notExported, "not_exported"},
		"de-preferred":             {synced("b"), "b", ready, notReady, depreferred, ""},
		"draining is not ready":    {synced("b"), "b", vip.Draining, notReady, withdrawn, ""},
		"ungated":                  {lbState{}, "", unknown, unknown, up, "VIP " + vipB.String() + " is ready"},
	} {
		p := afterDecision()
		p.bird.State().Set(bird.State{Gateways: []bird.GatewayState{{Up: true, Exported: 1}}})
		p.Gate.Ungated = name == "ungated"
		p.applied.Set(position(tt.applied))
		var u readiness.Update
		for v, state := range map[vip.VIP]vip.State{vipA: tt.a, vipB: tt.b} {
			if state != unknown {
				u.Changed = append(u.Changed, readiness.VIPReadiness{VIP: v, State: state})
			}
		}
		p.observer.updated(u)
		p.observer.decided(decisions{Changes: []gate.Change{tt.decision}})
		p.observer.drain()
		c := &trench.Config{Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vipB}}}
		if got := p.startProblem(c, tt.lb); (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// A start waits until a gateway receives the VIPs; the decision to announce them is not
// sufficient.
func TestStartWaitsForExports(t *testing.T) {
	p := afterDecision()
	p.Gate.Ungated = true
	p.observer.decided(decisions{Changes: []gate.Change{changeOf(vipA, gate.Withdrawn, gate.Announced, gate.Ready)}})
	p.observer.drain()
	c := &trench.Config{Attractor: trench.Attractor{VIPs: []vip.VIP{vipA}}}
	for name, tt := range map[string]struct {
		gateway bird.GatewayState
		waits   bool
	}{
		"none yet":            {bird.GatewayState{Up: true}, true},
		"all":                 {bird.GatewayState{Up: true, Exported: 1}, false},
		"session lost":        {bird.GatewayState{Exported: 1}, true},
		"too few, not listed": {bird.GatewayState{Up: true, Short: true}, true},
		"too few, listed":     {bird.GatewayState{Up: true, Short: true, Exports: vip.NewSet(vipA)}, false},
		"not listed":          {bird.GatewayState{Up: true, Short: true, Exports: vip.NewSet(vipB)}, true},
		"static":              {bird.GatewayState{Up: true, Protocol: trench.Static}, false},
		"of the other family": {bird.GatewayState{Family: vip.IPv6, Up: true, Exported: 1}, true},
	} {
		p.bird.State().Set(bird.State{Alive: true, Gateways: []bird.GatewayState{tt.gateway}})
		want := "BIRD has not exported every ipv4 VIP to a gateway yet"
		if name == "not listed" { // also before the gate has decided on the list
			want = "VIP " + vipA.String() + " is ready and not advertised, not_exported"
		}
		if got := p.startProblem(c, lbState{}); (got != "") != tt.waits || tt.waits && !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func position(instance string) readiness.Position {
	return readiness.Position{InstanceID: instance, Revision: 1}
}

func synced(instance string) lbState { return lbState{Position: position(instance), Synced: true} }

// A cached SVID has an event, also if it is in use before the first look, and its end has one.
func TestCachedSVIDIsAnEvent(t *testing.T) {
	p := afterDecision()
	source, err := identity.NewFiles(t.TempDir(), identity.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p.Identity = source
	f := &follower{process: p}
	for _, s := range []identity.Status{{Cached: true, RenewalErr: io.EOF}, {Cached: true, RenewalErr: io.EOF}, {}, {}} {
		source.Status().Set(s)
		f.showIdentity()
	}
	r, err := p.observer.journal.ListEvents(t.Context(), &adminv1.ListEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var events []string
	for _, e := range r.GetEvents() {
		events = append(events, e.GetDetail())
	}
	if want := []string{"identity: cached SVID in use: EOF", "identity: SVID usable"}; !slices.Equal(events, want) {
		t.Errorf("events %q, want %q", events, want)
	}
}

// The load balancer would read a report of families without VIPs as "no VIP is advertised".
func TestFamiliesAreReportedAfterVIPs(t *testing.T) {
	p := afterDecision()
	f := &follower{process: p}
	up := bird.State{Alive: true, Gateways: []bird.GatewayState{{Family: vip.IPv4, Up: true, Usable: true}}}
	p.bird.State().Set(up)
	if f.showBIRD(up); f.shownFamilies != nil {
		t.Errorf("%v is reported before the first VIP", f.shownFamilies)
	}
	p.report(nil)
	if f.showBIRD(up); !maps.Equal(f.shownFamilies, map[vip.Family]bool{vip.IPv4: true}) {
		t.Errorf("%v is reported after the first VIP", f.shownFamilies)
	}
	p.bird.State().Set(bird.State{})
	if f.showBIRD(bird.State{}); !maps.Equal(f.shownFamilies, map[vip.Family]bool{vip.IPv4: false}) {
		t.Errorf("%v is reported after the loss of the gateway", f.shownFamilies)
	}
}

// A family lacks a route if none of its gateways advertises one within firstRoutes after it came
// up.
func TestRouteMissing(t *testing.T) {
	now := time.Unix(100, 0)
	old, fresh := now.Add(-2*firstRoutes), now.Add(-firstRoutes/2)
	gateway := func(f vip.Family, imported int, since time.Time) bird.GatewayState {
		return bird.GatewayState{Family: f, Up: true, Usable: true, Imported: imported, Since: since}
	}
	for name, tt := range map[string]struct {
		dead     bool
		gateways []bird.GatewayState
		want     bool
	}{
		"no route":                 {false, []bird.GatewayState{gateway(vip.IPv4, 0, old)}, true},
		"a route":                  {false, []bird.GatewayState{gateway(vip.IPv4, 0, old), gateway(vip.IPv4, 1, old)}, false},
		"session is new":           {false, []bird.GatewayState{gateway(vip.IPv4, 0, fresh)}, false},
		"route of another family":  {false, []bird.GatewayState{gateway(vip.IPv4, 0, old), gateway(vip.IPv6, 1, old)}, true},
		"gateway of other family":  {false, []bird.GatewayState{gateway(vip.IPv6, 0, old)}, false},
		"BIRD does not answer":     {true, []bird.GatewayState{gateway(vip.IPv4, 0, old)}, false},
		"down gateway, no session": {false, []bird.GatewayState{{Family: vip.IPv4, Since: old}}, false},
	} {
		if got := routeMissing(bird.State{Alive: !tt.dead, Gateways: tt.gateways}, vip.IPv4, now); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// When BIRD answers again, the sessions that it reports are new events.
func TestSessionEventsAfterSilence(t *testing.T) {
	g := bird.GatewayState{Name: "g", Up: true, Since: time.Unix(1, 0)}
	silent := bird.State{Gateways: []bird.GatewayState{g}}
	alive := bird.State{Alive: true, PID: 1, Gateways: []bird.GatewayState{g}}
	came := func(e *adminv1.Event) bool { return e.GetTo() == "up" && e.GetObject() == "g" }
	if !slices.ContainsFunc(sessionEvents(silent, alive), came) {
		t.Errorf("events %+v", sessionEvents(silent, alive))
	}
	if list := sessionEvents(alive, alive); len(list) != 0 {
		t.Errorf("events without a change: %+v", list)
	}
}
