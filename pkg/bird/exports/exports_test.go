package exports

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

const session = `  BGP state:          Established
    Neighbor address: 169.254.100.150%ext-vlan
    Neighbor AS:      REMOTE
    Local AS:         8103
    Source address:   169.254.100.1
  Channel ipv4
    BGP Next hop:   169.254.100.1 fe80::1
  Channel ipv6
    BGP Next hop:   fd00:100::1 fe80::1
`

func TestAttributes(t *testing.T) {
	preference, med := uint32(0), uint32(20)
	for name, test := range map[string]struct {
		route, remote string
		want          *frontendv1.Export
	}{
		"BIRD 2, de-preferred": {
			"	BGP.origin: IGP\n	BGP.as_path: 8103 8103\n	BGP.next_hop: 127.0.0.2\n	BGP.local_pref: 100\n" +
				"	BGP.community: (65535,0) (8103,7)\n	BGP.large_community: (8103, 1, 2) (8103, 1, 3)\n" +
				"	BGP.ext_community: (rt, 8103, 7) (unknown 0x4, 8103, 1248125376)\n",
			"4248829953",
			&frontendv1.Export{
				AsPath: []uint32{8103, 8103, 8103}, Communities: []string{"65535:0", "8103:7", "8103:1:2", "8103:1:3"},
				LinkBandwidth: 3_750_000, // 30 Mbit/s
			},
		},
		"BIRD 3": {
			"	preference: 200\n	bgp_path: \n	bgp_next_hop: 127.0.0.2\n	bgp_local_pref: 100\n	bgp_med: 20\n", "64512",
			&frontendv1.Export{AsPath: []uint32{8103}, Med: &med},
		},
		"one AS": {
			"	BGP.as_path: \n	BGP.local_pref: 0\n", "8103", &frontendv1.Export{LocalPreference: &preference},
		},
	} {
		test.want.Gateway, test.want.NextHop = "gw", "169.254.100.1"
		got := parse("gw", test.route, strings.Replace(session, "REMOTE", test.remote, 1), vip.IPv4)
		if !proto.Equal(got, test.want) {
			t.Errorf("%s: got %s, want %s", name, prototext.Format(got), prototext.Format(test.want))
		}
	}
}

// Routes with the same attributes share an export. Lines about the route itself, and VIPs that the
// gateway was not sent, do not count.
func TestRoutesWithTheSameAttributes(t *testing.T) {
	reply := "Table master4:\n" +
		"20.0.0.3/32          blackhole [LB 12:00:01.5] * (200) [i]\n\tType: BGP univ\n\tBGP.as_path: 8103\n\tBGP.med: 7\n" +
		"\tInternal route handling values: 0L 1G 0S id 3\n" +
		"20.0.0.2/32          blackhole [LB 12:00:02.5] * (200) [i]\n\tType: BGP univ\n\tBGP.as_path: 8103\n" +
		"20.0.0.1/32          blackhole [LB 12:00:03.5] * (200) [i]\n\tType: BGP univ\n\tBGP.as_path: 8103\n\tBGP.med: 7\n" +
		"\tInternal route handling values: 0L 1G 0S id 4\n" +
		"20.0.0.9/32          blackhole [LB 12:00:03.5] * (200) [i]\n\tType: BGP univ\n" +
		"Table master6:\n2000::1/128          blackhole [LB 12:00:02.5] * (200) [i]\n\tBGP.as_path: 8103\n"
	all := routes{
		sent: vip.NewSet(vip.Require("20.0.0.1/32"), vip.Require("20.0.0.2/32"), vip.Require("20.0.0.3/32"),
			vip.Require("2000::1/128")),
		known: map[string][]vip.VIP{},
	}
	for line := range strings.Lines(reply) {
		all.add(strings.TrimSuffix(line, "\n"))
	}
	all.end()
	var got []string
	for _, export := range all.exports("gw", strings.Replace(session, "REMOTE", "64512", 1)) {
		got = append(got, fmt.Sprint(export.GetVips(), export.GetAsPath(), export.Med != nil, " via ", export.GetNextHop()))
	}
	want := []string{
		"[20.0.0.1/32 20.0.0.3/32] [8103 8103] true via 169.254.100.1",
		"[20.0.0.2/32] [8103 8103] false via 169.254.100.1", "[2000::1/128] [8103 8103] false via fd00:100::1",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
