package midstream

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/returning"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Stream is a stream of one family with slots whose earlier targets keep their flows.
type Stream struct {
	Name       string
	Size, Seed uint32
	// FWMarks holds the targets that keep their flows, by fwmark, with their link-layer addresses.
	FWMarks map[uint32]plan.LinkAddress
	// Asked holds the addresses to which packets are copied, by slot: the first and the second target,
	// other than the current one, that the slot had.
	Asked [copies]map[uint32]netip.Addr
	// Everyone holds the addresses of all targets, by fwmark, if the earlier targets are unknown and
	// all are asked: at most [MaxEveryone]. Asked is empty.
	Everyone map[uint32]netip.Addr
	// SCTP: the stream forwards SCTP, so that targets return its packets in every mode.
	SCTP bool
}

// copies is the maximum number of earlier targets that are asked about a packet.
const copies = 2

const (
	// maxUndecided limits the flows of a family that are being decided. Flows beyond it follow the
	// current set of targets, as without this package.
	maxUndecided = 1 << 16
	// maxDenials limits their denials, of which a flow has one for each target that is asked.
	maxDenials = 4 * maxUndecided
	// memory is how long an undecided flow is remembered after its last packet.
	memory = 10 * time.Second
)

// Names of chains, sets and maps. Chains and maps of streams have the stream's name as suffix.
const (
	refusalsChain  = "refusals"
	deniedChain    = "denied"
	askChain       = "ask"
	unknownChain   = "unknown"
	undecidedChain = "undecided"
	answersChain   = "answers"
	decideChain    = "decide"

	// undecidedSet and threeWaySet hold the flows that are being decided, of the latter by two copies.
	undecidedSet = "undecided"
	threeWaySet  = "three-way"
	// deniedSets hold the flows that one and two targets denied, denierSet the flow and the target.
	denierSet = "denier"
	// linksSet holds the link-layer addresses of targets. streamsMap maps fwmarks to streams.
	linksSet   = "links"
	streamsMap = "streams"
	linkPrefix = "link/"
)

var (
	deniedSets    = [copies]string{"denied-1", "denied-2"}
	askedPrefixes = [copies]string{"asked-1/", "asked-2/"}
)

// Comments of rules with counters.
const (
	comment        = "vipgate: "
	commentAsked   = comment + "a copy to an earlier target"
	commentFull    = comment + "too many undecided flows"
	commentDecided = comment + "another target has the flow"
	commentDenied  = comment + "denied by all targets"
)

// Offsets and flags of RFC 791, RFC 8200 and RFC 9293.
const (
	flagsAt = 13
	tcpFIN  = 0x01
	tcpSYN  = 0x02
	tcpRST  = 0x04
	tcpPSH  = 0x08
	tcpACK  = 0x10
)

var (
	tableFamily = [...]byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}
	addressType = [...]uint32{nft.TypeIPv4, nft.TypeIPv6}
	addressSize = [...]uint32{4, 16}
	sourceAt    = [...]uint32{12, 8}
	destAt      = [...]uint32{16, 24}
	portType    = nftables.TypeInetService.GetNFTMagic()
)

// builder builds the table of one family.
type builder struct {
	family vip.Family
	// mask has the bits of fwmarks; undecided is the bit above it, in connection marks of flows that
	// are being decided.
	mask, undecided uint32
	returning       bool
	chains          []nft.Chain
}

func newBuilder(family vip.Family, mode Mode) *builder {
	return &builder{family: family, mask: mode.Mask, undecided: mode.Mask + 1, returning: mode.Returning}
}

// Mode selects the rules.
type Mode struct {
	// Mask has the bits of fwmarks.
	Mask uint32
	// Returning: without connection tracking targets return packets of flows that they do not have.
	Returning bool
}

// table returns the table, without the elements of the maps of slots.
func (b *builder) table(streams []Stream) nft.Table {
	table := b.streamObjects(streams, nil)
	if b.returning {
		b.returningHook()
	} else {
		table.Sets = append(b.flowSets(), table.Sets...)
		b.commonChains()
	}
	table.Chains = append(b.chains, table.Chains...)
	return table
}

