package fwstate

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

// listRoom limits the size of the elements in one message: the length of their attribute has 16
// bits.
const listRoom = math.MaxUint16 - 256

// element is an element of a set, or of a map with a chain or data as value.
type element struct {
	key []byte
	// chain is the target of the goto verdict.
	chain string
	// data is the value in a map of fwmarks; 0 is not a valid value.
	data uint32
	// end marks the end of an interval.
	end bool
}

func markKey(fwmark uint32) []byte { return binary.NativeEndian.AppendUint32(nil, fwmark) }

func (t *transaction) addElements(set string, list []element) {
	t.putElements("add elements to set", unix.NFT_MSG_NEWSETELEM, 0, set, list)
}

func (t *transaction) removeElements(set string, list []element) {
	t.putElements("delete elements of set", unix.NFT_MSG_DELSETELEM, 0, set, list)
}

func (t *transaction) putElements(operation string, kind, flags uint16, set string, list []element) {
	for len(list) > 0 {
		t.begin(operation, kind, unix.NLM_F_CREATE|flags, unix.NFTA_SET_ELEM_LIST_SET, set)
		t.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for all := len(t.Data); len(list) > 0 && len(t.Data)-all < listRoom-512; list = list[1:] {
				t.Nested(unix.NFTA_LIST_ELEM, func() { t.putElement(list[0]) })
			}
		})
	}
}

