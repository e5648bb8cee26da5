package dataplane

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// hostsFrom returns n single-address IPv4 VIPs.
func hostsFrom(first string, n int) []string {
	a := netip.MustParseAddr(first).As4()
	at := binary.BigEndian.Uint32(a[:])
	list := make([]string, 0, n)
	for i := range n {
		list = append(list, netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, at+uint32(i)))).String()+"/32")
	}
	return list
}

// All VIPs of a full map are replaced in one transaction, even if new VIPs sort before removed
// ones.
func TestFullMapIsExchanged(t *testing.T) {
	s := newSite(t)
	r := s.start()
	for _, first := range []string{"21.0.0.0", "20.0.0.0", "22.0.0.0"} {
		list := hostsFrom(first, plan.MaxHostVIPs)
		state := r.configure(testStream("a", list, siteTarget(1, plan.Serving)))
		for _, v := range []string{list[0], list[plan.MaxHostVIPs-1]} {
			if state.VIPs[vip.Require(v)] != "a" || len(state.VIPs) != plan.MaxHostVIPs {
				t.Fatalf("%s: %d VIPs are served, %v", v, len(state.VIPs), state.Err)
			}
		}
	}
}
