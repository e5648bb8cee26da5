package replypath

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/returning"
	"github.com/vipgate/vipgate/pkg/vip"
)

// tableName is the name of the nftables table in each of tableFamilies.
const tableName = "vipgate-target"

// tableFamilies are the nftables families in the order of installation.
var tableFamilies = [...]uint8{
	unix.NFPROTO_ARP, unix.NFPROTO_NETDEV, unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6,
}

// netdev and inet are the tables without their content.
var (
	netdev = nft.Table{Family: unix.NFPROTO_NETDEV, Name: tableName}
	inet   = nft.Table{Family: unix.NFPROTO_INET, Name: tableName}
)

// Names of sets and maps.
const (
	peersMap = "peers" // fwmark to link-layer address; the kernel adds each sender
	deadSet  = "dead"  // fwmarks of dead peers, and 0 of flows without a peer
	liveMap  = "live"  // random number ranges to fwmarks, for flows that the application opens
)

const (
	// maxPeers is the size of the peers map.
	maxPeers = 1024
	// shares is the range of random numbers that the live map divides equally among peers.
	shares = 1 << 16
	// peerTimeout is the time after which a silent peer is forgotten.
	peerTimeout = 24 * time.Hour
	// neighborTimeout is the lifetime of a neighbor that never sent a packet to the pool. It is
	// shorter than the remaining lifetime of every peer that sent a packet in the last 23 hours.
	neighborTimeout = time.Hour
	// hashSeed and hashModulus yield fwmarks from 1 to 0x7fffffff.
	hashSeed    = 0x7667
	hashModulus = 0x7fffffff
)

// fwmark returns the connection mark of flows whose packets arrive from a link-layer address.
func fwmark(mac net.HardwareAddr) uint32 { return 1 + nft.Hash(mac, hashSeed, hashModulus) }

// placeholderMAC is the destination link-layer address of replies until the egress chain rewrites
// it. It is a locally administered address without a host.
func placeholderMAC() net.HardwareAddr { return net.HardwareAddr{0x02, 0x76, 0x67, 0, 0, 1} }

// placeholder returns the next hop of replies. Its neighbor entry has placeholderMAC.
func placeholder(family vip.Family) netip.Addr {
	if family == vip.IPv6 {
		return netip.MustParseAddr("fe80::7667:1")
	}
	return netip.MustParseAddr("169.254.76.67")
}

// arpOutput is NF_ARP_OUT.
const arpOutput = 1

// poolSet returns the set of the pool's prefixes of a family.
func poolSet(family vip.Family) nft.Set {
	return nft.AddressSet([...]string{"pool4", "pool6"}[family], family, unix.NFT_SET_INTERVAL)
}

// peersSet returns the map that the kernel fills; elements are restored into a new one.
func peersSet(elements []nft.Element) nft.Set {
	return nft.Set{
		Name: peersMap, Flags: unix.NFT_SET_MAP | unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT,
		KeyType: nft.TypeMark, KeyLen: 4, DataType: nft.TypeEther, DataLen: 6, Size: maxPeers, Timeout: peerTimeout,
		Volatile: true, Elements: elements,
	}
}

// disjoint returns the prefixes of a family that are not contained in a wider prefix.
func disjoint(prefixes []netip.Prefix, family vip.Family) (list []netip.Prefix) {
	for _, prefix := range prefixes {
		prefix = prefix.Masked()
		contained := slices.ContainsFunc(prefixes, func(wider netip.Prefix) bool {
			return wider.Bits() < prefix.Bits() && wider.Contains(prefix.Addr())
		})
		if vip.FamilyOf(prefix.Addr()) == family && !slices.Contains(list, prefix) && !contained {
			list = append(list, prefix)
		}
	}
	return list
}

type rule []expr.Any

// The 16-byte registers that rules use.
const reg1, reg2, reg3 = unix.NFT_REG_1, unix.NFT_REG_2, unix.NFT_REG_3

func native(number uint32) []byte { return binary.NativeEndian.AppendUint32(nil, number) }

