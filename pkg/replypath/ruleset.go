package replypath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Names of sets and maps.
const (
	peersMap = "peers" // fwmark to link-layer address; the kernel adds each sender
	aliveSet = "alive" // fwmarks of live peers
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
func fwmark(mac net.HardwareAddr) uint32 {
	return 1 + nft.Hash(mac, hashSeed, hashModulus)
}

// placeholderMAC is the destination link-layer address of replies until the egress chain rewrites
// it. It is a locally administered address without a host.
func placeholderMAC() net.HardwareAddr { return net.HardwareAddr{0x02, 0x76, 0x67, 0, 0, 1} }

// placeholder returns the next hop of replies. Its neighbor entry has placeholderMAC.
func placeholder(f vip.Family) netip.Addr {
	if f == vip.IPv6 {
		return netip.MustParseAddr("fe80::7667:1")
	}
	return netip.MustParseAddr("169.254.76.67")
}

// arpOutput is NF_ARP_OUT.
const arpOutput = 1

// nft data types.
const (
	typeInteger = 4
	typeIPv4    = 7
	typeIPv6    = 8
	typeEther   = 9
	typeMark    = 19
)

// poolSet returns the set of the pool's prefixes of a family.
func poolSet(f vip.Family) set {
	if f == vip.IPv6 {
		return set{name: "pool6", flags: unix.NFT_SET_INTERVAL, keyType: typeIPv6, keyLen: 16}
	}
	return set{name: "pool4", flags: unix.NFT_SET_INTERVAL, keyType: typeIPv4, keyLen: 4}
}

func peersSet() set {
	return set{
		name: peersMap, flags: unix.NFT_SET_MAP | unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT,
		keyType: typeMark, keyLen: 4, dataType: typeEther, dataLen: 6, capacity: maxPeers, timeout: peerTimeout,
	}
}

func liveSet() set {
	return set{
		name: liveMap, flags: unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL, keyType: typeInteger, keyLen: 4,
		dataType: typeMark, dataLen: 4,
	}
}

func aliveMarks() set {
	return set{name: aliveSet, keyType: typeMark, keyLen: 4, capacity: maxPeers}
}

// byteOrders returns the user data that makes nft list numbers correctly: 1 is host byte order, 2
// network byte order.
func byteOrders(s set) []byte {
	order := func(typ uint32) uint32 {
		if typ == typeMark {
			return 1
		}
		return 2
	}
	b := userdata.AppendUint32(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, order(s.keyType))
	if s.flags&unix.NFT_SET_MAP != 0 {
		b = userdata.AppendUint32(b, userdata.NFTNL_UDATA_SET_DATABYTEORDER, order(s.dataType))
	}
	return b
}

// poolElements returns the intervals of prefixes, which must not overlap.
func poolElements(prefixes []netip.Prefix) (list []element) {
	for _, p := range prefixes {
		list = append(list, element{key: p.Addr().AsSlice()})
		if end := endOf(p); end.IsValid() {
			list = append(list, element{key: end.AsSlice(), end: true})
		}
	}
	return list
}

// endOf returns the first address after a prefix, invalid if the prefix ends with the family's
// last address.
func endOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return last.Next()
}

// disjoint returns the prefixes of a family that are not contained in a wider prefix.
func disjoint(prefixes []netip.Prefix, f vip.Family) (list []netip.Prefix) {
	for _, p := range prefixes {
		p = p.Masked()
		contained := slices.ContainsFunc(prefixes, func(q netip.Prefix) bool {
			return q.Bits() < p.Bits() && q.Contains(p.Addr())
		})
		if vip.FamilyOf(p.Addr()) == f && !slices.Contains(list, p) && !contained {
			list = append(list, p)
		}
	}
	return list
}

// rule is the expression list of a rule.
type rule []expr.Any

func (r rule) marshal(family uint8) ([]byte, error) {
	var list []netlink.Attribute
	for _, e := range r {
		data, err := expr.Marshal(family, e)
		if err != nil {
			return nil, fmt.Errorf("failed to encode expression %T: %w", e, err)
		}
		list = append(list, netlink.Attribute{Type: unix.NFTA_LIST_ELEM | unix.NLA_F_NESTED, Data: data})
	}
	return netlink.MarshalAttributes(list)
}

// The 16-byte registers that rules use.
const reg1, reg2 = unix.NFT_REG_1, unix.NFT_REG_2

func native(x uint32) []byte { return binary.NativeEndian.AppendUint32(nil, x) }

func equal(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: data} }

