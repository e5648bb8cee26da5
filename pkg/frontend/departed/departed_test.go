package departed

import (
	"maps"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

var a, b = vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")

// A departed VIP keeps its source routing until its time expires, even if the configuration
// changes again.
func TestDepartedVIPsStayTheirTime(t *testing.T) {
	d := VIPs{}
	var configured vip.Set
	t0 := time.Unix(1000, 0)
	const ms, stay = time.Millisecond, 700 * time.Millisecond
	for _, step := range []struct {
		at         time.Duration
		configured vip.Set // nil: only the timer fires
		routed     vip.Set
		next       time.Duration // of the timer, from the begin; 0: none
	}{
		{0, vip.NewSet(a, b), vip.NewSet(a, b), 0},
		{100 * ms, vip.NewSet(a), vip.NewSet(a, b), 100*ms + stay},
		{200 * ms, vip.NewSet(a), vip.NewSet(a, b), 100*ms + stay}, // gateways changed
		{300 * ms, vip.NewSet(), vip.NewSet(a, b), 100*ms + stay},
		{100*ms + stay, nil, vip.NewSet(a), 300*ms + stay},
		{200*ms + stay, vip.NewSet(a), vip.NewSet(a), 0}, // it came back
		{300*ms + stay, nil, vip.NewSet(a), 0},
	} {
		now := t0.Add(step.at)
		if step.configured != nil {
			d.Configure(configured, step.configured, now.Add(stay))
			configured = step.configured
		}
		next, want := d.Expire(now), time.Time{}
		if step.next != 0 {
			want = t0.Add(step.next)
		}
		if routed := d.And(configured); !maps.Equal(routed, step.routed) || !next.Equal(want) {
			t.Errorf("at %v: routed %v until %v, want %v until %v", step.at, routed, next, step.routed, want)
		}
	}
}
