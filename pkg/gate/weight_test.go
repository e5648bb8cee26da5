package gate

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// report is a report of the load balancer, at a time in seconds.
type report struct {
	at     int
	state  vip.State
	weight uint32
}

// A weight changes alone at most once per interval, and the newest one is due at its end. A change
// of the state has the newest weight.
func TestWeight(t *testing.T) {
	ready := func(at int, weight uint32) report { return report{at, vip.Ready, weight} }
	for name, test := range map[string]struct {
		reports []report
		want    string // each change: second, advertisement, weight
	}{
		"rise":                     {[]report{ready(0, 3)}, "0 announced 3"},
		"no count":                 {[]report{ready(0, 0)}, "0 announced 0"},
		"first change within 10 s": {[]report{ready(0, 3), ready(4, 2)}, "0 announced 3, 10 announced 2"},
		"first change after 10 s":  {[]report{ready(0, 3), ready(14, 2)}, "0 announced 3, 14 announced 2"},
		"newest of several": {
			[]report{ready(0, 3), ready(14, 2), ready(15, 1), ready(20, 4)},
			"0 announced 3, 14 announced 2, 24 announced 4",
		},
		"back within 10 s": {[]report{ready(0, 3), ready(4, 2), ready(6, 3)}, "0 announced 3"},
		"back, and changed at last": {
			[]report{ready(0, 3), ready(4, 2), ready(6, 3), ready(8, 1)}, "0 announced 3, 10 announced 1",
		},
		"pending count of zero": {[]report{ready(0, 3), ready(4, 0)}, "0 announced 3, 10 announced 0"},
		"state within 10 s": {
			[]report{ready(0, 3), ready(4, 2), {6, vip.Draining, 1}}, "0 announced 3, 6 depreferred 1",
		},
		"after the state, 10 s more": {
			[]report{ready(0, 3), {6, vip.Draining, 1}, {7, vip.Draining, 2}},
			"0 announced 3, 6 depreferred 1, 16 depreferred 2",
		},
		"withdrawn and back": {
			[]report{ready(0, 3), {4, vip.NotReady, 0}, ready(5, 1)},
			"0 announced 3, 4 withdrawn 0, 5 announced 1",
		},
		"withdrawn while pending": {[]report{ready(0, 3), ready(3, 2), {4, vip.NotReady, 2}}, "0 announced 3, 4 withdrawn 0"},
		"each second": {
			[]report{ready(0, 3), ready(1, 4), ready(2, 5), ready(10, 6), ready(11, 7), ready(19, 8), ready(21, 9)},
			"0 announced 3, 10 announced 6, 20 announced 8, 30 announced 9",
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, Options{})
			start := b.now
			b.g.Gateways(Gateways{At: start.Add(time.Hour), Up: [2]bool{true, true}})
			b.g.Weigh(b.now)
			b.evaluate()
			var got []string
			evaluate := func() {
				for _, change := range b.g.Evaluate(b.now) {
					if change.From.Advertisement != Withdrawn || change.To.Advertisement != Withdrawn {
						second := int(b.now.Sub(start).Seconds())
						got = append(got, fmt.Sprint(second, " ", change.To.Advertisement, " ", change.To.Weight))
					}
				}
			}
			// until evaluates at each deadline, as the controller's timer does.
			until := func(end time.Time) {
				for at := b.g.Deadline(b.now); !at.IsZero() && at.Before(end); at = b.g.Deadline(b.now) {
					b.now = at
					evaluate()
				}
				b.now = end
			}
			for _, r := range test.reports {
				until(start.Add(time.Duration(r.at) * time.Second))
				state := VIPState{VIP: vipA, State: r.state, Weight: r.weight}
				if r.state == vip.Draining {
					state.DrainEnd = start.Add(time.Hour)
				}
				b.g.UpdateLB(b.now, LBUpdate{Instance: "lb", Live: true, LeaseEnd: start.Add(time.Hour), VIPs: []VIPState{state}})
				evaluate()
			}
			until(start.Add(time.Minute))
			if got := strings.Join(got, ", "); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// Weights do not differ, and cost nothing, before they are in use. From then on decisions have
// them.
func TestWeightsInUse(t *testing.T) {
	b := newFixture(t, Options{})
	weigh := func(weight uint32) {
		b.updateLB(func(u *LBUpdate) { u.VIPs = []VIPState{{VIP: vipA, State: vip.Ready, Weight: weight}} })
	}
	weigh(3)
	b.want(vipA, Announced, Ready)
	if weigh(4); len(b.changes) > 0 || len(b.g.timers) > 0 {
		t.Errorf("changes %v, timers %v", b.changes, b.g.timers)
	}
	b.g.Weigh(b.now)
	if got := b.g.Decision(vipA).Weight; got != 4 {
		t.Errorf("weight %d", got)
	}
	if b.evaluate(); len(b.changes) > 0 {
		t.Errorf("changes without an input: %v", b.changes)
	}
	for i := range uint32(100) {
		weigh(5 + i)
	}
	if len(b.changes) > 0 || len(b.g.timers) != 1 {
		t.Errorf("changes %v, timers %v", b.changes, b.g.timers)
	}
}

// Warming targets count for a tenth of a target at least.
func TestWeightOfTargets(t *testing.T) {
	for _, tt := range []struct{ ready, warmingTenths, want uint32 }{
		{0, 0, 0}, {3, 0, 30}, {3, 9, 21}, {1, 9, 1}, {1, 10, 1}, {0, 9, 0}, {1<<32 - 1, 0, 4294967290},
	} {
		if got := Weight(tt.ready, tt.warmingTenths); got != tt.want {
			t.Errorf("%d ready targets less %d tenths have weight %d, want %d", tt.ready, tt.warmingTenths, got, tt.want)
		}
	}
}
