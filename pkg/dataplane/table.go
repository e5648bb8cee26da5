package dataplane

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Names of what is in the table. The part before the slash is ours.
const (
	preroutingChain = "prerouting"
	notrackChain    = "notrack"
	defragmentChain = "defragment"
	portedSet       = "ported"
	streamPrefix    = "stream/"
	targetPrefix    = "target/"
)

// ourComment begins the comments of our rules, except those of targets, whose comment
// is "STREAM/TARGET". A rule without is somebody else's.
const ourComment = "vipgate: "

// By family.
var (
	hostMaps   = [...]string{"vip4", "vip6"}
	netMaps    = [...]string{"net4", "net6"}
	liveMaps   = [...]string{"live4/", "live6/"}
	errorSets  = [...]string{"errors4", "errors6"}
	ownHosts   = [...]string{"own4", "own6"}
	ownNets    = [...]string{"ownnet4", "ownnet6"}
	maglevMaps = [...]string{"maglev4/", "maglev6/"}
	spareMaps  = [...]string{"spare4/", "spare6/"}
)

func streamChain(name string) string { return streamPrefix + name }

func targetChain(number uint32) string {
	return targetPrefix + strconv.FormatUint(uint64(number), 10)
}

// targetNumber reads the name of a target's chain.
func targetNumber(chain string) (uint32, bool) {
	digits, ok := strings.CutPrefix(chain, targetPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	// Only one spelling is ours.
	return uint32(n), err == nil && targetChain(uint32(n)) == chain
}

func maglevMap(f vip.Family, stream string) string { return maglevMaps[f] + stream }

// spareMap names the map that stands in while one is replaced (see stepAside).
func spareMap(f vip.Family, stream string) string { return spareMaps[f] + stream }

func spareSpec(f vip.Family, stream string, size uint32) setSpec {
	s := maglevSpec(f, stream, size)
	s.name = spareMap(f, stream)
	return s
}

// liveMap names the map of a stream's targets whose flows live. Each stream has its
// own: when one changes the kernel follows every verdict of every rule to see that
// there is no loop, which took 40 ms with one map for 1 000 targets in 100 streams.
func liveMap(f vip.Family, stream string) string { return liveMaps[f] + stream }

func liveSpec(f vip.Family, stream string, size uint32) setSpec {
	// Of a table's entries each target should have a hundred, and has four at least.
	return setSpec{name: liveMap(f, stream), flags: unix.NFT_SET_MAP, keyType: typeMark, keySize: 4, dataType: dataVerdict, size: max(minLive, size/4)}
}

// minLive is how many targets a stream may have at least, among them those that are
// draining.
const minLive = 2048

// foreignError: something with a name of ours is of a kind that we cannot share.
type foreignError struct {
	// object is what people look for, such as "map inet vipgate-lb vip4".
	object string
	// detail says how it is different.
	detail string
}

func (e *foreignError) Error() string { return e.object + " is not ours: " + e.detail }

// Kinds of data in sets (struct nft_set, NFTA_SET_DATA_TYPE).
const dataVerdict = 0xffffff00

// setSpec is what a set or a map must be. The numbers of types are nft's, for its
// lists only.
type setSpec struct {
	name             string
	flags            uint32
	keyType, keySize uint32
	dataType, data   uint32
	size             uint32
	// fixed are the elements of a set that never change.
	fixed []byte
}

// mapSize bounds the VIPs of a family that are one address. With a size the kernel takes
// an array of hash buckets, 8 bytes each, that never grows: looking up in it took
// 0.1 µs less on Linux 6.18.
const mapSize = 16384

// Types of nft.
var (
	typeMark    = nftables.TypeMark.GetNFTMagic()
	typeIPv4    = nftables.TypeIPAddr.GetNFTMagic()
	typeIPv6    = nftables.TypeIP6Addr.GetNFTMagic()
	typeProto   = nftables.TypeInetProto.GetNFTMagic()
	typeICMP    = nftables.TypeICMPType.GetNFTMagic()
	typeICMPv6  = nftables.TypeICMP6Type.GetNFTMagic()
	typeAddress = [...]uint32{typeIPv4, typeIPv6}
	addressSize = [...]uint32{4, 16}
)

func maglevSpec(f vip.Family, stream string, size uint32) setSpec {
	// With its size the kernel picks an array of hash buckets of that size.
	return setSpec{name: maglevMap(f, stream), flags: unix.NFT_SET_MAP, keyType: typeMark, keySize: 4, dataType: typeMark, data: 4, size: size}
}

// commonSets are the sets that no stream owns.
func (f *fabric) commonSets() []setSpec {
	specs := []setSpec{{name: portedSet, keyType: typeProto, keySize: 1, fixed: []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}}}
	for _, family := range vip.Families {
		at, size := typeAddress[family], addressSize[family]
		specs = append(specs,
			setSpec{name: hostMaps[family], flags: unix.NFT_SET_MAP, keyType: at, keySize: size, dataType: dataVerdict, size: mapSize},
			setSpec{name: netMaps[family], flags: unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL, keyType: at, keySize: size, dataType: dataVerdict},
		)
		if f.o.Stateless {
			specs = append(specs,
				setSpec{name: ownHosts[family], keyType: at, keySize: size},
				setSpec{name: ownNets[family], flags: unix.NFT_SET_INTERVAL, keyType: at, keySize: size},
			)
		}
	}
	// Errors with a packet in them: destination unreachable, time exceeded, parameter
	// problem (RFC 792), and packet too big in between (RFC 4443).
	return append(specs,
		setSpec{name: errorSets[vip.IPv4], keyType: typeICMP, keySize: 1, fixed: []byte{3, 11, 12}},
		setSpec{name: errorSets[vip.IPv6], keyType: typeICMPv6, keySize: 1, fixed: []byte{1, 2, 3, 4}},
	)
}

