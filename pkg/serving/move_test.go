package serving

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// wantUnheld fails if a change waits for the frontend: VIPs are not ready then.
func (p *planeRig) wantUnheld(what string) {
	p.t.Helper()
	if len(p.out.Held) > 0 {
		p.t.Errorf("%s: held back: %q", what, p.out.Held)
	}
}

// A VIP moves without a change of its readiness, whatever the order of the names of the streams:
// its new stream has no VIP of the family, and targets without verdicts.
func TestVIPMoveKeepsReadiness(t *testing.T) {
	for _, test := range []struct {
		name, from, to string
		stays          bool // the old stream, with another VIP
	}{
		{"to a later name", "s", "t", true},
		{"to an earlier name", "t", "s", true},
		{"old stream removed", "s", "t", false},
		{"old stream with a later name removed", "t", "s", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			old := trenchOf(streamOf(test.from, vipA, vipB))
			next := trenchOf(streamOf(test.to, vipA, vipB))
			if test.stays {
				next = trenchOf(streamOf(test.from, vipB), streamOf(test.to, vipA))
			}
			p := startPlaneRig(t, old, map[string][]targetset.Member{
				test.from: {member("a", "172.16.0.1")}, test.to: {member("b", "172.16.0.2")},
			})
			p.health(test.from, "a", healthcheck.Ready)
			p.confirm()
			p.reports(vipA, vipB)

			moves := map[vip.VIP]Move{vipA: {test.from, test.to}}
			if !test.stays {
				moves[vipB] = moves[vipA]
			}
			both := trenchOf(slices.Clone(next.Streams)...)
			both.Streams = slices.DeleteFunc(both.Streams, func(s trench.Stream) bool { return s.Name == test.from })
			both.Streams = append(both.Streams, old.Streams...)
			p.e.Move(moves)
			p.configure(both)
			kept := func(step string) {
				t.Helper()
				got := p.want(vipA, vip.Ready, reasonReady, 1, 1)
				if !strings.HasPrefix(got.Detail, "served by stream "+test.from+" until its new stream is ready; stream "+test.to) {
					t.Errorf("%s: detail %q", step, got.Detail)
				}
				if has := p.streamsOf(vipA); !slices.Equal(has, []string{test.from}) {
					t.Errorf("%s: streams %v have the VIP", step, has)
				}
				if p.e.CanServe(test.to, vipA) {
					t.Errorf("%s: the new stream can serve", step)
				}
				p.wantUnheld(step)
			}
			kept("configured")
			p.confirm()
			kept("confirmed")
			p.health(test.to, "b", healthcheck.Ready)
			kept("ready")
			p.confirm()
			if !p.e.CanServe(test.to, vipA) {
				t.Fatal("the new stream cannot serve")
			}
			p.e.Move(nil)
			p.configure(next)
			p.want(vipA, vip.Ready, reasonReady, 1, 1)
			if has := p.streamsOf(vipA); !slices.Equal(has, []string{test.to}) {
				t.Errorf("streams %v have the VIP", has)
			}
			p.wantUnheld("moved")
			p.confirm()
			if got := p.want(vipA, vip.Ready, reasonReady, 1, 1); got.Detail != "" {
				t.Errorf("moved: detail %q", got.Detail)
			}
		})
	}
}

// Without a data plane the old stream keeps a VIP ready, too.
func TestVIPMoveWithoutDataPlane(t *testing.T) {
	r := newRig(t, Options{Settle: time.Minute}, map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	r.configure(trenchOf(streamOf("s", vipA)))
	r.health("s", "a", healthcheck.Ready)
	r.e.Move(map[vip.VIP]Move{vipA: {"s", "t"}})
	r.configure(trenchOf(streamOf("s", vipA), streamOf("t", vipA)))
	r.want(vipA, vip.Ready, reasonReady, 1, 2)
	if r.e.CanServe("t", vipA) {
		t.Error("the new stream can serve before its target is ready")
	}
	r.health("t", "b", healthcheck.Ready)
	if !r.e.CanServe("t", vipA) {
		t.Error("the new stream cannot serve")
	}
	r.e.Move(nil)
	r.configure(trenchOf(streamOf("t", vipA)))
	r.want(vipA, vip.Ready, reasonReady, 1, 1)
}

// A VIP that a new configuration makes not ready says so, until something else changes.
func TestReconfiguredVIP(t *testing.T) {
	r := newRig(t, Options{}, map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	r.configure(trenchOf(streamOf("s", vipA)))
	r.want(vipA, vip.NotReady, reasonNotChecked, 0, 1)
	r.health("s", "a", healthcheck.Ready)
	r.configure(trenchOf(streamOf("t", vipA)))
	r.want(vipA, vip.NotReady, reasonReconfigured, 0, 1)
	r.health("t", "b", healthcheck.Ready)
	r.health("t", "b", healthcheck.NotReady)
	r.want(vipA, vip.NotReady, reasonTooFew, 0, 1)
}
