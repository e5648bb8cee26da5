package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// turnsFixture is a pod with two gateways, each with a session of both families.
type turnsFixture struct {
	*fixture
	b *lab.Gateway
}

func newTurnsFixture(t *testing.T) *turnsFixture {
	t.Helper()
	f := &turnsFixture{fixture: newFixture(t)}
	f.b = f.second()
	f.up(f.target1, f.target2)
	f.write(lineA4, lineA6, lineB4, lineB6)
	f.startPod(visibleDrain)
	f.wantRoutes(every()...)
	f.wantRoutesAt(f.b, every()...)
	return f
}

// write writes the usual trench file with these gateways.
func (f *turnsFixture) write(gateways ...string) {
	f.t.Helper()
	f.must(f.pod.WriteTrench(edited(f.t, lineA4+"\n    "+lineA6, strings.Join(gateways, "\n    "))))
}

// marks are the positions in the traces of both gateways.
type marks [2]int

func (f *turnsFixture) marks() marks { return marks{f.routerMark(f.gateway), f.routerMark(f.b)} }

// dark returns how long a VIP was at neither gateway since the marks, at which it was at those with
// the index in at.
func (f *turnsFixture) dark(since marks, prefix string, at ...int) (total time.Duration) {
	f.t.Helper()
	type event struct {
		lab.RouteUpdate
		gateway int
	}
	var events []event
	for i, router := range []lab.Router{f.gateway, f.b} {
		trace, err := router.Trace()
		f.must(err)
		for _, update := range trace[since[i]:] {
			if update.Prefix == netip.MustParsePrefix(prefix) {
				events = append(events, event{update, i})
			}
		}
	}
	slices.SortStableFunc(events, func(a, b event) int { return a.At.Compare(b.At) })
	var present [2]bool
	for _, i := range at {
		present[i] = true
	}
	var began time.Time
	for _, e := range events {
		present[e.gateway] = !e.Withdrawn
		switch lit := present[0] || present[1]; {
		case !lit && began.IsZero():
			began = e.At
		case lit && !began.IsZero():
			total += e.At.Sub(began)
			began = time.Time{}
		}
	}
	if !began.IsZero() {
		total = max(total, time.Hour) // until now
	}
	return total
}

// settled waits until the configuration of BIRD has a text as often as wanted, no change is in
// progress, and exactly the named gateways are up.
func (f *turnsFixture) settled(text string, count int, names ...string) {
	f.t.Helper()
	f.waitLong(func() error {
		b, err := os.ReadFile(filepath.Join(f.pod.BirdDir(), "vipgate.conf"))
		f.must(err)
		if n := strings.Count(string(b), text); n != count {
			return fmt.Errorf("%q is %d times in BIRD's configuration, want %d", text, n, count)
		}
		status := f.frontendStatus()
		var up []string
		for _, g := range status.GetGateways() {
			if g.GetUp() {
				up = append(up, g.GetName())
			}
		}
		if status.GetGatewayChange() || len(status.GetGateways()) != len(names) || !slices.Equal(up, names) {
			return fmt.Errorf("change in progress: %v; gateways %v, want %v up", status.GetGatewayChange(),
				status.GetGateways(), names)
		}
		return nil
	})
}

// waitLong is waitFor with several turns.
func (f *turnsFixture) waitLong(condition func() error) {
	f.t.Helper()
	ctx := harness.Context(f.t, 3*waitTimeout)
	f.must(lab.Eventually(ctx, 20*time.Millisecond, condition))
}

// wantLit fails if a VIP was at neither gateway since the marks.
func (f *turnsFixture) wantLit(since marks, at ...int) {
	f.t.Helper()
	for _, prefix := range every() {
		if dark := f.dark(since, prefix, at...); dark > 0 {
			f.t.Errorf("%s was at neither gateway for %v", prefix, dark)
		}
	}
}

// wantDrained fails unless each gateway saw every VIP de-preferred before the VIP went.
func (f *turnsFixture) wantDrained(since marks, want ...string) {
	f.t.Helper()
	for i, router := range []lab.Router{f.gateway, f.b} {
		for _, prefix := range every() {
			f.wantRouterUpdates(router, since[i], prefix, want...)
		}
	}
}

