package plan

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

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

// Wide VIPs cost little more than single addresses, not a walk over all VIPs each.
func TestWideVIPsAreCheap(t *testing.T) {
	assign := func(bits int) (fastest time.Duration) {
		stream := &Stream{Name: "a"}
		for i := range uint32(6000) {
			address := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, 20<<24+8*i)))
			v, err := vip.FromPrefix(netip.PrefixFrom(address, bits))
			if err != nil {
				t.Fatal(err)
			}
			stream.VIPs = append(stream.VIPs, v)
		}
		for range 5 {
			began := time.Now()
			owners := AssignVIPs(map[string]*Stream{"a": stream}, nil, nil)
			if taken := time.Since(began); fastest == 0 || taken < fastest {
				fastest = taken
			}
			if len(owners.Owner) != len(stream.VIPs) {
				t.Fatalf("%d VIPs of %d are owned", len(owners.Owner), len(stream.VIPs))
			}
		}
		return fastest
	}
	if single, wide := assign(32), assign(29); wide > 10*single {
		t.Errorf("single addresses take %v, wide VIPs %v", single, wide)
	}
}

// A VIP is owned unless an owned one overlaps it, which is found among random nested ones.
func TestOverlapsAreFound(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 0))
	for round := range 300 {
		streams := map[string]*Stream{}
		for _, name := range []string{"a", "b", "c"} {
			stream := &Stream{Name: name}
			for range random.IntN(12) {
				address := netip.AddrFrom4([4]byte{20, 0, 0, byte(random.IntN(64))})
				v, err := vip.FromPrefix(netip.PrefixFrom(address, 26+random.IntN(7)).Masked())
				if err != nil {
					t.Fatal(err)
				}
				stream.VIPs = append(stream.VIPs, v)
			}
			streams[name] = stream
		}
		owners := AssignVIPs(streams, nil, nil)
		refused := vip.Set{}
		for _, problem := range owners.Problems {
			refused[problem.VIPs[0]] = struct{}{}
		}
		for name, stream := range streams {
			for _, v := range stream.VIPs {
				overlapping := map[string]bool{} // owners of VIPs that overlap it, except itself
				for w, by := range owners.Owner {
					if w != v && w.Overlaps(v) {
						overlapping[by] = true
					}
				}
				by, owned := owners.Owner[v]
				_, covered := owners.Covered[v]
				switch {
				case owned && (len(overlapping) > 1 || len(overlapping) == 1 && !overlapping[by]):
					t.Errorf("round %d: %s of %s overlaps VIPs of %v", round, v, by, overlapping)
				case !owned && len(overlapping) == 0, !owned && !covered && !refused.Has(v):
					t.Errorf("round %d: %s of %s is neither owned, covered nor refused", round, v, name)
				}
			}
		}
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
