package lb

import (
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
	t0 := time.Unix(1000, 0)
	for _, test := range []struct {
		name    string
		next    *trench.Config
		down    bool // the VIPs attract no traffic
		leaving int
		streams map[string]int // number of VIPs by stream
	}{
		{"nothing leaves", trenchOf(nil, stream("web", drain, a, b)), false, 0, map[string]int{"web": 2}},
		{"stream", trenchOf([]vip.VIP{a, b}), false, 2, map[string]int{"web": 2}},
		{"stream and its VIPs", trenchOf(nil), false, 2, map[string]int{"web": 2}},
		{"VIP", trenchOf(nil, stream("web", drain, a)), false, 1, map[string]int{"web": 2}},
		{
			"VIP moves", trenchOf(nil, stream("web", drain, a), stream("other", drain, b)), false, 0,
			map[string]int{"web": 1, "other": 1},
		},
		{"stream renamed", trenchOf(nil, stream("other", drain, a, b)), false, 0, map[string]int{"other": 2}},
		{"stream that is down", trenchOf(nil), true, 0, map[string]int{}},
		{"VIP within another one", trenchOf(nil, stream("other", drain, wide)), false, 0, map[string]int{"other": 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var d departures
			serves := func(vip.VIP) bool { return !test.down }
			if d.configure(t0, all, serves) != all {
				t.Fatal("the first configuration is not in force as it is")
			}
			check := func(what string, c *trench.Config, leaving int, streams map[string]int) {
				t.Helper()
				if len(d.ends) != leaving || len(c.Streams) != len(streams) {
					t.Fatalf("%s: %d VIPs leave, streams are %v", what, len(d.ends), c.Streams)
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
			if next := d.next(); next.IsZero() != (test.leaving == 0) {
				t.Errorf("the next drain ends at %v", next)
			}
			check("changed once more", d.configure(t0.Add(drain/2), test.next, serves), test.leaving, test.streams)
			if c := d.expire(t0.Add(drain - 1)); c != nil {
				t.Error("a drain ended before its time")
			}
			if c := d.expire(t0.Add(drain)); test.leaving > 0 && (c != test.next || len(d.ends) > 0) {
				t.Errorf("after the drain %v is in force", c)
			}
			d.configure(t0, all, serves)
			d.configure(t0, test.next, serves)
			if c := d.configure(t0, all, serves); c != all || len(d.ends) > 0 {
				t.Errorf("with the old file %v is in force", c)
			}
		})
	}
}
