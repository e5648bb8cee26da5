package fwstate

import (
	"fmt"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Names of the common nftables objects.
const (
	preroutingChain = "prerouting"
	notrackChain    = "notrack"
	outputChain     = "notrack-output"
	defragmentChain = "defragment"
	portedSet       = "ported"
)

// commonChains lists the common chains. All but the first exist without connection tracking only.
var commonChains = []string{preroutingChain, notrackChain, outputChain, defragmentChain}

// ruleComment is the comment prefix of the data plane's rules, except target rules, whose comment
// is a [plan.Label]. A rule without this prefix belongs to another process.
const ruleComment = "vipgate: "

// Names by family.
var (
	errorSets  = [...]string{"errors4", "errors6"}
	ownHosts   = [...]string{"own4", "own6"}
	ownNets    = [...]string{"ownnet4", "ownnet6"}
	shadowMaps = [...]string{"spare4/", "spare6/"}
)

// ConflictError reports an object of another process whose name the data plane needs.
type ConflictError struct {
	// Object names the object in nft syntax, such as "map inet vipgate-lb vip4".
	Object string
	// Detail is the difference.
	Detail string
}

func (e *ConflictError) Error() string { return e.Object + " belongs to another process: " + e.Detail }

// conflict returns a [ConflictError] for an object in the table, or nil if detail is empty.
func conflict(kind, name, detail string) error {
	if detail == "" {
		return nil
	}
	return &ConflictError{Object: kind + " inet " + plan.TableName + " " + name, Detail: detail}
}

// dataVerdict is the verdict type of NFTA_SET_DATA_TYPE (NFT_DATA_VERDICT).
const dataVerdict = 0xffffff00

// setSpec describes a set or a map. Only nft's listing uses the type numbers.
type setSpec struct {
	name             string
	flags            uint32
	keyType, keySize uint32
	dataType, data   uint32
	size             uint32
	// fixed holds the constant elements of a set.
	fixed []byte
}

// concatBits is the number of bits per type in a concatenation.
const concatBits = nftables.SetConcatTypeBits

// nft types.
var (
	typeMark    = nftables.TypeMark.GetNFTMagic()
	typeProto   = nftables.TypeInetProto.GetNFTMagic()
	typeService = nftables.TypeInetService.GetNFTMagic()
	typePort    = typeProto<<concatBits | typeService
	typeICMP    = [...]uint32{nftables.TypeICMPType.GetNFTMagic(), nftables.TypeICMP6Type.GetNFTMagic()}
	typeAddress = [...]uint32{nftables.TypeIPAddr.GetNFTMagic(), nftables.TypeIP6Addr.GetNFTMagic()}
	addressSize = [...]uint32{4, 16}
)

func maglevSpec(f vip.Family, stream string, size uint32) setSpec {
	// With a size the kernel selects a fixed array of as many hash buckets.
	return setSpec{
		name: plan.MaglevMap(f, stream), flags: unix.NFT_SET_MAP, keyType: typeMark, keySize: 4,
		dataType: typeMark, data: 4, size: size,
	}
}

// shadowMap returns the name of the map that replaces a Maglev map during a resize.
func shadowMap(f vip.Family, stream string) string { return shadowMaps[f] + stream }

func shadowSpec(f vip.Family, stream string, size uint32) setSpec {
	s := maglevSpec(f, stream, size)
	s.name = shadowMap(f, stream)
	return s
}

func liveSpec(f vip.Family, stream string) setSpec {
	// Without a size the kernel selects a hash table that grows with the targets. When a target is
	// added, the kernel validates the whole ruleset (Linux 6.18): for each VIP it visits every bucket
	// of this map once per referencing rule, so a large fixed array would be slow.
	return setSpec{
		name: plan.LiveMap(f, stream), flags: unix.NFT_SET_MAP, keyType: typeMark, keySize: 4, dataType: dataVerdict,
	}
}

// commonSets returns the common sets and maps.
func (f *Conn) commonSets() []setSpec {
	specs := []setSpec{{
		name: portedSet, keyType: typeProto, keySize: 1,
		fixed: []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP},
	}}
	for _, family := range vip.Families {
		addrs := setSpec{keyType: typeAddress[family], keySize: addressSize[family]}
		set := func(name string, flags, dataType, size uint32) {
			s := addrs
			s.name, s.flags, s.dataType, s.size = name, flags, dataType, size
			specs = append(specs, s)
		}
		set(plan.HostMaps[family], unix.NFT_SET_MAP, dataVerdict, plan.MaxHostVIPs)
		set(plan.NetMaps[family], unix.NFT_SET_MAP|unix.NFT_SET_INTERVAL, dataVerdict, 0)
		if f.config.Conntrack == ConntrackLoose {
			specs = append(specs, flowSpec(family))
		}
		if f.config.Conntrack != ConntrackOn {
			set(ownHosts[family], 0, 0, 0)
			set(ownNets[family], unix.NFT_SET_INTERVAL, 0, 0)
		}
	}
	// ICMP errors that contain a packet: destination unreachable, time exceeded and parameter
	// problem (RFC 792), and additionally packet too big for ICMPv6 (RFC 4443).
	return append(specs,
		setSpec{name: errorSets[vip.IPv4], keyType: typeICMP[vip.IPv4], keySize: 1, fixed: []byte{3, 11, 12}},
		setSpec{name: errorSets[vip.IPv6], keyType: typeICMP[vip.IPv6], keySize: 1, fixed: []byte{1, 2, 3, 4}},
	)
}

// mismatch returns the difference between a set and its description, or "".
func (s setSpec) mismatch(got setSpec) string {
	const kinds = unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL | unix.NFT_SET_ANONYMOUS | unix.NFT_SET_CONSTANT |
		unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | nftables.NFT_SET_CONCAT
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

// chainSpec describes a chain. A chain without a type (kind) has no hook.
type chainSpec struct {
	name     string
	kind     string
	hook     uint32
	priority int32
	policy   uint32
}

func (f *Conn) baseChains() []chainSpec {
	base := chainSpec{
		name: preroutingChain, kind: "filter", hook: unix.NF_INET_PRE_ROUTING,
		priority: int32(*nftables.ChainPriorityMangle), policy: uint32(nftables.ChainPolicyAccept),
	}
	if f.config.Conntrack == ConntrackOn {
		return []chainSpec{base}
	}
	notrack := base
	notrack.name, notrack.priority = notrackChain, int32(*nftables.ChainPriorityRaw)
	// Locally generated packets to VIPs, such as health checks. Replies pass the notrack chain.
	output := notrack
	output.name, output.hook = outputChain, unix.NF_INET_LOCAL_OUT
	return []chainSpec{base, notrack, output, {name: defragmentChain}}
}

// mismatch returns the difference between a chain and its description, or "".
func (c chainSpec) mismatch(got chainSpec) string {
	switch {
	case c.kind == "" && got.kind != "":
		return fmt.Sprintf("it is a base chain of type %s", got.kind)
	case c.kind != got.kind:
		return fmt.Sprintf("its type is %q instead of %q", got.kind, c.kind)
	case c.hook != got.hook || c.priority != got.priority:
		return fmt.Sprintf("it is at hook %d, priority %d instead of hook %d, priority %d",
			got.hook, got.priority, c.hook, c.priority)
	}
	return ""
}
