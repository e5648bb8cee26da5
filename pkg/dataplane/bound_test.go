package dataplane

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

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

func TestVIPsBeyondAMap(t *testing.T) {
	// What the kernel has stays, although it sorts last.
	kept := []string{"30.0.0.1/32", "30.0.0.2/32"}
	installed := map[vip.VIP]string{vip.Require(kept[0]): "b", vip.Require(kept[1]): "b"}
	many := hostsFrom("20.0.0.0", mapSize)
	s := shareOut(map[string]*Stream{
		"a": testStream("a", append(slices.Clone(many), "40.0.0.0/24", "2000::1/128")), "b": testStream("b", kept),
	}, nil)
	s.bound(installed)
	if got := s.owned["b"]; fmt.Sprint(got) != fmt.Sprint(kept) {
		t.Errorf("stream b owns %v", got)
	}
	if got := s.owned["a"]; len(got) != mapSize || slices.Contains(got, vip.Require(many[mapSize-2])) || !slices.Contains(got, vip.Require("40.0.0.0/24")) || !slices.Contains(got, vip.Require("2000::1/128")) {
		t.Errorf("stream a owns %d VIPs", len(got))
	}
	if len(s.problems) != 1 || fmt.Sprint(s.problems[0].VIPs) != fmt.Sprint(many[mapSize-2:]) {
		t.Errorf("problems %+v", s.problems)
	}
}

// A full map is exchanged in one transaction, also for VIPs that sort before those that go.
func TestFullMapIsExchanged(t *testing.T) {
	s := newSite(t)
	r := s.start()
	for _, first := range []string{"21.0.0.0", "20.0.0.0", "22.0.0.0"} {
		list := hostsFrom(first, mapSize)
		state := r.configure(testStream("a", list, siteTarget(1, Serving)))
		for _, v := range []string{list[0], list[mapSize-1]} {
			if state.VIPs[vip.Require(v)] != "a" || len(state.VIPs) != mapSize {
				t.Fatalf("%s: %d VIPs are served, %v", v, len(state.VIPs), state.Err)
			}
		}
	}
}