// streamObjects returns the part of the table that depends on the streams, without link-layer
// addresses that others have, too.
func (b *builder) streamObjects(streams, others []Stream) nft.Table {
	table := nft.Table{Family: tableFamily[b.family], Name: plan.TableName, Sets: []nft.Set{linksOf(streams, others)}}
	for _, stream := range streams {
		chain := nft.Chain{Name: plan.StreamChain(stream.Name)}
		if b.returning {
			chain.Rules = b.returningRules(stream)
			table.Chains = append(table.Chains, chain)
			continue
		}
		table.Sets = append(table.Sets, linkSet(stream))
		if stream.SCTP {
			table.Chains = append(table.Chains, nft.Chain{Name: sctpPrefix + stream.Name, Rules: b.returningRules(stream)})
		}
		if stream.asksEveryone() {
			chain.Rules = b.everyoneRules(stream)
			table.Chains = append(append(table.Chains, chain), b.peerChains(stream)...)
			continue
		}
		for order := range stream.Asked {
			table.Sets = append(table.Sets, b.askedSet(order, stream))
		}
		chain.Rules = b.streamRules(stream)
		table.Chains = append(table.Chains, chain)
	}
	if b.returning {
		table.Sets = append(table.Sets, b.returningSets(streams)...)
	} else {
		table.Sets = append(append(table.Sets, b.targetSets(streams)...), b.sctpSets(streams)...)
	}
	return table
}

// linkSet returns the map of link-layer addresses to fwmarks of a stream.
func linkSet(stream Stream) nft.Set {
	set := nft.Set{
		Name: linkPrefix + stream.Name, Flags: unix.NFT_SET_MAP, KeyType: nft.TypeEther, KeyLen: 6,
		DataType: nft.TypeMark, DataLen: 4,
	}
	for link, fwmark := range stream.byLink() {
		set.Elements = append(set.Elements, nft.Element{Key: link[:], Data: number(fwmark)})
	}
	return set
}

// linksOf returns the set of link-layer addresses of the targets, except those of other streams.
func linksOf(streams, others []Stream) nft.Set {
	set := nft.Set{Name: linksSet, KeyType: nft.TypeEther, KeyLen: 6}
	links := map[plan.LinkAddress]bool{}
	for _, stream := range streams {
		for _, link := range stream.FWMarks {
			links[link] = true
		}
	}
	delete(links, plan.LinkAddress{}) // unknown
	for _, stream := range others {
		for _, link := range stream.FWMarks {
			delete(links, link)
		}
	}
	for link := range links {
		set.Elements = append(set.Elements, nft.Element{Key: link[:]})
	}
	return set
}

func number(value uint32) []byte { return binary.NativeEndian.AppendUint32(nil, value) }

// words returns the number of registers of an address.
func (b *builder) words() uint32 { return addressSize[b.family] / 4 }

// linkRegister is the register behind a loaded tuple.
func (b *builder) linkRegister() uint32 { return 2*b.words() + 2 }

// flowSets returns the sets of undecided flows, which the packet path fills.
func (b *builder) flowSets() []nft.Set {
	key, length := uint32(0), uint32(0)
	for _, part := range []uint32{addressType[b.family], addressType[b.family], portType, portType} {
		key = key<<nftables.SetConcatTypeBits | part
	}
	length = 4 * b.linkRegister()
	var sets []nft.Set
	for _, name := range []string{undecidedSet, threeWaySet, deniedSets[0], deniedSets[1]} {
		sets = append(sets, nft.Set{Name: name, KeyType: key, KeyLen: length})
	}
	// A link-layer address takes two registers.
	sets = append(sets, nft.Set{
		Name: denierSet, KeyType: key<<nftables.SetConcatTypeBits | nft.TypeEther, KeyLen: length + 8,
	})
	sets = append(sets, nft.Set{
		Name: everyoneMap, Flags: unix.NFT_SET_MAP, KeyType: key, KeyLen: length, DataType: nft.TypeMark, DataLen: 4,
	})
	for i := range sets {
		sets[i].Flags, sets[i].Size = sets[i].Flags|unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL, maxUndecided
		sets[i].Timeout, sets[i].Volatile = memory, true
		if sets[i].Name == denierSet {
			sets[i].Size = maxDenials
		}
	}
	return sets
}

// askedSet returns the map of slots to addresses, whose elements [Apply] writes separately.
func (b *builder) askedSet(order int, stream Stream) nft.Set {
	return nft.Set{
		Name: askedPrefixes[order] + stream.Name, Flags: unix.NFT_SET_MAP, KeyType: nft.TypeMark, KeyLen: 4,
		DataType: addressType[b.family], DataLen: addressSize[b.family], Size: stream.Size, Volatile: true,
	}
}

func (b *builder) chain(chain nft.Chain, rules ...nft.Rule) {
	chain.Rules = rules
	b.chains = append(b.chains, chain)
}

// hook adds a base chain of the prerouting hook.
func (b *builder) hook(name string, priority int32, rules ...nft.Rule) {
	b.chain(nft.Chain{
		Name: name, Type: "filter", Hook: unix.NF_INET_PRE_ROUTING, Priority: priority, Policy: nft.PolicyAccept,
	}, rules...)
}

func (b *builder) rule(comment string, parts ...[]expr.Any) nft.Rule {
	return nft.NewRule(tableFamily[b.family], comment, slices.Concat(parts...)...)
}