func equal(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: data} }

func load(base expr.PayloadBase, offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: reg1, Base: base, Offset: offset, Len: length}
}

// onInterface matches the interface name in a meta key.
func onInterface(key expr.MetaKey, name string) rule {
	// The register holds the whole name, padded with zeros.
	padded := make([]byte, unix.IFNAMSIZ)
	copy(padded, name)
	return rule{&expr.Meta{Key: key, Register: reg1}, equal(padded)}
}

// inPool matches a source or destination address in the pool.
func inPool(family vip.Family, source bool) rule {
	// Offsets of RFC 791 and RFC 8200.
	offset, length := uint32(16), uint32(4)
	if family == vip.IPv6 {
		offset, length = 24, 16
	}
	if source {
		offset -= length
	}
	return rule{
		load(expr.PayloadBaseNetworkHeader, offset, length),
		&expr.Lookup{SourceRegister: reg1, SetName: poolSet(family).Name},
	}
}

// networkFamily matches the family of a packet in an inet table.
func networkFamily(family vip.Family) rule {
	proto := byte(unix.NFPROTO_IPV4)
	if family == vip.IPv6 {
		proto = unix.NFPROTO_IPV6
	}
	return rule{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1}, equal([]byte{proto})}
}

// etherType matches the family of a frame in a netdev table.
func etherType(family vip.Family) rule {
	kind := uint16(unix.ETH_P_IP)
	if family == vip.IPv6 {
		kind = unix.ETH_P_IPV6
	}
	return rule{&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: reg1}, equal(binary.BigEndian.AppendUint16(nil, kind))}
}

// markOfSender loads the sender's link-layer address into reg1 and its fwmark into reg2.
func markOfSender() rule {
	return rule{
		load(expr.PayloadBaseLLHeader, 6, 6),
		// The offset excludes 0, the mark of flows without a peer.
		&expr.Hash{
			SourceRegister: reg1, DestRegister: reg2, Length: 6, Modulus: hashModulus, Seed: hashSeed, Offset: 1,
			Type: expr.HashTypeJenkins,
		},
	}
}

// acceptRule sets the connection mark from the sender of a packet to the pool. It ignores ICMP
// errors, because they may arrive through a different trench pod than the packets of the flow.
func acceptRule(family vip.Family, link string) rule {
	rule := slices.Concat(onInterface(expr.MetaKeyIIFNAME, link), networkFamily(family), inPool(family, false), rule{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: native(expr.CtStateBitRELATED), Xor: native(0)},
		equal(native(0)),
	})
	return append(append(rule, markOfSender()...), &expr.Ct{Key: expr.CtKeyMARK, Register: reg2, SourceRegister: true})
}

// establishedSYNRule keeps the mark of an established TCP flow on a SYN. Any host on the link can
// forge a SYN without the flow's sequence numbers, and the challenge ACK (RFC 5961) would disclose
// them. Connection tracking classifies all other segments outside the window as invalid. A flow is
// assured after its handshake; before, the mark follows retransmitted SYNs.
func establishedSYNRule(link string) rule {
	const (
		flagsOffset, flagSYN = 13, 0x02       // RFC 9293
		assured              = uint32(1 << 2) // IPS_ASSURED
	)
	return slices.Concat(onInterface(expr.MetaKeyIIFNAME, link), rule{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1}, equal([]byte{unix.IPPROTO_TCP}),
		load(expr.PayloadBaseTransportHeader, flagsOffset, 1),
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 1, Mask: []byte{flagSYN}, Xor: []byte{0}},
		equal([]byte{flagSYN}),
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: native(assured), Xor: native(0)},
		equal(native(assured)),
		&expr.Verdict{Kind: expr.VerdictReturn},
	})
}

