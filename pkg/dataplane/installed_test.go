package dataplane

import (
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestLabelsAreReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[A-Za-z0-9_.-]{1,60}`)
		x := installedTarget{Stream: name.Draw(t, "stream"), Name: name.Draw(t, "name")}
		if rapid.Bool().Draw(t, "IPv4") {
			x.IPs = append(x.IPs, netip.MustParseAddr("172.16.255.255"))
		}
		if rapid.Bool().Draw(t, "IPv6") {
			x.IPs = append(x.IPs, netip.MustParseAddr("fd00:1111:2222:3333:4444:5555:6666:7777"))
		}
		now := time.UnixMilli(1_800_000_000_000)
		if rapid.Bool().Draw(t, "drains") {
			x.Drain = time.Hour
			x.DrainEnd = now.Add(x.Drain)
		}
		l := parseLabel(x.label().String())
		if l != x.label() || len(l.String()) > maxComment {
			t.Fatalf("%q became %q", x.label(), l)
		}
		end, drain := l.drainEndAt(now)
		if !end.Equal(x.DrainEnd) || drain != x.Drain {
			t.Fatalf("the drain ends at %s", end)
		}
	})
}

// A comment of an earlier version, or one that another process wrote, is read as far as
// it goes.
func TestUnknownFieldsOfLabelsAreIgnored(t *testing.T) {
	for comment, want := range map[string]label{
		"":                            {},
		"a/t1":                        {stream: "a", name: "t1"},
		"a/t1 later=7 10.1.0.1":       {stream: "a", name: "t1", ips: [2]netip.Addr{netip.MustParseAddr("10.1.0.1")}},
		"a/t1 drain=x/y":              {stream: "a", name: "t1"},
		"a/t1 drain=1800000000000":    {stream: "a", name: "t1", drainEnd: 1800000000000},
		"a":                           {stream: "a"},
		"a/t1 drain=1800000000000/50": {stream: "a", name: "t1", drainEnd: 1800000000000, drain: 50},
	} {
		if got := parseLabel(comment); got != want {
			t.Errorf("%q: %+v", comment, got)
		}
	}
}

// A clock that jumped back does not make a drain longer than it was to be.
func TestClockJumpsDoNotProlongDrains(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	l := label{stream: "a", name: "t1", drainEnd: now.Add(time.Hour).UnixMilli(), drain: 5000}
	if end, _ := l.drainEndAt(now); !end.Equal(now.Add(5 * time.Second)) {
		t.Errorf("the drain ends at %s", end)
	}
}

// A process that was killed while it replaced a large table by one of another size left
// the stream's rules on a spare table.
func TestRestartAfterKilledResize(t *testing.T) {
	x := newSite(t)
	stream := siteStream("a", bothVIPs, siteTarget(1, Serving, Serving), siteTarget(2, Serving, Serving))
	stream.Size = 10007
	p := x.start()
	p.configure(stream)
	p.stop()
	f := openFabric(t, x.ns, Options{})
	want := streamContent{name: "a", size: 20011, seed: stream.Seed, tables: bothFamilies(filled(20011, 5000, 5001))}
	must(t, f.toSpare(&want))
	x.has(t, "spare4/a")
	stream.Size = 20011
	p = x.start()
	p.configure(stream)
	p.wait("the stream to serve", func(s State) bool { return serves(s, "a", 0, "t1", "t2") && len(s.VIPs) == 2 && len(s.Drift) == 0 })
	x.lacks(t, "spare")
	x.has(t, "mod 20011")
}
