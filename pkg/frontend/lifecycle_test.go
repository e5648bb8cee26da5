package frontend

import (
	"log/slog"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// What the program does differently while it starts ends with the start, also where a VIP is ready
// and never advertised, as without a gateway of its family.
func TestEndOfStart(t *testing.T) {
	announced := change(vipA, gate.Withdrawn, gate.Announced, gate.Ready)
	for name, advertised := range map[string]bool{"advertised": true, "ready timeout": false} {
		t.Run(name, func(t *testing.T) {
			p := afterDecision()
			p.Log, p.Gate.Ungated, p.ReadyTimeout = slog.New(slog.DiscardHandler), true, time.Nanosecond
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
