package fwstate

import (
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// With [ConntrackLoose] the rules of a stream store the target of each flow with ports in a map
// that the packet path updates, starting with the client's first packet. Connection tracking
// cannot be used if the kernel sees only the client's packets: after a SYN without a SYN-ACK it
// classifies the rest of the flow as invalid.
//
// A value is the fwmark of the target, with a bit for a closing flow. Elements of a removed target
// are harmless: no live map contains its fwmark, and the next packet replaces the element.

// flowMaps holds the names of the flow maps, by family.
var flowMaps = [...]string{"flows4", "flows6"}

// maxFlows limits the stored flows of one family. Flows beyond the limit use only the Maglev map.
const maxFlows = 1 << 18

// Timeouts of flows without packets from their client.
const (
	// establishedTimeout follows RFC 5382, REQ-5: it exceeds the two hours of TCP keepalive.
	establishedTimeout = 2*time.Hour + 4*time.Minute
	// shortTimeout follows RFC 4787, REQ-5. It applies to UDP and SCTP, before the second packet of
	// a TCP client, and after its FIN or RST.
	shortTimeout = 2 * time.Minute
)

// dynsetDelete is NFT_DYNSET_OP_DELETE.
const dynsetDelete = 2

// flagsAt is the offset of the flags in a TCP header (RFC 9293).
const (
	flagsAt = 13
	tcpFIN  = 0x01
	tcpSYN  = 0x02
	tcpRST  = 0x04
)

// FlowLength returns the length of a key: two addresses, protocol, two ports, padded to registers.
func FlowLength(family vip.Family) uint32 { return 4 * (2*words(family) + 3) }

// flowFlags are the flags of a map that rules update.
const flowFlags = unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL

func flowSpec(family vip.Family) nft.Set {
	key := uint32(0)
	for _, t := range []uint32{typeAddress[family], typeAddress[family], typeProto, typeService, typeService} {
		key = key<<concatBits | t
	}
	return nft.Set{
		Name: flowMaps[family], Flags: flowFlags,
		KeyType: key, KeyLen: FlowLength(family), DataType: nft.TypeMark, DataLen: 4, Size: maxFlows,
	}
}

// closing is set in the values of flows whose client sent a FIN or RST. No fwmark has this bit.
const closing = 1 << 31

// flowRegisters holds the registers that follow the loaded flow in a flow rule.
//
// As in hashAndLookup, nft must not see a map value used as a key or as data. The value is copied,
// together with the preceding word, so that it overwrites a register that nft still tracks as the
// packet's mark.
type flowRegisters struct{ last, value, copied, mark, other uint32 }

func registersOf(family vip.Family) flowRegisters {
	last := FlowLength(family)/4 - 1
	return flowRegisters{Register(last), Register(last + 1), Register(last + 2), Register(last + 3), Register(last + 4)}
}

func bitwise(from, to, mask, xor uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: from, DestRegister: to, Len: 4, Mask: markKey(mask), Xor: markKey(xor)}
}

// find looks up a key in a map of fwmarks and loads the value into the mark register.
func (registers flowRegisters) find(key uint32, set string) []expr.Any {
	return []expr.Any{
		// nft tracks this register as the packet's mark; the copy below replaces it by the value.
		&expr.Meta{Key: expr.MetaKeyMARK, Register: registers.mark},
		&expr.Lookup{SourceRegister: key, SetName: set, DestRegister: registers.value, IsDestRegSet: true},
		&expr.Bitwise{
			SourceRegister: registers.last, DestRegister: registers.copied, Len: 8,
			Mask: slices.Repeat([]byte{0xff}, 8), Xor: make([]byte, 8),
		},
	}
}

// change updates or deletes the element of the loaded flow, with the mark register as data.
func (registers flowRegisters) change(family vip.Family, operation uint32, timeout time.Duration) expr.Any {
	return &expr.Dynset{
		SrcRegKey: Register(0), SrcRegData: registers.mark, SetName: flowMaps[family], Operation: operation, Timeout: timeout,
	}
}

