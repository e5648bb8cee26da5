package frontend

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestReloadDetail(t *testing.T) {
	p := &process{Options: Options{SourceName: "trench file"}}
	refused := errors.New("refused")
	for want, loaded := range map[string]trench.Loaded{
		"trench file reloaded":                                   {Generation: 1},
		"no VIPs configured: refused":                            {Err: refused},
		"trench file refused, keeping the previous one: refused": {Err: refused, Generation: 1},
		"trench file reloaded, except for: VIP a: x; gateway b: y": {
			Err: errors.New("VIP a: x\ngateway b: y"), Partial: true, Generation: 1,
		},
	} {
		if got := p.reloadDetail(loaded); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// newFollower returns a follower with a controller that announces vipA and withdraws vipB.
func newFollower(t *testing.T) *follower {
	t.Helper()
	p := afterDecision()
	p.Log, p.kernel, p.InForce = slog.New(slog.DiscardHandler), kernel.New(kernel.Options{}), latest.New(&change.InForce{})
	p.Gate.DrainTime, p.Settle = 2*time.Second, 300*time.Millisecond
	p.attractor = &attractor{current: latest.New(attraction{}), apply: func(time.Time, [len(vip.Families)]bool) {}}
	s := &scriptedSource{update: readiness.Update{
		Position: readiness.Position{InstanceID: "lb", Revision: 1}, Complete: true, Synced: true, Open: true,
		LeaseEnd: time.Now().Add(time.Hour), Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready}},
	}}
	up := bird.State{At: time.Now().Add(time.Hour), Alive: true, Gateways: []bird.GatewayState{{
		Name: "g", Family: vip.IPv4, Up: true, Usable: true,
	}}}
	p.controller = &controller{
		gate: gate.New(gate.Options{DrainTime: p.Gate.DrainTime}), source: s, bird: latest.New(up),
		kernel: latest.New(kernel.Confirmed{VIPs: vip.NewSet(vipA, vipB)}), announcer: announce.New(announce.Options{}),
		session: latest.New(gate.Announcer{Up: true}), observer: p.observer, attractor: p.attractor,
		commands: make(chan command), ready: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.controller.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	<-p.controller.ready
	f := &follower{
		process: p, departed: map[vip.VIP]time.Time{}, release: time.NewTimer(time.Hour), leave: time.NewTimer(time.Hour),
	}
	f.configureVIPs(t, vipA, vipB)
	synctest.Wait()
	if !p.controller.tryUpdate() {
		t.Fatal("the controller is busy")
	}
	return f
}

func (f *follower) configureVIPs(t *testing.T, vips ...vip.VIP) {
	t.Helper()
	config := &trench.Config{Attractor: trench.Attractor{VIPs: vips}}
	if err := f.configure(t.Context(), trench.Loaded{Config: config}); err != nil {
		t.Fatal(err)
	}
}

// An announced VIP that leaves the configuration is de-preferred for the drain time, and
// kept until gateways have confirmed its withdrawal. A withdrawn VIP leaves immediately.
func TestVIPLeavesConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFollower(t)
		left := time.Now()
		f.configureVIPs(t)
		if is := f.InForce.Load().Attractor.VIPs; !slices.Equal(is, []vip.VIP{vipA}) {
			t.Errorf("in force while %s leaves: %v", vipA, is)
		}
		if end := f.departed[vipB]; !end.Equal(left.Add(confirmTimeout + f.Settle)) {
			t.Errorf("source routing of %s ends after %v", vipB, end.Sub(left))
		}
		<-f.leave.C
		if took, want := time.Since(left), f.Gate.DrainTime+confirmTimeout; took != want {
			t.Errorf("%s leaves after %v, want %v", vipA, took, want)
		}
		if err := f.endLeaving(t.Context()); err != nil || len(f.InForce.Load().Attractor.VIPs) != 0 {
			t.Errorf("in force in the end: %v, %v", f.InForce.Load().Attractor.VIPs, err)
		}
	})
}

