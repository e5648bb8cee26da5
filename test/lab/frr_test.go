package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func TestParseFRRTrace(t *testing.T) {
	trace, err := parseFRRTrace(`2026/11/21 07:15:39 BGP: [T83RR-8SM5G] bgpd 8.4.4 starting: vty@0, bgp@169.254.100.2:10179
2026/11/21 07:15:41.222665 BGP: [T5AAP-5GA85] 169.254.100.1(Unknown) rcvd UPDATE w/ attr: nexthop 169.254.100.1, origin i, path 8103
2026/11/21 07:15:41.222667 BGP: [PCFFM-WMARW] 169.254.100.1(Unknown) rcvd UPDATE wlen 0 attrlen 27 alen 10
2026/11/21 07:15:41.222726 BGP: [YCKEM-GB33T] 169.254.100.1(Unknown) rcvd 20.0.0.1/32 IPv4 unicast
2026/11/21 07:15:42.062748 BGP: [T5AAP-5GA85] fd00:100::1(gw) rcvd UPDATE w/ attr: , origin i, mp_nexthop fd00:100::1(fe80::1), community 1:2 graceful-shutdown, path 8103 8103
2026/11/21 07:15:42.062774 BGP: [YCKEM-GB33T] fd00:100::1(gw) rcvd 2000::1/128 IPv6 unicast
2026/11/21 07:15:43.062774 BGP: [YCKEM-GB33T] 169.254.100.1(Unknown) rcvd 20.0.0.2/32 IPv4 unicast...duplicate ignored
2026/11/21 07:16:03.474060 BGP: [PAPP6-VDAWM] 169.254.100.1(Unknown) rcvd UPDATE about 20.0.0.1/32 IPv4 unicast -- withdrawn
2026/11/21 07:16:03.474060 BGP: [PAPP6-VDAWM] 169.254.100.1(Unknown) rcvd UPDATE about 20.0.0.9/32 IPv4 unicast -- withdrawn
2026/11/21 07:16:36.401113 BGP: [PXVXG-TFNNT] %ADJCHANGE: neighbor 169.254.100.1(Unknown) in vrf default Down User reset
2026/11/21 07:16:37.000000 BGP: [T83RR-8SM5G] bgpd 8.4.4 starting: vty@0
2026/11/21 07:16:37.403442 BGP: [PXVXG-TFNNT] %ADJCHANGE: neighbor fd00:100::1(gw) in vrf default Down User reset
2026/11/21 07:16:38.474060 BGP: [PAPP6-VDAWM] 169.254.100.1(Unknown) rcvd UPDATE about 20.0.0.2/32 IPv4 un`)
	harness.Must(t, err)
	got := fmt.Sprint(trace)
	want := "[07:15:41.222726 20.0.0.1/32 announced path=[8103] communities=[]" +
		" 07:15:42.062774 2000::1/128 announced path=[8103 8103] communities=[(1,2) (65535,0)]" +
		" 07:15:43.062774 20.0.0.2/32 announced path=[8103] communities=[]" +
		" 07:16:03.474060 20.0.0.1/32 withdrawn 07:16:36.401113 20.0.0.2/32 withdrawn]"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if trace[0].GracefulShutdown() || !trace[1].GracefulShutdown() {
		t.Error("GRACEFUL_SHUTDOWN is not distinguished from its absence")
	}
	if _, err := parseFRRTrace("yesterday noon BGP: [X] 10.0.0.1(Unknown) rcvd\n"); err == nil {
		t.Error("a line without a time is no error")
	}
}

func TestParseFRRRoutes(t *testing.T) {
	routes := map[netip.Prefix]Route{}
	err := parseFRRRoutes(`{"vrfId":0,"routes":{"20.0.0.1/32":[{"prefix":"20.0.0.1/32","version":9,"advertisedTo":{}},
{"aspath":{"string":"8103 8103","length":2},"valid":true,"bestpath":{},"nexthops":[{"ip":"169.254.100.151"}],"peer":{"peerId":"169.254.100.151"}},
{"aspath":{"string":"8103","length":1},"locPrf":0,"metric":50,"largeCommunity":{"string":"64512:1:100"},"extendedCommunity":{"string":"LB:8103:1250000 (10.000 Mbps)"},"valid":true,"bestpath":{"overall":true},"community":{"string":"graceful-shutdown 1:2"},"nexthops":[{"ip":"169.254.100.1"}],"peer":{"peerId":"169.254.100.1"}}],
"0.0.0.0/0":[{"prefix":"0.0.0.0/0"},{"aspath":{"string":"Local","length":0},"sourced":true,"local":true,"bestpath":{"overall":true},"nexthops":[{"ip":"0.0.0.0"}],"peer":{"peerId":"0.0.0.0"}}]}}`, routes)
	harness.Must(t, err)
	want := "map[20.0.0.1/32:{20.0.0.1/32 169.254.100.1 [8103] [(65535,0) (1,2) (64512,1,100)] 0 50 " +
		"LB:8103:1250000 (10.000 Mbps)}]"
	if got := fmt.Sprint(routes); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// vtysh loads each form of the documented configuration once, as at FRR's start, and accepts all
// of its statements.
func TestFRRLoadsConfiguration(t *testing.T) {
	if lacks := MissingForFRR(); lacks != "" {
		Skip(t, "missing: "+lacks)
	}
	for name, change := range map[string]func(*GatewayConfig){
		"sessions": func(*GatewayConfig) {},
		"ranges":   func(c *GatewayConfig) { c.Ranges = ExternalSubnets() },
		"secured":  func(c *GatewayConfig) { c.Ranges, c.Password, c.Passive = ExternalSubnets(), "secret", true },
	} {
		t.Run(name, func(t *testing.T) {
			l, err := New(QuickDAD)
			harness.Must(t, err)
			c := GatewayA()
			c.BFD = true
			change(&c)
			_, err = l.StartRouter(KindFRR, l.Gateway, c)
			harness.Check(t, errors.Join(err, l.Close()))
		})
	}
}
