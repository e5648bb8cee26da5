package fwstate

import (
	"slices"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Names of the common nftables objects.
const (
	preroutingChain = "prerouting"
	checksChain     = "checks"
	notrackChain    = "notrack"
	outputChain     = "notrack-output"
	defragmentChain = "defragment"
	portedSet       = "ported"
)

// commonChains lists the common chains. The last three exist without connection tracking only.
var commonChains = []string{preroutingChain, checksChain, notrackChain, outputChain, defragmentChain}

// ruleComment is the comment prefix of the data plane's rules, except target rules, whose comment
// is a [plan.Label]. A rule without this prefix belongs to another process.
const ruleComment = "vipgate: "

// checkTimeouts are the timeouts of connections of health checks, of TCP in SYN_SENT and CLOSE: with
// the kernel's 120 s, 2 200 checks a second without an answer fill the connection tracking table.
// A retransmitted SYN gets a new entry. The kernel keeps an object: other timeouts need other names.
var checkTimeouts = []nft.Timeouts{
	{Name: "checks-tcp", Protocol: unix.IPPROTO_TCP, Seconds: map[uint16]uint32{1: 5, 8: 1}},
	{Name: "checks-udp", Protocol: unix.IPPROTO_UDP, Seconds: map[uint16]uint32{1: 10, 2: 10}},
}

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

// concatBits is the number of bits per type in a concatenation.
const concatBits = nftables.SetConcatTypeBits

// nft types.
var (
	typeProto   = nftables.TypeInetProto.GetNFTMagic()
	typeService = nftables.TypeInetService.GetNFTMagic()
	typePort    = typeProto<<concatBits | typeService
	typeICMP    = [...]uint32{nftables.TypeICMPType.GetNFTMagic(), nftables.TypeICMP6Type.GetNFTMagic()}
	typeAddress = [...]uint32{nft.TypeIPv4, nft.TypeIPv6}
	addressSize = [...]uint32{4, 16}
)

// inet is the table of the data plane.
var inet = nft.Table{Family: unix.NFPROTO_INET, Name: plan.TableName}

func newTransaction() *nft.Transaction { return &nft.Transaction{Table: inet} }

// owned reports whether the comment of a listed rule identifies it as the data plane's.
func owned(rule nft.Rule) bool {
	if strings.HasPrefix(rule.Chain, plan.TargetPrefix) {
		return strings.Contains(rule.Comment, "/")
	}
	return strings.HasPrefix(rule.Comment, ruleComment)
}

// sameRules reports whether the data plane's rules among have equal want.
func sameRules(have, want []nft.Rule) bool {
	have = slices.DeleteFunc(slices.Clone(have), func(rule nft.Rule) bool { return !owned(rule) })
	return slices.EqualFunc(have, want, nft.Rule.Same)
}

// setRules replaces the data plane's rules of a chain if they differ.
func setRules(transaction *nft.Transaction, chain string, have []nft.Rule, want ...nft.Rule) {
	if !sameRules(have, want) {
		deleteRules(transaction, have)
		transaction.AddRules(chain, want...)
	}
}

// deleteRules deletes the data plane's rules.
func deleteRules(transaction *nft.Transaction, have []nft.Rule) {
	for _, rule := range have {
		if owned(rule) {
			transaction.DeleteRule(rule)
		}
	}
}

func maglevSpec(family vip.Family, stream string, size uint32) nft.Set {
	// With a size the kernel selects a fixed array of as many hash buckets.
	return nft.Set{
		Name: plan.MaglevMap(family, stream), Flags: unix.NFT_SET_MAP, KeyType: nft.TypeMark, KeyLen: 4,
		DataType: nft.TypeMark, DataLen: 4, Size: size,
	}
}

// shadowMap returns the name of the map that replaces a Maglev map during a resize.
func shadowMap(family vip.Family, stream string) string { return shadowMaps[family] + stream }

func shadowSpec(family vip.Family, stream string, size uint32) nft.Set {
	set := maglevSpec(family, stream, size)
	set.Name = shadowMap(family, stream)
	return set
}

func liveSpec(family vip.Family, stream string) nft.Set {
	// Without a size the kernel selects a hash table that grows with the targets. When a target is
	// added, the kernel validates the whole ruleset (Linux 6.18): for each VIP it visits every bucket
	// of this map once per referencing rule, so a large fixed array would be slow.
	return nft.Set{
		Name: plan.LiveMap(family, stream), Flags: unix.NFT_SET_MAP, KeyType: nft.TypeMark, KeyLen: 4,
		DataType: nft.TypeVerdict,
	}
}

// fixed returns the constant elements of a set of bytes.
func fixed(keys ...byte) (list []nft.Element) {
	for _, key := range keys {
		list = append(list, nft.Element{Key: []byte{key}})
	}
	return list
}

func (config Config) commonSets() []nft.Set {
	specs := []nft.Set{{
		Name: portedSet, KeyType: typeProto, KeyLen: 1,
		Elements: fixed(unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP),
	}}
	for _, family := range vip.Families {
		hosts := nft.AddressSet(plan.HostMaps[family], family, unix.NFT_SET_MAP)
		hosts.DataType, hosts.Size = nft.TypeVerdict, plan.MaxHostVIPs
		nets := nft.AddressSet(plan.NetMaps[family], family, unix.NFT_SET_MAP|unix.NFT_SET_INTERVAL)
		nets.DataType = nft.TypeVerdict
		specs = append(specs, hosts, nets)
		if config.Conntrack == ConntrackLoose {
			specs = append(specs, flowSpec(family))
		}
		if config.Conntrack != ConntrackOn {
			specs = append(specs, nft.AddressSet(ownHosts[family], family, 0),
				nft.AddressSet(ownNets[family], family, unix.NFT_SET_INTERVAL))
		}
	}
	// ICMP errors that contain a packet: destination unreachable, time exceeded and parameter
	// problem (RFC 792), and additionally packet too big for ICMPv6 (RFC 4443).
	return append(specs,
		nft.Set{Name: errorSets[vip.IPv4], KeyType: typeICMP[vip.IPv4], KeyLen: 1, Elements: fixed(3, 11, 12)},
		nft.Set{Name: errorSets[vip.IPv6], KeyType: typeICMP[vip.IPv6], KeyLen: 1, Elements: fixed(1, 2, 3, 4)},
	)
}

func (config Config) baseChains() []nft.Chain {
	base := nft.Chain{
		Name: preroutingChain, Type: "filter", Hook: unix.NF_INET_PRE_ROUTING,
		Priority: int32(*nftables.ChainPriorityMangle), Policy: uint32(nftables.ChainPolicyAccept),
	}
	checks := base
	checks.Name, checks.Hook = checksChain, unix.NF_INET_LOCAL_OUT
	if config.Conntrack == ConntrackOn {
		return []nft.Chain{base, checks}
	}
	notrack := base
	notrack.Name, notrack.Priority = notrackChain, int32(*nftables.ChainPriorityRaw)
	// Locally generated packets to VIPs, such as health checks. Replies pass the notrack chain.
	output := notrack
	output.Name, output.Hook = outputChain, unix.NF_INET_LOCAL_OUT
	return []nft.Chain{base, checks, notrack, output, {Name: defragmentChain}}
}
