package midstream

import (
	"hash/fnv"
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
)

// MaxEveryone is the maximum number of targets of a stream that are all asked about a flow.
const MaxEveryone = 16

const (
	// askRate and askBurst limit the packets per second that are copied to all targets of a stream. A
	// flood must not multiply; a flow whose packet is not copied asks with its next packet.
	askRate, askBurst = 2_000, 20_000
)

// Names of chains and maps for streams of which all targets are asked. The chains have the stream's
// name as suffix.
const (
	denierEveryoneChain = "denied-everyone"
	askPrefix           = "ask/"
	deniedPrefix        = "denied/"
	restPrefix          = "rest/"
	everyoneMap         = "everyone" // an undecided flow to the ID of its stream
	denialsMap          = "denials"  // IDs of streams to chains with deniedPrefix
	restMap             = "rest"     // fwmarks to chains with restPrefix
	ownSet              = "own"      // fwmarks with the link-layer address of the target itself
	commentCurrent      = comment + "the current target has the flow"
	commentOverAskRate  = comment + "too many packets of undecided flows"
)

// asksEveryone reports whether all targets are asked, instead of earlier ones of a slot.
func (stream *Stream) asksEveryone() bool { return len(stream.Everyone) > 0 }

// id identifies the stream in everyoneMap. A fwmark cannot: its target may leave while the flow is
// undecided, and an update prolongs an element but keeps its value. Of two streams with equal IDs
// (500 streams: 3 in 100 000) the second one's dead flows end by a timeout.
func (stream *Stream) id() uint32 {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(stream.Name)) // never fails
	return hash.Sum32()
}

// targetSets returns the sets with elements of targets, except linksSet and linkPrefix.
func (b *builder) targetSets(streams []Stream) []nft.Set {
	own := nft.Set{
		Name: ownSet, KeyType: nft.TypeMark<<nftables.SetConcatTypeBits | nft.TypeEther, KeyLen: 12,
	}
	var everyone []Stream
	for _, stream := range streams {
		for link, fwmark := range stream.byLink() {
			own.Elements = append(own.Elements, nft.Element{Key: pair(fwmark, link)})
		}
		if stream.asksEveryone() {
			everyone = append(everyone, stream)
		}
	}
	denials, ids := verdictMap(denialsMap), map[uint32]bool{}
	for _, stream := range everyone {
		if id := stream.id(); !ids[id] {
			ids[id] = true
			denials.Elements = append(denials.Elements, nft.Element{Key: number(id), Chain: deniedPrefix + stream.Name})
		}
	}
	return []nft.Set{
		byFWMark(streamsMap, plan.StreamChain(""), streams), denials, byFWMark(restMap, restPrefix, everyone), own,
	}
}

func verdictMap(name string) nft.Set {
	return nft.Set{Name: name, Flags: unix.NFT_SET_MAP, KeyType: nft.TypeMark, KeyLen: 4, DataType: nft.TypeVerdict}
}

// byFWMark returns the map of the fwmarks of streams to their chains with a prefix.
func byFWMark(name, prefix string, streams []Stream) nft.Set {
	set := verdictMap(name)
	for _, stream := range streams {
		for fwmark := range stream.FWMarks {
			set.Elements = append(set.Elements, nft.Element{Key: number(fwmark), Chain: prefix + stream.Name})
		}
	}
	return set
}

// pair returns the key of a fwmark and a link-layer address.
func pair(fwmark uint32, link plan.LinkAddress) []byte {
	return append(append(number(fwmark), link[:]...), 0, 0)
}

// byLink returns the targets by link-layer address. Of two targets behind one address an answer
// could not tell which one has the flow: the first one counts.
func (stream *Stream) byLink() map[plan.LinkAddress]uint32 {
	known := map[plan.LinkAddress]uint32{}
	for _, fwmark := range slices.Sorted(maps.Keys(stream.FWMarks)) {
		link := stream.FWMarks[fwmark]
		if _, taken := known[link]; !taken && link != (plan.LinkAddress{}) {
			known[link] = fwmark
		}
	}
	return known
}

// scratch is the register behind a tuple with a link-layer address.
func (b *builder) scratch() uint32 { return b.linkRegister() + 2 }

// stored loads the ID of the stream of the tuple's flow.
func (b *builder) stored() []expr.Any { return lookupData(0, everyoneMap, b.scratch()) }

func lookupData(key uint32, set string, to uint32) []expr.Any {
	return []expr.Any{&expr.Lookup{
		SourceRegister: register(key), SetName: set, DestRegister: register(to), IsDestRegSet: true,
	}}
}

func immediate(to uint32, data []byte) []expr.Any {
	return []expr.Any{&expr.Immediate{Register: register(to), Data: data}}
}

// connectionFWMark loads the fwmark of the connection mark.
func (b *builder) connectionFWMark() []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: register(0)}, bitwise(0, 0, b.mask, 0)}
}

