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
func (problem Problem) Message(place func(path string) string) string {
	text := problem.Text
	if problem.Related != "" {
		text += " in " + place(problem.Related)
	}
	if problem.Remedy == "" {
		return text
	}
	return text + ": " + problem.Remedy
}

// Item splits the path of an item of a list, or of a part of it: "streams[3].vips" is item 3 of
// "streams", with the rest "vips".
func Item(path, list string) (index int, rest string, ok bool) {
	path, isItem := strings.CutPrefix(path, list+"[")
	number, rest, closed := strings.Cut(path, "]")
	index, err := strconv.Atoi(number)
	return index, strings.TrimPrefix(rest, "."), isItem && closed && err == nil
}

// maxProblems limits the work and memory that aliases of YAML can cause: 1 000 streams with 1 000
// wrong VIPs fit into 60 KiB. No configuration of 10 000 VIPs has as many.
const maxProblems = 100_000

// Validate returns the problems of a complete configuration, at most one for each path.
//
// A stream with a VIP that the attractor does not have is a problem only if the VIPs of the
// attractor are known: the list is not nil, and no VIP in it is zero.
func Validate(config *Config) []Problem {
	result := validation{reported: map[string]bool{}}
	result.object("", reflect.ValueOf(config).Elem())
	return result.problems
}

// ValidateStream returns the problems of a complete stream, with paths in it. vips are the VIPs of
// the attractor, sorted and without overlaps.
func ValidateStream(stream *Stream, vips []vip.VIP) []Problem {
	result := validation{reported: map[string]bool{}, sorted: vips, covers: vips, vipsKnown: true}
	result.object("", reflect.ValueOf(stream).Elem())
	return result.problems
}

// validation is one run of [Validate].
type validation struct {
	problems []Problem
	reported map[string]bool
	// sorted holds the VIPs of the attractor, covers the ones that no other VIP contains.
	sorted, covers []vip.VIP
	vipsKnown      bool
}

// add records a problem of the value at a path, unless the value has one already.
func (result *validation) add(path string, problem Problem) {
	if problem == (Problem{}) || result.reported[path] || len(result.problems) == maxProblems {
		return
	}
	result.reported[path] = true
	problem.Path = path
	result.problems = append(result.problems, problem)
}

func (result *validation) report(path, text, remedy string) {
	result.add(path, newProblem(text, remedy))
}

// conflict records that the value at a path conflicts with the value at the path related.
func (result *validation) conflict(path, related, text, remedy string) {
	result.add(path, Problem{Text: text, Remedy: remedy, Related: related})
}

// checker is an object with constraints beyond its tags. Its fields are validated before.
type checker interface {
	check(result *validation, path string)
}

func (result *validation) object(path string, object reflect.Value) {
	pointer := object.Addr().Interface()
	gateway, _ := pointer.(*Gateway)
	fields := FieldsOf(object.Type())
	for i := range fields {
		field, fieldPath := &fields[i], member(path, fields[i].Key)
		value := field.Of(object)
		switch {
		// A static gateway has no fields of a BGP session: zero, which is out of bounds otherwise.
		case gateway == nil || field.protocol == "" || gateway.Protocol.String() == field.protocol:
			result.value(fieldPath, value, field)
		case !value.IsZero():
			result.report(fieldPath, "conflicts with protocol: static, which has no BGP session",
				"remove it, or write protocol: bgp")
		}
	}
	if constrained, ok := pointer.(checker); ok {
		constrained.check(result, path)
	}
}