// liveRule assigns a live peer to a flow that the application opens, which has no mark, and to a
// flow of a dead peer: a client that waits for an answer sends nothing that would move its flow.
func liveRule(family vip.Family, link string) rule {
	return slices.Concat(onInterface(expr.MetaKeyOIFNAME, link), networkFamily(family), inPool(family, true), rule{
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1},
		&expr.Lookup{SourceRegister: reg1, SetName: deadSet},
		&expr.Numgen{Register: reg1, Modulus: shares, Type: unix.NFT_NG_RANDOM},
		// nftables compares intervals in network byte order.
		&expr.Byteorder{SourceRegister: reg1, DestRegister: reg1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Lookup{SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: liveMap},
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1, SourceRegister: true},
	})
}

// replyRule copies the connection mark to the fwmark of a packet from the pool.
func replyRule(family vip.Family, link string) rule {
	return slices.Concat(onInterface(expr.MetaKeyOIFNAME, link), networkFamily(family), inPool(family, true), rule{
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1, SourceRegister: true},
	})
}

// learnRules add the sender of a packet to the pool to the peers map. If it is restricted they drop
// the packet of a sender that is not in it, before the packet sets the mark of a flow.
func learnRules(family vip.Family, restricted bool) []rule {
	toPool := slices.Concat(etherType(family), inPool(family, false))
	learn := slices.Concat(toPool, markOfSender())
	update := &expr.Dynset{
		SrcRegKey: reg2, SrcRegData: reg1, SetName: peersMap, Operation: unix.NFT_DYNSET_OP_UPDATE,
	}
	if !restricted {
		return []rule{append(learn, update)}
	}
	return []rule{
		append(learn,
			&expr.Lookup{SourceRegister: reg2, DestRegister: reg3, IsDestRegSet: true, SetName: peersMap},
			update, &expr.Verdict{Kind: expr.VerdictAccept}),
		append(toPool, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}),
	}
}

// egressRules returns the rules that replace placeholderMAC with the peer's link-layer address,
// and drop frames of unknown peers.
func egressRules() []rule {
	toPlaceholder := rule{load(expr.PayloadBaseLLHeader, 0, 6), equal(placeholderMAC())}
	return []rule{
		slices.Concat(toPlaceholder, rule{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1},
			&expr.Lookup{SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: peersMap},
			&expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg1, Base: expr.PayloadBaseLLHeader, Len: 6},
		}),
		slices.Concat(toPlaceholder, rule{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}),
	}
}

// returnRules return a packet of a flow that connection tracking does not know to the sender's
// link-layer address, if the trench pod asks for it (package returning).
func returnRules(family vip.Family, link string, index int) (rules []rule) {
	const unknown = expr.CtStateBitNEW | expr.CtStateBitINVALID
	for _, later := range returning.Later(reg1) {
		// Most packets are not marked, and end the rule first.
		rules = append(rules, slices.Concat(returning.Has(family, returning.Bits&^returning.Steps, returning.Ask, reg1),
			later, rule{
				&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
				&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: native(unknown), Xor: native(0)},
				&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: native(0)},
			}, onInterface(expr.MetaKeyIIFNAME, link), inPool(family, false), markOfSender(), rule{
				// The egress chain replaces the placeholder by the address with this mark.
				&expr.Meta{Key: expr.MetaKeyMARK, Register: reg2, SourceRegister: true},
			}, returning.Set(family, returning.Back, returning.Back, reg1), rule{
				&expr.Immediate{Register: reg1, Data: placeholder(family).AsSlice()},
				&expr.Immediate{Register: reg2, Data: native(uint32(index))},
				&expr.Dup{RegAddr: reg1, RegDev: reg2, IsRegDevSet: true},
				&expr.Verdict{Kind: expr.VerdictDrop},
			}))
	}
	return rules
}

// silenceRule drops ARP packets whose sender address is in the pool, for IPv4 over Ethernet (RFC
// 826): both replies, and the kernel's requests for the placeholder if its entry is missing.
func silenceRule() rule {
	return rule{
		load(expr.PayloadBaseNetworkHeader, 4, 2), equal([]byte{6, 4}),
		load(expr.PayloadBaseNetworkHeader, 14, 4), &expr.Lookup{SourceRegister: reg1, SetName: poolSet(vip.IPv4).Name},
		&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop},
	}
}

