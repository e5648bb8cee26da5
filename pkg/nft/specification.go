package nft

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Table names a table. With sets and chains it describes the content, for [Inspect] and [Ensure].
type Table struct {
	Family byte
	Name   string
	Sets   []Set
	Chains []Chain
}

var familyNames = map[byte]string{
	unix.NFPROTO_INET: "inet", unix.NFPROTO_ARP: "arp", unix.NFPROTO_NETDEV: "netdev",
	unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6",
}

// String returns the name in nft syntax.
func (table Table) String() string { return familyNames[table.Family] + " " + table.Name }

// PolicyAccept is the default verdict of a base chain.
const PolicyAccept = 1

// Chain describes a chain. A chain without a type has no hook.
type Chain struct {
	Name, Type string
	Hook       uint32
	Priority   int32
	Device     string // of a netdev chain
	Policy     uint32
	Rules      []Rule
}

// Mismatch returns the difference between a chain and its description, or "". It ignores the
// policy, which a transaction can change.
func (want Chain) Mismatch(got Chain) string {
	switch {
	case want.Type == "" && got.Type != "":
		return fmt.Sprintf("it is a base chain of type %s", got.Type)
	case want.Type != got.Type:
		return fmt.Sprintf("its type is %q instead of %q", got.Type, want.Type)
	case want.Hook != got.Hook || want.Priority != got.Priority:
		return fmt.Sprintf("it is at hook %d, priority %d instead of hook %d, priority %d",
			got.Hook, got.Priority, want.Hook, want.Priority)
	case want.Device != got.Device:
		return fmt.Sprintf("it is on interface %q instead of %q", got.Device, want.Device)
	}
	return ""
}

func parseChain(attributes nlmsg.Attributes) Chain {
	hook := attributes.Get(unix.NFTA_CHAIN_HOOK)
	return Chain{
		Name: attributes.Text(unix.NFTA_CHAIN_NAME), Type: attributes.Text(unix.NFTA_CHAIN_TYPE),
		Policy: attributes.Uint32BE(unix.NFTA_CHAIN_POLICY),
		Hook:   hook.Uint32BE(unix.NFTA_HOOK_HOOKNUM), Priority: int32(hook.Uint32BE(unix.NFTA_HOOK_PRIORITY)),
		Device: hook.Text(unix.NFTA_HOOK_DEV),
	}
}

// Types of keys and data. Only the listing by nft uses them.
var (
	TypeInteger = nftables.TypeInteger.GetNFTMagic()
	TypeIPv4    = nftables.TypeIPAddr.GetNFTMagic()
	TypeIPv6    = nftables.TypeIP6Addr.GetNFTMagic()
	TypeEther   = nftables.TypeEtherAddr.GetNFTMagic()
	TypeMark    = nftables.TypeMark.GetNFTMagic()
	TypeFamily  = nftables.TypeNFProto.GetNFTMagic()
)

// TypeVerdict is the type of the data of a verdict map (NFT_DATA_VERDICT).
const TypeVerdict = 0xffffff00

// Set describes a set or, with NFT_SET_MAP in Flags, a map.
type Set struct {
	Name              string
	Flags             uint32
	KeyType, KeyLen   uint32
	DataType, DataLen uint32
	Size              uint32
	Timeout           time.Duration
	// Elements holds the elements of a new set.
	Elements []Element
	// Volatile: the packet path or the owner changes the elements later. Inspect ignores them, and a
	// repair keeps them.
	Volatile bool
}

// AddressSet describes a set of addresses of a family.
func AddressSet(name string, family vip.Family, flags uint32) Set {
	if family == vip.IPv6 {
		return Set{Name: name, Flags: flags, KeyType: TypeIPv6, KeyLen: 16}
	}
	return Set{Name: name, Flags: flags, KeyType: TypeIPv4, KeyLen: 4}
}

// Mismatch returns the difference between a set and its description, or "". It ignores the size,
// the timeout and the elements.
func (want Set) Mismatch(got Set) string {
	const kinds = unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL | unix.NFT_SET_ANONYMOUS | unix.NFT_SET_CONSTANT |
		unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | nftables.NFT_SET_CONCAT
	switch {
	case got.Flags&kinds != want.Flags&kinds:
		return fmt.Sprintf("its flags are %#x instead of %#x", got.Flags&kinds, want.Flags&kinds)
	case got.KeyLen != want.KeyLen || got.KeyType != want.KeyType:
		return "its keys are of another type"
	case want.Flags&unix.NFT_SET_MAP != 0 && got.DataType != want.DataType:
		return "its data are of another type"
	}
	return ""
}

// same reports whether a listed set can replace a described one.
func (want Set) same(got Set) bool {
	return want.Mismatch(got) == "" && want.Size == got.Size && want.Timeout == got.Timeout
}

