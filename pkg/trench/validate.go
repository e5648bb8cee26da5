package trench

import (
	"fmt"
	"maps"
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

func newProblem(text, remedy string) Problem { return Problem{Text: text, Remedy: remedy} }

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

// add records a problem of the value at a path, unless the value has one already.
func (v *validator) add(path string, problem Problem) {
	if problem == (Problem{}) || v.reported[path] {
		return
	}
	v.reported[path] = true
	problem.Path = path
	v.problems = append(v.problems, problem)
}

func (v *validator) report(path, text, remedy string) { v.add(path, newProblem(text, remedy)) }

// conflict records that the value at a path conflicts with the value at the path related.
func (v *validator) conflict(path, related, text, remedy string) {
	v.add(path, Problem{Text: text, Remedy: remedy, Related: related})
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
		field, at := &fields[i], member(path, fields[i].Key)
		value := field.Of(object)
		switch {
		case gateway == nil || field.protocol == "" || gateway.Protocol.String() == field.protocol:
			v.value(at, value, field)
		case !value.IsZero():
			v.report(at, "conflicts with protocol: static, which has no BGP session", "remove it, or write protocol: bgp")
		}
	}
	if c, ok := pointer.(checker); ok {
		c.check(v, path)
	}
}

// value validates a field, or an item of its list.
func (v *validator) value(path string, value reflect.Value, field *Field) {
	list := value.Kind() == reflect.Slice || value.Kind() == reflect.Array
	switch {
	case value.Type() == VIPType: // valid, or zero
	case value.Kind() == reflect.Pointer:
		if !value.IsNil() {
			v.object(path, value.Elem())
		}
	case list && field.Type == value.Type():
		if field.Required && field.Tag.Get("empty") != "" && value.Len() == 0 {
			v.add(path, EmptyList(field))
		}
		for i := range value.Len() {
			// An array has fewer items than its length: the rest is zero.
			if item := value.Index(i); value.Kind() == reflect.Slice || !item.IsZero() {
				v.value(index(path, i), item, field)
			}
		}
	case value.Kind() == reflect.Struct && value.Type() != AddressType:
		// An optional object that is zero is left out.
		if field.Required || field.Type != value.Type() || !value.IsZero() {
			v.object(path, value)
		}
	default:
		v.add(path, field.check(value, ""))
	}
}

// EmptyList returns the problem of an empty list that must have an item.
func EmptyList(field *Field) Problem {
	return newProblem("is an empty list", field.Tag.Get("remedy")+", or remove "+field.Tag.Get("empty"))
}

func member(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func index(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

// within returns the paths of a field of the objects in a list.
func within(list, field string) func(i int) string {
	return func(i int) string { return index(list, i) + "." + field }
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
			v.twice(fmt.Sprint(kind, " ", value), path(i), path(before))
			continue
		}
		first[value] = i
	}
	return first
}

func (v *validator) twice(value, path, first string) {
	v.conflict(path, first, value+" appears twice, first", "remove one of them or change it")
}

// collect returns a value of each object in a list.
func collect[T, V any](list []T, value func(*T) V) []V {
	values := make([]V, len(list))
	for i := range list {
		values[i] = value(&list[i])
	}
	return values
}

func (c *Config) check(v *validator, _ string) {
	names := collect(c.Streams, func(s *Stream) string { return s.Name })
	unique(v, "stream", names, within("streams", "name"))
}

