package trench

import (
	"cmp"
	"fmt"
	"math/big"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// parser holds the state of checks across the objects of one file.
type parser struct {
	defaults Defaults
	// attractorVIPs is the VIP list of the attractor; vips has the VIPs of all lists. vipsKnown is
	// set if all VIPs of the attractor are valid: only then are unknown VIPs of streams reported.
	attractorVIPs value
	vips          map[vip.VIP]place
	vipsKnown     bool
	addresses     []located[netip.Addr]
	streams       int32         // number of streams read
	lines         map[entry]int // line of each unique entry
	staticBFD     staticBFD     // first static gateway with BFD; the rest must have equal parameters
	types         map[reflect.Type]objectType
}

func newParser(d Defaults) *parser {
	return &parser{defaults: d, lines: map[entry]int{}, types: map[reflect.Type]objectType{}}
}

// place is the position of a VIP in the file. One exists per VIP, so it is small.
type place struct {
	attractor int32 // position in the attractor's list, from 1; 0 if absent
	stream    int32 // number of the last stream with this VIP, from 1; 0 for none
	line      int32 // line in the list of that stream
}

// located is a value with its position in the file and the remedy if it is rejected.
type located[T any] struct {
	is     T
	at     value
	remedy string
}

// entry is a value that must be unique for its kind within an object.
type entry struct{ in, kind, is any }

// unique reports whether an entry appears for the first time; a second appearance is a problem.
func (p *parser) unique(v value, in any, kind string, is any) bool {
	key := entry{in, kind, is}
	if line, twice := p.lines[key]; twice {
		v.twice(kind, is, line)
		return false
	}
	p.lines[key] = v.node.Line
	return true
}

// twice records a second appearance of an entry; line is the line of the first one.
func (v value) twice(kind string, is any, line int) {
	v.problem("%s %v appears twice, first in line %d: remove one of them or change it", kind, is, line)
}

// Remedies for an address in a VIP.
const (
	gatewayInVIP = "a gateway cannot be reached through itself, change one of them"
	targetInVIP  = "write the target's own address"
	sourceInVIP  = "what comes from a VIP is sent to the gateways, write an address of the load balancer's own"
)

func (a *Attractor) check(p *parser, m mapping) {
	p.attractorVIPs = m.fields["vips"]
	_, p.vipsKnown = m.valid("vips")
	p.vips = make(map[vip.VIP]place, len(a.VIPs))
	for i, x := range a.VIPs {
		if x.IsZero() {
			p.vipsKnown = false
			continue
		}
		if first := p.vips[x].attractor; first > 0 {
			p.attractorVIPs.item(i).twice("VIP", x, p.attractorVIPs.item(int(first)-1).node.Line)
			p.vipsKnown = false
			continue
		}
		p.vips[x] = place{attractor: int32(i + 1)}
	}
}

func (g *Gateway) check(p *parser, m mapping) {
	if at, ok := m.valid("name"); ok && g.Name == "BFD" {
		at.problem("is \"BFD\": BIRD's protocol NBR-BFD has that name, take another")
	} else if ok {
		p.unique(at, m.in, "gateway", g.Name)
	}
	if at, ok := m.valid("address"); ok {
		p.unique(at, m.in, "gateway address", g.Address)
		p.addresses = append(p.addresses, located[netip.Addr]{g.Address, at, gatewayInVIP})
	}
	if _, ok := m.read["protocol"]; g.Protocol == Static && ok {
		g.checkStatic(p, m)
		return
	}
	m.report("localASN", checkASN(g.LocalASN))
	m.report("remoteASN", checkASN(g.RemoteASN))
	m.report("holdTime", checkHoldTime(g.HoldTime))
}

// onlyBGP lists the fields that a static gateway cannot have.
var onlyBGP = []string{"localASN", "remoteASN", "localPort", "remotePort", "holdTime", "passwordFile"}

func (g *Gateway) checkStatic(p *parser, m mapping) {
	for _, name := range onlyBGP {
		if at, ok := m.fields[name]; ok {
			at.problem("conflicts with protocol: static, which has no BGP session: remove it, or write protocol: bgp")
		}
	}
	// Clear the BGP defaults, so that they do not make equal static gateways differ.
	*g = Gateway{Name: g.Name, Address: g.Address, Protocol: Static, BFD: g.BFD}
	if at, ok := m.valid("bfd"); ok && g.BFD != nil {
		// BIRD applies the BFD parameters of the interface to its static routes.
		if first := p.staticBFD; first.gateway == nil {
			p.staticBFD = staticBFD{g, at}
		} else if *first.gateway.BFD != *g.BFD {
			at.problem("of static gateway %s differs from that of static gateway %s in line %d: static gateways share "+
				"the BFD parameters of the interface, write the same values", quote(g.Name), quote(first.gateway.Name),
				first.at.node.Line)
		}
	}
}

// staticBFD is a static gateway with BFD and the position of its parameters.
type staticBFD struct {
	gateway *Gateway
	at      value
}

func (s *Stream) check(p *parser, m mapping) {
	if at, ok := m.valid("name"); ok {
		p.unique(at, m.in, "stream", s.Name)
	}
	p.checkStreamVIPs(s.VIPs, m.fields["vips"])
	if _, ok := m.fields["check"]; !ok && len(s.Targets) > 0 {
		m.missing("check", "write how the targets are checked, such as check: {tcp: {port: 5000}}")
	}
	ports := 0
	for _, x := range s.Match {
		ports += len(x.Protocols) * len(x.Ports)
	}
	if ports > MaxMatch {
		m.fields["match"].problem("has %d ports, each counted for each of its protocols: a stream has %d at most, "+
			"leave the field out to forward all packets", ports, MaxMatch)
	}
	if _, ok := m.fields["maglev"]; !ok {
		p.setDefaults(reflect.ValueOf(&s.Maglev).Elem())
	}
}

// checkStreamVIPs checks the VIPs of a stream. The attractor is read before the streams.
func (p *parser) checkStreamVIPs(vips []vip.VIP, list value) {
	p.streams++
	if p.vips == nil { // the file has no attractor
		p.vips = make(map[vip.VIP]place)
	}
	for i, x := range vips {
		if x.IsZero() {
			continue
		}
		at, known := list.item(i), p.vips[x]
		if known.stream == p.streams {
			at.twice("VIP", x, int(known.line))
			continue
		}
		known.stream, known.line = p.streams, int32(at.node.Line)
		p.vips[x] = known
		if p.vipsKnown && known.attractor == 0 {
			at.problem("VIP %s is not one of the attractor: add it to attractor.vips or remove it here", x)
		}
	}
}

func (t *Target) check(p *parser, m mapping) {
	s, _ := m.in.(*Stream)
	if at, ok := m.valid("name"); ok {
		p.unique(at, s, "target", t.Name)
	}
	unique := func(at value, a netip.Addr) bool { return p.unique(at, s, "target address", a) }
	const remedy = "a target has one of a family, make a second target of it"
	p.onePerFamily(m.fields["ips"], t.IPs, remedy, targetInVIP, unique)
	families := s.Check.Families
	isChecked := func(a netip.Addr) bool { return families.Has(vip.FamilyOf(a)) }
	if at, ok := m.valid("ips"); ok && !slices.ContainsFunc(t.IPs, isChecked) {
		at.problem("has no %s address, and the stream's check.families is %s, so that nothing would check it: "+
			"add one, or write families: both", familyName(families == OnlyIPv4), families)
	}
}

func (x *Match) check(p *parser, m mapping) {
	for i, protocol := range x.Protocols {
		p.unique(m.fields["protocols"].item(i), x, "protocol", protocol)
	}
	_, known := m.valid("protocols")
	for i, port := range x.Ports {
		at := m.fields["ports"].item(i)
		if port == 0 || !p.unique(at, x, "port", port) || !known {
			continue
		}
		for _, protocol := range x.Protocols {
			p.unique(at, m.in, protocol+" port", port)
		}
	}
}

func (l *Maglev) check(_ *parser, m mapping) {
	at, ok := m.valid("size")
	if !ok || prime(l.Size) {
		return
	}
	// Both bounds are prime, so a prime exists on either side.
	below, above := l.Size-1, l.Size+1
	for ; !prime(below); below-- {
	}
	for ; !prime(above); above++ {
	}
	at.problem("is %d, which is no prime number: write %d or %d", l.Size, below, above)
}

// prime reports whether n is a prime number. ProbablyPrime is exact for 64 bits.
func prime(n uint32) bool { return big.NewInt(int64(n)).ProbablyPrime(0) }

// checkKinds lists the fields of which a check has exactly one.
var checkKinds = []string{"tcp", "http", "grpc"}

func (c *Check) check(p *parser, m mapping) {
	kinds := slices.DeleteFunc(slices.Clone(checkKinds), func(name string) bool { return m.fields[name].node == nil })
	if len(kinds) == 0 {
		m.problem("has none of tcp, http, grpc: write one of them, such as tcp: {port: 5000}")
	}
	for _, name := range kinds[min(1, len(kinds)):] {
		m.fields[name].problem("conflicts with %s: write only one of tcp, http, grpc", kinds[0])
	}
	for name, d := range map[string]time.Duration{"fastInterval": c.FastInterval, "timeout": c.Timeout} {
		if d > c.Interval {
			m.report(name, fmt.Sprintf("is %s, longer than the interval of %s: write at most the interval",
				d, c.Interval))
		}
	}
	c.FastInterval, c.Timeout = cmp.Or(c.FastInterval, c.Interval), min(c.Timeout, c.Interval)
	checked := func(at value, a netip.Addr) bool {
		if !c.Families.Has(vip.FamilyOf(a)) {
			at.problem("is %s, but families is %s, so that nothing would be checked from it: "+
				"remove it, or write families: both", a, c.Families)
			return false
		}
		if a.Is4() {
			c.Source4 = a
		} else {
			c.Source6 = a
		}
		return true
	}
	sources, _ := m.read["source"].([]netip.Addr)
	p.onePerFamily(m.fields["source"], sources, "checks of a family come from one", sourceInVIP, checked)
}

func (c *TLSCheck) check(_ *parser, m mapping) {
	c.On = true
	if c.Insecure {
		m.report("caFile", "conflicts with insecure: true, which takes any certificate: remove one of them")
	}
}

// onePerFamily applies keep to each address and reports a second address of a family. Addresses
// are also recorded for the comparison with the VIPs.
func (p *parser) onePerFamily(
	list value, addresses []netip.Addr, remedy, inVIP string, keep func(at value, a netip.Addr) bool,
) {
	has := map[bool]bool{} // key: the address is IPv4
	for i, a := range addresses {
		at := list.item(i)
		if !a.IsValid() || !keep(at, a) {
			continue
		}
		if has[a.Is4()] {
			at.problem("is a second %s address: %s", familyName(a.Is4()), remedy)
		}
		has[a.Is4()] = true
		p.addresses = append(p.addresses, located[netip.Addr]{a, at, inVIP})
	}
}

func familyName(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}

// checkAcross checks addresses against VIPs, and VIPs against each other, after all objects are
// read.
func (p *parser) checkAcross() {
	covers := p.overlaps()
	for _, a := range p.addresses {
		if v, ok := covers.of(a.is); ok {
			a.at.problem("is %s, which lies in the VIP %s: %s", a.is, v, a.remedy)
		}
	}
}

// covering is a sorted list of VIPs without overlaps.
type covering []vip.VIP

// overlaps reports VIPs that share addresses, and returns the VIPs that no other VIP contains.
// Overlaps are rejected because the wider VIP would attract the traffic of the narrower one while
// that is withdrawn.
func (p *parser) overlaps() covering {
	sorted := make([]vip.VIP, 0, len(p.vips))
	for v, at := range p.vips {
		if at.attractor > 0 {
			sorted = append(sorted, v)
		}
	}
	slices.SortFunc(sorted, vip.Compare)
	c := covering(sorted[:0])
	for _, v := range sorted {
		// A prefix sorts after the prefixes that contain it, and prefixes nest: a VIP that overlaps any
		// VIP in c overlaps the last one.
		if n := len(c); n > 0 && c[n-1].Overlaps(v) {
			p.attractorVIP(v).problem("VIP %s lies in the VIP %s of line %d, which would attract its traffic even while it is "+
				"withdrawn: remove one of them", v, c[n-1], p.attractorVIP(c[n-1]).node.Line)
			continue
		}
		c = append(c, v)
	}
	return c
}

// attractorVIP returns the list item of a VIP in the attractor.
func (p *parser) attractorVIP(v vip.VIP) value {
	return p.attractorVIPs.item(int(p.vips[v].attractor) - 1)
}

// of returns the VIP that contains the address. Only the last VIP that starts at or before the
// address can contain it.
func (c covering) of(a netip.Addr) (vip.VIP, bool) {
	i, found := slices.BinarySearchFunc(c, a,
		func(v vip.VIP, a netip.Addr) int { return v.Prefix().Addr().Compare(a) })
	if !found {
		i--
	}
	if i >= 0 && c[i].Prefix().Contains(a) {
		return c[i], true
	}
	return vip.VIP{}, false
}