// desired is the content of the nftables tables.
type desired struct {
	pool       []netip.Prefix
	link       string
	index      int      // of the link
	live       []uint32 // fwmarks
	dead       []uint32
	peers      map[uint32]learned
	restricted bool // to these peers
}

func (desired desired) pools(families ...vip.Family) (sets []nft.Set) {
	for _, family := range families {
		set := poolSet(family)
		for _, prefix := range disjoint(desired.pool, family) {
			set.Elements = append(set.Elements, nft.RangeOf(prefix).Elements()...)
		}
		sets = append(sets, set)
	}
	return sets
}

// chain returns a base chain of a table.
func chain(family byte, base nft.Chain, rules ...rule) nft.Chain {
	base.Type, base.Policy = "filter", nft.PolicyAccept
	for _, r := range rules {
		base.Rules = append(base.Rules, nft.NewRule(family, "", r...))
	}
	return base
}

func (desired desired) tables() []nft.Table {
	arp, netdev, inet := nft.Table{Family: unix.NFPROTO_ARP, Name: tableName}, netdev, inet
	both, mangle := vip.Families[:], int32(-150)

	arp.Sets = desired.pools(vip.IPv4)
	arp.Chains = []nft.Chain{chain(arp.Family, nft.Chain{Name: "output", Hook: arpOutput}, silenceRule())}

	// A new peers map gets the peers that the last one had, so that a repair keeps their flows.
	var known []nft.Element
	for fwmark, peer := range desired.peers {
		known = append(known, nft.Element{Key: native(fwmark), Data: peer.mac, Timeout: peer.left})
	}
	netdev.Sets = append(desired.pools(both...), peersSet(known))
	netdev.Chains = []nft.Chain{
		chain(netdev.Family, nft.Chain{Name: "ingress", Hook: unix.NF_NETDEV_INGRESS, Device: desired.link},
			append(learnRules(both[0], desired.restricted), learnRules(both[1], desired.restricted)...)...),
		chain(netdev.Family, nft.Chain{Name: "egress", Hook: unix.NF_NETDEV_EGRESS, Device: desired.link}, egressRules()...),
	}

	inet.Sets = append(desired.pools(both...), desired.liveSets()...)
	inet.Chains = []nft.Chain{
		// establishedSYNRule precedes acceptRule, which would replace the mark.
		chain(inet.Family, nft.Chain{Name: "prerouting", Hook: unix.NF_INET_PRE_ROUTING, Priority: mangle},
			establishedSYNRule(desired.link), acceptRule(vip.IPv4, desired.link), acceptRule(vip.IPv6, desired.link)),
		// liveRule precedes replyRule, which copies the mark to the packet.
		chain(inet.Family, nft.Chain{Name: "output", Hook: unix.NF_INET_LOCAL_OUT, Priority: mangle},
			liveRule(vip.IPv4, desired.link), liveRule(vip.IPv6, desired.link), replyRule(vip.IPv4, desired.link),
			replyRule(vip.IPv6, desired.link)),
	}
	tables := []nft.Table{arp, netdev, inet}
	for _, family := range vip.Families {
		if family == vip.IPv6 && disabledIPv6("all").Read() == "" {
			continue // ipv6.disable=1
		}
		// "dup" does not exist in the family inet.
		table := nft.Table{Family: tableFamilies[3+family], Name: tableName, Sets: desired.pools(family)}
		table.Chains = []nft.Chain{
			chain(table.Family, nft.Chain{Name: "prerouting", Hook: unix.NF_INET_PRE_ROUTING, Priority: mangle + 1},
				returnRules(family, desired.link, desired.index)...),
		}
		tables = append(tables, table)
	}
	return tables
}