func (a *Attractor) check(v *validator, path string) {
	if n := len(a.VIPs); n > MaxVIPs {
		v.report(member(path, "vips"), fmt.Sprintf("has %d VIPs", n), fmt.Sprintf("an attractor has %d at most", MaxVIPs))
	} else {
		v.checkVIPs(member(path, "vips"), a.VIPs)
	}
	gateways := member(path, "gateways")
	names := collect(a.Gateways, func(g *Gateway) string { return g.Name })
	unique(v, "gateway", names, within(gateways, "name"))
	addresses := collect(a.Gateways, func(g *Gateway) netip.Addr { return g.Address })
	unique(v, "gateway address", addresses, within(gateways, "address"))
	first := -1 // static gateway with BFD
	for i, g := range a.Gateways {
		v.outsideVIPs(within(gateways, "address")(i), g.Address, "a gateway cannot be reached through itself, change one of them")
		switch at := within(gateways, "bfd"); {
		case g.Protocol != Static || g.BFD == nil:
		case first < 0:
			first = i
		case *g.BFD != *a.Gateways[first].BFD:
			// BIRD applies the BFD parameters of the interface to its static routes.
			v.conflict(at(i), at(first), "differs from static gateway "+Quote(a.Gateways[first].Name),
				"static gateways share the BFD parameters of the interface, write the same values")
		}
	}
}

// checkVIPs reports VIPs that share addresses. Overlaps are rejected because the wider VIP would
// attract the traffic of the narrower one while that is withdrawn.
func (v *validator) checkVIPs(path string, vips []vip.VIP) {
	at := func(i int) string { return index(path, i) }
	first := unique(v, "VIP", vips, at)
	v.vipsKnown = vips != nil && !slices.Contains(vips, vip.VIP{})
	v.sorted = slices.SortedFunc(maps.Keys(first), vip.Compare)
	for _, x := range v.sorted {
		// A prefix sorts after the prefixes that contain it, and prefixes nest: a VIP that overlaps any
		// VIP in covers overlaps the last one.
		if n := len(v.covers); n == 0 || !v.covers[n-1].Overlaps(x) {
			v.covers = append(v.covers, x)
			continue
		}
		wide := v.covers[len(v.covers)-1]
		v.conflict(at(first[x]), at(first[wide]), fmt.Sprintf("VIP %s lies in the VIP %s", x, wide), "remove one of them, "+
			"since the wider VIP attracts the traffic of the narrower one even while that is withdrawn")
	}
}

// outsideVIPs reports an address in a VIP.
func (v *validator) outsideVIPs(path string, address netip.Addr, remedy string) {
	if wide, ok := vip.Containing(v.covers, address); ok {
		v.report(path, fmt.Sprintf("is %s, which lies in the VIP %s", address, wide), remedy)
	}
}

func (g *Gateway) check(v *validator, path string) {
	if g.Name == "BFD" {
		v.report(member(path, "name"), "is \"BFD\"", "BIRD's protocol NBR-BFD has that name, take another")
	}
	if g.Protocol == BGP {
		v.add(member(path, "localASN"), checkASN(g.LocalASN))
		v.add(member(path, "remoteASN"), checkASN(g.RemoteASN))
		v.add(member(path, "holdTime"), checkHoldTime(g.HoldTime))
	}
}

func (s *Stream) check(v *validator, path string) {
	at := func(i int) string { return index(member(path, "vips"), i) }
	unique(v, "VIP", s.VIPs, at)
	for i, x := range s.VIPs {
		if _, found := slices.BinarySearchFunc(v.sorted, x, vip.Compare); v.vipsKnown && !found && !x.IsZero() {
			v.report(at(i), fmt.Sprintf("VIP %s is not one of the attractor", x),
				"add it to attractor.vips or remove it here")
		}
	}
	s.checkMatch(v, member(path, "match"))
	if s.Check == (Check{}) && len(s.Targets) > 0 {
		v.report(member(path, "check"), "is missing",
			"write how the targets are checked, such as check: {tcp: {port: 5000}}")
	}
	s.checkTargets(v, member(path, "targets"))
}