// An edit that restarts the sessions of all gateways restarts one after another: each VIP is at a
// gateway at every instant (docs/gateways.md#when-a-session-changes).
func TestSessionsTakeTurns(t *testing.T) {
	t.Parallel()
	f := newTurnsFixture(t)
	names := []string{"gateway-a4", "gateway-a6", "gateway-b4", "gateway-b6"}
	lines := []string{lineA4, lineA6, lineB4, lineB6}
	renamed := strings.Split(strings.ReplaceAll(strings.Join(lines, "\n"), "gateway-", "router-"), "\n")
	newNames := strings.Fields(strings.ReplaceAll(strings.Join(names, " "), "gateway-", "router-"))
	for _, step := range []struct {
		name  string
		lines []string
		text  string
		count int
		names []string
	}{
		{"hold time", with("holdTime: 6s", lines...), "hold time 6;", 4, names},
		{"local port", with("localPort: 10200", lines...), "port 10200 as", 4, names},
		{"name", with("localPort: 10200", renamed...), "NBR-router", 4, newNames},
		{"name and port", lines, "NBR-gateway", 4, names},
	} {
		since, began := f.marks(), time.Now()
		f.write(step.lines...)
		f.settled(step.text, step.count, step.names...)
		f.wantLit(since, 0, 1)
		f.wantDrained(since, depreferred, withdrawn, announced)
		t.Logf("%s changed: %v", step.name, time.Since(began).Round(time.Millisecond))
	}
	f.wantHealth(lab.FrontendHealth, "GatewayChange", healthServing)
}

// Both ends of the sessions get another AS number, gateway by gateway.
func TestASChangesByTurns(t *testing.T) {
	t.Parallel()
	f := newTurnsFixture(t)
	since := f.marks()
	f.write(with("localASN: 8104", lineA4, lineA6, lineB4, lineB6)...)
	restarting := func(g *frontendv1.GatewayStatus) bool { return g.GetChange() == "changing: local AS" }
	for i, gateway := range []*lab.Gateway{f.gateway, f.b} {
		for _, family := range []string{"4", "6"} {
			f.waitGateway(fmt.Sprintf("gateway-%c%s", 'a'+rune(i), family), restarting)
		}
		f.must(gateway.Process.Kill())
		gateway.RemoteAS = 8104
		f.must(gateway.Start())
	}
	f.settled("as 8104;", 4, "gateway-a4", "gateway-a6", "gateway-b4", "gateway-b6")
	for _, prefix := range every() {
		if dark := f.dark(since, prefix, 0, 1); dark > 0 {
			t.Errorf("%s was at neither gateway for %v", prefix, dark)
		}
	}
}

// Gateways that leave the configuration get every VIP de-preferred, then withdrawn. The sessions of
// the remaining gateways are not touched.
func TestGatewaysLeave(t *testing.T) {
	t.Parallel()
	f := newTurnsFixture(t)
	since := f.marks()
	sessions := f.sessions()
	leaving := func(g *frontendv1.GatewayStatus) bool {
		return strings.HasPrefix(g.GetChange(), "leaving") && g.GetUp()
	}

	f.write(lineA4, lineA6)
	f.waitGateway("gateway-b4", leaving)
	f.settled("protocol bgp 'NBR-", 2, "gateway-a4", "gateway-a6")
	f.wantLit(since, 0, 1)
	for _, prefix := range every() {
		f.wantRouterUpdates(f.b, since[1], prefix, depreferred, withdrawn)
	}
	f.wantNoUpdates(since[0], every()...)
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}

	// The last gateway of a family, without a confirmation: de-preferred, then withdrawn.
	since = f.marks()
	f.must(f.pod.WriteTrench("maxRemoval: 100\n" + edited(t, lineA4+"\n    "+lineA6, lineA6)))
	f.settled("protocol bgp 'NBR-", 1, "gateway-a6")
	f.wantRoutes(vipA6, vipB6)
	for _, prefix := range []string{vipA4, vipB4} {
		f.wantUpdates(since[0], prefix, depreferred, withdrawn)
	}
	f.wantNoUpdates(since[0], vipA6, vipB6)

	// A gateway is replaced by another one: the new one receives the VIPs before the old one loses them.
	since = f.marks()
	f.write(lineB4, lineB6)
	f.settled("protocol bgp 'NBR-", 2, "gateway-b4", "gateway-b6")
	for _, prefix := range []string{vipA6, vipB6} {
		if dark := f.dark(since, prefix, 0); dark > 0 {
			t.Errorf("%s was at neither gateway for %v", prefix, dark)
		}
	}
}