func (t *transaction) putElement(e element) {
	t.Nested(unix.NFTA_SET_ELEM_KEY, func() { t.Bytes(unix.NFTA_DATA_VALUE, e.key) })
	if e.end {
		t.Uint32BE(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	switch {
	case e.chain != "":
		t.Nested(unix.NFTA_SET_ELEM_DATA, func() {
			t.Nested(unix.NFTA_DATA_VERDICT, func() {
				t.Uint32BE(unix.NFTA_VERDICT_CODE, gotoCode)
				t.Text(unix.NFTA_VERDICT_CHAIN, e.chain)
			})
		})
	case e.data != 0:
		t.Nested(unix.NFTA_SET_ELEM_DATA, func() { t.Uint32(unix.NFTA_DATA_VALUE, e.data) })
	}
}

// gotoCode is NFT_GOTO, which is negative.
const gotoCode = 1<<32 - 4

func keyOf(e nlmsg.Attributes) nlmsg.Attributes {
	return e.Get(unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)
}

// chainOf returns the target chain of an element's goto verdict, or "" for any other verdict.
func chainOf(e nlmsg.Attributes) string {
	verdict := e.Get(unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VERDICT)
	if verdict.Uint32BE(unix.NFTA_VERDICT_CODE) != gotoCode {
		return ""
	}
	return verdict.Text(unix.NFTA_VERDICT_CHAIN)
}

func endsInterval(e nlmsg.Attributes) bool {
	return e.Uint32BE(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0
}

// dumpElements lists the elements of a set. It returns ENOENT for a missing set.
func (f *Conn) dumpElements(set string, each func(e nlmsg.Attributes)) error {
	return f.dump("elements", unix.NFT_MSG_GETSETELEM, unix.NFTA_SET_ELEM_LIST_SET, set, func(b nlmsg.Attributes) {
		for _, e := range b.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
			each(e)
		}
	})
}

// readTable reads a Maglev map with size entries. It ignores elements outside this range, which
// belong to other processes.
func (f *Conn) readTable(set string, size uint32) ([]uint32, error) {
	if size == 0 || size > plan.MaxTable {
		return nil, conflict("map", set, fmt.Sprintf("its size is %d", size))
	}
	table := make([]uint32, size)
	err := f.dumpElements(set, func(e nlmsg.Attributes) {
		if x := tableEntry(e); x.index < size {
			table[x.index] = x.fwmark
		}
	})
	return table, err
}

// tableEntry parses an element of a Maglev map in one pass, because reads cover several hundred
// thousand elements.
func tableEntry(e nlmsg.Attributes) (x entry) {
	for kind, value := range e.All() {
		switch {
		case len(value) != 8: // not a nested attribute of 4 bytes
		case kind == unix.NFTA_SET_ELEM_KEY:
			x.index = binary.NativeEndian.Uint32(value[4:])
		case kind == unix.NFTA_SET_ELEM_DATA:
			x.fwmark = binary.NativeEndian.Uint32(value[4:])
		}
	}
	return x
}

// readLive reads a live map, which maps fwmarks of targets to their chains; nil if it does not
// exist.
func (f *Conn) readLive(family vip.Family, stream string) (map[uint32]string, error) {
	live := map[uint32]string{}
	err := f.dumpElements(plan.LiveMap(family, stream), func(e nlmsg.Attributes) { live[keyOf(e).Uint32()] = chainOf(e) })
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return live, err
}

// readHosts reads the single addresses of a map with their chains, or of a set with chain "".
func (f *Conn) readHosts(set string, each func(netip.Prefix, string)) error {
	return f.dumpElements(set, func(e nlmsg.Attributes) {
		if a := keyOf(e).Addr(); a.IsValid() {
			each(netip.PrefixFrom(a, a.BitLen()), chainOf(e))
		}
	})
}

// bound is a boundary of an interval.
type bound struct {
	at    netip.Addr
	start int // 0 is the end
	chain string
}

// readNets reads the prefixes of an interval map with their chains, or of an interval set with
// chain "". It ignores intervals that are not a prefix, which belong to other processes.
func (f *Conn) readNets(set string, each func(netip.Prefix, string)) error {
	var bounds []bound
	err := f.dumpElements(set, func(e nlmsg.Attributes) {
		b := bound{at: keyOf(e).Addr(), start: 1, chain: chainOf(e)}
		if endsInterval(e) {
			b.start = 0
		}
		if b.at.IsValid() {
			bounds = append(bounds, b)
		}
	})
	slices.SortFunc(bounds, func(a, b bound) int { return cmp.Or(a.at.Compare(b.at), a.start-b.start) })
	for i, b := range bounds {
		if b.start == 0 {
			continue
		}
		last := vip.Last(netip.PrefixFrom(b.at, 0))
		if i+1 < len(bounds) {
			last = bounds[i+1].at.Prev()
		}
		for bits := range b.at.BitLen() + 1 {
			if p := netip.PrefixFrom(b.at, bits); p.Masked() == p && vip.Last(p) == last {
				each(p, b.chain)
				break
			}
		}
	}
	return err
}

// prefixElements returns the elements of a VIP in a map with a chain as value, or in a set.
func prefixElements(v vip.VIP, chain string) []element {
	p := v.Prefix()
	list := []element{{key: p.Addr().AsSlice(), chain: chain}}
	if p.IsSingleIP() {
		return list
	}
	// An interval that includes the highest address has no end element.
	if end := vip.Last(p).Next(); end.IsValid() {
		list = append(list, element{key: end.AsSlice(), end: true})
	}
	return list
}

func setOf(v vip.VIP, hosts, nets [len(vip.Families)]string) string {
	if v.Prefix().IsSingleIP() {
		return hosts[v.Family()]
	}
	return nets[v.Family()]
}

// ReadVIPs reads the VIPs with their streams. Without connection tracking it excludes VIPs that
// are missing in the notrack sets.
func (f *Conn) ReadVIPs() (map[vip.VIP]string, error) {
	chains, untracked, err := f.readVIPs()
	vips := make(map[vip.VIP]string, len(chains))
	for v, chain := range chains {
		stream, owned := strings.CutPrefix(chain, plan.StreamPrefix)
		if _, ok := untracked[v]; owned && (ok || f.config.Conntrack == ConntrackOn) {
			vips[v] = stream
		}
	}
	return vips, err
}

// readVIPs reads the VIPs with their chains and, without connection tracking, the VIPs in the
// notrack sets.
func (f *Conn) readVIPs() (chains, untracked map[vip.VIP]string, err error) {
	if chains, err = f.readVIPElements(plan.HostMaps, plan.NetMaps); err == nil && f.config.Conntrack != ConntrackOn {
		untracked, err = f.readVIPElements(ownHosts, ownNets)
	}
	return chains, untracked, err
}

// readVIPElements reads the VIPs of maps or sets with their chains. A missing map or set is empty.
func (f *Conn) readVIPElements(hosts, nets [len(vip.Families)]string) (map[vip.VIP]string, error) {
	vips := map[vip.VIP]string{}
	add := func(p netip.Prefix, chain string) {
		if v, err := vip.FromPrefix(p); err == nil {
			vips[v] = chain
		}
	}
	for _, family := range vip.Families {
		for _, err := range []error{f.readHosts(hosts[family], add), f.readNets(nets[family], add)} {
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return nil, err
			}
		}
	}
	return vips, nil
}
