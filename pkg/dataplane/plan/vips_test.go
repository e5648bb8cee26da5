package plan

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

func TestOwnerOfVIP(t *testing.T) {
	local := map[netip.Addr]struct{}{netip.MustParseAddr("20.9.0.1"): {}}
	routes := []LocalRoute{{Prefix: netip.MustParsePrefix("20.8.0.0/24"), Target: true}}
	for _, tt := range []struct {
		name     string
		streams  map[string][]string
		owned    string
		problems int
	}{
		{"one stream", map[string][]string{"a": {"20.0.0.2/32", "20.0.0.1/32"}}, "map[a:[20.0.0.1/32 20.0.0.2/32]]", 0},
		{
			"the name that sorts first",
			map[string][]string{
				"b": {"20.0.0.1/32"}, "a": {"20.0.0.1/32"},
				"c": {"20.0.0.1/32", "20.0.0.3/32"},
			},
			"map[a:[20.0.0.1/32] c:[20.0.0.3/32]]", 2,
		},
		{
			"a host in another's network",
			map[string][]string{"a": {"20.0.0.0/24"}, "b": {"20.0.0.1/32"}},
			"map[a:[20.0.0.0/24]]", 1,
		},
		{
			"a network around another's host",
			map[string][]string{"b": {"20.0.0.0/24"}, "a": {"20.0.0.1/32"}},
			"map[a:[20.0.0.1/32]]", 1,
		},
		{
			"a host in its own network",
			map[string][]string{"a": {"20.0.0.1/32", "20.0.0.0/24"}},
			"map[a:[20.0.0.0/24 20.0.0.1/32]]", 0,
		},
		{"a network in its own network", map[string][]string{"a": {"20.0.0.0/25", "20.0.0.0/24"}}, "map[a:[20.0.0.0/24]]", 0},
		{
			"an address of this host",
			map[string][]string{"a": {"20.9.0.1/32", "20.9.0.0/24", "20.9.1.0/24"}},
			"map[a:[20.9.1.0/24]]", 2,
		},
		{
			"a local route of this host",
			map[string][]string{"a": {"20.8.0.1/32", "20.8.0.0/16", "20.8.1.0/24"}},
			"map[a:[20.8.1.0/24]]", 2,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			streams := map[string]*Stream{}
			for name, vips := range tt.streams {
				streams[name] = streamOf(name, vips)
			}
			s := AssignVIPs(streams, local, routes)
			maps.DeleteFunc(s.Owned, func(_ string, v []vip.VIP) bool { return len(v) == 0 })
			if got := fmt.Sprint(s.Owned); got != tt.owned || len(s.Problems) != tt.problems {
				t.Errorf("got %s and %+v", got, s.Problems)
			}
		})
	}
}

func TestVIPsBeyondAMap(t *testing.T) {
	// Installed VIPs are kept although they sort last.
	kept := []string{"30.0.0.1/32", "30.0.0.2/32"}
	installed := map[vip.VIP]string{vip.Require(kept[0]): "b", vip.Require(kept[1]): "b"}
	many := hosts("20.0.0.0", MaxHostVIPs)
	s := AssignVIPs(map[string]*Stream{
		"a": streamOf("a", append(slices.Clone(many), "40.0.0.0/24", "2000::1/128")), "b": streamOf("b", kept),
	}, nil, nil)
	s.Limit(installed)
	if got := s.Owned["b"]; fmt.Sprint(got) != fmt.Sprint(kept) {
		t.Errorf("stream b owns %v", got)
	}
	if got := s.Owned["a"]; len(got) != MaxHostVIPs || slices.Contains(got, vip.Require(many[MaxHostVIPs-2])) ||
		!slices.Contains(got, vip.Require("40.0.0.0/24")) || !slices.Contains(got, vip.Require("2000::1/128")) {
		t.Errorf("stream a owns %d VIPs", len(got))
	}
	if len(s.Problems) != 1 || fmt.Sprint(s.Problems[0].VIPs) != fmt.Sprint(many[MaxHostVIPs-2:]) {
		t.Errorf("problems %+v", s.Problems)
	}
}

func streamOf(name string, vips []string) *Stream {
	s := &Stream{Name: name}
	for _, v := range vips {
		s.VIPs = append(s.VIPs, vip.Require(v))
	}
	return s
}

// hosts returns n single-address IPv4 VIPs.
func hosts(first string, n int) []string {
	a := netip.MustParseAddr(first).As4()
	at := binary.BigEndian.Uint32(a[:])
	list := make([]string, 0, n)
	for i := range n {
		list = append(list, netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, at+uint32(i)))).String()+"/32")
	}
	return list
}
