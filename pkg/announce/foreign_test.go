package announce

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// attributesOf returns the path attributes of the first UPDATE that the announcer sends for a
// route, as the BGP library shows them.
func attributesOf(t *testing.T, o Options, v vip.VIP, route Route) string {
	t.Helper()
	e, err := newEncoder(o.withDefaults())
	harness.Must(t, err)
	var c changes
	c.add(v, route)
	message, err := bgp.ParseBGPMessage(e.appendUpdates(nil, &c, bothFamilies))
	harness.Must(t, err)
	var texts []string
	for _, attribute := range message.Body.(*bgp.BGPUpdate).PathAttributes {
		texts = append(texts, attribute.String())
	}
	return strings.Join(texts, " ")
}

// The attributes of a session with a speaker of another program, in iBGP and eBGP.
func TestForeignAttributes(t *testing.T) {
	internal := Options{
		Local: netip.MustParseAddr("10.77.0.2"), Peer: netip.MustParseAddrPort("10.77.0.1:179"), PeerAS: 8103,
		LocalAS: 8103, Speaker: "FRR", NextHops: [2]netip.Addr{vip.IPv6: netip.MustParseAddr("fd00:77::2")},
	}
	external := internal
	external.LocalAS = 65000
	policy := Metrics{MED: 50, LocalPreference: 300}.Attributes([]uint32{64512<<16 | 1}, nil)
	v4, v6 := vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")
	for name, tt := range map[string]struct {
		options Options
		v       vip.VIP
		route   Route
		want    []string
		not     string
	}{
		"iBGP": {
			internal, v4,
			Route{Advertisement: Announced},
			[]string{"{Nexthop: 10.77.0.2}", "{LocalPref: 100}", "{AsPath: }"},
			"",
		},
		"iBGP, de-preferred": {
			internal, v6,
			Route{Advertisement: Depreferred, Prepend: 2},
			[]string{"fd00:77::2", "{LocalPref: 0}", "{AsPath: }"},
			"",
		},
		"iBGP, policy": {
			internal, v4,
			Route{Advertisement: Announced, Attributes: policy},
			[]string{"{LocalPref: 300}", "{Med: 50}", "64512:1"},
			"{LocalPref: 100}",
		},
		"eBGP": {external, v6, Route{Advertisement: Announced}, []string{"{AsPath: 65000}"}, "LocalPref"},
		"eBGP, prepends": {
			external, v4, Route{Advertisement: Announced, Prepend: 2}, []string{"{AsPath: 65000 65000 65000}"}, "LocalPref",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := attributesOf(t, tt.options, tt.v, tt.route)
			harness.WantText(t, got, tt.want...)
			if tt.not != "" && strings.Contains(got, tt.not) {
				t.Errorf("%s contains %s", got, tt.not)
			}
		})
	}
}

// A family that the speaker lacks is not announced to it.
func TestForeignFamilies(t *testing.T) {
	e := testEncoder(t)
	var c changes
	c.add(vip.Require("2000::1/128"), Route{Advertisement: Announced})
	if b := e.appendUpdates(nil, &c, [2]bool{vip.IPv4: true}); len(b) > 0 {
		t.Errorf("sends % x", b)
	}
}
