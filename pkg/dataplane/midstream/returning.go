package midstream

import (
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/returning"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Without connection tracking the current target returns a packet of a flow that it does not know
// (package returning), and each further one until a target has the flow. Nothing is remembered.
// SCTP is always returned: connection tracking has no entry for an association that began elsewhere.

const (
	nextPrefix = "next/" // the link-layer address of a target to the address of the next one
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
	const anyStep = returning.Bits &^ returning.Steps
	first := mark(returning.Ask)
	if stream.asksEveryone() {
		// The current target may change while others have the packet: all are asked after it, in an order
		// that does not depend on it.
		const asked = returning.Ask + returning.AskStep
		if ring := stream.ring(); len(ring) > 0 {
			rules = append(rules, b.rule(commentAsked, returned(returning.Bits, 0), mark(asked),
				immediate(addressRegister, stream.Everyone[ring[0]].AsSlice()), send(addressRegister)))
		}
		rules = append(rules, b.rule(commentAsked, returned(returning.Bits, returning.AskStep), link(0),
			lookupData(0, nextPrefix+stream.Name, addressRegister), mark(asked), send(addressRegister)))
	} else {
		for order := range copies {
			step, asked := uint16(order)*returning.AskStep, b.slotLookup(stream, order)
			rules = append(rules, b.rule(commentAsked, returned(returning.Bits, step), asked,
				mark(returning.Ask+step+returning.AskStep), send(b.slotAddress())))
		}
		first = append(b.slotLookup(stream, 0), first...)
	}
	return append(rules,
		b.rule(commentDenied, returned(anyStep, 0), mark(0), []expr.Any{&expr.Counter{}}, verdict(expr.VerdictAccept, "")),
		b.rule(comment+"the target may return it", first))
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

// ring returns the fwmarks of the targets with known link-layer addresses in the order in which they
// are asked.
func (stream *Stream) ring() []uint32 { return slices.Sorted(maps.Values(stream.byLink())) }

// next returns the map of a stream from the link-layer address of each target but the last to the
// address of the next one.
func (b *builder) next(stream Stream) nft.Set {
	next := nft.Set{
		Name: nextPrefix + stream.Name, Flags: unix.NFT_SET_MAP, KeyType: nft.TypeEther, KeyLen: 6,
		DataType: addressType[b.family], DataLen: addressSize[b.family],
	}
	ring := stream.ring()
	for i := range len(ring) - 1 {
		link := stream.FWMarks[ring[i]]
		next.Elements = append(next.Elements, nft.Element{Key: link[:], Data: stream.Everyone[ring[i+1]].AsSlice()})
	}
	return next
}

// returningSets returns the sets with elements of targets, except linksSet.
func (b *builder) returningSets(streams []Stream) []nft.Set {
	sets := append(b.targetSets(streams)[:1], b.ringSets(streams)...)
	for _, stream := range streams {
		for order := range copies {
			if !stream.asksEveryone() {
				sets = append(sets, b.askedSet(order, stream))
			}
		}
	}
	return sets
}

// ringSets returns the sets of streams of which all targets are asked.
func (b *builder) ringSets(streams []Stream) (sets []nft.Set) {
	for _, stream := range streams {
		if stream.asksEveryone() {
			sets = append(sets, b.next(stream))
		}
	}
	return sets
}

// sctpSets returns the sets of streams with SCTP besides those of TCP.
func (b *builder) sctpSets(streams []Stream) []nft.Set {
	streams = slices.DeleteFunc(slices.Clone(streams), func(stream Stream) bool { return !stream.SCTP })
	return append(b.ringSets(streams), byFWMark(sctpMap, sctpPrefix, streams))
}
