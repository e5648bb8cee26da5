package lb

import (
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// trenchOf is a configuration with streams of these VIPs, which drain for their time; other VIPs of
// the attractor have no stream.
func trenchOf(others []vip.VIP, streams ...trench.Stream) *trench.Config {
	c := &trench.Config{Attractor: trench.Attractor{VIPs: others}, Streams: streams}
	for _, s := range streams {
		c.Attractor.VIPs = append(c.Attractor.VIPs, s.VIPs...)
	}
	return c
}

// fakeMover serves every VIP by the first stream that lists it in a configuration.
type fakeMover struct {
	inForce *trench.Config
	down    bool // the VIPs attract no traffic
	ready   bool // the new streams
}

func (f *fakeMover) Owners() map[vip.VIP]string {
	owners := map[vip.VIP]string{}
	for _, s := range slices.Backward(f.inForce.Streams) {
		for _, v := range s.VIPs {
			if !f.down {
				owners[v] = s.Name
			}
		}
	}
	return owners
}

func (f *fakeMover) Attracts(v vip.VIP) bool           { return f.Owners()[v] != "" }
func (f *fakeMover) CanServe(_ string, _ vip.VIP) bool { return f.ready }

func TestDepartures(t *testing.T) {
	parse := func(text string) vip.VIP {
		v, err := vip.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	a, b, wide := parse("20.0.0.1/32"), parse("20.0.0.2/32"), parse("20.0.0.0/24")
	stream := func(name string, drain time.Duration, vips ...vip.VIP) trench.Stream {
		return trench.Stream{Name: name, DrainTime: drain, VIPs: vips}
	}
	const drain = time.Minute
	all := trenchOf(nil, stream("web", drain, a, b))
	contested := trenchOf(nil, stream("web", drain, a, b))
	contested.Streams = append(contested.Streams, stream("api", drain, b))
	t0 := time.Unix(1000, 0)
	for _, test := range []struct {
		name    string
		next    *trench.Config
		down    bool // the VIPs attract no traffic
		leaving int
		moving  int
		streams map[string]int // number of VIPs by stream
	}{
		{"nothing leaves", trenchOf(nil, stream("web", drain, a, b)), false, 0, 0, map[string]int{"web": 2}},
		{"stream", trenchOf([]vip.VIP{a, b}), false, 2, 0, map[string]int{"web": 2}},
		{"stream and its VIPs", trenchOf(nil), false, 2, 0, map[string]int{"web": 2}},
		{"VIP", trenchOf(nil, stream("web", drain, a)), false, 1, 0, map[string]int{"web": 2}},
		{
			"VIP moves", trenchOf(nil, stream("web", drain, a), stream("other", drain, b)), false, 0, 1,
			map[string]int{"web": 2, "other": 1},
		},
		{
			"stream renamed", trenchOf(nil, stream("other", drain, a, b)), false, 0, 2,
			map[string]int{"web": 2, "other": 2},
		},
		{"stream renamed while down", trenchOf(nil, stream("other", drain, a, b)), true, 0, 0, map[string]int{"other": 2}},
		{"VIP also of an earlier name", contested, false, 0, 1, map[string]int{"web": 2, "api": 1}},
		{"VIP leaves, VIP moves", trenchOf(nil, stream("new", drain, b)), false, 1, 1, map[string]int{"web": 2, "new": 1}},
		{"stream that is down", trenchOf(nil), true, 0, 0, map[string]int{}},
		{"VIP within another one", trenchOf(nil, stream("other", drain, wide)), false, 0, 0, map[string]int{"other": 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var d departures
			serves := &fakeMover{inForce: all, down: test.down}
			if d.configure(t0, all, serves) != all {
				t.Fatal("the first configuration is not in force as it is")
			}
			check := func(what string, c *trench.Config, leaving int, streams map[string]int) {
				t.Helper()
				if len(d.ends) != leaving || len(d.moves) != test.moving || len(c.Streams) != len(streams) {
					t.Fatalf("%s: %d VIPs leave, %d move, streams are %v", what, len(d.ends), len(d.moves), c.Streams)
				}
				for _, s := range c.Streams {
					if len(s.VIPs) != streams[s.Name] {
						t.Errorf("%s: stream %s has %v", what, s.Name, s.VIPs)
					}
				}
				configured := vip.NewSet(c.Attractor.VIPs...)
				if len(configured) != len(c.Attractor.VIPs) {
					t.Errorf("%s: the attractor has %v", what, c.Attractor.VIPs)
				}
				for v := range d.ends {
					if !configured.Has(v) {
						t.Errorf("%s: the attractor lacks %v", what, v)
					}
				}
			}
			check("changed", d.configure(t0, test.next, serves), test.leaving, test.streams)
			next := d.next(t0, serves)
			if next.IsZero() != (test.leaving+test.moving == 0) {
				t.Errorf("the next drain or move ends at %v", next)
			}
			// Neither a drain nor a move is prolonged.
			check("changed once more", d.configure(t0.Add(maxMove/2), test.next, serves), test.leaving, test.streams)
			if c, _ := d.expire(t0.Add(maxMove-1), serves); c != nil {
				t.Error("a drain or a move ended before its time")
			}
			if c, late := d.expire(t0.Add(maxMove), serves); (c != nil) != (test.moving > 0) || len(late) != test.moving {
				t.Errorf("after the moves %v is in force, %d are late", c, len(late))
			}
			c, _ := d.expire(t0.Add(drain), serves)
			if test.leaving > 0 && (c != test.next || len(d.ends) > 0) || d.inForce != test.next {
				t.Errorf("after the drain %v is in force", d.inForce)
			}
			d.configure(t0, all, serves)
			d.configure(t0, test.next, serves)
			if c := d.configure(t0, all, serves); c != all || len(d.ends)+len(d.moves) > 0 {
				t.Errorf("with the old file %v is in force", c)
			}
			d.configure(t0, test.next, serves)
			serves.ready = true
			if test.moving > 0 && d.next(t0, serves) != t0 {
				t.Error("a move waits although the new stream is ready")
			}
			if d.expire(t0, serves); test.leaving == 0 && d.inForce != test.next {
				t.Errorf("with a new stream that is ready %v is in force", d.inForce)
			}
		})
	}
}
