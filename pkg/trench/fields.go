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
	lines      map[entry]int // where entries that must be unique are
}

// located is something that was read, where, and the remedy if it must not be there.
type located[T any] struct {
	is     T
	at     value
	remedy string
}

// entry is something that is unique among those of its kind in an object.
type entry struct{ in, kind, is any }

// unique reports a second appearance of an entry.
func (p *parser) unique(v value, in any, kind string, is any) bool {
	key := entry{in, kind, is}
	if line, twice := p.lines[key]; twice {
		v.problem("%s %v appears twice, first in line %d: remove one of them or change it", kind, is, line)
		return false
	}
	p.lines[key] = v.node.Line
	return true
}

// The remedies of addresses that lie in a VIP.
const (
	gatewayInVIP = "a gateway cannot be reached through itself, change one of them"
	targetInVIP  = "write the target's own address"
	sourceInVIP  = "what comes from a VIP is sent to the gateways, write an address of the load balancer's own"
)

// The lists of the file that may be empty.
var (
	streamList  = list{remedy: "write a list of streams, or [] for none"}
	gatewayList = list{remedy: "write a list of gateways, or [] for none"}
	targetList  = list{remedy: "write a list of targets, or [] for none"}
)

func (p *parser) config(c *Config) object {
	return object{fields: []field{
		{name: "trench", is: text{&c.Trench, nameForm}, remedy: "write the name of the trench"},
		{name: "attractor", is: p.attractor(&c.Attractor), remedy: "write its name, vips and gateways"},
		{name: "streams", is: listOf(&c.Streams, streamList, p.stream, nil)},
	}}
}

func (p *parser) attractor(a *Attractor) object {
	vips := list{
		max: MaxVIPs, tooMany: "has %d VIPs: an attractor has %d at most",
		remedy: "write a list of VIPs such as [20.0.0.1/32], or [] for none",
	}
	keepVIP := func(v value, x vip.VIP) bool {
		if !p.unique(v, a, "VIP", x) {
			return false
		}
		p.vips[x] = v
		return true
	}
	return object{
		name: "attractor",
		fields: []field{
			{name: "name", is: text{&a.Name, nameForm}, remedy: "write the name of the attractor"},
			{name: "vips", is: listOf(&a.VIPs, vips, newPrefix, keepVIP), remedy: vips.remedy},
			{name: "gateways", is: listOf(&a.Gateways, gatewayList, p.gateway, nil)},
		},
		then: func(m mapping) {
			v, ok := m.fields["vips"]
			p.vipsKnown = ok && v.node.Kind == yaml.SequenceNode && len(a.VIPs) == len(v.node.Content)
		},
	}
}

