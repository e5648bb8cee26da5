package trench

import (
	"cmp"
	"fmt"
	"math"
	"math/big"
	"net/netip"
	"slices"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/vip"
)

// parser holds what is compared across the objects of one file.
type parser struct {
	defaults Defaults
	// vips are the attractor's, and where each is.
	vips map[vip.VIP]value
	// vipsKnown is true when all of them are known, so that it can be reported what does not fit them.
	vipsKnown  bool
	streamVIPs []located[vip.VIP]
	addresses  []located[netip.Addr]
}

// located is something that was read, where, and the remedy if it must not be there.
type located[T any] struct {
	is     T
	at     value
	remedy string
}

// The remedies of addresses that lie in a VIP.
const (
	gatewayInVIP = "a gateway cannot be reached through itself, change one of them"
	targetInVIP  = "write the target's own address"
	sourceInVIP  = "what comes from a VIP is sent to the gateways, write an address of the load balancer's own"
)

func (p *parser) config(c *Config) object {
	streams := map[string]int{}
	return object{fields: []field{
		{name: "trench", is: text{&c.Trench, nameForm}, remedy: "write the name of the trench"},
		{name: "attractor", is: p.attractor(&c.Attractor), remedy: "write its name, vips and gateways"},
		{name: "streams", is: listOf(&c.Streams, list{remedy: "write a list of streams, or [] for none"},
			func(s *Stream) kind { return p.stream(s, streams) }, nil)},
	}}
}

func (p *parser) attractor(a *Attractor) object {
	const vipsRemedy = "write a list of VIPs such as [20.0.0.1/32], or [] for none"
	vips, names, addresses := map[vip.VIP]int{}, map[string]int{}, map[netip.Addr]int{}
	return object{
		name: "attractor",
		fields: []field{
			{name: "name", is: text{&a.Name, nameForm}, remedy: "write the name of the attractor"},
			{name: "vips", remedy: vipsRemedy, is: listOf(&a.VIPs,
				list{max: MaxVIPs, remedy: vipsRemedy, tooMany: "has %d VIPs: an attractor has %d at most"}, vipKind,
				func(v value, x vip.VIP) bool {
					known := unique(vips, x, v, "VIP")
					if known {
						p.vips[x] = v
					}
					return known
				})},
			{name: "gateways", is: listOf(&a.Gateways, list{remedy: "write a list of gateways, or [] for none"},
				func(g *Gateway) kind { return p.gateway(g, names, addresses) }, nil)},
		},
		then: func(m mapping) {
			v, ok := m.fields["vips"]
			p.vipsKnown = ok && v.node.Kind == yaml.SequenceNode && len(a.VIPs) == len(v.node.Content)
		},
	}
}

func (p *parser) gateway(g *Gateway, names map[string]int, addresses map[netip.Addr]int) object {
	d, protocol := p.defaults, "bgp"
	*g = Gateway{
		LocalASN: d.LocalASN, RemoteASN: d.RemoteASN,
		LocalPort: d.LocalPort, RemotePort: d.RemotePort,
		HoldTime: d.HoldTime,
	}
	checkName := func(v value) {
		if g.Name == "BFD" {
			v.problem("is \"BFD\": BIRD's protocol NBR-BFD has that name, take another")
			return
		}
		unique(names, g.Name, v, "gateway")
	}
	checkAddress := func(v value) {
		unique(addresses, g.Address, v, "gateway address")
		p.addresses = append(p.addresses, located[netip.Addr]{g.Address, v, gatewayInVIP})
	}
	report := func(v value, problem string) {
		if problem != "" {
			v.problem("%s", problem)
		}
	}
	return object{
		name: "gateway",
		fields: []field{
			{name: "name", is: text{&g.Name, nameForm}, then: checkName, remedy: "write a name for the gateway"},
			{
				name: "address", is: address{&g.Address, "169.254.100.150"}, then: checkAddress,
				remedy: "write the gateway's IP address",
			},
			{name: "protocol", is: text{&protocol, protocolForm}, doc: "Only bgp so far."},
			{name: "localASN", is: asn(&g.LocalASN), then: func(v value) { report(v, checkASN(g.LocalASN)) }},
			{name: "remoteASN", is: asn(&g.RemoteASN), then: func(v value) { report(v, checkASN(g.RemoteASN)) }},
			{name: "localPort", is: port(&g.LocalPort)},
			{name: "remotePort", is: port(&g.RemotePort)},
			{
				name: "holdTime", is: duration{to: &g.HoldTime, lo: MinHoldTime, hi: MaxHoldTime},
				then: func(v value) { report(v, checkHoldTime(g.HoldTime)) },
			},
			{name: "bfd", is: bfd(&g.BFD)},
			{name: "passwordFile", is: text{&g.PasswordFile, passwordForm}},
		},
	}
}

