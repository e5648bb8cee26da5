package fwstate

import (
	"bytes"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

func newRule(comment string, expressions ...expr.Any) nft.Rule {
	return nft.NewRule(inet.Family, comment, expressions...)
}

// Register returns the number that the kernel lists for the 32-bit register i: every fourth has
// the number of the 128-bit register that starts there.
func Register(i uint32) uint32 {
	if i%4 == 0 {
		return unix.NFT_REG_1 + i/4
	}
	return unix.NFT_REG32_00 + i
}

// Header offsets and lengths of RFC 791 and RFC 8200.
var (
	protocolOf = [...]byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}
	icmpOf     = [...]byte{unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6}
	sourceAt   = [...]uint32{12, 8}
	destAt     = [...]uint32{16, 24}
	// Offset of the protocol, and length of a header without options.
	protocolAt   = [...]uint32{9, 6}
	headerLength = [...]uint32{20, 40}
)

// icmpHeader is the offset of the packet in an ICMP error (RFC 792, RFC 4443).
const icmpHeader = 8

func ofFamily(family vip.Family) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: Register(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: Register(0), Data: []byte{protocolOf[family]}},
	}
}

func (config Config) baseRules(chain string) (rules []nft.Rule) {
	add := func(comment string, expressions ...expr.Any) {
		rules = append(rules, newRule(ruleComment+comment, expressions...))
	}
	address := func(family vip.Family, offset uint32) []expr.Any {
		return append(ofFamily(family), load(expr.PayloadBaseNetworkHeader, offset, addressSize[family])(Register(0)))
	}
	switch chain {
	case preroutingChain:
		// Single addresses precede networks, because they are more specific.
		for _, maps := range [][len(vip.Families)]string{plan.HostMaps, plan.NetMaps} {
			for _, family := range vip.Families {
				add("to a VIP", append(address(family, destAt[family]), lookupVerdict(0, maps[family]))...)
			}
		}
	case checksChain:
		for _, timeouts := range checkTimeouts[:config.timeouts] {
			add("connections of health checks",
				&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: Register(0)},
				&expr.Cmp{Op: expr.CmpOpEq, Register: Register(0), Data: markKey(trench.CheckPriority)},
				&expr.Objref{Type: unix.NFT_OBJECT_CT_TIMEOUT, Name: timeouts.Name + "\x00"})
		}
	case notrackChain, outputChain:
		for _, sets := range [][len(vip.Families)]string{ownHosts, ownNets} {
			for _, family := range vip.Families {
				// Accept the packet, because no later rule of the chain applies.
				notrack := []expr.Any{
					&expr.Lookup{SourceRegister: Register(0), SetName: sets[family]},
					&expr.Notrack{}, &expr.Verdict{Kind: expr.VerdictAccept},
				}
				add("to a VIP", append(address(family, destAt[family]), notrack...)...)
				// Replies of targets come from a VIP and pass the prerouting hook.
				if chain == notrackChain {
					add("from a VIP", append(address(family, sourceAt[family]), notrack...)...)
				}
			}
		}
	case defragmentChain:
		// No rule jumps here. The existence of a ct expression enables defragmentation.
		add("has fragments put together", &expr.Ct{Key: expr.CtKeyMARK, Register: Register(0)}, &expr.Counter{})
	}
	return rules
}

func lookupVerdict(source uint32, set string) expr.Any {
	return &expr.Lookup{
		SourceRegister: Register(source), SetName: set, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true,
	}
}

func (config Config) targetRule(target plan.KernelTarget) nft.Rule {
	mask, fwmark := markKey(^config.FWMarkMask()), markKey(target.FWMark)
	// Other processes may use the bits outside the mask.
	mark := func() *expr.Bitwise {
		return &expr.Bitwise{SourceRegister: Register(0), DestRegister: Register(0), Len: 4, Mask: mask, Xor: fwmark}
	}
	expressions := []expr.Any{
		&expr.Counter{},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: Register(0)},
		mark(),
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: Register(0)},
	}
	if config.Conntrack == ConntrackOn {
		// The ct expressions are last: an untracked packet ends the rule here, after its fwmark is set.
		expressions = append(expressions,
			&expr.Ct{Key: expr.CtKeyMARK, Register: Register(0)},
			mark(),
			&expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: Register(0)},
		)
	}
	return newRule(target.Label.String(), expressions...)
}

// streamRules returns the rules of a stream's chain for the families with a Maglev map.
func (config Config) streamRules(stream *plan.KernelStream) []nft.Rule {
	return config.streamRulesBy(stream, plan.MaglevMap)
}

// streamRulesBy returns the rules of a stream's chain with the Maglev map names of name.
func (config Config) streamRulesBy(stream *plan.KernelStream, name func(vip.Family, string) string) (rules []nft.Rule) {
	add := func(comment string, expressions ...[]expr.Any) {
		rules = append(rules, newRule(ruleComment+comment, slices.Concat(expressions...)...))
	}
	// The match precedes the flows, so that a port that leaves it ends its flows.
	if stream.Match != nil {
		rules = matchRules(stream.Name)
	}
	for _, family := range stream.Families() {
		if config.Conntrack == ConntrackOn {
			add("flows that are known", ofFamily(family), []expr.Any{
				&expr.Ct{Key: expr.CtKeyMARK, Register: Register(0)},
				&expr.Bitwise{
					SourceRegister: Register(0), DestRegister: Register(0), Len: 4,
					Mask: markKey(config.FWMarkMask()), Xor: markKey(0),
				},
				lookupVerdict(0, plan.LiveMap(family, stream.Name)),
			})
		}
		// A packet that no rule above sent to a target is a new flow, or its target left.
		table := name(family, stream.Name)
		var unremembered []expr.Any
		if config.Conntrack == ConntrackLoose {
			rules = append(append(rules, flowRules(family, stream.Name)...), rememberRule(family, stream, table))
			unremembered = []expr.Any{&expr.Counter{}}
		}
		forward := hashAndLookup(family, stream, table)
		add("ICMP errors, by @"+table, ofFamily(family), inner(family), forward)
		add("flows with ports, by @"+table, ofFamily(family), ported(false), unremembered, LoadFlow(family, true), forward)
		add("others, by @"+table, ofFamily(family), ported(true), LoadFlow(family, false), forward)
	}
	// Packets without a live target must not reach the main table, which could loop them.
	add("no target", []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}})
	return rules
}