func load(base expr.PayloadBase, offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: reg1, Base: base, Offset: offset, Len: length}
}

// onInterface matches the interface name in a meta key.
func onInterface(key expr.MetaKey, name string) rule {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return rule{&expr.Meta{Key: key, Register: reg1}, equal(b)}
}

// inPool matches a source or destination address in the pool.
func inPool(f vip.Family, source bool) rule {
	// Offsets of RFC 791 and RFC 8200.
	offset, length := uint32(16), uint32(4)
	if f == vip.IPv6 {
		offset, length = 24, 16
	}
	if source {
		offset -= length
	}
	return rule{
		load(expr.PayloadBaseNetworkHeader, offset, length),
		&expr.Lookup{SourceRegister: reg1, SetName: poolSet(f).name},
	}
}

// networkFamily matches the family of a packet in an inet table.
func networkFamily(f vip.Family) rule {
	proto := byte(unix.NFPROTO_IPV4)
	if f == vip.IPv6 {
		proto = unix.NFPROTO_IPV6
	}
	return rule{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1}, equal([]byte{proto})}
}

// etherType matches the family of a frame in a netdev table.
func etherType(f vip.Family) rule {
	kind := uint16(unix.ETH_P_IP)
	if f == vip.IPv6 {
		kind = unix.ETH_P_IPV6
	}
	return rule{&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: reg1}, equal(binary.BigEndian.AppendUint16(nil, kind))}
}

// markOfSender loads the sender's link-layer address into reg1 and its fwmark into reg2.
func markOfSender() rule {
	return rule{
		load(expr.PayloadBaseLLHeader, 6, 6),
		&expr.Hash{
			SourceRegister: reg1, DestRegister: reg2, Length: 6, Modulus: hashModulus, Seed: hashSeed, Offset: 1,
			Type: expr.HashTypeJenkins,
		},
	}
}

// acceptRule sets the connection mark from the sender of a packet to the pool. It ignores ICMP
// errors, because they may arrive through a different trench pod than the packets of the flow.
func acceptRule(f vip.Family, link string) rule {
	r := slices.Concat(onInterface(expr.MetaKeyIIFNAME, link), networkFamily(f), inPool(f, false), rule{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: native(expr.CtStateBitRELATED), Xor: native(0)},
		equal(native(0)),
	})
	return append(append(r, markOfSender()...), &expr.Ct{Key: expr.CtKeyMARK, Register: reg2, SourceRegister: true})
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

// openRule assigns a live peer to a flow that the application opens, and reassigns it if the peer
// fails before the first reply. Later the mark follows the replies.
func openRule(f vip.Family, link string) rule {
	return slices.Concat(onInterface(expr.MetaKeyOIFNAME, link), networkFamily(f), inPool(f, true), rule{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: native(expr.CtStateBitNEW), Xor: native(0)},
		equal(native(expr.CtStateBitNEW)),
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1},
		&expr.Lookup{SourceRegister: reg1, SetName: aliveSet, Invert: true},
		&expr.Numgen{Register: reg1, Modulus: shares, Type: unix.NFT_NG_RANDOM},
		// nftables compares intervals in network byte order.
		&expr.Byteorder{SourceRegister: reg1, DestRegister: reg1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Lookup{SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: liveMap},
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1, SourceRegister: true},
	})
}

// replyRule copies the connection mark to the fwmark of a packet from the pool.
func replyRule(f vip.Family, link string) rule {
	return slices.Concat(onInterface(expr.MetaKeyOIFNAME, link), networkFamily(f), inPool(f, true), rule{
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1, SourceRegister: true},
	})
}

// learnRule adds the sender of a packet to the pool to the peers map.
func learnRule(f vip.Family) rule {
	return slices.Concat(etherType(f), inPool(f, false), markOfSender(), rule{
		&expr.Dynset{SrcRegKey: reg2, SrcRegData: reg1, SetName: peersMap, Operation: unix.NFT_DYNSET_OP_UPDATE},
	})
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

// silenceRule drops ARP packets whose sender address is in the pool, for IPv4 over Ethernet (RFC
// 826): both replies, and the kernel's requests for the placeholder if its entry is missing.
func silenceRule() rule {
	return rule{
		load(expr.PayloadBaseNetworkHeader, 4, 2), equal([]byte{6, 4}),
		load(expr.PayloadBaseNetworkHeader, 14, 4), &expr.Lookup{SourceRegister: reg1, SetName: poolSet(vip.IPv4).name},
		&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop},
	}
}

