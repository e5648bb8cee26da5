package growth

import (
	"fmt"
	"net/netip"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Sizes are numbers of objects of a configuration.
type Sizes struct {
	VIPs     int // of alternating families
	Streams  int // each VIP is in one of them
	Targets  int // all of them in each stream, with an address of each family
	Policies int // of the first VIPs, each with attributes of its own
}

// Dimensions have one of the sizes each that grows: few, and many at scale.
var Dimensions = []struct {
	Name      string
	Few, Many int
	Of        func(n int) Sizes
}{
	{"VIPs", 500, 25_000, func(n int) Sizes { return Sizes{VIPs: n, Streams: 1, Targets: 2} }},
	{"targets", 250, 1000, func(n int) Sizes { return Sizes{VIPs: 4, Streams: 2, Targets: n} }},
	{"streams", 25, 500, func(n int) Sizes { return Sizes{VIPs: n, Streams: n, Targets: 20} }},
	{"policies", 250, 25_000, func(n int) Sizes { return Sizes{VIPs: n, Policies: n} }},
}

// VIP returns one of many VIPs.
func VIP(i int) vip.VIP {
	if i%2 == 0 {
		return vip.Require(netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)}), 32).String())
	}
	address := netip.AddrFrom16([16]byte{0x20, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
	return vip.Require(netip.PrefixFrom(address, 128).String())
}

// Target returns one of many targets.
func Target(i int) trench.Target {
	return trench.Target{Name: fmt.Sprintf("target-%d", i), IPs: []netip.Addr{
		netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}),
		netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)}),
	}}
}

// Trench returns a complete and valid configuration with a gateway.
func (sizes Sizes) Trench() *trench.Config {
	config := &trench.Config{Trench: "a", Attractor: trench.Attractor{Name: "a", Gateways: []trench.Gateway{
		{Name: "g", Address: netip.MustParseAddr("172.16.0.254"), Families: trench.SessionBoth},
	}}}
	for i := range sizes.Streams {
		stream := trench.Stream{Name: fmt.Sprintf("stream-%d", i)}
		stream.Check.TCP.Port = 80
		for nth := range sizes.Targets {
			stream.Targets = append(stream.Targets, Target(nth))
		}
		config.Streams = append(config.Streams, stream)
	}
	attractor := &config.Attractor
	for i := range sizes.VIPs {
		attractor.VIPs = append(attractor.VIPs, VIP(i))
		if sizes.Streams > 0 {
			stream := &config.Streams[i%sizes.Streams]
			stream.VIPs = append(stream.VIPs, VIP(i))
		}
		if i < sizes.Policies {
			attractor.Policies = append(attractor.Policies, trench.Policy{
				VIPs: []vip.VIP{VIP(i)}, Ready: trench.Attributes{MED: int64(i + 1), Communities: []string{"64512:100"}},
			})
		}
	}
	return config.Complete(trench.DefaultDefaults())
}