// value validates a field, or an item of its list.
func (result *validation) value(path string, value reflect.Value, field *Field) {
	list := value.Kind() == reflect.Slice || value.Kind() == reflect.Array
	switch {
	case value.Type() == VIPType: // valid, or zero
	case value.Type() == AddressType && field.Type == AddressType && value.IsZero(): // left out
	case value.Kind() == reflect.Pointer:
		if !value.IsNil() {
			result.object(path, value.Elem())
		}
	case list && field.Type == value.Type():
		if field.Required && field.Tag.Get("empty") != "" && value.Len() == 0 {
			result.add(path, EmptyList(field))
		}
		result.add(path, field.TooMany(value.Len()))
		for i := range value.Len() {
			// An array has fewer items than its length: the rest is zero.
			if item := value.Index(i); value.Kind() == reflect.Slice || !item.IsZero() {
				result.value(index(path, i), item, field)
			}
		}
	case value.Kind() == reflect.Struct && value.Type() != AddressType:
		// An optional object that is zero is left out.
		if field.Required || field.Type != value.Type() || !value.IsZero() {
			result.object(path, value)
		}
	default:
		result.add(path, field.check(value, ""))
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
func unique[Value comparable](result *validation, kind string, values []Value, path func(i int) string) map[Value]int {
	first := make(map[Value]int, len(values))
	var zero Value
	for i, value := range values {
		if value == zero { // reported as invalid
			continue
		}
		if before, twice := first[value]; twice {
			result.twice(fmt.Sprint(kind, " ", value), path(i), path(before))
			continue
		}
		first[value] = i
	}
	return first
}

func (result *validation) twice(value, path, first string) {
	result.conflict(path, first, value+" appears twice, first", "remove one of them or change it")
}

// collect returns a value of each object in a list.
func collect[Object, Value any](list []Object, value func(*Object) Value) []Value {
	values := make([]Value, len(list))
	for i := range list {
		values[i] = value(&list[i])
	}
	return values
}

func (config *Config) check(result *validation, _ string) {
	names := collect(config.Streams, func(stream *Stream) string { return stream.Name })
	unique(result, "stream", names, within("streams", "name"))
}

func (attractor *Attractor) check(result *validation, path string) {
	// Skip the comparison of too many VIPs, which bounds its time.
	if len(attractor.VIPs) <= MaxVIPs {
		result.checkVIPs(member(path, "vips"), attractor.VIPs)
	}
	attractor.checkPolicies(result, member(path, "policies"))
	// The name becomes the name of BIRD's protocol, and BIRD has one session for an address.
	gateways := member(path, "gateways")
	names := collect(attractor.Gateways, func(gateway *Gateway) string { return gateway.Name })
	unique(result, "gateway", names, within(gateways, "name"))
	addresses := collect(attractor.Gateways, func(gateway *Gateway) netip.Addr { return gateway.Address })
	unique(result, "gateway address", addresses, within(gateways, "address"))
	// One router on the link can be learned.
	interfaces := collect(attractor.Gateways, func(gateway *Gateway) string { return gateway.Interface })
	unique(result, "gateway interface", interfaces, within(gateways, "interface"))
	first := -1 // static gateway with BFD
	for i, gateway := range attractor.Gateways {
		result.outsideVIPs(within(gateways, "address")(i), gateway.Address,
			"a gateway cannot be reached through itself, change one of them")
		switch at := within(gateways, "bfd"); {
		case gateway.Protocol != Static || gateway.BFD == nil:
		case first < 0:
			first = i
		case *gateway.BFD != *attractor.Gateways[first].BFD:
			// BIRD applies the BFD parameters of the interface to its static routes.
			result.conflict(at(i), at(first), "differs from static gateway "+Quote(attractor.Gateways[first].Name),
				"static gateways share the BFD parameters of the interface, write the same values")
		}
	}
}

// checkVIPs reports VIPs that share addresses. Overlaps are rejected because the wider VIP would
// attract the traffic of the narrower one while that is withdrawn.
func (result *validation) checkVIPs(path string, vips []vip.VIP) {
	place := func(i int) string { return index(path, i) }
	first := unique(result, "VIP", vips, place)
	// With an unreadable VIP, an unknown VIP of a stream is probably the same mistake.
	result.vipsKnown = vips != nil && !slices.Contains(vips, vip.VIP{})
	result.sorted = slices.SortedFunc(maps.Keys(first), vip.Compare)
	for _, candidate := range result.sorted {
		// A prefix sorts after the prefixes that contain it, and prefixes nest: a VIP that overlaps any
		// VIP in covers overlaps the last one.
		if n := len(result.covers); n == 0 || !result.covers[n-1].Overlaps(candidate) {
			result.covers = append(result.covers, candidate)
			continue
		}
		wide := result.covers[len(result.covers)-1]
		result.conflict(place(first[candidate]), place(first[wide]), fmt.Sprintf("VIP %s lies in the VIP %s",
			candidate, wide), "remove one of them, "+
			"since the wider VIP attracts the traffic of the narrower one even while that is withdrawn")
	}
}

// inAttractor reports a VIP that the attractor does not have.
func (result *validation) inAttractor(path string, served vip.VIP) {
	_, found := slices.BinarySearchFunc(result.sorted, served, vip.Compare)
	if result.vipsKnown && !found && !served.IsZero() {
		result.report(path, fmt.Sprintf("VIP %s is not one of the attractor", served),
			"add it to attractor.vips or remove it here")
	}
}

// outsideVIPs reports an address in a VIP.
func (result *validation) outsideVIPs(path string, address netip.Addr, remedy string) {
	if wide, ok := vip.Containing(result.covers, address); ok {
		result.report(path, fmt.Sprintf("is %s, which lies in the VIP %s", address, wide), remedy)
	}
}

func (gateway *Gateway) check(result *validation, path string) {
	if gateway.Name == "BFD" {
		result.report(member(path, "name"), "is \"BFD\"", "BIRD's protocol NBR-BFD has that name, take another")
	}
	if !gateway.Address.IsValid() && gateway.Interface == "" {
		result.report(member(path, "address"), "is missing", "write the gateway's IP address, "+
			"or interface for the router on the link")
	}
	if gateway.Protocol != BGP {
		return
	}
	result.add(member(path, "localASN"), checkASN(gateway.LocalASN))
	result.add(member(path, "remoteASN"), checkASN(gateway.RemoteASN))
	result.add(member(path, "holdTime"), checkHoldTime(gateway.HoldTime))
	gateway.checkTimer(result, member(path, "keepaliveTime"), gateway.KeepaliveTime)
	gateway.checkTimer(result, member(path, "connectRetryTime"), gateway.ConnectRetryTime)
	if gateway.KeepaliveTime > gateway.HoldTime/3 {
		result.report(member(path, "keepaliveTime"), fmt.Sprintf(
			"is %s, more than a third of the hold time %s", gateway.KeepaliveTime, gateway.HoldTime),
			"write at most a third (RFC 4271 section 10), or leave it out")
	}
	switch own := gateway.Families == OwnFamily || gateway.Address.Is4() == (gateway.Families == SessionIPv4); {
	case gateway.Interface != "" && gateway.Address.IsValid():
		result.conflict(member(path, "interface"), member(path, "address"), "conflicts with the address",
			"write only one of them")
	case gateway.Interface != "" && gateway.Multihop > 0:
		result.report(member(path, "multihop"), "conflicts with interface: link-local addresses cross no router",
			"remove it, or write an address")
	case gateway.Multihop > 0 && (!own || gateway.Families == SessionBoth):
		result.report(member(path, "families"), "conflicts with multihop: the path to the gateway has one family",
			"write a gateway for each family")
	}
}

// checkTimer rejects a timer that BIRD cannot have.
func (gateway *Gateway) checkTimer(result *validation, path string, timer time.Duration) {
	if timer%time.Second != 0 {
		result.report(path, "is "+timer.String(), "write whole seconds")
	}
}

func (stream *Stream) check(result *validation, path string) {
	place := func(i int) string { return index(member(path, "vips"), i) }
	unique(result, "VIP", stream.VIPs, place)
	for i, served := range stream.VIPs {
		result.inAttractor(place(i), served)
	}
	stream.checkMatch(result, member(path, "match"))
	if stream.Check == (Check{}) && len(stream.Targets) > 0 {
		result.report(member(path, "check"), "is missing",
			"write how the targets are checked, such as check: {tcp: {port: 5000}}")
	}
	stream.checkTargets(result, member(path, "targets"))
}

// checkMatch reports ports that are selected twice, and too many of them.
func (stream *Stream) checkMatch(result *validation, path string) {
	type selected struct {
		protocol string
		port     uint16
	}
	type position struct{ match, nth int }
	place := func(at position) string { return index(index(path, at.match)+".ports", at.nth) }
	first := map[selected]position{}
	for i := range stream.Match {
		match := &stream.Match[i]
		unique(result, "protocol", match.Protocols, func(nth int) string { return index(index(path, i)+".protocols", nth) })
		unique(result, "port", match.Ports, func(nth int) string { return place(position{i, nth}) })
		for nth, port := range match.Ports {
			for _, protocol := range match.Protocols {
				before, twice := first[selected{protocol, port}]
				switch {
				case !twice:
					first[selected{protocol, port}] = position{i, nth}
				case before.match != i: // unique reports a duplicate in one entry
					result.twice(fmt.Sprintf("%s port %d", protocol, port), place(position{i, nth}), place(before))
				}
			}
		}
	}
	if len(first) > MaxMatch {
		result.report(path, fmt.Sprintf("has %d ports, each counted for each of its protocols", len(first)),
			fmt.Sprintf("a stream has %d at most, leave the field out to forward all packets", MaxMatch))
	}
}

// checkTargets reports targets with equal names or addresses, and with addresses that cannot be
// checked or lie in a VIP.
func (stream *Stream) checkTargets(result *validation, path string) {
	names := collect(stream.Targets, func(target *Target) string { return target.Name })
	unique(result, "target", names, within(path, "name"))
	var addresses []netip.Addr
	var paths []func() string
	families := stream.Check.Families
	for i := range stream.Targets {
		// The uniqueness of addresses is checked over all targets, each with the path of its item.
		ips := stream.Targets[i].IPs
		place := func(nth int) string { return index(within(path, "ips")(i), nth) }
		for nth, address := range ips {
			addresses, paths = append(addresses, address), append(paths, func() string { return place(nth) })
			if address.IsLoopback() && stream.Check.Via == ViaVIP {
				result.report(place(nth), fmt.Sprintf("is %s, but check.via is vip, and no route leads to this host itself",
					address), "remove via")
			}
		}
		if len(ips) > 0 && !slices.ContainsFunc(ips,
			func(address netip.Addr) bool { return families.Has(vip.FamilyOf(address)) }) {
			result.report(within(path, "ips")(i),
				fmt.Sprintf("has no %s address, and the stream's check.families is %s, so that "+
					"nothing would check it", familyName(families == OnlyIPv4), families), "add one, or write families: both")
		}
		result.onePerFamily(ips, "a target has one of a family, make a second target of it",
			"write the target's own address", place)
	}
	unique(result, "target address", addresses, func(i int) string { return paths[i]() })
}

// onePerFamily reports a second address of a family, and addresses in a VIP.
func (result *validation) onePerFamily(addresses []netip.Addr, remedy, inVIP string, path func(i int) string) {
	var has [len(vip.Families)]bool
	for i, address := range addresses {
		if !address.IsValid() {
			continue
		}
		if family := vip.FamilyOf(address); has[family] {
			result.report(path(i), "is a second "+familyName(address.Is4())+" address", remedy)
		} else {
			has[family] = true
		}
		result.outsideVIPs(path(i), address, inVIP)
	}
}

func (maglev *Maglev) check(result *validation, path string) {
	if prime(maglev.Size) || maglev.Size < 101 {
		return
	}
	// Both bounds are prime, so a prime exists on either side.
	below, above := maglev.Size-1, maglev.Size+1
	for ; !prime(below); below-- {
	}
	for ; !prime(above); above++ {
	}
	result.report(member(path, "size"), fmt.Sprintf("is %d, which is no prime number", maglev.Size),
		fmt.Sprintf("write %d or %d", below, above))
}

// prime reports whether number is a prime number. ProbablyPrime is exact for 64 bits.
func prime(number uint32) bool { return big.NewInt(int64(number)).ProbablyPrime(0) }

func familyName(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}
