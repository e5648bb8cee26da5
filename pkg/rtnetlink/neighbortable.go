package rtnetlink

import (
	"fmt"

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
	request := dump(unix.RTM_GETNEIGHTBL, make([]byte, ndtmsgLength))
	_, err := list(c, request, nil, func(b []byte) (t NeighborTable, _ bool, err error) {
		a, err := attributes(b, ndtmsgLength, "neighbor table")
		if err != nil {
			return t, false, err
		}
		t.Limit = a.Uint32(ndtaThresh3)
		if config := a.Get(ndtaConfig); len(config) >= ndtConfigLength {
			t.Entries = config[4:].Uint32()
		}
		// Messages about one interface have no limit.
		if family, ok := familyFrom(b[0]); ok && t.Limit > 0 {
			tables[family] = t
		}
		return t, false, nil
	})
	if err != nil {
		return nil, fmt.Errorf("failed to list neighbor tables: %w", err)
	}
	return tables, nil
}
