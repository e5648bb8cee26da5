package dataplane

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// hostsFrom are n IPv4 VIPs of one address.
func hostsFrom(first string, n int) []string {
	a := netip.MustParseAddr(first).As4()
	at := binary.BigEndian.Uint32(a[:])
	list := make([]string, 0, n)
	for i := range n {
		list = append(list, netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, at+uint32(i)))).String()+"/32")
	}
	return list
}

// A full map is exchanged in one transaction, also for VIPs that sort before those that go.
func TestFullMapIsExchanged(t *testing.T) {
	s := newSite(t)
	r := s.start()
	for _, first := range []string{"21.0.0.0", "20.0.0.0", "22.0.0.0"} {
		list := hostsFrom(first, plan.MaxHostVIPs)
		state := r.configure(testStream("a", list, siteTarget(1, Serving)))
		for _, v := range []string{list[0], list[plan.MaxHostVIPs-1]} {
			if state.VIPs[vip.Require(v)] != "a" || len(state.VIPs) != plan.MaxHostVIPs {
				t.Fatalf("%s: %d VIPs are served, %v", v, len(state.VIPs), state.Err)
			}
		}
	}
}