// A newer configuration replaces the plan of an older one, and `frontend apply-now` ends drains
// and turns.
func TestNewerConfigurationReplacesTurns(t *testing.T) {
	t.Parallel()
	f := newTurnsFixture(t)
	f.must(f.pod.Frontend.Kill())
	f.must(f.pod.StartFrontend("--drain-time=1h"))
	f.wantRoutes(every()...)
	f.wantRoutesAt(f.b, every()...)
	names := []string{"gateway-a4", "gateway-a6", "gateway-b4", "gateway-b6"}
	draining := func(g *frontendv1.GatewayStatus) bool { return strings.HasPrefix(g.GetChange(), "draining") }
	pending := func(text string) func(*frontendv1.GatewayStatus) bool {
		return func(g *frontendv1.GatewayStatus) bool { return g.GetChange() == "change pending: "+text }
	}
	since := f.marks()
	f.write(with("holdTime: 6s", lineA4, lineA6, lineB4, lineB6)...)
	f.waitGateway("gateway-a4", draining)
	f.waitGateway("gateway-b4", pending("hold time"))
	f.waitUpdate(since[0], vipA4, depreferred)

	// Another change of the second gateway only: the first one is preferred again, without a restart.
	f.write(append([]string{lineA4, lineA6}, with("holdTime: 9s", lineB4, lineB6)...)...)
	f.waitUpdate(since[0], vipA4, announced)
	f.waitGateway("gateway-b4", draining)
	f.wantUpdates(since[0], vipA4, depreferred, announced)

	// A gateway and a VIP leave as well, and their drains take an hour.
	gateways := append([]string{lineA6}, with("holdTime: 9s", lineB4, lineB6)...)
	text := edited(t, lineA4+"\n    "+lineA6, strings.Join(gateways, "\n    "))
	f.must(f.pod.WriteTrench(strings.ReplaceAll(text, fmt.Sprintf(", %q]", vipB6), "]")))
	leaving := func(g *frontendv1.GatewayStatus) bool { return strings.HasPrefix(g.GetChange(), "leaving, ") }
	f.waitGateway("gateway-a4", leaving)
	f.waitUpdate(since[0], vipB6, depreferred)
	out, code := f.run("frontend", "apply-now", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if code != 0 || !strings.Contains(out, "applied now: "+vipB6) || !strings.Contains(out, "gateway-a4") {
		t.Errorf("exit status %d: %s", code, out)
	}
	f.settled("hold time 9;", 2, names[1:]...)
	out, code = f.run("frontend", "apply-now", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if code != 0 || !strings.Contains(out, "no change was in progress") {
		t.Errorf("exit status %d: %s", code, out)
	}
	f.wantRoutesAt(f.b, vipA4, vipA6, vipB4)
}

// A session that does not come back after a change is reported, and the last session of its family
// keeps its parameters. After a correction all of them take turns.
func TestSessionMissingAfterChange(t *testing.T) {
	t.Parallel()
	f := newTurnsFixture(t)
	since := f.marks()
	f.write(with("localASN: 8104", lineA4, lineA6, lineB4, lineB6)...)
	const problem = "gateway-a4 did not come back after a change: local AS"
	f.waitLong(func() error {
		for _, c := range f.frontendStatus().GetConditions() {
			if c.GetName() == "GatewayChange" && !c.GetServing() && strings.Contains(c.GetDetail(), problem) {
				return nil
			}
		}
		return errors.New("the condition does not report the session")
	})
	waits := func(g *frontendv1.GatewayStatus) bool {
		return g.GetUp() && g.GetChange() == "change pending: local AS"
	}
	f.waitGateway("gateway-b4", waits)
	f.waitGateway("gateway-b6", waits)
	f.write(lineA4, lineA6, lineB4, lineB6)
	f.settled("as 8103;", 4, "gateway-a4", "gateway-a6", "gateway-b4", "gateway-b6")
	f.wantHealth(lab.FrontendHealth, "GatewayChange", healthServing)
	f.wantLit(since, 0, 1)
	mark := since[1]
	for _, prefix := range every() {
		f.wantRouterUpdates(f.b, mark, prefix)
	}
}

// The only session of each family restarts in the slot of the pod, de-preferred before.
func TestOnlySessionRestartsInSlot(t *testing.T) {
	t.Parallel()
	const slot = 2 * time.Second // pkg/frontend
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB())
	// Choose an identity whose slot begins some seconds after the edit.
	router := netip.MustParseAddr("10.0.0.1")
	start := func() time.Duration { return time.Duration(turns.Slot(router.String())) * slot }
	phase := func(at time.Time) time.Duration { return at.Sub(at.Truncate(turns.Slots * slot)) }
	for begin := phase(time.Now().Add(15 * time.Second)).Truncate(slot); start() != begin; {
		router = router.Next()
	}
	f.must(f.pod.StartFrontend(visibleDrain, "--router-id="+router.String()))
	f.wantRoutes(vipA4, vipA6)
	mark, edit := f.mark(), time.Now()
	slower := with("holdTime: 6s", lineA4, lineA6)
	f.must(f.pod.WriteTrench(edited(t, lineA4, slower[0], lineA6, slower[1])))
	f.waitFor(func() error {
		if n := len(f.updates(mark, vipA4)) + len(f.updates(mark, vipA6)); n < 6 {
			return fmt.Errorf("%d updates", n)
		}
		return nil
	})
	for _, prefix := range []string{vipA4, vipA6} {
		f.wantUpdates(mark, prefix, depreferred, withdrawn, announced)
		// A machine that is too slow for the slot takes the next one.
		if late := phase(f.updates(mark, prefix)[0].At.Add(-start())); late > slot {
			t.Errorf("%s was de-preferred %v after the start of the slot", prefix, late)
		}
	}
	t.Logf("restarted %v after the edit", time.Since(edit).Round(time.Second))
}
