package fwstate

import (
	"fmt"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Names of the nftables objects that belong to no stream.
const (
	preroutingChain = "prerouting"
	notrackChain    = "notrack"
	outputChain     = "notrack-output"
	defragmentChain = "defragment"
	portedSet       = "ported"
)

// commonChains are those that no stream owns; all but the first are without connection tracking.
var commonChains = []string{preroutingChain, notrackChain, outputChain, defragmentChain}

// ruleComment begins the comments of the data plane's rules, except those of targets, whose
// comment is a [plan.Label]. A rule without belongs to another process.
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
	// Object is the object as an operator finds it, such as "map inet vipgate-lb vip4".
	Object string
	// Detail is the difference.
	Detail string
}

func (e *ConflictError) Error() string { return e.Object + " belongs to another process: " + e.Detail }

// conflict returns a [ConflictError] about an object in the table, unless detail is empty.
func conflict(kind, name, detail string) error {
	if detail == "" {
		return nil
	}
	return &ConflictError{Object: kind + " inet " + plan.TableName + " " + name, Detail: detail}
}

// Kinds of data in sets (struct nft_set, NFTA_SET_DATA_TYPE).
const dataVerdict = 0xffffff00

// setSpec describes a set or a map. The numbers of types are for the lists of nft only.
type setSpec struct {
	name             string
	flags            uint32
	keyType, keySize uint32
	dataType, data   uint32
	size             uint32
	// fixed are the elements of a set that never change.
	fixed []byte
}

// concatBits are the bits of each type in a concatenation.
const concatBits = nftables.SetConcatTypeBits

// Types of nft.
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
	// With its size the kernel picks an array of hash buckets of that size.
	return setSpec{
		name: plan.MaglevMap(f, stream), flags: unix.NFT_SET_MAP, keyType: typeMark, keySize: 4,
		dataType: typeMark, data: 4, size: size,
	}
}

// shadowMap names the map that replaces a Maglev map while it is resized.
func shadowMap(f vip.Family, stream string) string { return shadowMaps[f] + stream }

func shadowSpec(f vip.Family, stream string, size uint32) setSpec {
	s := maglevSpec(f, stream, size)
	s.name = shadowMap(f, stream)
	return s
}

func liveSpec(f vip.Family, stream string) setSpec {
	// Without its size the kernel picks a hash table that grows with the targets. When a target comes
	// the kernel validates the whole ruleset (Linux 6.18): for each VIP it visits every bucket of this
	// map, as often as rules refer to it.
	return setSpec{
		name: plan.LiveMap(f, stream), flags: unix.NFT_SET_MAP, keyType: typeMark, keySize: 4, dataType: dataVerdict,
	}
}

// commonSets are the sets that no stream owns.
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
	// Errors with a packet in them: destination unreachable, time exceeded, parameter
	// problem (RFC 792), and packet too big in between (RFC 4443).
	return append(specs,
		setSpec{name: errorSets[vip.IPv4], keyType: typeICMP[vip.IPv4], keySize: 1, fixed: []byte{3, 11, 12}},
		setSpec{name: errorSets[vip.IPv6], keyType: typeICMP[vip.IPv6], keySize: 1, fixed: []byte{1, 2, 3, 4}},
	)
}

// mismatch returns how a set differs from its description, "" if it does not.
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

// chainSpec describes a chain; without a type it has no hook.
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
	// This host's own packets to VIPs, such as those of checks: replies pass the other chain.
	output := notrack
	output.name, output.hook = outputChain, unix.NF_INET_LOCAL_OUT
	return []chainSpec{base, notrack, output, {name: defragmentChain}}
}

// mismatch returns how a chain differs from its description, "" if it does not.
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