func (b *builder) commonChains() {
	reverse, accept := b.tuple(true), verdict(expr.VerdictAccept, "")
	// Before connection tracking: it deletes an entry whose first reply is a RST. Only a target that
	// has no socket of the flow sends a RST without ACK flag (RFC 9293, 3.10.7.1).
	refusal := slices.Concat(tcpFlags(tcpRST|tcpACK, expr.CmpOpEq, tcpRST), link(0), in(0, linksSet), reverse)
	b.hook(refusalsChain, int32(*nftables.ChainPriorityRaw),
		// First: a flow of a stream that asked earlier targets before is in undecidedSet, too, and the first
		// denial of a target that was not asked then would count as the last one.
		b.refusalRule(refusal),
		b.rule(comment+"a target denies an undecided flow", refusal, in(0, undecidedSet),
			verdict(expr.VerdictGoto, deniedChain)))
	twoWay := slices.Concat(reverse, in(0, deniedSets[0]), notIn(0, threeWaySet))
	threeWay := slices.Concat(reverse, in(0, deniedSets[1]))
	counted := slices.Concat([]expr.Any{&expr.Counter{}}, accept)
	deny := func(order int) []expr.Any {
		return slices.Concat(link(b.linkRegister()), update(denierSet), update(deniedSets[order]),
			verdict(expr.VerdictDrop, ""))
	}
	b.chain(nft.Chain{Name: deniedChain},
		b.rule(comment+"the same target again", reverse, link(b.linkRegister()), in(0, denierSet),
			verdict(expr.VerdictDrop, "")),
		b.rule(commentDenied, threeWay, counted),
		b.rule(commentDenied, twoWay, counted),
		b.rule(comment+"the second target", reverse, in(0, deniedSets[0]), deny(1)),
		b.rule(comment+"the first target", reverse, deny(0)),
		// With a full set another target may still have the flow: the client's next packet asks again.
		b.rule(comment+"too many denials", verdict(expr.VerdictDrop, "")),
	)
	// After the table of package fwstate, which has set both marks to the current target.
	undecided := func(op expr.CmpOp) []expr.Any {
		return []expr.Any{
			&expr.Ct{Key: expr.CtKeyMARK, Register: register(0)}, bitwise(0, 0, b.undecided, 0), compare(0, op, number(0)),
		}
	}
	current := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)}, bitwise(0, 0, b.mask, 0), lookupVerdict(0, streamsMap),
	}
	noSYN, undecide := tcpFlags(tcpSYN, expr.CmpOpEq, 0), b.setUndecided(b.undecided)
	b.hook(askChain, int32(*nftables.ChainPriorityMangle)+1,
		b.rule(comment+"undecided flows", undecided(expr.CmpOpNeq), verdict(expr.VerdictGoto, undecidedChain)),
		// Of a flow that this pod knows, connection tracking has seen a reply.
		b.rule(comment+"unknown flows", state(expr.CtStateBitNEW), noSYN, verdict(expr.VerdictGoto, unknownChain)),
		// No entry begins with a FIN or RST. Other invalid packets belong to a flow whose replies take
		// another pod: a refusal of a copy would reach its client there.
		b.rule(comment+"ends of unknown flows", state(expr.CtStateBitINVALID), noSYN,
			tcpFlags(tcpFIN|tcpRST, expr.CmpOpNeq, 0), verdict(expr.VerdictGoto, unknownChain)),
		b.rule(comment+"later packets of SCTP", returning.LaterSCTP(register(0)), b.packetFWMark(0),
			[]expr.Any{lookupVerdict(0, sctpMap)}),
	)
	b.chain(nft.Chain{Name: undecidedChain},
		b.rule(comment+"packets of targets", tcpFlags(tcpRST, expr.CmpOpEq, 0), link(0), in(0, linksSet),
			verdict(expr.VerdictGoto, answersChain)),
		b.rule(comment+"by the current target", noSYN, current),
	)
	b.chain(nft.Chain{Name: unknownChain},
		// A target begins the entry: gateways moved a flow whose client only waits, or the client's packet
		// was invalid. Without the bit, the client's next packet would belong to a known flow.
		b.rule(comment+"the flow is undecided", link(0), in(0, linksSet), undecide),
		b.rule(comment+"by the current target", current),
	)
	decide := verdict(expr.VerdictGoto, decideChain)
	b.chain(nft.Chain{Name: answersChain},
		b.rule(comment+"data or the end", tcpFlags(tcpPSH|tcpFIN, expr.CmpOpNeq, 0), decide),
		// A socket that an earlier flow of the same ports left answers with a bare ACK, too (RFC 5961).
		b.rule(comment+"by the current target", b.connectionFWMark(), []expr.Any{lookupVerdict(0, restMap)}),
		b.rule(comment+"denied by the rest", threeWay, decide),
		b.rule(comment+"denied by the rest", twoWay, decide),
	)
	b.chain(nft.Chain{Name: decideChain},
		b.rule(commentCurrent, b.connectionFWMark(), link(1), in(0, ownSet), b.setUndecided(0), counted),
		b.rule(comment+"by the current target", b.connectionFWMark(), []expr.Any{lookupVerdict(0, streamsMap)}))
}

