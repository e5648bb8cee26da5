package trench

import (
	"net/netip"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/vip"
)

func (p *parser) stream(v value, names map[string]int) (Stream, bool) {
	s := Stream{MinReady: defaultMinReady, DrainTime: defaultDrainTime, Maglev: Maglev{Size: defaultMaglevSize, Seed: defaultMaglevSeed}}
	o, ok := v.object(streamMapping)
	if !ok {
		return s, false
	}
	if v, ok := o.required("name"); ok {
		if s.Name, ok = v.name(); ok {
			unique(names, s.Name, v, "stream")
		}
	}
	if v, ok := o.required("vips"); ok {
		seen := make(map[vip.VIP]int)
		s.VIPs = items(v, "write a list of VIPs such as [20.0.0.1/32]", func(v value) (vip.VIP, bool) {
			x, ok := v.vip()
			if !ok || !unique(seen, x, v, "VIP") {
				return x, false
			}
			p.streamVIPs = append(p.streamVIPs, placed[vip.VIP]{x, v})
			return x, true
		})
		if v.node.Kind == yaml.SequenceNode && len(v.node.Content) == 0 {
			v.problem("is an empty list: write the VIPs that the stream serves, or remove the stream")
		}
	}
	number(o, "minReady", &s.MinReady)
	check, checked := o.optional("check")
	if checked {
		s.Check = p.check(check)
	}
	o.duration("drainTime", &s.DrainTime)
	if v, ok := o.optional("maglev"); ok {
		v.maglev(&s.Maglev)
	}
	if v, ok := o.optional("targets"); ok {
		names, addresses := make(map[string]int), make(map[netip.Addr]int)
		s.Targets = items(v, "write a list of targets, or [] for none", func(v value) (Target, bool) {
			return p.target(v, names, addresses, s.Check.Families)
		})
		if v.node.Kind == yaml.SequenceNode && len(v.node.Content) > 0 && !checked {
			o.missing("check", "write how the targets are checked, such as check: {tcp: {port: 5000}}")
		}
	}
	return s, true
}

func (p *parser) target(v value, names map[string]int, addresses map[netip.Addr]int, checked Families) (Target, bool) {
	var t Target
	o, ok := v.object(targetMapping)
	if !ok {
		return t, false
	}
	if v, ok := o.required("name"); ok {
		if t.Name, ok = v.name(); ok {
			unique(names, t.Name, v, "target")
		}
	}
	if v, ok := o.required("ips"); ok {
		remedy := "a target has one of a family, make a second target of it"
		t.IPs = p.onePerFamily(v, remedy, &p.targets, func(v value) (netip.Addr, bool) {
			a, ok := v.address("172.16.1.1")
			return a, ok && unique(addresses, a, v, "target address")
		})
		switch {
		case v.node.Kind != yaml.SequenceNode:
		case len(v.node.Content) == 0:
			v.problem("is an empty list: write the target's addresses, or remove the target")
		case len(t.IPs) == len(v.node.Content) && !anyOf(t.IPs, checked):
			v.problem("has no %s address, and the stream's check.families is %s, so that nothing would check it: add one, or write families: both", checked.people(), checked)
		}
	}
	o.boolean("terminating", &t.Terminating)
	return t, true
}

func (v value) maglev(to *Maglev) {
	o, ok := v.object(maglevMapping)
	if !ok {
		return
	}
	number(o, "seed", &to.Seed)
	number(o, "size", &to.Size)
	if prime(to.Size) {
		return
	}
	// Both bounds are prime, so that there is one on either side.
	below, above := to.Size-1, to.Size+1
	for !prime(below) {
		below--
	}
	for !prime(above) {
		above++
	}
	o.fields["size"].problem("is %d, which is no prime number: write %d or %d", to.Size, below, above)
}

// prime reports whether n, at least 2, is a prime number.
func prime(n uint32) bool {
	for d := uint32(2); d*d <= n; d++ {
		if n%d == 0 {
			return false
		}
	}
	return true
}

// anyOf reports whether one of the addresses belongs to the families.
func anyOf(addresses []netip.Addr, f Families) bool {
	for _, a := range addresses {
		if f.Has(vip.FamilyOf(a)) {
			return true
		}
	}
	return false
}

// onePerFamily reads a list of addresses by read, at most one of each family, and notes where they
// stand.
func (p *parser) onePerFamily(v value, remedy string, at *[]placed[netip.Addr], read func(value) (netip.Addr, bool)) []netip.Addr {
	var of [len(vip.Families)]bool
	return items(v, "write a list of addresses such as [172.16.1.1]", func(v value) (netip.Addr, bool) {
		a, ok := read(v)
		if !ok {
			return a, false
		}
		if f := vip.FamilyOf(a); of[f] {
			v.problem("is a second %s address: %s", familyName(f), remedy)
		} else {
			of[f] = true
		}
		*at = append(*at, placed[netip.Addr]{a, v})
		return a, true
	})
}

