package fwstate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// listRoom bounds the elements of one message: they are one attribute, whose length has 16
// bits.
const listRoom = math.MaxUint16 - 256

// element is one element of a set; of a map it has a chain or data.
type element struct {
	key []byte
	// chain is the target of the verdict.
	chain string
	// data is the value in a map of fwmarks.
	data    uint32
	hasData bool
	// end closes an interval.
	end bool
}

// putElements writes messages about elements of a set.
func putElements(m *nlmsg.Messages, kind uint16, set string, list []element) {
	for len(list) > 0 {
		m.Begin(nftMessage(kind), unix.NLM_F_CREATE, familyInet, unix.NFNETLINK_V0, 0, 0)
		m.Text(unix.NFTA_SET_ELEM_LIST_TABLE, plan.TableName)
		m.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
		all := m.BeginNested(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		n := 0
		for n < len(list) && len(m.Data)-all < listRoom-512 {
			putElement(m, list[n])
			n++
		}
		m.EndNested(all)
		m.End()
		list = list[n:]
	}
}

func putElement(m *nlmsg.Messages, e element) {
	one := m.BeginNested(unix.NFTA_LIST_ELEM)
	key := m.BeginNested(unix.NFTA_SET_ELEM_KEY)
	m.Bytes(unix.NFTA_DATA_VALUE, e.key)
	m.EndNested(key)
	if e.end {
		m.Uint32BE(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	switch {
	case e.chain != "":
		data := m.BeginNested(unix.NFTA_SET_ELEM_DATA)
		verdict := m.BeginNested(unix.NFTA_DATA_VERDICT)
		m.Uint32BE(unix.NFTA_VERDICT_CODE, gotoCode)
		m.Text(unix.NFTA_VERDICT_CHAIN, e.chain)
		m.EndNested(verdict)
		m.EndNested(data)
	case e.hasData:
		data := m.BeginNested(unix.NFTA_SET_ELEM_DATA)
		m.Bytes(unix.NFTA_DATA_VALUE, nlmsg.Uint32Bytes(e.data))
		m.EndNested(data)
	}
	m.EndNested(one)
}

// gotoCode is NFT_GOTO, which is negative.
const gotoCode = 1<<32 - 4

// verdictOf returns the chain of a goto verdict; "" for another verdict.
func verdictOf(data []byte) string {
	verdict := nlmsg.Attribute(data, unix.NFTA_DATA_VERDICT)
	if nlmsg.Uint32BE(nlmsg.Attribute(verdict, unix.NFTA_VERDICT_CODE)) != gotoCode {
		return ""
	}
	return nlmsg.Text(nlmsg.Attribute(verdict, unix.NFTA_VERDICT_CHAIN))
}

// dumpElements lists the elements of a set. Each is valid during the call only. For a set that
// does not exist it returns ENOENT.
func (f *Conn) dumpElements(set string, each func(e []byte)) error {
	var m nlmsg.Messages
	m.Begin(nftMessage(unix.NFT_MSG_GETSETELEM), unix.NLM_F_DUMP, familyInet, unix.NFNETLINK_V0, 0, 0)
	m.Text(unix.NFTA_SET_ELEM_LIST_TABLE, plan.TableName)
	m.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
	err := f.nft.Dump(m.End(), func(data []byte) error {
		if len(data) < nlmsg.NFHeaderLen {
			return nil
		}
		for _, e := range nlmsg.Attributes(nlmsg.Attribute(data[nlmsg.NFHeaderLen:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			each(e)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the elements of inet %s %s: %w", plan.TableName, set, err)
	}
	return nil
}

// readTable reads a Maglev map with size entries. Other elements belong to other processes.
func (f *Conn) readTable(set string, size uint32) ([]uint32, error) {
	if size == 0 || size > plan.MaxTable {
		return nil, &ConflictError{Object: "map inet " + plan.TableName + " " + set, Detail: fmt.Sprintf("its size is %d", size)}
	}
	table := make([]uint32, size)
	err := f.dumpElements(set, func(e []byte) {
		// Without iterators, since this runs for some hundred thousand elements.
		var key, data uint32
		for len(e) >= 4 {
			length, kind := int(binary.NativeEndian.Uint16(e)), binary.NativeEndian.Uint16(e[2:])&^unix.NLA_F_NESTED
			if length < 4 || length > len(e) {
				return
			}
			// The value is in an attribute of its own.
			switch {
			case length != 12:
			case kind == unix.NFTA_SET_ELEM_KEY:
				key = binary.NativeEndian.Uint32(e[8:])
			case kind == unix.NFTA_SET_ELEM_DATA:
				data = binary.NativeEndian.Uint32(e[8:])
			}
			e = e[min(nlmsg.Align(length), len(e)):]
		}
		if key < size {
			table[key] = data
		}
	})
	return table, err
}

// readLive reads a live map: the fwmarks of its targets with their chains; nil if it does not
// exist.
func (f *Conn) readLive(family vip.Family, stream string) (map[uint32]string, error) {
	live := map[uint32]string{}
	err := f.dumpElements(plan.LiveMap(family, stream), func(e []byte) {
		number := nlmsg.Uint32(nlmsg.Attribute(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE))
		live[number] = verdictOf(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_DATA))
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return live, err
}

// bound is one end of an interval.
type bound struct {
	at    netip.Addr
	end   bool
	chain string
}

// readPrefixes reads the prefixes of a map or a set with their chains, "" in a set. Intervals
// that are not a prefix belong to other processes.
func (f *Conn) readPrefixes(set string, interval bool) (map[netip.Prefix]string, error) {
	prefixes := map[netip.Prefix]string{}
	var bounds []bound
	if err := f.dumpElements(set, func(e []byte) {
		a, ok := netip.AddrFromSlice(nlmsg.Attribute(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE))
		if !ok {
			return
		}
		chain := verdictOf(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_DATA))
		if !interval {
			prefixes[netip.PrefixFrom(a, a.BitLen())] = chain
			return
		}
		end := nlmsg.Uint32BE(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_FLAGS))&unix.NFT_SET_ELEM_INTERVAL_END != 0
		bounds = append(bounds, bound{a, end, chain})
	}); err != nil || !interval {
		return prefixes, err
	}
	slices.SortFunc(bounds, func(a, b bound) int {
		if c := a.at.Compare(b.at); c != 0 || a.end == b.end {
			return c
		}
		if a.end {
			return -1
		}
		return 1
	})
	for i, b := range bounds {
		if b.end {
			continue
		}
		last := lastOf(netip.PrefixFrom(b.at, 0))
		if i+1 < len(bounds) {
			last = bounds[i+1].at.Prev()
		}
		for bits := range b.at.BitLen() + 1 {
			p := netip.PrefixFrom(b.at, bits)
			if p.Masked() == p && lastOf(p) == last {
				prefixes[p] = b.chain
				break
			}
		}
	}
	return prefixes, nil
}

// lastOf returns the highest address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// prefixElements returns the elements of a VIP in a map to a chain, or in a set.
func prefixElements(v vip.VIP, chain string) []element {
	p := v.Prefix()
	list := []element{{key: p.Addr().AsSlice(), chain: chain}}
	if p.IsSingleIP() {
		return list
	}
	// An interval up to the highest address has no end.
	if end := lastOf(p).Next(); end.IsValid() {
		list = append(list, element{key: end.AsSlice(), end: true})
	}
	return list
}

// setOf returns the name of the map or set for a VIP.
func setOf(v vip.VIP, hosts, nets [len(vip.Families)]string) string {
	if v.Prefix().IsSingleIP() {
		return hosts[v.Family()]
	}
	return nets[v.Family()]
}

// ReadVIPs reads the VIPs with their streams. In stateless mode a VIP counts only if it is
// in the set of untracked addresses, too.
func (f *Conn) ReadVIPs() (map[vip.VIP]string, error) {
	all, err := f.readVIPElements(plan.HostMaps, plan.NetMaps)
	if err != nil {
		return nil, err
	}
	var own map[vip.VIP]string
	if f.config.Stateless {
		if own, err = f.readVIPElements(ownHosts, ownNets); err != nil {
			return nil, err
		}
	}
	vips := make(map[vip.VIP]string, len(all))
	for v, chain := range all {
		stream, ours := strings.CutPrefix(chain, plan.StreamPrefix)
		if _, untracked := own[v]; ours && (untracked || !f.config.Stateless) {
			vips[v] = stream
		}
	}
	return vips, nil
}

// readVIPElements reads the VIPs of maps or sets with their chains. Missing ones have none.
func (f *Conn) readVIPElements(hosts, nets [len(vip.Families)]string) (map[vip.VIP]string, error) {
	vips := map[vip.VIP]string{}
	for _, family := range vip.Families {
		for i, set := range []string{hosts[family], nets[family]} {
			prefixes, err := f.readPrefixes(set, i == 1)
			if errors.Is(err, unix.ENOENT) {
				continue
			}
			if err != nil {
				return nil, err
			}
			for p, chain := range prefixes {
				if v, err := vip.FromPrefix(p); err == nil {
					vips[v] = chain
				}
			}
		}
	}
	return vips, nil
}