func (p *parser) gateway(g *Gateway) object {
	d, protocol := p.defaults, "bgp"
	*g = Gateway{
		LocalASN: d.LocalASN, RemoteASN: d.RemoteASN, LocalPort: d.LocalPort, RemotePort: d.RemotePort,
		HoldTime: d.HoldTime,
	}
	checkName := func(v value) {
		if g.Name == "BFD" {
			v.problem("is \"BFD\": BIRD's protocol NBR-BFD has that name, take another")
		} else {
			p.unique(v, p, "gateway", g.Name)
		}
	}
	checkAddress := func(v value) {
		p.unique(v, p, "gateway address", g.Address)
		p.addresses = append(p.addresses, located[netip.Addr]{g.Address, v, gatewayInVIP})
	}
	holdTime := duration{to: &g.HoldTime, lo: MinHoldTime, hi: MaxHoldTime}
	return object{
		name: "gateway",
		fields: []field{
			{name: "name", is: text{&g.Name, nameForm}, then: checkName, remedy: "write a name for the gateway"},
			{name: "address", is: address{&g.Address}, then: checkAddress, remedy: "write the gateway's IP address"},
			{name: "protocol", is: text{&protocol, protocolForm}, doc: "Only bgp so far."},
			{name: "localASN", is: asn(&g.LocalASN), then: func(v value) { v.report(checkASN(g.LocalASN)) }},
			{name: "remoteASN", is: asn(&g.RemoteASN), then: func(v value) { v.report(checkASN(g.RemoteASN)) }},
			{name: "localPort", is: port(&g.LocalPort)},
			{name: "remotePort", is: port(&g.RemotePort)},
			{name: "holdTime", is: holdTime, then: func(v value) { v.report(checkHoldTime(g.HoldTime)) }},
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

func (p *parser) stream(s *Stream) object {
	*s = Stream{MinReady: 1, DrainTime: 5 * time.Second, Maglev: Maglev{Size: 1009, Seed: 1}}
	const vipsRemedy = "write the VIPs that the stream serves"
	vips := list{
		remedy:  "write a list of VIPs such as [20.0.0.1/32]",
		ifEmpty: vipsRemedy + ", or remove the stream",
	}
	keepVIP := func(v value, x vip.VIP) bool {
		if !p.unique(v, s, "VIP", x) {
			return false
		}
		p.streamVIPs = append(p.streamVIPs, located[vip.VIP]{is: x, at: v})
		return true
	}
	checkName := func(v value) { p.unique(v, p, "stream", s.Name) }
	target := func(t *Target) object { return p.target(t, s) }
	return object{
		name: "stream",
		fields: []field{
			{name: "name", is: text{&s.Name, nameForm}, then: checkName, remedy: "write a name for the stream"},
			{name: "vips", is: listOf(&s.VIPs, vips, newPrefix, keepVIP), remedy: vipsRemedy},
			{name: "minReady", is: numberOf(&s.MinReady, 1, 1_000_000)},
			{name: "check", is: stored(&s.Check, p.check)},
			{name: "drainTime", is: duration{to: &s.DrainTime, lo: 0, hi: MaxDrainTime}},
			{name: "maglev", is: maglev(&s.Maglev)},
			{name: "targets", is: listOf(&s.Targets, targetList, target, nil)},
		},
		then: func(m mapping) {
			if _, ok := m.fields["check"]; !ok && len(s.Targets) > 0 {
				m.missing("check", "write how the targets are checked, such as check: {tcp: {port: 5000}}")
			}
		},
	}
}

func (p *parser) target(t *Target, s *Stream) object {
	const ipsRemedy = "write the target's addresses"
	ips := list{max: 2, remedy: addressList, ifEmpty: ipsRemedy + ", or remove the target"}
	keepIP := p.onePerFamily("a target has one of a family, make a second target of it", targetInVIP,
		func(v value, a netip.Addr) bool { return p.unique(v, s, "target address", a) })
	checkName := func(v value) { p.unique(v, s, "target", t.Name) }
	checkIPs := func(v value) {
		families := s.Check.Families
		isChecked := func(a netip.Addr) bool { return families.Has(vip.FamilyOf(a)) }
		if len(t.IPs) == len(v.node.Content) && !slices.ContainsFunc(t.IPs, isChecked) {
			v.problem("has no %s address, and the stream's check.families is %s, so that nothing would check it: "+
				"add one, or write families: both", familyName(families == OnlyIPv4), families)
		}
	}
	return object{
		name: "target",
		fields: []field{
			{name: "name", is: text{&t.Name, nameForm}, then: checkName, remedy: "write a name for the target"},
			{name: "ips", is: listOf(&t.IPs, ips, newAddress, keepIP), then: checkIPs, remedy: ipsRemedy},
			{name: "terminating", is: boolean{&t.Terminating}},
		},
	}
}

func maglev(m *Maglev) object {
	checkSize := func(v value) {
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
	}
	return object{
		name: "maglev",
		fields: []field{
			{name: "size", is: numberOf(&m.Size, MinMaglevSize, MaxMaglevSize), then: checkSize},
			{name: "seed", is: numberOf(&m.Seed, 1, math.MaxUint32)},
		},
	}
}

// prime reports whether n is a prime number; the test is exact for 64 bits.
func prime(n uint32) bool { return big.NewInt(int64(n)).ProbablyPrime(0) }

func (p *parser) check(c *Check) object {
	*c = Check{Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3}
	fastInterval := duration{&c.FastInterval, MinCheckInterval, MaxCheckInterval, "interval"}
	timeout := duration{&c.Timeout, MinCheckTimeout, MaxCheckInterval, "interval"}
	// The interval was read before.
	withinInterval := func(d *time.Duration) func(value) {
		return func(v value) {
			if *d > c.Interval {
				v.problem("is %s, longer than the interval of %s: write at most the interval", *d, c.Interval)
			}
		}
	}
	families := BothFamilies.String()
	setFamilies := func(value) { c.Families = Families(slices.Index(familyNames, families)) }
	var sources []netip.Addr
	sourceList := list{
		max: 2, remedy: addressList,
		ifEmpty: "write the addresses to check from, or remove the field for the kernel's choice",
	}
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
			{name: "fastInterval", is: fastInterval, then: withinInterval(&c.FastInterval)},
			{name: "timeout", is: timeout, then: withinInterval(&c.Timeout)},
			{name: "rise", is: numberOf(&c.Rise, 1, MaxRiseFall)},
			{name: "fall", is: numberOf(&c.Fall, 1, MaxRiseFall)},
			{name: "families", is: text{&families, familiesForm}, then: setFamilies},
			{name: "source", is: listOf(&sources, sourceList, newAddress, keepSource), doc: "Addresses to check " +
				"from, at most one of a family, none of them in a VIP. Left out: as the kernel chooses."},
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
		name:   "tls",
		ifNull: "write {} for the target's address and the system's authorities, or remove the field for plaintext",
		fields: []field{
			{name: "serverName", is: text{&c.ServerName, serverForm}},
			{name: "caFile", is: text{&c.CAFile, authorityForm}},
			{name: "insecure", is: boolean{&c.Insecure}},
		},
		then: func(m mapping) {
			if c.CAFile != "" && c.Insecure {
				m.fields["caFile"].problem("conflicts with insecure: true, which takes any certificate: " +
					"remove one of them")
			}
		},
	}
}

const addressList = "write a list of addresses such as [172.16.1.1]"

// onePerFamily checks addresses of a list: keep, and that no two are of one family.
func (p *parser) onePerFamily(
	remedy, inVIP string, keep func(value, netip.Addr) bool,
) func(value, netip.Addr) bool {
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