// desired is the content of the nftables tables.
type desired struct {
	pool   []netip.Prefix
	link   string
	device int      // index of the interface; 0: absent
	live   []uint32 // fwmarks
	peers  map[uint32]learned
}

func (d desired) addPools(t *transaction, families ...vip.Family) {
	for _, f := range families {
		t.addSet(poolSet(f))
		t.addElements(poolSet(f).name, poolElements(disjoint(d.pool, f)))
	}
}

// write returns the transaction that replaces the tables, except the peers map: the kernel fills
// it.
func (d desired) write(netdev *objects) *transaction {
	t := &transaction{}
	const mangle = -150
	both := vip.Families[:]
	for _, t.family = range tableFamilies {
		keep := t.family == unix.NFPROTO_NETDEV && netdev.sets[peersMap] == peersSet()
		t.addTable()
		if keep {
			t.begin("delete rules of", unix.NFT_MSG_DELRULE, 0, 0, "")
			for _, name := range netdev.chains {
				t.begin("delete chain", unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name)
			}
			for name := range netdev.sets {
				if name != peersMap {
					t.begin("delete set", unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name)
				}
			}
		} else {
			t.deleteTable()
			t.addTable()
		}
		switch t.family {
		case unix.NFPROTO_ARP:
			d.addPools(t, vip.IPv4)
			t.addChain("output", hook{number: arpOutput}, silenceRule())
		case unix.NFPROTO_NETDEV:
			d.addPools(t, both...)
			if !keep {
				t.addSet(peersSet())
				t.addElements(peersMap, d.peerElements())
			}
			if d.device != 0 {
				t.addChain("ingress", hook{unix.NF_NETDEV_INGRESS, 0, d.link}, learnRule(vip.IPv4), learnRule(vip.IPv6))
				t.addChain("egress", hook{unix.NF_NETDEV_EGRESS, 0, d.link}, egressRules()...)
			}
		case unix.NFPROTO_INET:
			d.addPools(t, both...)
			t.addSet(liveSet())
			t.addSet(aliveMarks())
			d.addLive(t)
			t.addChain("prerouting", hook{unix.NF_INET_PRE_ROUTING, mangle, ""}, establishedSYNRule(d.link),
				acceptRule(vip.IPv4, d.link), acceptRule(vip.IPv6, d.link))
			t.addChain("output", hook{unix.NF_INET_LOCAL_OUT, mangle, ""},
				openRule(vip.IPv4, d.link), openRule(vip.IPv6, d.link), replyRule(vip.IPv4, d.link), replyRule(vip.IPv6, d.link))
		}
	}
	return t
}

// writeLive returns the transaction that replaces the live peers.
func (d desired) writeLive() *transaction {
	t := &transaction{family: unix.NFPROTO_INET}
	for _, name := range []string{liveMap, aliveSet} {
		t.begin("flush set", unix.NFT_MSG_DELSETELEM, 0, unix.NFTA_SET_ELEM_LIST_SET, name)
	}
	d.addLive(t)
	return t
}

func (d desired) peerElements() (list []element) {
	for mark, l := range d.peers {
		list = append(list, element{key: native(mark), data: l.mac, timeout: l.left})
	}
	return list
}

func (d desired) addLive(t *transaction) {
	share := func(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i*shares/len(d.live))) }
	var ranges, marks []element
	for i, mark := range d.live {
		ranges = append(ranges, element{key: share(i), data: native(mark)}, element{key: share(i + 1), end: true})
		marks = append(marks, element{key: native(mark)})
	}
	t.addElements(liveMap, ranges)
	t.addElements(aliveSet, marks)
}

// hint returns the remedy for a rejected transaction, or "".
func hint(err error) string {
	step, _ := errors.AsType[*stepError](err)
	switch {
	case errors.Is(err, unix.EPERM):
		return capabilityRemedy
	case step == nil:
		return ""
	case step.step == "add chain netdev "+tableName+" egress":
		return "run Linux 5.16 or newer with CONFIG_NETFILTER_EGRESS"
	case step.step == "add table arp "+tableName || step.step == "add chain arp "+tableName+" output":
		return "run a kernel with CONFIG_NF_TABLES_ARP"
	case step.step == "add table netdev "+tableName || step.step == "add chain netdev "+tableName+" ingress":
		return "run a kernel with CONFIG_NF_TABLES_NETDEV and CONFIG_NETFILTER_INGRESS"
	case errors.Is(err, unix.ENOENT):
		return "run a kernel with CONFIG_NFT_CT, CONFIG_NFT_HASH and CONFIG_NFT_NUMGEN, or load their modules"
	}
	return "run a kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET"
}
