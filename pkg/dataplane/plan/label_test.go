package plan

import (
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestLabelsAreReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[A-Za-z0-9_.-]{1,60}`)
		x := InstalledTarget{Stream: name.Draw(t, "stream"), Name: name.Draw(t, "name")}
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
		l := ParseLabel(x.Label().String())
		if l != x.Label() || len(l.String()) > MaxLabel {
			t.Fatalf("%q became %q", x.Label(), l)
		}
		end, drain := l.DrainEndAt(now)
		if !end.Equal(x.DrainEnd) || drain != x.Drain {
			t.Fatalf("the drain ends at %s", end)
		}
	})
}

// A comment of an earlier version, or one that another process wrote, is read as far as
// it goes.
func TestUnknownFieldsOfLabelsAreIgnored(t *testing.T) {
	for comment, want := range map[string]Label{
		"":                            {},
		"a/t1":                        {Stream: "a", Name: "t1"},
		"a/t1 later=7 10.1.0.1":       {Stream: "a", Name: "t1", IPs: [2]netip.Addr{netip.MustParseAddr("10.1.0.1")}},
		"a/t1 drain=x/y":              {Stream: "a", Name: "t1"},
		"a/t1 drain=1800000000000":    {Stream: "a", Name: "t1", DrainEnd: 1800000000000},
		"a":                           {Stream: "a"},
		"a/t1 drain=1800000000000/50": {Stream: "a", Name: "t1", DrainEnd: 1800000000000, Drain: 50},
	} {
		if got := ParseLabel(comment); got != want {
			t.Errorf("%q: %+v", comment, got)
		}
	}
}

// A clock that jumped back does not make a drain longer than it was to be.
func TestClockJumpsDoNotProlongDrains(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	l := Label{Stream: "a", Name: "t1", DrainEnd: now.Add(time.Hour).UnixMilli(), Drain: 5000}
	if end, _ := l.DrainEndAt(now); !end.Equal(now.Add(5 * time.Second)) {
		t.Errorf("the drain ends at %s", end)
	}
}
