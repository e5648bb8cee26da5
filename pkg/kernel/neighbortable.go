package kernel

import (
	"encoding/binary"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// NeighborTable is how full a neighbor table of the node is.
type NeighborTable struct {
	Entries uint32
	Limit   uint32 // gc_thresh3
}

// linux/neighbour.h
const (
	ndtaThresh3 = 4
	ndtaConfig  = 5
	// ndtConfigLength is the size of struct ndt_config up to its entries.
	ndtConfigLength = 8
)

// NeighborTables returns the node's neighbor tables, which all network namespaces
// share. Their sysctls exist in the initial namespace only.
func NeighborTables() (map[vip.Family]NeighborTable, error) {
	msgs, err := rtnetlink(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETNEIGHTBL, Flags: netlink.Request | netlink.Dump},
		Data:   make([]byte, 4), // struct ndtmsg: every family
	})
	if err != nil {
		return nil, fmt.Errorf("list neighbor tables: %w", err)
	}
	tables := map[vip.Family]NeighborTable{}
	for _, m := range msgs {
		if len(m.Data) < 4 {
			continue
		}
		family, known := familyFrom(m.Data[0])
		ad, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			return nil, fmt.Errorf("parse neighbor table: %w", err)
		}
		var t NeighborTable
		for ad.Next() {
			switch b := ad.Bytes(); {
			case ad.Type() == ndtaThresh3:
				t.Limit = ad.Uint32()
			case ad.Type() == ndtaConfig && len(b) >= ndtConfigLength:
				t.Entries = binary.NativeEndian.Uint32(b[4:])
			}
		}
		// Messages about one interface have no limit.
		if known && t.Limit > 0 {
			tables[family] = t
		}
	}
	return tables, nil
}