func (b *builder) packetFWMark(to uint32) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: register(to)}, bitwise(to, to, b.mask, 0)}
}

// setPacketMark sets the packet mark from a register.
func setPacketMark(from uint32) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: register(from)}}
}

// unmark restores the packet mark that denierEveryoneChain had set.
func unmark() []expr.Any { return append(immediate(0, number(0)), setPacketMark(0)...) }

// refusalRule returns the rule for RSTs of flows about which all targets are asked, and adds the
// chain that finds the stream. The packet mark holds the looked-up ID: nft cannot list a lookup of a
// looked-up value.
func (b *builder) refusalRule(refusal []expr.Any) nft.Rule {
	b.chain(nft.Chain{Name: denierEveryoneChain},
		b.rule(comment+"by the stream", []expr.Any{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)}, lookupVerdict(0, denialsMap),
		}),
		// The stream asks earlier targets now. A denial of a target that it does not ask must not count.
		b.rule(comment+"all targets were asked before", verdict(expr.VerdictDrop, "")),
	)
	return b.rule(comment+"one of all targets denies an undecided flow", refusal, b.stored(), setPacketMark(b.scratch()),
		verdict(expr.VerdictGoto, denierEveryoneChain))
}

// everyoneRules returns the rules of the chain of a stream of which all targets are asked.
func (b *builder) everyoneRules(stream Stream) []nft.Rule {
	tuple, scratch, count := b.tuple(false), b.scratch(), []expr.Any{&expr.Counter{}}
	return []nft.Rule{
		b.decidedRule(stream),
		b.rule(comment+"the flow is undecided", tuple, immediate(scratch, number(stream.id())), []expr.Any{&expr.Dynset{
			SrcRegKey: register(0), SrcRegData: register(scratch), SetName: everyoneMap, Operation: unix.NFT_DYNSET_OP_UPDATE,
		}}),
		b.rule(comment+"within the rate", tuple, b.stored(), []expr.Any{&expr.Limit{
			Type: expr.LimitTypePkts, Rate: askRate, Unit: expr.LimitTimeSecond, Burst: askBurst,
		}}, verdict(expr.VerdictGoto, askPrefix+stream.Name)),
		b.rule(commentOverAskRate, tuple, b.stored(), count, b.setUndecided(b.undecided)),
		b.rule(comment+"over the rate", tuple, b.stored(), verdict(expr.VerdictAccept, "")),
		b.rule(commentFull, count),
	}
}

// peerChains returns the chains with a rule for each target of a stream.
func (b *builder) peerChains(stream Stream) []nft.Chain {
	reverse, senderLink, deniers := b.tuple(true), link(0), link(b.linkRegister())
	accept, drop := verdict(expr.VerdictAccept, ""), verdict(expr.VerdictDrop, "")
	ask := nft.Chain{Name: askPrefix + stream.Name}
	for _, fwmark := range slices.Sorted(maps.Keys(stream.Everyone)) {
		ask.Rules = append(ask.Rules, b.rule(commentAsked, b.packetFWMark(0),
			[]expr.Any{compare(0, expr.CmpOpNeq, number(fwmark))}, immediate(0, stream.Everyone[fwmark].AsSlice()),
			[]expr.Any{&expr.Counter{}, &expr.Dup{RegAddr: register(0)}}))
	}
	// The last rule: a packet that connection tracking calls invalid has no entry and ends it.
	ask.Rules = append(ask.Rules, b.rule(comment+"the flow is undecided", b.setUndecided(b.undecided)))

	denied := nft.Chain{Name: deniedPrefix + stream.Name, Rules: []nft.Rule{
		b.rule(comment+"the same target again", reverse, deniers, in(0, denierSet), drop),
		b.rule(comment+"a target denies", reverse, deniers, update(denierSet)),
		// With a full set another target may still have the flow: the client's next packet asks again.
		b.rule(comment+"too many denials", reverse, deniers, notIn(0, denierSet), drop),
	}}
	rest := nft.Chain{Name: restPrefix + stream.Name}
	known := stream.byLink()
	byAddress := func(a, b plan.LinkAddress) int { return slices.Compare(a[:], b[:]) }
	for _, peer := range slices.SortedFunc(maps.Keys(known), byAddress) {
		without := slices.Concat(reverse, immediate(b.linkRegister(), peer[:]), notIn(0, denierSet))
		denied.Rules = append(denied.Rules, b.rule(comment+"a target has not denied", without, drop))
		rest.Rules = append(rest.Rules, b.rule(comment+"a target has not denied", senderLink,
			[]expr.Any{compare(0, expr.CmpOpNeq, peer[:])}, without, accept))
	}
	denied.Rules = append(denied.Rules, b.rule(commentDenied, []expr.Any{&expr.Counter{}}, unmark(), accept))
	rest.Rules = append(rest.Rules, b.rule(comment+"denied by the rest", verdict(expr.VerdictGoto, decideChain)))
	return []nft.Chain{ask, denied, rest}
}
