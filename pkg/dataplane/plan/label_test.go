package plan

import (
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/vip"
)

// maxLabel is the maximum length of a rule comment: nftables stores the length in one byte.
const maxLabel = 250

func TestLabelsAreReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[A-Za-z0-9_.-]{1,60}`)
		x := InstalledTarget{Label: Label{Stream: name.Draw(t, "stream"), Name: name.Draw(t, "name")}}
		if rapid.Bool().Draw(t, "IPv4") {
			x.IPs[vip.IPv4] = netip.MustParseAddr("172.16.255.255")
		}
		if rapid.Bool().Draw(t, "IPv6") {
			x.IPs[vip.IPv6] = netip.MustParseAddr("fd00:1111:2222:3333:4444:5555:6666:7777")
		}
		now := time.UnixMilli(1_800_000_000_000)
		if rapid.Bool().Draw(t, "drains") {
			x.Drain(now.Add(time.Hour), time.Hour)
		}
		l := ParseLabel(x.Label.String())
		if l != x.Label || len(l.String()) > maxLabel {
			t.Fatalf("%q became %q", x.Label, l)
		}
		y := InstalledTarget{Label: l}
		y.ResumeDrain(now)
		if !y.DrainEnd.Equal(x.DrainEnd) || y.Label != x.Label {
			t.Fatalf("the drain ends at %s", y.DrainEnd)
		}
	})
}

// The known fields of a comment by an earlier version or another process are parsed.
func TestUnknownFieldsOfLabelsAreIgnored(t *testing.T) {
	for comment, want := range map[string]Label{
		"":                            {},
		"a/t1":                        {Stream: "a", Name: "t1"},
		"a/t1 later=7 10.1.0.1":       {Stream: "a", Name: "t1", IPs: [2]netip.Addr{netip.MustParseAddr("10.1.0.1")}},
		"a/t1 drain=x/y":              {Stream: "a", Name: "t1"},
		"a/t1 drain=1800000000000":    {Stream: "a", Name: "t1", DrainEndMilli: 1800000000000},
		"a":                           {Stream: "a"},
		"a/t1 drain=1800000000000/50": {Stream: "a", Name: "t1", DrainEndMilli: 1800000000000, DrainMilli: 50},
	} {
		if got := ParseLabel(comment); got != want {
			t.Errorf("%q: %+v", comment, got)
		}
	}
}

// A backward clock jump does not extend a drain beyond its duration.
func TestClockJumpsDoNotProlongDrains(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	x := InstalledTarget{Label: Label{
		Stream: "a", Name: "t1", DrainEndMilli: now.Add(time.Hour).UnixMilli(), DrainMilli: 5000,
	}}
	x.ResumeDrain(now)
	if !x.DrainEnd.Equal(now.Add(5 * time.Second)) {
		t.Errorf("the drain ends at %s", x.DrainEnd)
	}
}
