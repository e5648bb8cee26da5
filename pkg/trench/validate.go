package trench

import (
	"fmt"
	"math/big"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Problem is an invalid value of a configuration.
type Problem struct {
	// Path is the path of the value, such as "attractor.gateways[0].address"; "" for the whole
	// configuration.
	Path string
	// Text describes the value, Remedy what to change.
	Text, Remedy string
	// Related is the path of the value that it conflicts with; "" without a conflict.
	Related string
}

// Message returns the text and the remedy. place returns where the user finds the value of Related.
func (p Problem) Message(place func(path string) string) string {
	text := p.Text
	if p.Related != "" {
		text += " in " + place(p.Related)
	}
	if p.Remedy == "" {
		return text
	}
	return text + ": " + p.Remedy
}

// Item splits the path of an item of a list, or of a part of it: "streams[3].vips" is item 3 of
// "streams", with the rest "vips".
func Item(path, list string) (index int, rest string, ok bool) {
	path, isItem := strings.CutPrefix(path, list+"[")
	number, rest, closed := strings.Cut(path, "]")
	index, err := strconv.Atoi(number)
	return index, strings.TrimPrefix(rest, "."), isItem && closed && err == nil
}

// Validate returns the problems of a complete configuration, at most one for each path.
//
// A stream with a VIP that the attractor does not have is a problem only if the VIPs of the
// attractor are known: the list is not nil, and no VIP in it is zero.
func Validate(c *Config) []Problem {
	v := validator{reported: map[string]bool{}}
	v.object("", reflect.ValueOf(c).Elem())
	return v.problems
}

// ValidateStream returns the problems of a complete stream, with paths in it. vips are those of the
// attractor, sorted and without overlaps.
func ValidateStream(s *Stream, vips []vip.VIP) []Problem {
	v := validator{reported: map[string]bool{}, sorted: vips, covers: vips, vipsKnown: true}
	v.object("", reflect.ValueOf(s).Elem())
	return v.problems
}

type validator struct {
	problems []Problem
	reported map[string]bool
	// sorted holds the VIPs of the attractor, covers those that no other VIP contains.
	sorted, covers []vip.VIP
	vipsKnown      bool
}

// report records a problem, unless the value has one already.
func (v *validator) report(path string, problem Problem) {
	if problem == (Problem{}) || v.reported[path] {
		return
	}
	v.reported[path] = true
	problem.Path = path
	v.problems = append(v.problems, problem)
}

// checker is an object with constraints beyond its tags. Its fields are validated before.
type checker interface {
	check(v *validator, path string)
}

func (v *validator) object(path string, object reflect.Value) {
	pointer := object.Addr().Interface()
	gateway, _ := pointer.(*Gateway)
	fields := FieldsOf(object.Type())
	for i := range fields {
		field := &fields[i]
		value := field.Of(object)
		if gateway != nil && field.protocol != "" && gateway.Protocol.String() != field.protocol {
			if !value.IsZero() {
				v.report(member(path, field.Key), Problem{
					Text:   "conflicts with protocol: static, which has no BGP session",
					Remedy: "remove it, or write protocol: bgp",
				})
			}
			continue
		}
		v.value(path, value, field)
	}
	if c, ok := pointer.(checker); ok {
		c.check(v, path)
	}
}

// value validates a field of the object at path.
func (v *validator) value(path string, value reflect.Value, field *Field) {
	switch {
	case value.Kind() == reflect.Pointer:
		if !value.IsNil() {
			v.object(member(path, field.Key), value.Elem())
		}
	case value.Kind() == reflect.Slice, value.Kind() == reflect.Array:
		v.list(path, value, field)
	case value.Kind() == reflect.Struct && field.Type != AddressType:
		if field.Required || !value.IsZero() {
			v.object(member(path, field.Key), value)
		}
	default:
		if problem := field.check(value, ""); problem != (Problem{}) {
			v.report(member(path, field.Key), problem)
		}
	}
}

func (v *validator) list(path string, value reflect.Value, field *Field) {
	if removal := field.Tag.Get("empty"); field.Required && removal != "" && value.Len() == 0 {
		v.report(member(path, field.Key), EmptyList(field))
	}
	for i := range value.Len() {
		item := value.Index(i)
		switch {
		case item.Type() == VIPType: // valid, or zero
		case item.Type() == AddressType && value.Kind() == reflect.Array && item.IsZero(): // fewer than the maximum
		case item.Kind() == reflect.Struct && item.Type() != AddressType:
			v.object(indexed(path, field.Key, i), item)
		default:
			if problem := field.check(item, ""); problem != (Problem{}) {
				v.report(indexed(path, field.Key, i), problem)
			}
		}
	}
}

// EmptyList returns the problem of an empty list that must have an item.
func EmptyList(field *Field) Problem {
	return Problem{
		Text: "is an empty list", Remedy: field.Tag.Get("remedy") + ", or remove " + field.Tag.Get("empty"),
	}
}

func member(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func indexed(path, key string, i int) string {
	return member(path, key) + "[" + strconv.Itoa(i) + "]"
}

// unique reports the values that occur more than once. path returns the path of a value; it is
// called only for duplicates, because a list may have 50 000 items. The result maps each value to
// its first position.
func unique[T comparable](v *validator, kind string, values []T, path func(i int) string) map[T]int {
	first := make(map[T]int, len(values))
	var zero T
	for i, value := range values {
		if value == zero { // reported as invalid
			continue
		}
		if before, twice := first[value]; twice {
			v.report(path(i), Problem{
				Text: fmt.Sprintf("%s %v appears twice, first", kind, value), Related: path(before),
				Remedy: "remove one of them or change it",
			})
			continue
		}
		first[value] = i
	}
	return first
}

// Remedies for an address in a VIP.
const (
	gatewayInVIP = "a gateway cannot be reached through itself, change one of them"
	targetInVIP  = "write the target's own address"
	sourceInVIP  = "what comes from a VIP is sent to the gateways, write an address of the load balancer's own"
)

func (c *Config) check(v *validator, _ string) {
	names := collect(c.Streams, func(s *Stream) string { return s.Name })
	unique(v, "stream", names, func(i int) string { return indexed("", "streams", i) + ".name" })
}

func collect[T, V any](list []T, value func(*T) V) []V {
	values := make([]V, len(list))
	for i := range list {
		values[i] = value(&list[i])
	}
	return values
}

func (a *Attractor) check(v *validator, path string) {
	if len(a.VIPs) > MaxVIPs {
		v.report(member(path, "vips"), Problem{
			Text: fmt.Sprintf("has %d VIPs", len(a.VIPs)), Remedy: fmt.Sprintf("an attractor has %d at most", MaxVIPs),
		})
	} else {
		v.checkVIPs(member(path, "vips"), a.VIPs)
	}
	names := collect(a.Gateways, func(g *Gateway) string { return g.Name })
	unique(v, "gateway", names, func(i int) string { return indexed(path, "gateways", i) + ".name" })
	addresses := collect(a.Gateways, func(g *Gateway) netip.Addr { return g.Address })
	unique(v, "gateway address", addresses, func(i int) string { return indexed(path, "gateways", i) + ".address" })
	first := -1
	for i, g := range a.Gateways {
		at := indexed(path, "gateways", i)
		v.onePerFamily([]netip.Addr{g.Address}, "", gatewayInVIP, func(int) string { return at + ".address" })
		// BIRD applies the BFD parameters of the interface to its static routes.
		switch {
		case g.Protocol != Static || g.BFD == nil:
		case first < 0:
			first = i
		case *g.BFD != *a.Gateways[first].BFD:
			v.report(at+".bfd", Problem{
				Text:    "differs from static gateway " + Quote(a.Gateways[first].Name),
				Related: indexed(path, "gateways", first) + ".bfd",
				Remedy:  "static gateways share the BFD parameters of the interface, write the same values",
			})
		}
	}
}

// checkVIPs reports VIPs that share addresses. Overlaps are rejected because the wider VIP would
// attract the traffic of the narrower one while that is withdrawn.
func (v *validator) checkVIPs(path string, vips []vip.VIP) {
	at := func(i int) string { return indexed("", path, i) }
	first := unique(v, "VIP", vips, at)
	v.vipsKnown = vips != nil && !slices.Contains(vips, vip.VIP{})
	v.sorted = make([]vip.VIP, 0, len(first))
	for x := range first {
		v.sorted = append(v.sorted, x)
	}
	slices.SortFunc(v.sorted, vip.Compare)
	for _, x := range v.sorted {
		// A prefix sorts after the prefixes that contain it, and prefixes nest: a VIP that overlaps any
		// VIP in covers overlaps the last one.
		if n := len(v.covers); n > 0 && v.covers[n-1].Overlaps(x) {
			wide := v.covers[n-1]
			v.report(at(first[x]), Problem{
				Text:    fmt.Sprintf("VIP %s lies in the VIP %s", x, wide),
				Related: at(first[wide]),
				Remedy:  "remove one of them, since the wider VIP attracts the traffic of the narrower one even while that is withdrawn",
			})
			continue
		}
		v.covers = append(v.covers, x)
	}
}

func (g *Gateway) check(v *validator, path string) {
	if g.Name == "BFD" {
		v.report(member(path, "name"), Problem{Text: "is \"BFD\"", Remedy: "BIRD's protocol NBR-BFD has that name, take another"})
	}
	if g.Protocol == BGP {
		v.report(member(path, "localASN"), checkASN(g.LocalASN))
		v.report(member(path, "remoteASN"), checkASN(g.RemoteASN))
		v.report(member(path, "holdTime"), checkHoldTime(g.HoldTime))
	}
}

func (s *Stream) check(v *validator, path string) {
	at := func(i int) string { return indexed(path, "vips", i) }
	unique(v, "VIP", s.VIPs, at)
	for i, x := range s.VIPs {
		if _, found := slices.BinarySearchFunc(v.sorted, x, vip.Compare); v.vipsKnown && !found && !x.IsZero() {
			v.report(at(i), Problem{
				Text: fmt.Sprintf("VIP %s is not one of the attractor", x), Remedy: "add it to attractor.vips or remove it here",
			})
		}
	}
	s.checkMatch(v, path)
	if s.Check == (Check{}) && len(s.Targets) > 0 {
		v.report(member(path, "check"), Problem{
			Text: "is missing", Remedy: "write how the targets are checked, such as check: {tcp: {port: 5000}}",
		})
	}
	names := collect(s.Targets, func(t *Target) string { return t.Name })
	unique(v, "target", names, func(i int) string { return indexed(path, "targets", i) + ".name" })
	s.checkAddresses(v, path)
}

// checkMatch reports ports that are selected twice, and too many of them.
func (s *Stream) checkMatch(v *validator, path string) {
	type port struct {
		protocol string
		number   uint16
	}
	type position struct{ match, port int }
	at := func(p position) string { return indexed(indexed(path, "match", p.match), "ports", p.port) }
	first := map[port]position{}
	for i := range s.Match {
		match, inMatch := &s.Match[i], indexed(path, "match", i)
		unique(v, "protocol", match.Protocols, func(n int) string { return indexed(inMatch, "protocols", n) })
		unique(v, "port", match.Ports, func(n int) string { return indexed(inMatch, "ports", n) })
		for n, number := range match.Ports {
			for _, protocol := range match.Protocols {
				key := port{protocol, number}
				before, twice := first[key]
				switch {
				case !twice:
					first[key] = position{i, n}
				case before.match != i: // duplicates in one entry are reported above
					v.report(at(position{i, n}), Problem{
						Text:    fmt.Sprintf("%s port %d appears twice, first", protocol, number),
						Related: at(before), Remedy: "remove one of them or change it",
					})
				}
			}
		}
	}
	if len(first) > MaxMatch {
		v.report(member(path, "match"), Problem{
			Text:   fmt.Sprintf("has %d ports, each counted for each of its protocols", len(first)),
			Remedy: fmt.Sprintf("a stream has %d at most, leave the field out to forward all packets", MaxMatch),
		})
	}
}

// checkAddresses reports addresses of targets that are duplicate, not checked, or in a VIP.
func (s *Stream) checkAddresses(v *validator, path string) {
	type position struct{ target, address int }
	var addresses []netip.Addr
	var positions []position
	at := func(i int) string {
		return indexed(indexed(path, "targets", positions[i].target), "ips", positions[i].address)
	}
	for i := range s.Targets {
		for k, address := range s.Targets[i].IPs {
			addresses, positions = append(addresses, address), append(positions, position{i, k})
		}
	}
	unique(v, "target address", addresses, at)
	next := 0
	for i := range s.Targets {
		ips, families := s.Targets[i].IPs, s.Check.Families
		if len(ips) > 0 && !slices.ContainsFunc(ips, func(a netip.Addr) bool { return families.Has(vip.FamilyOf(a)) }) {
			v.report(indexed(path, "targets", i)+".ips", Problem{
				Text: fmt.Sprintf("has no %s address, and the stream's check.families is %s, so that nothing would check it",
					familyName(families == OnlyIPv4), families),
				Remedy: "add one, or write families: both",
			})
		}
		v.onePerFamily(ips, "a target has one of a family, make a second target of it", targetInVIP,
			func(k int) string { return at(next + k) })
		next += len(ips)
	}
}

// onePerFamily reports a second address of a family, and addresses in a VIP.
func (v *validator) onePerFamily(addresses []netip.Addr, remedy, inVIP string, path func(i int) string) {
	var has [len(vip.Families)]bool
	for i, address := range addresses {
		if !address.IsValid() {
			continue
		}
		family := &has[vip.FamilyOf(address)]
		if *family {
			v.report(path(i), Problem{Text: fmt.Sprintf("is a second %s address", familyName(address.Is4())), Remedy: remedy})
		}
		*family = true
		if wide, ok := vip.Containing(v.covers, address); ok {
			v.report(path(i), Problem{Text: fmt.Sprintf("is %s, which lies in the VIP %s", address, wide), Remedy: inVIP})
		}
	}
}

func (m *Maglev) check(v *validator, path string) {
	if prime(m.Size) || m.Size < 101 {
		return
	}
	// Both bounds are prime, so a prime exists on either side.
	below, above := m.Size-1, m.Size+1
	for ; !prime(below); below-- {
	}
	for ; !prime(above); above++ {
	}
	v.report(member(path, "size"), Problem{
		Text: fmt.Sprintf("is %d, which is no prime number", m.Size), Remedy: fmt.Sprintf("write %d or %d", below, above),
	})
}

// prime reports whether n is a prime number. ProbablyPrime is exact for 64 bits.
func prime(n uint32) bool { return big.NewInt(int64(n)).ProbablyPrime(0) }

// Kind returns the kind of the check as in the file, such as "tcp", or "" without one.
func (c *Check) Kind() string {
	if kinds := c.kinds(); len(kinds) > 0 {
		return kinds[0]
	}
	return ""
}

// kinds lists the kinds that are set, of which a check has exactly one.
func (c *Check) kinds() (kinds []string) {
	value := reflect.ValueOf(c).Elem()
	for _, field := range FieldsOf(value.Type()) {
		if field.Tag.Get("oneof") != "" && !field.Of(value).IsZero() {
			kinds = append(kinds, field.Key)
		}
	}
	return kinds
}

func (c *Check) check(v *validator, path string) {
	kinds := c.kinds()
	if len(kinds) == 0 {
		v.report(path, Problem{Text: "has none of tcp, http, grpc", Remedy: "write one of them, such as tcp: {port: 5000}"})
	}
	for _, kind := range kinds[min(1, len(kinds)):] {
		v.report(member(path, kind), Problem{
			Text: "conflicts with " + kinds[0], Remedy: "write only one of tcp, http, grpc",
		})
	}
	longer := func(key string, d time.Duration) {
		if d > c.Interval {
			v.report(member(path, key), Problem{
				Text: fmt.Sprintf("is %s, longer than the interval of %s", d, c.Interval), Remedy: "write at most the interval",
			})
		}
	}
	longer("fastInterval", c.FastInterval)
	longer("timeout", c.Timeout)
	at := func(i int) string { return indexed(path, "source", i) }
	for i, source := range c.Sources {
		if source.IsValid() && !c.Families.Has(vip.FamilyOf(source)) {
			v.report(at(i), Problem{
				Text:   fmt.Sprintf("is %s, but families is %s, so that nothing would be checked from it", source, c.Families),
				Remedy: "remove it, or write families: both",
			})
		}
	}
	v.onePerFamily(c.Sources[:], "checks of a family come from one", sourceInVIP, at)
}

func (c *TLSCheck) check(v *validator, path string) {
	if c.Insecure && c.CAFile != "" {
		v.report(member(path, "caFile"), Problem{
			Text: "conflicts with insecure: true, which takes any certificate", Remedy: "remove one of them",
		})
	}
}

func familyName(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}