func bfd(to **BFD) object {
	b := &BFD{MinTx: 300 * time.Millisecond, MinRx: 300 * time.Millisecond, Multiplier: 3}
	return object{
		name: "bfd",
		ifNull: fmt.Sprintf("write {} for the defaults %s, %s and %d, or remove the field for no BFD",
			b.MinTx, b.MinRx, b.Multiplier),
		fields: []field{
			{name: "minTx", is: duration{to: &b.MinTx, lo: MinBFDInterval, hi: MaxBFDInterval}},
			{name: "minRx", is: duration{to: &b.MinRx, lo: MinBFDInterval, hi: MaxBFDInterval}},
			{name: "multiplier", is: numberOf(&b.Multiplier, 1, math.MaxUint8)},
		},
		then: func(mapping) { *to = b },
	}
}

func (p *parser) stream(s *Stream, streams map[string]int) object {
	*s = Stream{MinReady: 1, DrainTime: 5 * time.Second, Maglev: Maglev{Size: 1009, Seed: 1}}
	vips, names, addresses := map[vip.VIP]int{}, map[string]int{}, map[netip.Addr]int{}
	keepVIP := func(v value, x vip.VIP) bool {
		if !unique(vips, x, v, "VIP") {
			return false
		}
		p.streamVIPs = append(p.streamVIPs, located[vip.VIP]{is: x, at: v})
		return true
	}
	return object{
		name: "stream",
		fields: []field{
			{
				name: "name", is: text{&s.Name, nameForm}, remedy: "write a name for the stream",
				then: func(v value) { unique(streams, s.Name, v, "stream") },
			},
			{name: "vips", remedy: "write the VIPs that the stream serves", is: listOf(&s.VIPs, list{
				remedy:  "write a list of VIPs such as [20.0.0.1/32]",
				ifEmpty: "write the VIPs that the stream serves, or remove the stream",
			}, vipKind, keepVIP)},
			{name: "minReady", is: numberOf(&s.MinReady, 1, 1_000_000)},
			{name: "check", is: stored(&s.Check, p.check)},
			{name: "drainTime", is: duration{to: &s.DrainTime, lo: 0, hi: MaxDrainTime}},
			{name: "maglev", is: maglev(&s.Maglev)},
			{name: "targets", is: listOf(&s.Targets, list{remedy: "write a list of targets, or [] for none"},
				func(t *Target) kind { return p.target(t, names, addresses, s.Check.Families) }, nil)},
		},
		then: func(m mapping) {
			if _, ok := m.fields["check"]; !ok && len(s.Targets) > 0 {
				m.missing("check", "write how the targets are checked, such as check: {tcp: {port: 5000}}")
			}
		},
	}
}

func (p *parser) target(t *Target, names map[string]int, addresses map[netip.Addr]int, checked Families) object {
	keep := p.onePerFamily("a target has one of a family, make a second target of it", targetInVIP,
		func(v value, a netip.Addr) bool { return unique(addresses, a, v, "target address") })
	return object{
		name: "target",
		fields: []field{
			{
				name: "name", is: text{&t.Name, nameForm}, remedy: "write a name for the target",
				then: func(v value) { unique(names, t.Name, v, "target") },
			},
			{name: "ips", remedy: "write the target's addresses", is: listOf(&t.IPs, list{
				max: 2, remedy: addressList, ifEmpty: "write the target's addresses, or remove the target",
			}, addressKind("172.16.1.1"), keep), then: func(v value) {
				isChecked := func(a netip.Addr) bool { return checked.Has(vip.FamilyOf(a)) }
				if len(t.IPs) == len(v.node.Content) && !slices.ContainsFunc(t.IPs, isChecked) {
					v.problem("has no %s address, and the stream's check.families is %s, so that nothing would check it: "+
						"add one, or write families: both", familyName(checked == OnlyIPv4), checked)
				}
			}},
			{name: "terminating", is: boolean{&t.Terminating}},
		},
	}
}

func maglev(m *Maglev) object {
	return object{
		name: "maglev",
		fields: []field{
			{name: "size", is: numberOf(&m.Size, MinMaglevSize, MaxMaglevSize), then: func(v value) {
				if prime(m.Size) {
					return
				}
				// Both bounds are prime, so that there is one on either side.
				below, above := m.Size-1, m.Size+1
				for ; !prime(below); below-- {
				}
				for ; !prime(above); above++ {
				}
				v.problem("is %d, which is no prime number: write %d or %d", m.Size, below, above)
			}},
			{name: "seed", is: numberOf(&m.Seed, 1, math.MaxUint32)},
		},
	}
}

// prime reports whether n is a prime number; the test is exact for 64 bits.
func prime(n uint32) bool { return big.NewInt(int64(n)).ProbablyPrime(0) }