// same tells how a set is different from what it must be; "" is not at all.
func (s setSpec) same(got setSpec) string {
	const kinds = unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL | unix.NFT_SET_ANONYMOUS | unix.NFT_SET_CONSTANT | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | nftables.NFT_SET_CONCAT
	switch {
	case got.flags&kinds != s.flags&kinds:
		return fmt.Sprintf("its flags are %#x instead of %#x", got.flags&kinds, s.flags&kinds)
	case got.keySize != s.keySize || got.keyType != s.keyType:
		return "its keys are of another type"
	case s.flags&unix.NFT_SET_MAP != 0 && got.dataType != s.dataType:
		return "its data are of another type"
	}
	return ""
}

// chainSpec is what a chain must be; without a type it has no hook.
type chainSpec struct {
	name     string
	kind     string
	hook     uint32
	priority int32
	policy   uint32
}

func (f *fabric) baseChains() []chainSpec {
	chains := []chainSpec{{name: preroutingChain, kind: "filter", hook: unix.NF_INET_PRE_ROUTING, priority: int32(*nftables.ChainPriorityMangle), policy: uint32(nftables.ChainPolicyAccept)}}
	if f.o.Stateless {
		chains = append(chains,
			chainSpec{name: notrackChain, kind: "filter", hook: unix.NF_INET_PRE_ROUTING, priority: int32(*nftables.ChainPriorityRaw), policy: uint32(nftables.ChainPolicyAccept)},
			chainSpec{name: defragmentChain},
		)
	}
	return chains
}

// same tells how a chain is different from what it must be; "" is not at all.
func (c chainSpec) same(got chainSpec) string {
	switch {
	case c.kind == "" && got.kind != "":
		return fmt.Sprintf("it is a base chain of type %s", got.kind)
	case c.kind != got.kind:
		return fmt.Sprintf("its type is %q instead of %q", got.kind, c.kind)
	case c.hook != got.hook || c.priority != got.priority:
		return fmt.Sprintf("it is at hook %d, priority %d instead of hook %d, priority %d", got.hook, got.priority, c.hook, c.priority)
	}
	return ""
}

// families are those that the stream has tables for.
func (s *streamContent) families() []vip.Family {
	return slices.DeleteFunc(slices.Clone(vip.Families[:]), func(f vip.Family) bool { return s.tables[f] == nil })
}