// A departed VIP keeps its source routing until its time expires, even if the configuration
// changes again.
func TestDepartedVIPsStayTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFollower(t)
		f.Gate.DrainTime = 0
		const ms = time.Millisecond
		begin, stay := time.Now(), confirmTimeout+f.Settle
		for _, step := range []struct {
			at         time.Duration
			configured []vip.VIP // nil: only the timer fires
			routed     []vip.VIP
			next       time.Duration // of the timer, from the begin; 0: none
		}{
			{0, []vip.VIP{vipA, vipB}, []vip.VIP{vipA, vipB}, 0},
			{100 * ms, []vip.VIP{vipA}, []vip.VIP{vipA, vipB}, 100*ms + stay},
			{200 * ms, []vip.VIP{vipA}, []vip.VIP{vipA, vipB}, 100*ms + stay}, // gateways changed
			{300 * ms, []vip.VIP{}, []vip.VIP{vipA, vipB}, 100*ms + stay},
			{100*ms + stay - 1, nil, []vip.VIP{vipA, vipB}, 100*ms + stay},
			{100*ms + stay, nil, []vip.VIP{vipA}, 300*ms + stay},
			{200*ms + stay, []vip.VIP{vipA}, []vip.VIP{vipA}, 0}, // it came back
			{300*ms + stay, nil, []vip.VIP{vipA}, 0},
		} {
			time.Sleep(step.at - time.Since(begin))
			if step.configured != nil {
				f.configureVIPs(t, step.configured...)
			}
			want := time.Time{}
			if step.next != 0 {
				want = begin.Add(step.next)
			}
			routed, next := f.routed(time.Now())
			if !slices.Equal(routed.Sorted(), step.routed) || !next.Equal(want) {
				t.Errorf("after %v: routed %v until %v, want %v until %v", step.at, routed.Sorted(), next, step.routed, want)
			}
		}
	})
}

// A new configuration ends the drain of a leaving VIP, but not a drain by an operator.
func TestConfigurationKeepsDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFollower(t)
		drained := func() (list map[vip.VIP]time.Time) {
			if err := f.controller.Do(t.Context(), func(g *gate.Gate, _ time.Time) { list = g.Drained() }); err != nil {
				t.Fatal(err)
			}
			return list
		}
		f.configureVIPs(t, vipB)
		if list := drained(); len(list) != 1 || list[vipA].IsZero() {
			t.Errorf("drained while %s leaves: %v", vipA, list)
		}
		f.configureVIPs(t, vipA, vipB)
		if list := drained(); len(list) != 0 {
			t.Errorf("drained once %s is back: %v", vipA, list)
		}
		if err := f.controller.Do(t.Context(), func(g *gate.Gate, now time.Time) {
			g.OperatorDrains(func(v vip.VIP) (end time.Time) {
				if v == vipA {
					end = now
				}
				return end
			})
		}); err != nil {
			t.Fatal(err)
		}
		f.configureVIPs(t, vipA)
		if list := drained(); len(list) != 1 {
			t.Errorf("drained by an operator after a change: %v", list)
		}
	})
}

// Routes that another process keeps removing are exported again once per interval, including
// after the last removal.
func TestRemovedRoutesAreExportedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &follower{process: afterDecision()}
		var log strings.Builder
		f.Log = slog.New(slog.NewTextHandler(&log, nil))
		removed := func(n int) bool {
			before := f.exported
			f.exportRoutes(kernel.Confirmed{Removed: n})
			return f.exported != before
		}
		if removed(0) || !removed(1) || removed(1) || removed(2) || removed(3) {
			t.Error("not exactly one export for the first removal and those that follow at once")
		}
		<-f.exportDue // without any other event
		if since := time.Since(f.exported); since != exportInterval || !removed(3) {
			t.Errorf("the last removal was not answered after %v", since)
		}
		time.Sleep(exportInterval)
		if removed(3) || f.exportDue != nil {
			t.Error("exported, or waits, without a removal")
		}
		for n := range 100 { // of 200 ms: 20 s
			time.Sleep(exportInterval)
			removed(4 + n)
		}
		// The first one, and two of the others.
		if n := strings.Count(log.String(), "another process"); n != 3 {
			t.Errorf("%d warnings of 103 removals in 20 s", n)
		}
	})
}