func (p *parser) check(c *Check) object {
	*c = Check{Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3}
	// The interval was read before.
	withinInterval := func(d *time.Duration) func(value) {
		return func(v value) {
			if *d > c.Interval {
				v.problem("is %s, longer than the interval of %s: write at most the interval", *d, c.Interval)
			}
		}
	}
	families := BothFamilies.String()
	var sources []netip.Addr
	keepSource := p.onePerFamily("checks of a family come from one", sourceInVIP, func(v value, a netip.Addr) bool {
		if !c.Families.Has(vip.FamilyOf(a)) {
			v.problem("is %s, but families is %s, so that nothing would be checked from it: "+
				"remove it, or write families: both", a, c.Families)
			return false
		}
		return true
	})
	return object{
		name: "check", oneOf: []string{"tcp", "http", "grpc"}, example: "tcp: {port: 5000}",
		fields: []field{
			{name: "tcp", is: stored(&c.TCP, tcpCheck)},
			{name: "http", is: stored(&c.HTTP, httpCheck)},
			{name: "grpc", is: stored(&c.GRPC, grpcCheck)},
			{name: "interval", is: duration{to: &c.Interval, lo: MinCheckInterval, hi: MaxCheckInterval}},
			{
				name: "fastInterval", then: withinInterval(&c.FastInterval),
				is: duration{&c.FastInterval, MinCheckInterval, MaxCheckInterval, "interval"},
			},
			{
				name: "timeout", then: withinInterval(&c.Timeout),
				is: duration{&c.Timeout, MinCheckTimeout, MaxCheckInterval, "interval"},
			},
			{name: "rise", is: numberOf(&c.Rise, 1, MaxRiseFall)},
			{name: "fall", is: numberOf(&c.Fall, 1, MaxRiseFall)},
			{
				name: "families", is: text{&families, familiesForm},
				then: func(value) { c.Families = Families(slices.Index(familyNames, families)) },
			},
			{name: "source", doc: "Addresses to check from, at most one of a family, none of them in a VIP. " +
				"Left out: as the kernel chooses.", is: listOf(&sources, list{
				max: 2, remedy: addressList,
				ifEmpty: "write the addresses to check from, or remove the field for the kernel's choice",
			}, addressKind("172.16.0.1"), keepSource)},
		},
		then: func(mapping) {
			c.FastInterval = cmp.Or(c.FastInterval, c.Interval)
			c.Timeout = min(c.Timeout, c.Interval) // that of the file was checked
			for _, a := range sources {
				if a.Is4() {
					c.Source4 = a
				} else {
					c.Source6 = a
				}
			}
		},
	}
}

const portRemedy = "write the TCP port to connect to"

func tcpCheck(c *TCPCheck) object {
	return object{name: "tcp", fields: []field{{name: "port", is: port(&c.Port), remedy: portRemedy}}}
}

func httpCheck(c *HTTPCheck) object {
	*c = HTTPCheck{Path: "/", Status: "200-399"}
	return object{
		name: "http",
		fields: []field{
			{name: "port", is: port(&c.Port), remedy: portRemedy},
			{name: "path", is: text{&c.Path, requestForm}},
			{name: "host", is: text{&c.Host, hostForm}},
			{name: "status", is: text{&c.Status, statusForm}},
			{name: "body", is: text{&c.Body, bodyForm}},
			{name: "tls", is: stored(&c.TLS, tlsCheck)},
		},
	}
}

func grpcCheck(c *GRPCCheck) object {
	return object{
		name: "grpc",
		fields: []field{
			{name: "port", is: port(&c.Port), remedy: portRemedy},
			{name: "service", is: text{&c.Service, serviceForm}},
			{name: "tls", is: stored(&c.TLS, tlsCheck)},
		},
	}
}

func tlsCheck(c *TLSCheck) object {
	c.On = true
	return object{
		name: "tls",
		ifNull: "write {} for the target's address and the system's authorities, " +
			"or remove the field for plaintext",
		fields: []field{
			{name: "serverName", is: text{&c.ServerName, serverForm}},
			{name: "caFile", is: text{&c.CAFile, authorityForm}},
			{name: "insecure", is: boolean{&c.Insecure}},
		},
		then: func(m mapping) {
			if c.CAFile != "" && c.Insecure {
				m.fields["caFile"].problem("conflicts with insecure: true, which takes any certificate: remove one of them")
			}
		},
	}
}

func vipKind(to *vip.VIP) kind { return prefix{to} }

func addressKind(example string) func(to *netip.Addr) kind {
	return func(to *netip.Addr) kind { return address{to, example} }
}

const addressList = "write a list of addresses such as [172.16.1.1]"

// onePerFamily checks addresses of a list: keep, and that no two are of one family.
func (p *parser) onePerFamily(remedy, inVIP string, keep func(value, netip.Addr) bool) func(value, netip.Addr) bool {
	has := map[bool]bool{} // by whether the address is IPv4
	return func(v value, a netip.Addr) bool {
		if !keep(v, a) {
			return false
		}
		if has[a.Is4()] {
			v.problem("is a second %s address: %s", familyName(a.Is4()), remedy)
		}
		has[a.Is4()] = true
		p.addresses = append(p.addresses, located[netip.Addr]{a, v, inVIP})
		return true
	}
}

func familyName(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}
