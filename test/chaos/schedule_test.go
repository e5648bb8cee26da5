package main

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

// lines returns the schedule of a seed as text.
func lines(seed uint64, n int) []string {
	var all []string
	for _, g := range plan(seed, n, catalog()) {
		for _, f := range g.Faults {
			all = append(all, strings.Join([]string{g.what(), f.String(), f.Start.String(), f.Duration.String()}, " "))
		}
	}
	return all
}

func TestPlanIsDeterministic(t *testing.T) {
	for _, seed := range []uint64{1, 2, 1 << 60} {
		first := lines(seed, 200)
		if len(first) != 200 {
			t.Errorf("seed %d has %d faults, want 200", seed, len(first))
		}
		if !reflect.DeepEqual(first, lines(seed, 200)) {
			t.Errorf("seed %d means two things", seed)
		}
	}
	if reflect.DeepEqual(lines(1, 50), lines(2, 50)) {
		t.Error("two seeds mean the same")
	}
	if a, b := lines(7, 20), lines(7, 500); !reflect.DeepEqual(a[:15], b[:15]) {
		t.Error("a longer run begins otherwise: what failed late cannot be repeated in a short one")
	}
}

func TestPlanLimits(t *testing.T) {
	for name, kinds := range map[string][]*kind{"BIRD": catalog(), "FRR": externalCatalog()} {
		t.Run(name, func(t *testing.T) { testPlanLimits(t, kinds) })
	}
}

func testPlanLimits(t *testing.T, kinds []*kind) {
	seen := map[string]bool{}
	for _, g := range plan(3, 3000, kinds) {
		busy := map[string]time.Duration{}
		for _, f := range g.Faults {
			seen[f.Kind.Name] = true
			if f.Arg < 0 || f.Arg >= f.Kind.Args || f.Duration < f.Kind.Least || f.Duration > f.Kind.Most {
				t.Errorf("fault %d: variant %d for %s", f.ID, f.Arg, f.Duration)
			}
			for _, r := range f.Kind.holds(f.Arg) {
				if busy[r] > f.Start {
					t.Errorf("group %d: %s hits %s, which is broken until %s", g.Number, f, r, busy[r])
				}
				busy[r] = f.Start + f.Duration
			}
			touches := f.Kind.touches(f.Arg)
			switch g.Breadth {
			case quiet:
				if touches != nothing {
					t.Errorf("group %d may cause no updates: %s", g.Number, f)
				}
			case ofGateway:
				if touches.gateways&^(1<<g.Gateway) != 0 {
					t.Errorf("group %d is of %s: %s", g.Number, gatewayName(g.Gateway), f)
				}
			case ofTargets:
				for v := range vips {
					if vips[v].streams[0] == untouchedStream && touches.has(v, gatewayA) {
						t.Errorf("group %d touches the untouched stream: %s", g.Number, f)
					}
				}
			case wide:
			}
		}
	}
	for _, k := range kinds {
		if !seen[k.Name] {
			t.Errorf("%s is never drawn", k.Name)
		}
	}
}

func TestScopes(t *testing.T) {
	for _, c := range []struct {
		name string
		s    scope
		vips int
	}{
		{"nothing", nothing, 0},
		{"everything", everything, len(vips)},
		{"a stream of its own", ofStream(0), 2},
		{"a stream that shares a VIP", ofStream(2), 4},
		{"one family at a gateway", atGateway(gatewayB, ipv6), len(vips) / 2},
	} {
		n := 0
		for v := range vips {
			if c.s.has(v, gatewayB) {
				n++
			}
		}
		if n != c.vips {
			t.Errorf("%s has %d VIPs at gateway B, want %d", c.name, n, c.vips)
		}
	}
	if atGateway(gatewayB, ipv4).has(0, gatewayA) {
		t.Error("what is at gateway B is at gateway A")
	}
}
