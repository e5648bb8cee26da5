package healthcheck

import (
	"fmt"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// An edit costs as much with many streams of few targets as with few streams of many, although the
// streams share these targets: the number of checks counts.
func TestStreamsThatShareTargets(t *testing.T) {
	// streams have as many checks in all, whatever their number, and a VIP each.
	streams := func(number int, port uint16, prefix string) (list []trench.Stream) {
		for i := range number {
			check := testCheck
			check.TCP.Port = port
			one := named(fmt.Sprintf("service-%d", i), 4096/number, check)
			for at := range one.Targets {
				one.Targets[at].Name = prefix + one.Targets[at].Name
			}
			one.VIPs = []vip.VIP{vip.Require(fmt.Sprintf("20.0.0.%d/32", i))}
			list = append(list, one)
		}
		return list
	}
	for name, options := range map[string]Options{"address": {}, "VIP": {FWMark: routed}} {
		t.Run(name, func(t *testing.T) {
			// took is the shortest time of some renames of all targets, and edits of all checks.
			took := func(number int) (least time.Duration) {
				options.Log = discard
				c := New(options)
				for round := range 10 {
					list := streams(number, uint16(5000+round/2), fmt.Sprint(round))
					began := time.Now()
					c.Update(list, nil)
					if took := time.Since(began); round > 1 && (least == 0 || took < least) {
						least = took
					}
					for entry := range c.entries {
						entry.State, entry.judged = Ready, true
					}
				}
				return least
			}
			few, many := took(8), took(256)
			t.Logf("8 streams: %v, 256 streams: %v", few, many)
			if ratio := float64(many) / float64(few); ratio > 5 {
				t.Errorf("32 times as many streams with as many checks take %.1f times as long", ratio)
			}
		})
	}
}
