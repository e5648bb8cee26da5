package rtnetlink

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
	ndtmsgLength = 4 // struct ndtmsg
	ndtaThresh3  = 4
	ndtaConfig   = 5
	// ndtConfigLength is the size of struct ndt_config up to its entries.
	ndtConfigLength = 8
)

// NeighborTables returns the node's neighbor tables, which all network namespaces share. Their
// sysctls exist in the initial namespace only.
func (c *Conn) NeighborTables() (map[vip.Family]NeighborTable, error) {
	tables := map[vip.Family]NeighborTable{}
	body := make([]byte, ndtmsgLength)
	_, err := list(c.requests, unix.RTM_GETNEIGHTBL, body, nil, func(b []byte) (NeighborTable, bool, error) {
		var t NeighborTable
		err := decode(b, ndtmsgLength, "neighbor table", func(ad *netlink.AttributeDecoder) {
			switch b := ad.Bytes(); {
			case ad.Type() == ndtaThresh3:
				t.Limit = ad.Uint32()
			case ad.Type() == ndtaConfig && len(b) >= ndtConfigLength:
				t.Entries = binary.NativeEndian.Uint32(b[4:])
			}
		})
		// Messages about one interface have no limit.
		if err == nil && t.Limit > 0 {
			if family, ok := familyFrom(b[0]); ok {
				tables[family] = t
			}
		}
		return t, false, err
	})
	if err != nil {
		return nil, fmt.Errorf("failed to list neighbor tables: %w", err)
	}
	return tables, nil
}
