package fwstate

import (
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// With [ConntrackLoose] the rules of a stream remember the target of each flow with ports in a map
// of the packet path, from the first packet of the client on. Connection tracking cannot do that
// if it sees the packets of the client only: after a SYN without a SYN-ACK it takes the rest of the
// flow for invalid.
//
// A value is the fwmark of the target, with a bit for a flow that is closing. Elements that lead to
// a target that is gone are harmless: its fwmark is in no live map, and the next packet replaces
// them.

// flowMaps are the maps of flows, by family.
var flowMaps = [...]string{"flows4", "flows6"}

// maxFlows bounds the flows of one family that are remembered. More go by the Maglev map alone.
const maxFlows = 1 << 18

// Times after which a flow without packets from its client is forgotten.
const (
	// establishedTimeout is that of RFC 5382, REQ-5: more than the two hours of TCP keepalive.
	establishedTimeout = 2*time.Hour + 4*time.Minute
	// shortTimeout is that of RFC 4787, REQ-5: for UDP and SCTP, before the second packet of a TCP
	// client, and after its FIN or RST.
	shortTimeout = 2 * time.Minute
)

// dynsetDelete is NFT_DYNSET_OP_DELETE.
const dynsetDelete = 2

// flagsAt is the offset of the flags in a TCP header (RFC 9293), with FIN, SYN and RST.
const (
	flagsAt = 13
	tcpFIN  = 0x01
	tcpSYN  = 0x02
	tcpRST  = 0x04
)

// flowSize is the length of a key: two addresses, the protocol, two ports, each in its registers.
func flowSize(f vip.Family) uint32 { return 4 * (2*words(f) + 3) }

// flowFlags make a map that rules change.
const flowFlags = unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL

func flowSpec(f vip.Family) setSpec {
	key := uint32(0)
	for _, t := range []uint32{typeAddress[f], typeAddress[f], typeProto, typeService, typeService} {
		key = key<<concatBits | t
	}
	return setSpec{
		name: flowMaps[f], flags: flowFlags,
		keyType: key, keySize: flowSize(f), dataType: typeMark, data: 4, size: maxFlows,
	}
}

// closing is the bit of values of flows whose client sent a FIN or RST. It is never in a fwmark.
const closing = 1 << 31

// flowRegisters are those of a rule for flows, behind the loaded flow.
//
// As in hashAndLookup nft must not see the value of a map used as a key or as data. So it is
// copied, with the word before it, onto a register of which nft believes that it has the packet's
// mark.
type flowRegisters struct{ last, value, copied, mark, other uint32 }

func registersOf(f vip.Family) flowRegisters {
	last := flowSize(f)/4 - 1
	return flowRegisters{register(last), register(last + 1), register(last + 2), register(last + 3), register(last + 4)}
}

func bitwise(from, to, mask, xor uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: from, DestRegister: to, Len: 4, Mask: markKey(mask), Xor: markKey(xor)}
}

// find loads the value of a key in a map of fwmarks as the mark.
func (r flowRegisters) find(key uint32, set string) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: r.mark},
		&expr.Lookup{SourceRegister: key, SetName: set, DestRegister: r.value, IsDestRegSet: true},
		&expr.Bitwise{
			SourceRegister: r.last, DestRegister: r.copied, Len: 8,
			Mask: slices.Repeat([]byte{0xff}, 8), Xor: make([]byte, 8),
		},
	}
}

// change changes the element of the loaded flow; its data is the mark.
func (r flowRegisters) change(f vip.Family, operation uint32, timeout time.Duration) expr.Any {
	return &expr.Dynset{
		SrcRegKey: register(0), SrcRegData: r.mark, SetName: flowMaps[f], Operation: operation, Timeout: timeout,
	}
}

// live goes to the chain of the target in the mark, if the live map has it.
func (r flowRegisters) live(f vip.Family, stream string) []expr.Any {
	return []expr.Any{
		bitwise(r.mark, r.other, closing-1, 0),
		&expr.Lookup{
			SourceRegister: r.other, SetName: plan.LiveMap(f, stream), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true,
		},
	}
}

// tcpFlags matches TCP packets with one of the flags, or with none of them.
func tcpFlags(flags byte, op expr.CmpOp) []expr.Any {
	r := register(0)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: r},
		&expr.Cmp{Op: expr.CmpOpEq, Register: r, Data: []byte{unix.IPPROTO_TCP}},
		load(expr.PayloadBaseTransportHeader, flagsAt, 1)(r),
		&expr.Bitwise{SourceRegister: r, DestRegister: r, Len: 1, Mask: []byte{flags}, Xor: []byte{0}},
		&expr.Cmp{Op: op, Register: r, Data: []byte{0}},
	}
}

// flowRules returns the rules for flows that are remembered: of TCP that neither opens nor closes,
// which is most packets, of TCP that closes, of the rest, and of ICMP errors.
func flowRules(f vip.Family, stream string) []ruleSpec {
	r := registersOf(f)
	rule := func(comment string, flow []expr.Any, refresh ...expr.Any) ruleSpec {
		return newRule(ruleComment+comment,
			slices.Concat(ofFamily(f), flow, r.find(register(0), flowMaps[f]), refresh, r.live(f, stream))...)
	}
	flow := outer(f, true)
	return []ruleSpec{
		rule("TCP flows that are known", slices.Concat(tcpFlags(tcpFIN|tcpSYN|tcpRST, expr.CmpOpEq), flow),
			bitwise(r.mark, r.other, closing, 0),
			&expr.Cmp{Op: expr.CmpOpEq, Register: r.other, Data: markKey(0)},
			r.change(f, unix.NFT_DYNSET_OP_UPDATE, establishedTimeout)),
		rule("TCP flows that close", slices.Concat(tcpFlags(tcpFIN|tcpRST, expr.CmpOpNeq), flow),
			r.change(f, dynsetDelete, 0),
			bitwise(r.mark, r.mark, closing-1, closing),
			r.change(f, unix.NFT_DYNSET_OP_UPDATE, shortTimeout)),
		rule("flows that are known", slices.Concat(ported(false), flow),
			r.change(f, unix.NFT_DYNSET_OP_UPDATE, shortTimeout)),
		rule("ICMP errors about known flows", inner(f)),
	}
}

// rememberRule returns the rule that finds the target of a new flow, and remembers it. Where that
// fails, the next rule finds the target.
func rememberRule(f vip.Family, s *plan.KernelStream, table string) ruleSpec {
	r := registersOf(f)
	hash := &expr.Hash{
		SourceRegister: register(0), DestRegister: r.other, Length: flowSize(f),
		Modulus: s.Size, Seed: s.Seed, Type: expr.HashTypeJenkins,
	}
	return newRule(ruleComment+"new flows, by @"+table, slices.Concat(
		ofFamily(f), ported(false), outer(f, true), []expr.Any{hash}, r.find(r.other, table),
		// Also the flow of a target that is gone.
		[]expr.Any{r.change(f, dynsetDelete, 0), r.change(f, unix.NFT_DYNSET_OP_UPDATE, shortTimeout)},
		r.live(f, s.Name))...)
}