// ported matches protocols whose header starts with the ports.
func ported(not bool) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: Register(0)},
		&expr.Lookup{SourceRegister: Register(0), SetName: portedSet, Invert: not},
	}
}

// words returns the number of registers of an address.
func words(family vip.Family) uint32 { return addressSize[family] / 4 }

// tuple loads the hash input: source, destination, protocol, source port, destination port. Each
// occupies separate registers, padded with zeros.
func tuple(
	family vip.Family, source, destination, protocol, sourcePort, destinationPort func(uint32) expr.Any,
) []expr.Any {
	n := words(family)
	return []expr.Any{
		source(Register(0)), destination(Register(n)), protocol(Register(2 * n)),
		sourcePort(Register(2*n + 1)), destinationPort(Register(2*n + 2)),
	}
}

func load(base expr.PayloadBase, offset, length uint32) func(uint32) expr.Any {
	return func(r uint32) expr.Any {
		return &expr.Payload{DestRegister: r, Base: base, Offset: offset, Len: length}
	}
}

func zero(r uint32) expr.Any { return &expr.Immediate{Register: r, Data: make([]byte, 4)} }

// LoadFlow loads the flow of the packet, with ports 0 for protocols without ports.
func LoadFlow(family vip.Family, ports bool) []expr.Any {
	source, destination := zero, zero
	if ports {
		source, destination = load(expr.PayloadBaseTransportHeader, 0, 2), load(expr.PayloadBaseTransportHeader, 2, 2)
	}
	return tuple(family,
		load(expr.PayloadBaseNetworkHeader, sourceAt[family], addressSize[family]),
		load(expr.PayloadBaseNetworkHeader, destAt[family], addressSize[family]),
		func(r uint32) expr.Any { return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: r} },
		source, destination)
}

// inner matches ICMP errors that contain a packet with ports and loads the flow of that packet in
// the client's direction: the packet came from the VIP, so its source is the flow's destination.
func inner(family vip.Family) []expr.Any {
	transport := func(offset, length uint32) func(uint32) expr.Any {
		return load(expr.PayloadBaseTransportHeader, icmpHeader+offset, length)
	}
	key := Register(0)
	match := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: key},
		&expr.Cmp{Op: expr.CmpOpEq, Register: key, Data: []byte{icmpOf[family]}},
		load(expr.PayloadBaseTransportHeader, 0, 1)(key),
		&expr.Lookup{SourceRegister: key, SetName: errorSets[family]},
	}
	if family == vip.IPv4 {
		match = append(match,
			// Match version 4 and a header without options, which fixes the offset of the ports.
			transport(0, 1)(key),
			&expr.Cmp{Op: expr.CmpOpEq, Register: key, Data: []byte{0x45}},
			// Match the first fragment or an unfragmented packet.
			transport(6, 2)(key),
			&expr.Bitwise{SourceRegister: key, DestRegister: key, Len: 2, Mask: []byte{0x1f, 0xff}, Xor: []byte{0, 0}},
			&expr.Cmp{Op: expr.CmpOpEq, Register: key, Data: []byte{0, 0}},
		)
	}
	match = append(match, transport(protocolAt[family], 1)(key), &expr.Lookup{SourceRegister: key, SetName: portedSet})
	return append(match, tuple(family,
		transport(destAt[family], addressSize[family]),
		transport(sourceAt[family], addressSize[family]),
		transport(protocolAt[family], 1),
		transport(headerLength[family]+2, 2),
		transport(headerLength[family], 2))...)
}

// hashAndLookup hashes the loaded tuple and goes to the chain of the target in the Maglev map,
// if the live map contains the target.
//
// nft 1.0.6 assumes that a map value has zero bits, and fails an assertion when it lists a rule
// that uses the value as a key. The fwmark is therefore copied into the register of the hash as
// the second of two words, which nft does not track: it lists a lookup of the hash in the live
// map, and the comment of the rule names the Maglev map.
func hashAndLookup(family vip.Family, stream *plan.KernelStream, table string) []expr.Any {
	ones, zeros := bytes.Repeat([]byte{0xff}, 8), make([]byte, 8)
	return []expr.Any{
		&expr.Hash{
			SourceRegister: Register(0), DestRegister: Register(3), Length: FlowLength(family),
			Modulus: stream.Size, Seed: stream.Seed, Type: expr.HashTypeJenkins,
		},
		&expr.Lookup{SourceRegister: Register(3), SetName: table, DestRegister: Register(1), IsDestRegSet: true},
		&expr.Bitwise{SourceRegister: Register(0), DestRegister: Register(2), Len: 8, Mask: ones, Xor: zeros},
		lookupVerdict(3, plan.LiveMap(family, stream.Name)),
	}
}
