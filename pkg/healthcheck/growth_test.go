package healthcheck

import (
	"fmt"
	"runtime"
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
						entry.State = Ready
						c.judge(entry, time.Now())
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
		t.Run("one of many/"+name, func(t *testing.T) {
			// took are the shortest times of edits and of removals of one of some streams.
			took := func(number int) (edit, removal time.Duration) {
				options.Log = discard
				c := New(options)
				of := func(i int, port uint16) []trench.Stream {
					check := testCheck
					check.TCP.Port = port
					one := named(fmt.Sprintf("service-%d", i), 256, check)
					one.VIPs = []vip.VIP{vip.Require(fmt.Sprintf("20.0.0.%d/32", i))}
					return []trench.Stream{one}
				}
				judge := func(stream string) {
					for _, target := range c.streams[stream] {
						target.members[0].State = Ready
						c.judge(target.members[0], time.Now())
					}
					c.Evaluate(time.Now())
				}
				for i := range number {
					c.Update(of(i, 5000), nil)
					judge(of(i, 5000)[0].Name)
				}
				for round := range 10 {
					next, began := of(0, uint16(5001+round)), time.Now()
					c.Update(next, nil)
					edited := time.Since(began)
					judge(next[0].Name)
					began = time.Now()
					c.Update(nil, []string{next[0].Name})
					removed := time.Since(began)
					if round == 0 || edited < edit {
						edit = edited
					}
					if round == 0 || removed < removal {
						removal = removed
					}
					c.Update(of(0, 5000), nil)
					judge(next[0].Name)
				}
				return edit, removal
			}
			fewEdit, fewRemoval := took(2)
			manyEdit, manyRemoval := took(200)
			t.Logf("2 streams: %v, %v; 200 streams: %v, %v", fewEdit, fewRemoval, manyEdit, manyRemoval)
			if manyEdit > 5*fewEdit || manyRemoval > 5*fewRemoval {
				t.Error("with 100 times as many streams, an edit or the removal of one takes longer")
			}
		})
	}
}

// Without a change of the check or of the VIPs, an Update builds nothing for each VIP.
func TestUpdateOfManyVIPs(t *testing.T) {
	c := New(Options{Log: discard, FWMark: routed})
	of := func(targets int) []trench.Stream {
		one := stream(targets, testCheck)
		for i := range 10_000 {
			one.VIPs = append(one.VIPs, vip.Require(fmt.Sprintf("20.0.%d.%d/32", i>>8, i&255)))
		}
		return []trench.Stream{one}
	}
	c.Update(of(2), nil)
	for i, next := range [][]trench.Stream{of(2), of(3), of(1)} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		c.Update(next, nil)
		runtime.ReadMemStats(&after)
		if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 100_000 {
			t.Errorf("update %d allocates %d bytes", i, bytes)
		}
	}
}
