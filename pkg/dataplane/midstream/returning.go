package midstream

import (
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/returning"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Without connection tracking the current target returns a packet of a flow that it does not know
// (package returning), and each further one until a target has the flow. Nothing is remembered.
// SCTP is always returned: connection tracking has no entry for an association that began elsewhere.

const (
	nextPrefix = "next/" // the link-layer address of a target to the address of the next one
	lastPrefix = "last/" // the link-layer address of the target that is asked last
	sctpMap    = "sctp"  // fwmarks to chains with sctpPrefix
	sctpPrefix = "sctp/"
)

// returningHook adds the base chain. The table of package fwstate has set the packet mark to the
// current target.
func (b *builder) returningHook() {
	var rules []nft.Rule
	for _, later := range returning.Later(register(0)) {
		rules = append(rules, b.rule(comment+"by the current target", later, b.packetFWMark(0),
			[]expr.Any{lookupVerdict(0, streamsMap)}))
	}
	b.hook(askChain, int32(*nftables.ChainPriorityMangle)+1, rules...)
}

func (b *builder) returningRules(stream Stream) (rules []nft.Rule) {
	// Only packets of targets are returned ones: a client can send these code points, too.
	returned := func(bits, step uint16) []expr.Any {
		return slices.Concat(returning.Has(b.family, bits, returning.Ask|returning.Back|step, register(0)),
			link(0), in(0, linksSet))
	}
	mark := func(point uint16) []expr.Any { return returning.Set(b.family, returning.Bits, point, register(0)) }
	send := func(address uint32) []expr.Any {
		return []expr.Any{
			&expr.Counter{}, &expr.Dup{RegAddr: register(address)}, &expr.Verdict{Kind: expr.VerdictDrop},
		}
	}
	const (
		anyStep = returning.Bits &^ returning.Steps
		// ringStep is the step of all targets, in both directions of a change of what is asked.
		ringStep = 3 * returning.AskStep
	)
	denied := func(returned, last []expr.Any) nft.Rule {
		return b.rule(commentDenied, returned, last, mark(0), []expr.Any{&expr.Counter{}}, verdict(expr.VerdictAccept, ""))
	}
	first := mark(returning.Ask)
	if stream.asksEveryone() {
		// The current target may change meanwhile: all are asked after it, in an order of their own.
		ask := func(returned, after []expr.Any) nft.Rule {
			return b.rule(commentAsked, returned, after, lookupData(0, nextPrefix+stream.Name, addressRegister),
				mark(returning.Ask+ringStep), send(addressRegister))
		}
		start := plan.LinkAddress{}
		rules = append(rules, ask(returned(returning.Bits, ringStep), link(0)),
			denied(returned(returning.Bits, ringStep), slices.Concat(link(0), in(0, lastPrefix+stream.Name))),
			// The others, of a target that has left or of slots, begin again.
			ask(returned(returning.Bits, 0), immediate(0, append(start[:], 0, 0))))
	} else {
		ask := func(step uint16, order int, next uint16) nft.Rule {
			return b.rule(commentAsked, returned(returning.Bits, step), b.slotLookup(stream, order),
				mark(returning.Ask+next), send(b.slotAddress()))
		}
		const one, two = returning.AskStep, 2 * returning.AskStep
		rules = append(rules, ask(0, 0, one), ask(ringStep, 0, one), ask(one, 1, two),
			// The list has become shorter, and its first target may have been the second.
			ask(one, 0, two), denied(returned(anyStep, 0), nil))
		first = append(b.slotLookup(stream, 0), first...)
	}
	return append(rules, b.rule(comment+"the target may return it", first))
}

// addressRegister is where the next target's address is loaded, aligned for IPv6.
const addressRegister = 4

// slotAddress is the register of the address of the slot's earlier target.
func (b *builder) slotAddress() uint32 {
	if b.family == vip.IPv4 {
		return 8
	}
	return b.linkRegister() + 2 // a multiple of 4
}

// slotLookup loads the address of an earlier target of the packet's slot.
func (b *builder) slotLookup(stream Stream, order int) []expr.Any {
	address := b.slotAddress()
	return slices.Concat(fwstate.LoadFlow(b.family, true), []expr.Any{&expr.Hash{
		SourceRegister: register(0), DestRegister: register(address - 1), Length: fwstate.FlowLength(b.family),
		Modulus: stream.Size, Seed: stream.Seed, Type: expr.HashTypeJenkins,
	}}, lookupData(address-1, askedPrefixes[order]+stream.Name, address))
}

// ring returns the fwmarks of the targets with known link-layer addresses in the order of asking.
func (stream *Stream) ring() []uint32 { return slices.Sorted(maps.Values(stream.byLink())) }

// ringSets returns the map of a stream from each target but the last to the next one, where zero
// leads to the first, and the set with the last.
func (b *builder) ringSets(stream Stream) []nft.Set {
	next := nft.Set{
		Name: nextPrefix + stream.Name, Flags: unix.NFT_SET_MAP, KeyType: nft.TypeEther, KeyLen: 6,
		DataType: addressType[b.family], DataLen: addressSize[b.family],
	}
	var link plan.LinkAddress
	for _, fwmark := range stream.ring() {
		to := nft.Element{Key: slices.Clone(link[:]), Data: stream.Everyone[fwmark].AsSlice()}
		next.Elements, link = append(next.Elements, to), stream.FWMarks[fwmark]
	}
	last := nft.Set{Name: lastPrefix + stream.Name, KeyType: nft.TypeEther, KeyLen: 6}
	if len(next.Elements) > 0 {
		last.Elements = []nft.Element{{Key: link[:]}}
	}
	return []nft.Set{next, last}
}

// returningSets returns the sets with elements of targets, except linksSet.
func (b *builder) returningSets(streams []Stream) []nft.Set {
	sets := b.targetSets(streams)[:1]
	for _, stream := range streams {
		if stream.asksEveryone() {
			sets = append(sets, b.ringSets(stream)...)
			continue
		}
		for order := range copies {
			sets = append(sets, b.askedSet(order, stream))
		}
	}
	return sets
}

// sctpSets returns the sets of streams with SCTP besides those of TCP.
func (b *builder) sctpSets(streams []Stream) []nft.Set {
	streams = slices.DeleteFunc(slices.Clone(streams), func(stream Stream) bool { return !stream.SCTP })
	sets := []nft.Set{byFWMark(sctpMap, sctpPrefix, streams)}
	for _, stream := range streams {
		if stream.asksEveryone() {
			sets = append(sets, b.ringSets(stream)...)
		}
	}
	return sets
}
