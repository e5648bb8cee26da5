package frontend

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
)

// The events and the report of decisions about all VIPs.
func TestGrowth(t *testing.T) {
	growth.Check(t, "VIPs", 500, 25_000, func(t *testing.T, n int) func() {
		p := afterDecision()
		up := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}
		down := gate.Decision{Advertisement: gate.Withdrawn, Reason: gate.LBNotReady}
		revision := uint64(0)
		flip := func(state vip.State, from, to gate.Decision) {
			revision++
			update := readiness.Update{Changed: make([]readiness.VIPReadiness, n)}
			changes := make([]gate.Change, n)
			for i := range n {
				update.Changed[i] = readiness.VIPReadiness{VIP: growth.VIP(i), State: state, Detail: "0 of 1 targets ready"}
				changes[i] = gate.Change{VIP: growth.VIP(i), From: from, To: to}
			}
			p.observer.updated(update)
			p.observer.decided(decisions{At: time.Now(), Revision: revision, Changes: changes})
			p.observer.drain()
			for p.reporter.confirmPending(t.Context()); len(p.reporter.rounds) > 0; {
				p.reporter.reportSettled()
			}
		}
		return func() {
			flip(vip.Ready, down, up)
			flip(vip.NotReady, up, down)
		}
	})
}