// live goes to the chain of the target in the mark register, if the live map contains it.
func (registers flowRegisters) live(family vip.Family, stream string) []expr.Any {
	return []expr.Any{
		// Live maps contain fwmarks without the closing bit.
		bitwise(registers.mark, registers.other, closing-1, 0),
		&expr.Lookup{
			SourceRegister: registers.other, SetName: plan.LiveMap(family, stream), DestRegister: unix.NFT_REG_VERDICT,
			IsDestRegSet: true,
		},
	}
}

// tcpFlags matches TCP packets with any of the flags set, or with all of them clear.
func tcpFlags(flags byte, op expr.CmpOp) []expr.Any {
	key := Register(0)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: key},
		&expr.Cmp{Op: expr.CmpOpEq, Register: key, Data: []byte{unix.IPPROTO_TCP}},
		load(expr.PayloadBaseTransportHeader, flagsAt, 1)(key),
		&expr.Bitwise{SourceRegister: key, DestRegister: key, Len: 1, Mask: []byte{flags}, Xor: []byte{0}},
		&expr.Cmp{Op: op, Register: key, Data: []byte{0}},
	}
}

// flowRules returns the rules for stored flows, in this order: established TCP, which is most
// packets; closing TCP; all other packets with ports; and ICMP errors.
func flowRules(family vip.Family, stream string) []nft.Rule {
	registers := registersOf(family)
	rule := func(comment string, flow []expr.Any, refresh ...expr.Any) nft.Rule {
		return newRule(ruleComment+comment,
			slices.Concat(ofFamily(family), flow, registers.find(Register(0), flowMaps[family]), refresh, registers.live(family,
				stream))...)
	}
	flow := LoadFlow(family, true)
	return []nft.Rule{
		// A closing flow ends this rule at the comparison, which keeps its short timeout.
		rule("TCP flows that are known", slices.Concat(tcpFlags(tcpFIN|tcpSYN|tcpRST, expr.CmpOpEq), flow),
			bitwise(registers.mark, registers.other, closing, 0),
			&expr.Cmp{Op: expr.CmpOpEq, Register: registers.other, Data: markKey(0)},
			registers.change(family, unix.NFT_DYNSET_OP_UPDATE, establishedTimeout)),
		// An update of an existing element changes only its timeout, so the rule deletes it first.
		rule("TCP flows that close", slices.Concat(tcpFlags(tcpFIN|tcpRST, expr.CmpOpNeq), flow),
			registers.change(family, dynsetDelete, 0),
			bitwise(registers.mark, registers.mark, closing-1, closing),
			registers.change(family, unix.NFT_DYNSET_OP_UPDATE, shortTimeout)),
		// A client reuses the ports of a closed flow: the Maglev map selects its target.
		newRule(ruleComment+"TCP flows that begin again", slices.Concat(ofFamily(family), tcpFlags(tcpSYN, expr.CmpOpNeq),
			flow, registers.find(Register(0), flowMaps[family]), []expr.Any{
				bitwise(registers.mark, registers.other, closing, 0),
				&expr.Cmp{Op: expr.CmpOpNeq, Register: registers.other, Data: markKey(0)},
				registers.change(family, dynsetDelete, 0),
			})...),
		rule("flows that are known", slices.Concat(ported(false), flow),
			registers.change(family, unix.NFT_DYNSET_OP_UPDATE, shortTimeout)),
		rule("ICMP errors about known flows", inner(family)),
	}
}

// rememberRule returns the rule that selects the target of a new flow and stores it. If the update
// fails, for example in a full map, the next rule selects the target.
func rememberRule(family vip.Family, stream *plan.KernelStream, table string) nft.Rule {
	registers := registersOf(family)
	hash := &expr.Hash{
		SourceRegister: Register(0), DestRegister: registers.other, Length: FlowLength(family),
		Modulus: stream.Size, Seed: stream.Seed, Type: expr.HashTypeJenkins,
	}
	return newRule(ruleComment+"new flows, by @"+table, slices.Concat(
		ofFamily(family), ported(false), LoadFlow(family, true), []expr.Any{hash}, registers.find(registers.other, table),
		// Delete first, because the flow may have an element with a removed target.
		[]expr.Any{registers.change(family, dynsetDelete, 0), registers.change(family, unix.NFT_DYNSET_OP_UPDATE,
			shortTimeout)},
		registers.live(family, stream.Name))...)
}
