package lab

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func TestParseGoBGPTrace(t *testing.T) {
	trace, err := parseGoBGPTrace(`not JSON
{"level":"info","msg":"gobgpd started","time":"2026-11-21T07:33:18Z"}
{"Key":"169.254.100.1","attributes":[{"type":1,"value":0},{"type":2,"as_paths":[{"segment_type":2,"num":1,"asns":[8103]}]},{"type":3,"nexthop":"169.254.100.1"}],"msg":"received update","nlri":[{"prefix":"20.0.0.1/32"},{"prefix":"20.0.0.2/32"}],"time":"2026-11-21T07:33:19Z","withdrawals":[]}
{"Key":"169.254.100.1","attributes":[],"msg":"received update","nlri":[],"time":"2026-11-21T07:33:19Z","withdrawals":[]}
{"Key":"fd00:100::1","attributes":[{"type":2,"as_paths":[{"segment_type":2,"num":2,"asns":[8103,8103]}]},{"type":8,"communities":[4294901760,65538]},{"type":14,"nexthop":"fd00:100::1","afi":2,"safi":1,"value":[{"prefix":"2000::1/128"}]}],"msg":"received update","nlri":[],"time":"2026-11-21T07:33:20Z","withdrawals":[]}
{"Key":"fd00:100::1","attributes":[{"type":15,"afi":2,"safi":1,"value":[{"prefix":"2000::1/128"},{"prefix":"2000::9/128"}]}],"msg":"received update","nlri":[],"time":"2026-11-21T07:33:21Z","withdrawals":[]}
{"Key":"169.254.100.1","attributes":[],"msg":"received update","nlri":[],"time":"2026-11-21T07:33:22Z","withdrawals":[{"prefix":"20.0.0.1/32"}]}
{"Key":"169.254.100.1","Reason":"notification","msg":"Peer Down","time":"2026-11-21T07:35:44Z"}
{"Key":"169.254.100.1","attributes":[],"msg":"rece`)
	harness.Must(t, err)
	got := fmt.Sprint(trace)
	want := "[07:33:19.000000 20.0.0.1/32 announced path=[8103] communities=[]" +
		" 07:33:19.000000 20.0.0.2/32 announced path=[8103] communities=[]" +
		" 07:33:20.000000 2000::1/128 announced path=[8103 8103] communities=[(65535,0) (1,2)]" +
		" 07:33:21.000000 2000::1/128 withdrawn 07:33:22.000000 20.0.0.1/32 withdrawn 07:35:44.000000 20.0.0.2/32 " +
		"withdrawn]"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if _, err := parseGoBGPTrace(`{"msg":"received update","time":"noon"}` + "\n"); err == nil {
		t.Error("a line without a time is no error")
	}
}

func TestParseGoBGPRoutes(t *testing.T) {
	routes := map[netip.Prefix]Route{}
	err := parseGoBGPRoutes(`{"0.0.0.0/0":[{"best":true,"attrs":[{"type":1,"value":2},{"type":3,"nexthop":"0.0.0.0"}]}],
"20.0.0.1/32":[{"best":true,"attrs":[{"type":1,"value":0},{"type":2,"as_paths":[{"asns":[8103]}]},{"type":3,"nexthop":"169.254.100.1"},{"type":4,"metric":50},{"type":5,"value":100},{"type":8,"communities":[4294901760]},{"type":16,"value":[7]},{"type":32,"value":[{"ASN":64512,"LocalData1":1,"LocalData2":100}]}],"neighbor-ip":"169.254.100.1"},
{"best":false,"attrs":[{"type":3,"nexthop":"169.254.100.2"}],"neighbor-ip":"169.254.100.2"}]}`, routes)
	harness.Must(t, err)
	want := "map[20.0.0.1/32:{20.0.0.1/32 169.254.100.1 [8103] [(65535,0) (64512,1,100)] 100 50 [7]}]"
	if got := fmt.Sprint(routes); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