// checkMatch reports ports that are selected twice, and too many of them.
func (s *Stream) checkMatch(v *validator, path string) {
	type port struct {
		protocol string
		number   uint16
	}
	type position struct{ match, port int }
	at := func(p position) string { return index(index(path, p.match)+".ports", p.port) }
	first := map[port]position{}
	for i := range s.Match {
		match := &s.Match[i]
		unique(v, "protocol", match.Protocols, func(n int) string { return index(index(path, i)+".protocols", n) })
		unique(v, "port", match.Ports, func(n int) string { return at(position{i, n}) })
		for n, number := range match.Ports {
			for _, protocol := range match.Protocols {
				before, twice := first[port{protocol, number}]
				switch {
				case !twice:
					first[port{protocol, number}] = position{i, n}
				case before.match != i: // a duplicate in one entry is reported above
					v.twice(fmt.Sprintf("%s port %d", protocol, number), at(position{i, n}), at(before))
				}
			}
		}
	}
	if len(first) > MaxMatch {
		v.report(path, fmt.Sprintf("has %d ports, each counted for each of its protocols", len(first)),
			fmt.Sprintf("a stream has %d at most, leave the field out to forward all packets", MaxMatch))
	}
}

// checkTargets reports targets with equal names or addresses, and with addresses that cannot be
// checked or lie in a VIP.
func (s *Stream) checkTargets(v *validator, path string) {
	names := collect(s.Targets, func(t *Target) string { return t.Name })
	unique(v, "target", names, within(path, "name"))
	var addresses []netip.Addr
	var paths []func() string
	families := s.Check.Families
	for i := range s.Targets {
		ips := s.Targets[i].IPs
		at := func(k int) string { return index(within(path, "ips")(i), k) }
		for k, address := range ips {
			addresses, paths = append(addresses, address), append(paths, func() string { return at(k) })
		}
		if len(ips) > 0 && !slices.ContainsFunc(ips, func(a netip.Addr) bool { return families.Has(vip.FamilyOf(a)) }) {
			v.report(within(path, "ips")(i), fmt.Sprintf("has no %s address, and the stream's check.families is %s, so that "+
				"nothing would check it", familyName(families == OnlyIPv4), families), "add one, or write families: both")
		}
		v.onePerFamily(ips, "a target has one of a family, make a second target of it", "write the target's own address", at)
	}
	unique(v, "target address", addresses, func(i int) string { return paths[i]() })
}

// onePerFamily reports a second address of a family, and addresses in a VIP.
func (v *validator) onePerFamily(addresses []netip.Addr, remedy, inVIP string, path func(i int) string) {
	var has [len(vip.Families)]bool
	for i, address := range addresses {
		if !address.IsValid() {
			continue
		}
		if family := vip.FamilyOf(address); has[family] {
			v.report(path(i), "is a second "+familyName(address.Is4())+" address", remedy)
		} else {
			has[family] = true
		}
		v.outsideVIPs(path(i), address, inVIP)
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
	v.report(member(path, "size"), fmt.Sprintf("is %d, which is no prime number", m.Size),
		fmt.Sprintf("write %d or %d", below, above))
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
		v.report(path, "has none of tcp, http, grpc", "write one of them, such as tcp: {port: 5000}")
	}
	for _, kind := range kinds[min(1, len(kinds)):] {
		v.report(member(path, kind), "conflicts with "+kinds[0], "write only one of tcp, http, grpc")
	}
	longer := func(key string, d time.Duration) {
		if d > c.Interval {
			v.report(member(path, key), fmt.Sprintf("is %s, longer than the interval of %s", d, c.Interval),
				"write at most the interval")
		}
	}
	longer("fastInterval", c.FastInterval)
	longer("timeout", c.Timeout)
	at := func(i int) string { return index(member(path, "source"), i) }
	for i, source := range c.Sources {
		if source.IsValid() && !c.Families.Has(vip.FamilyOf(source)) {
			v.report(at(i), fmt.Sprintf("is %s, but families is %s, so that nothing would be checked from it", source,
				c.Families), "remove it, or write families: both")
		}
	}
	v.onePerFamily(c.Sources[:], "checks of a family come from one", "what comes from a VIP is sent to the gateways, write "+
		"an address of the load balancer's own", at)
}

func (c *TLSCheck) check(v *validator, path string) {
	if c.Insecure && c.CAFile != "" {
		v.report(member(path, "caFile"), "conflicts with insecure: true, which takes any certificate", "remove one of them")
	}
}

func familyName(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}
