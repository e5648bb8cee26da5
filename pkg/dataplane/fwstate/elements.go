package fwstate

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

func markKey(fwmark uint32) []byte { return binary.NativeEndian.AppendUint32(nil, fwmark) }

// elements calls each for every element of a set, which is valid during the call only. It returns
// ENOENT for a missing set.
func (conn *Conn) elements(set string, each func(nft.Element)) error {
	_, err := conn.nft.Elements(inet, set, each)
	return err
}

// readTable reads a Maglev map with size entries. It ignores elements outside this range, which
// belong to other processes.
func (f *Conn) readTable(set string, size uint32) ([]uint32, error) {
	if size == 0 || size > plan.MaxTable {
		return nil, conflict("map", set, fmt.Sprintf("its size is %d", size))
	}
	table := make([]uint32, size)
	err := f.elements(set, func(e nft.Element) {
		if x := tableEntry(e); x.index < size {
			table[x.index] = x.fwmark
		}
	})
	return table, err
}

// tableEntry converts an element of a Maglev map.
func tableEntry(e nft.Element) (x entry) {
	if len(e.Key) == 4 {
		x.index = binary.NativeEndian.Uint32(e.Key)
	}
	if len(e.Data) == 4 {
		x.fwmark = binary.NativeEndian.Uint32(e.Data)
	}
	return x
}

// readLive reads a live map, which maps fwmarks of targets to their chains; nil if it does not
// exist.
func (f *Conn) readLive(family vip.Family, stream string) (map[uint32]string, error) {
	live := map[uint32]string{}
	err := f.elements(plan.LiveMap(family, stream), func(e nft.Element) {
		live[binary.NativeEndian.Uint32(e.Key)] = e.Chain
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return live, err
}

// readHosts reads the single addresses of a map with their chains, or of a set with chain "".
func (conn *Conn) readHosts(set string, each func(netip.Prefix, string)) error {
	return conn.elements(set, func(e nft.Element) {
		if address, ok := netip.AddrFromSlice(e.Key); ok {
			each(netip.PrefixFrom(address, address.BitLen()), e.Chain)
		}
	})
}

// readNets reads the prefixes of an interval map with their chains, or of an interval set with
// chain "". It ignores intervals that are not a prefix, which belong to other processes.
func (conn *Conn) readNets(set string, each func(netip.Prefix, string)) error {
	var list []nft.Element
	err := conn.elements(set, func(e nft.Element) {
		list = append(list, nft.Element{Key: bytes.Clone(e.Key), Chain: e.Chain, End: e.End})
	})
	for _, r := range nft.Ranges(list) {
		for bits := range r.First.BitLen() + 1 {
			if p := netip.PrefixFrom(r.First, bits); p.Masked() == p && vip.Last(p) == r.Last {
				each(p, r.Chain)
				break
			}
		}
	}
	return err
}

// prefixElements returns the elements of a VIP in a map with a chain as value, or in a set.
func prefixElements(v vip.VIP, chain string) []nft.Element {
	p := v.Prefix()
	if p.IsSingleIP() {
		return []nft.Element{{Key: p.Addr().AsSlice(), Chain: chain}}
	}
	r := nft.RangeOf(p)
	r.Chain = chain
	return r.Elements()
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