// setUndecided sets the undecided bit of the connection mark to b.undecided or 0. Other processes
// may use the bits outside the mask.
func (b *builder) setUndecided(to uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: register(0)}, bitwise(0, 0, ^b.undecided, to),
		&expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: register(0)},
	}
}

// streamRules returns the rules for answers of a stream's targets, and for packets of its clients,
// whose link-layer addresses the first rule does not find.
func (b *builder) streamRules(stream Stream) []nft.Rule {
	tuple, count := b.tuple(false), []expr.Any{&expr.Counter{}}
	dup := []expr.Any{&expr.Counter{}, &expr.Dup{RegAddr: register(b.slotAddress())}}
	return []nft.Rule{
		b.decidedRule(stream),
		// A full set ends the rule before the copy: the current target's RST then reaches the client.
		b.rule(commentAsked, b.slotLookup(stream, 0), tuple, update(undecidedSet), dup),
		b.rule(commentAsked, b.slotLookup(stream, 1), tuple, in(0, undecidedSet), update(threeWaySet), dup),
		b.rule(commentFull, b.slotLookup(stream, 0), tuple, notIn(0, undecidedSet), count),
		// The last rule: a packet that connection tracking calls invalid has no entry and ends it.
		b.rule(comment+"the flow is undecided", tuple, in(0, undecidedSet), b.setUndecided(b.undecided)),
	}
}

// decidedRule returns the rule for the answer of another target than the current one.
func (b *builder) decidedRule(stream Stream) nft.Rule {
	return b.rule(commentDecided, link(0), lookupData(0, linkPrefix+stream.Name, 2), []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: register(2)}, &expr.Counter{},
	}, verdict(expr.VerdictAccept, ""))
}

func register(i uint32) uint32 { return fwstate.Register(i) }

// tuple loads addresses and ports in the client's direction; reverse for a packet of a target.
func (b *builder) tuple(reverse bool) []expr.Any {
	addresses, ports := [2]uint32{sourceAt[b.family], destAt[b.family]}, [2]uint32{0, 2}
	if reverse {
		slices.Reverse(addresses[:])
		slices.Reverse(ports[:])
	}
	network, transport := expr.PayloadBaseNetworkHeader, expr.PayloadBaseTransportHeader
	return []expr.Any{
		load(network, addresses[0], addressSize[b.family], 0),
		load(network, addresses[1], addressSize[b.family], b.words()),
		load(transport, ports[0], 2, 2*b.words()), load(transport, ports[1], 2, 2*b.words()+1),
	}
}

// state compares the state of connection tracking.
func state(bit uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: register(0)}, bitwise(0, 0, bit, 0), compare(0, expr.CmpOpNeq, number(0)),
	}
}

func load(base expr.PayloadBase, offset, length, to uint32) expr.Any {
	return &expr.Payload{Base: base, Offset: offset, Len: length, DestRegister: register(to)}
}

// link loads the link-layer address of the sender.
func link(to uint32) []expr.Any { return []expr.Any{load(expr.PayloadBaseLLHeader, 6, 6, to)} }

func bitwise(from, to, mask, xor uint32) expr.Any {
	return &expr.Bitwise{
		SourceRegister: register(from), DestRegister: register(to), Len: 4, Mask: number(mask), Xor: number(xor),
	}
}

func compare(with uint32, op expr.CmpOp, data []byte) expr.Any {
	return &expr.Cmp{Op: op, Register: register(with), Data: data}
}

// tcpFlags compares some flags of a TCP packet.
func tcpFlags(flags byte, op expr.CmpOp, want byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register(0)},
		compare(0, expr.CmpOpEq, []byte{unix.IPPROTO_TCP}),
		load(expr.PayloadBaseTransportHeader, flagsAt, 1, 0),
		&expr.Bitwise{
			SourceRegister: register(0), DestRegister: register(0), Len: 1, Mask: []byte{flags}, Xor: []byte{0},
		},
		compare(0, op, []byte{want}),
	}
}

func in(key uint32, set string) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: register(key), SetName: set}}
}

func notIn(key uint32, set string) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: register(key), SetName: set, Invert: true}}
}

func lookupVerdict(key uint32, set string) expr.Any {
	return &expr.Lookup{
		SourceRegister: register(key), SetName: set, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true,
	}
}

// update adds the loaded key to a set, or prolongs it.
func update(set string) []expr.Any {
	return []expr.Any{&expr.Dynset{SrcRegKey: register(0), SetName: set, Operation: unix.NFT_DYNSET_OP_UPDATE}}
}

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind, Chain: chain}}
}
