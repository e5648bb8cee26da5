package fwstate

import (
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

// elements calls each for every element of a set. It returns ENOENT for a missing set.
func (reader reader) elements(set string, each func(nft.Element)) error {
	_, err := reader.Elements(inet, set, each)
	return err
}

// readTable reads a Maglev map with size entries. It ignores elements outside this range, which
// belong to other processes.
func (reader reader) readTable(set string, size uint32) ([]uint32, error) {
	if size == 0 || size > plan.MaxTable {
		return nil, conflict("map", set, fmt.Sprintf("its size is %d", size))
	}
	table := make([]uint32, size)
	err := reader.elements(set, func(element nft.Element) {
		if entry := tableEntry(element); entry.index < size {
			table[entry.index] = entry.fwmark
		}
	})
	return table, err
}

func tableEntry(element nft.Element) (result entry) {
	if len(element.Key) == 4 {
		result.index = binary.NativeEndian.Uint32(element.Key)
	}
	if len(element.Data) == 4 {
		result.fwmark = binary.NativeEndian.Uint32(element.Data)
	}
	return result
}

// readLive reads a live map, which maps fwmarks of targets to their chains; nil if it is missing.
func (reader reader) readLive(family vip.Family, stream string) (map[uint32]string, error) {
	live := map[uint32]string{}
	err := reader.elements(plan.LiveMap(family, stream), func(element nft.Element) {
		live[binary.NativeEndian.Uint32(element.Key)] = element.Chain
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return live, err
}

// readHosts reads the single addresses of a map with their chains, or of a set with chain "".
func (reader reader) readHosts(set string, each func(netip.Prefix, string)) error {
	return reader.elements(set, func(element nft.Element) {
		if address, ok := netip.AddrFromSlice(element.Key); ok {
			each(netip.PrefixFrom(address, address.BitLen()), element.Chain)
		}
	})
}

// readNets reads the prefixes of an interval map with their chains, or of an interval set with
// chain "". It ignores intervals that are not a prefix, which belong to other processes.
func (reader reader) readNets(set string, each func(netip.Prefix, string)) error {
	var list []nft.Element
	err := reader.elements(set, func(element nft.Element) { list = append(list, element) })
	for _, interval := range nft.Ranges(list) {
		for bits := range interval.First.BitLen() + 1 {
			if prefix := netip.PrefixFrom(interval.First, bits); prefix.Masked() == prefix && vip.Last(prefix) == interval.Last {
				each(prefix, interval.Chain)
				break
			}
		}
	}
	return err
}

// prefixElements returns the elements of a VIP in a map with a chain as value, or in a set.
func prefixElements(address vip.VIP, chain string) []nft.Element {
	prefix := address.Prefix()
	if prefix.IsSingleIP() {
		return []nft.Element{{Key: prefix.Addr().AsSlice(), Chain: chain}}
	}
	interval := nft.RangeOf(prefix)
	interval.Chain = chain
	return interval.Elements()
}

func setOf(address vip.VIP, hosts, nets [len(vip.Families)]string) string {
	if address.Prefix().IsSingleIP() {
		return hosts[address.Family()]
	}
	return nets[address.Family()]
}

// ReadVIPs reads the VIPs with their streams. Without connection tracking it excludes VIPs that
// are missing in the notrack sets.
func (conn *Conn) ReadVIPs() (map[vip.VIP]string, error) {
	chains, untracked, err := conn.readVIPs()
	vips := make(map[vip.VIP]string, len(chains))
	for address, chain := range chains {
		stream, owned := strings.CutPrefix(chain, plan.StreamPrefix)
		if _, found := untracked[address]; owned && (found || conn.config.Conntrack == ConntrackOn) {
			vips[address] = stream
		}
	}
	return vips, err
}

// readVIPs reads the VIPs with their chains and, without connection tracking, the notrack sets.
func (conn *Conn) readVIPs() (chains, untracked map[vip.VIP]string, err error) {
	if chains, err = conn.readVIPElements(plan.HostMaps, plan.NetMaps); err == nil &&
		conn.config.Conntrack != ConntrackOn {
		untracked, err = conn.readVIPElements(ownHosts, ownNets)
	}
	return chains, untracked, err
}

// readVIPElements reads the VIPs of maps or sets with their chains. A missing map or set is empty.
func (conn *Conn) readVIPElements(hosts, nets [len(vip.Families)]string) (map[vip.VIP]string, error) {
	vips := map[vip.VIP]string{}
	add := func(prefix netip.Prefix, chain string) {
		if address, err := vip.FromPrefix(prefix); err == nil {
			vips[address] = chain
		}
	}
	for _, family := range vip.Families {
		for _, err := range []error{conn.nft.readHosts(hosts[family], add), conn.nft.readNets(nets[family], add)} {
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return nil, err
			}
		}
	}
	return vips, nil
}