func parseSet(attributes nlmsg.Attributes) Set {
	return Set{
		Name: attributes.Text(unix.NFTA_SET_NAME), Flags: attributes.Uint32BE(unix.NFTA_SET_FLAGS),
		KeyType: attributes.Uint32BE(unix.NFTA_SET_KEY_TYPE), KeyLen: attributes.Uint32BE(unix.NFTA_SET_KEY_LEN),
		DataType: attributes.Uint32BE(unix.NFTA_SET_DATA_TYPE), DataLen: attributes.Uint32BE(unix.NFTA_SET_DATA_LEN),
		Size:    attributes.Uint32BE(unix.NFTA_SET_DESC, unix.NFTA_SET_DESC_SIZE),
		Timeout: time.Duration(attributes.Uint64BE(unix.NFTA_SET_TIMEOUT)) * time.Millisecond,
	}
}

// Timeouts describes an object with timeouts of connections of a protocol.
type Timeouts struct {
	Name     string
	Protocol byte
	// Seconds has the timeouts by state, in the numbers of linux/netfilter/nfnetlink_cttimeout.h.
	// Other states have those of the network namespace when the object was created.
	Seconds map[uint16]uint32
}

// Element is an element of a set, or of a map with data or a chain as value.
type Element struct {
	Key, Data []byte
	// Chain is the target of the goto verdict.
	Chain string
	// End marks the end of an interval.
	End bool
	// Timeout is the time until the element expires; zero for the default of the set.
	Timeout time.Duration
}

// gotoCode is NFT_GOTO, which is negative.
const gotoCode = 1<<32 - 4

// parseElement parses an element in one pass, because lists have several hundred thousand.
func parseElement(attributes nlmsg.Attributes) (element Element) {
	for kind, value := range attributes.All() {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			element.Key = value.Get(unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			for kind, data := range value.All() {
				if kind == unix.NFTA_DATA_VALUE {
					element.Data = data
				} else if data.Uint32BE(unix.NFTA_VERDICT_CODE) == gotoCode {
					element.Chain = data.Text(unix.NFTA_VERDICT_CHAIN)
				}
			}
		case unix.NFTA_SET_ELEM_FLAGS:
			element.End = binary.BigEndian.Uint32(value)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_EXPIRATION:
			element.Timeout = time.Duration(binary.BigEndian.Uint64(value)) * time.Millisecond
		}
	}
	return element
}

// compareElements sorts by key. The end of an interval precedes the start of the next one.
func compareElements(a, b Element) int {
	switch order := bytes.Compare(a.Key, b.Key); {
	case order != 0 || a.End == b.End:
		return order
	case a.End:
		return -1
	}
	return 1
}

// Range is an interval of addresses of one family, both ends included.
type Range struct {
	First, Last netip.Addr
	Chain       string // of a verdict map
}

// RangeOf returns the addresses of a prefix.
func RangeOf(prefix netip.Prefix) Range { return Range{First: prefix.Addr(), Last: vip.Last(prefix)} }

// Elements returns the elements of a range in a set with intervals. A range up to the last address
// of its family has no end.
func (interval Range) Elements() []Element {
	list := []Element{{Key: interval.First.AsSlice(), Chain: interval.Chain}}
	if end := interval.Last.Next(); end.IsValid() {
		list = append(list, Element{Key: end.AsSlice(), End: true})
	}
	return list
}

// Ranges returns the ranges of the elements of a set of addresses with intervals, sorted. A range
// without an end reaches to the next element.
func Ranges(list []Element) []Range {
	slices.SortFunc(list, compareElements)
	ranges := make([]Range, 0, (len(list)+1)/2)
	for index, element := range list {
		first, valid := netip.AddrFromSlice(element.Key)
		if !valid || element.End {
			continue
		}
		// A range up to the last address of its family has no end element.
		interval := Range{first, vip.Last(netip.PrefixFrom(first, 0)), element.Chain}
		if index+1 < len(list) {
			// The next element is the exclusive end of this range, or the start of an adjacent range.
			next, _ := netip.AddrFromSlice(list[index+1].Key)
			interval.Last = next.Prev()
		}
		ranges = append(ranges, interval)
	}
	return ranges
}

// Compare orders ranges by their first address. Of two with the same start the wider comes first.
func (interval Range) Compare(other Range) int {
	return cmp.Or(interval.First.Compare(other.First), other.Last.Compare(interval.Last))
}

// Covers reports whether r contains all addresses of other.
func (interval Range) Covers(other Range) bool {
	return interval.First.Compare(other.First) <= 0 && other.Last.Compare(interval.Last) <= 0
}