// liveSets returns the map of live peers and the set of dead ones, which change most often.
func (desired desired) liveSets() []nft.Set {
	live := nft.Set{
		Name: liveMap, Flags: unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL, KeyType: nft.TypeInteger, KeyLen: 4,
		DataType: nft.TypeMark, DataLen: 4, Volatile: true,
	}
	dead := nft.Set{
		Name: deadSet, KeyType: nft.TypeMark, KeyLen: 4, Size: maxPeers + 1, Volatile: true,
		Elements: []nft.Element{{Key: native(uint32(0))}},
	}
	for _, fwmark := range desired.dead {
		dead.Elements = append(dead.Elements, nft.Element{Key: native(fwmark)})
	}
	share := func(index int) []byte {
		return binary.BigEndian.AppendUint32(nil, uint32(index*shares/len(desired.live)))
	}
	for index, fwmark := range desired.live {
		live.Elements = append(live.Elements,
			nft.Element{Key: share(index), Data: native(fwmark)}, nft.Element{Key: share(index + 1), End: true})
	}
	return []nft.Set{live, dead}
}

// ruleset gives the nftables tables the desired content. With restore false it writes at most the
// live peers. It returns the first missing object, or "".
func (kernel *kernel) ruleset(desired desired, restore bool) (missing string, err error) {
	tables := desired.tables()
	if restore {
		missing, _, err = kernel.nft.Ensure(tables...)
	}
	for _, table := range tables {
		if err != nil || missing != "" {
			break
		}
		var have *nft.Ruleset
		// Read the tables also after Ensure: they contain the counters.
		if have, missing, err = kernel.nft.Inspect(table); err == nil && table.Family == netdev.Family {
			kernel.dropped = 0
			for _, rule := range have.Rules["egress"] {
				kernel.dropped += rule.Packets // only the rule that drops has a counter
			}
		}
	}
	if missing != "" {
		missing = "nftables " + missing
	}
	if err != nil || missing != "" && !restore {
		return missing, err
	}
	// The packet path reads these sets, and only this function writes them.
	sets, intact := desired.liveSets(), kernel.written != nil
	for _, set := range kernel.written {
		same, err := kernel.nft.Holds(inet, set)
		if err != nil {
			return missing, err
		}
		intact = intact && same
	}
	if !intact && missing == "" && kernel.written != nil {
		// Another process changed the sets.
		if missing = "nftables map " + inet.String() + " " + liveMap; !restore {
			return missing, nil
		}
	}
	if intact && reflect.DeepEqual(kernel.written, sets) {
		return missing, nil
	}
	transaction := nft.Transaction{Table: inet}
	for _, set := range sets {
		// Flush and fill in one transaction, so that no packet sees an empty map.
		transaction.FlushSet(set.Name)
		transaction.AddElements(set.Name, set.Elements)
	}
	if err := kernel.nft.Commit(&transaction, nil); err != nil {
		return missing, err
	}
	kernel.written = sets
	return missing, nil
}

// hint returns the remedy for a rejected transaction, or "".
func hint(err error) string {
	rejected, _ := errors.AsType[*nft.Error](err)
	if errors.Is(err, unix.EPERM) {
		return capabilityRemedy
	}
	if rejected == nil {
		return ""
	}
	switch rejected.Operation + " " + rejected.Object {
	case "add chain netdev " + tableName + " egress":
		return "run Linux 5.16 or newer with CONFIG_NETFILTER_EGRESS"
	case "add table arp " + tableName, "add chain arp " + tableName + " output":
		return "run a kernel with CONFIG_NF_TABLES_ARP"
	case "add table netdev " + tableName, "add chain netdev " + tableName + " ingress":
		return "run a kernel with CONFIG_NF_TABLES_NETDEV and CONFIG_NETFILTER_INGRESS"
	}
	// The kernel returns ENOENT for an expression whose module is missing.
	if errors.Is(err, unix.ENOENT) {
		return "run a kernel with CONFIG_NFT_CT, CONFIG_NFT_HASH, CONFIG_NFT_NUMGEN, CONFIG_NFT_DUP_IPV4 and " +
			"CONFIG_NFT_DUP_IPV6, or load their modules"
	}
	return "run a kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET"
}