func (p *parser) check(v value) Check {
	c := Check{Interval: defaultCheckInterval, Timeout: defaultCheckTimeout, Rise: defaultRise, Fall: defaultFall}
	o, ok := v.object(checkMapping)
	if !ok {
		return c
	}
	o.exactlyOne("such as tcp: {port: 5000}")
	if v, ok := o.optional("tcp"); ok {
		if o, ok := v.object(tcpMapping); ok {
			o.port(&c.TCP.Port)
		}
	}
	if v, ok := o.optional("http"); ok {
		c.HTTP = v.http()
	}
	if v, ok := o.optional("grpc"); ok {
		c.GRPC = v.grpc()
	}
	o.duration("interval", &c.Interval)
	c.FastInterval = c.Interval
	if v, ok := o.duration("fastInterval", &c.FastInterval); ok && c.FastInterval > c.Interval {
		v.problem("is %s, longer than the interval of %s: write at most the interval", c.FastInterval, c.Interval)
	}
	if v, ok := o.duration("timeout", &c.Timeout); ok && c.Timeout > c.Interval {
		v.problem("is %s, longer than the interval of %s: write at most the interval", c.Timeout, c.Interval)
	} else if !ok {
		c.Timeout = min(c.Timeout, c.Interval)
	}
	number(o, "rise", &c.Rise)
	number(o, "fall", &c.Fall)
	if v, ok := o.optional("families"); ok {
		c.Families = v.families()
	}
	if v, ok := o.optional("source"); ok {
		p.source(v, &c)
	}
	return c
}

func (p *parser) source(v value, c *Check) {
	list := p.onePerFamily(v, "checks of a family come from one", &p.sources, func(v value) (netip.Addr, bool) {
		a, ok := v.address("172.16.0.1")
		if ok && !c.Families.Has(vip.FamilyOf(a)) {
			v.problem("is %s, but families is %s, so that nothing would be checked from it: remove it, or write families: both", a, c.Families)
			return a, false
		}
		return a, ok
	})
	for _, a := range list {
		if a.Is4() {
			c.Source4 = a
		} else {
			c.Source6 = a
		}
	}
	if v.node.Kind == yaml.SequenceNode && len(v.node.Content) == 0 {
		v.problem("is an empty list: write the addresses to check from, or remove the field for the kernel's choice")
	}
}

func (v value) http() HTTPCheck {
	c := HTTPCheck{Path: defaultPath, Status: defaultStatus}
	o, ok := v.object(httpMapping)
	if !ok {
		return c
	}
	o.port(&c.Port)
	if v, ok := o.optional("path"); ok {
		c.Path = v.request()
	}
	if v, ok := o.optional("host"); ok {
		c.Host = v.host()
	}
	if v, ok := o.optional("status"); ok {
		c.Status = v.status()
	}
	if v, ok := o.optional("body"); ok {
		c.Body = v.body()
	}
	if v, ok := o.optional("tls"); ok {
		c.TLS = v.tls()
	}
	return c
}

func (v value) grpc() GRPCCheck {
	var c GRPCCheck
	o, ok := v.object(grpcMapping)
	if !ok {
		return c
	}
	o.port(&c.Port)
	if v, ok := o.optional("service"); ok {
		c.Service = v.service()
	}
	if v, ok := o.optional("tls"); ok {
		c.TLS = v.tls()
	}
	return c
}

func (v value) tls() TLSCheck {
	c := TLSCheck{On: true}
	if v.isNull() {
		v.problem("is empty: write {} for the target's address and the system's authorities, or remove the field for plaintext")
		return c
	}
	o, ok := v.object(tlsMapping)
	if !ok {
		return c
	}
	if v, ok := o.optional("serverName"); ok {
		c.ServerName = v.serverName()
	}
	o.boolean("insecure", &c.Insecure)
	if v, ok := o.optional("caFile"); ok {
		c.CAFile = v.file("the PEM file with the authorities", "for the system's authorities")
		if c.Insecure {
			v.problem("conflicts with insecure: true, which takes any certificate: remove one of them")
		}
	}
	return c
}

// exactlyOne reports when the file has none or several of the fields of which it must have one.
func (o object) exactlyOne(example string) {
	last := len(o.is.oneOf) - 1
	choice := strings.Join(o.is.oneOf[:last], ", ") + " and " + o.is.oneOf[last]
	first := ""
	for _, name := range o.is.oneOf {
		v, ok := o.fields[name]
		switch {
		case !ok:
		case first == "":
			first = name
		default:
			v.problem("conflicts with %s: write one of %s", first, choice)
		}
	}
	if first == "" {
		o.problem("has none of %s: write one of them, %s", choice, example)
	}
}

func (o object) port(to *uint16) {
	if _, ok := o.required("port"); ok {
		number(o, "port", to)
	}
}

func (o object) boolean(name string, to *bool) {
	if v, ok := o.optional(name); ok {
		if is, ok := v.boolean(); ok {
			*to = is
		}
	}
}
