package plan

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// vacant marks an unassigned entry.
	vacant = math.MaxUint16
	// maxShares is the maximum number of names with entries: their indices are below vacant.
	maxShares = vacant
)

// maglev divides size entries among names, as in section 3.4 of the Maglev paper (Eisenbud et
// al., NSDI 2016). The result holds indices into names, which must be sorted and distinct, and
// depends only on the names, size and seed. size must be prime: otherwise a name's steps do not
// reach every entry. The result is nil without names. If there are more names than entries, or
// more than 65535, the names that sort last receive no entries.
//
// The shares of two names differ by at most one entry. When one of 10 names is removed, on average
// 12.6 % of 1009 entries move, 11.7 % of 2003, 10.7 % of 10 007, 10.2 % of 65 537, with any hash.
//
// Pods of different versions must compute equal tables, so the algorithm must never change. A
// name visits entries from offset in steps of skip, both derived from the SHA-256 of seed (4
// bytes, most significant first) and name:
//
//	offset = bytes 0 to 7, most significant first, mod size
//	skip   = bytes 8 to 15, most significant first, mod (size - 1), plus 1
//
// In the order of names, each name in turn takes the next vacant entry of its sequence.
func maglev(names []string, size, seed uint32) []uint16 {
	if len(names) == 0 {
		return nil
	}
	names = names[:min(len(names), int(size), maxShares)]
	walks := make([]walk, len(names))
	for i, name := range names {
		walks[i] = newWalk(name, size, seed)
	}
	table := make([]uint16, size)
	for i := range table {
		table[i] = vacant
	}
	// One entry for each name in turn keeps the shares equal.
	for taken := uint32(0); ; {
		for i := range walks {
			walk := &walks[i]
			for table[walk.next] != vacant {
				walk.step(size)
			}
			table[walk.next] = uint16(i)
			walk.step(size)
			if taken++; taken == size {
				return table
			}
		}
	}
}

// walk is the preference sequence of a name over the entries of a table.
type walk struct{ next, skip uint32 }

func newWalk(name string, size, seed uint32) walk {
	var stack [128]byte // names have at most 60 bytes
	sum := sha256.Sum256(append(binary.BigEndian.AppendUint32(stack[:0], seed), name...))
	return walk{
		next: uint32(binary.BigEndian.Uint64(sum[0:8]) % uint64(size)),
		// With skip 0 the walk would not leave its first entry.
		skip: uint32(binary.BigEndian.Uint64(sum[8:16])%uint64(size-1)) + 1,
	}
}

func (w *walk) step(size uint32) {
	if w.next += w.skip; w.next >= size {
		w.next -= size
	}
}

// tableCache holds the last Maglev table of one stream and family, with its inputs.
type tableCache struct {
	names      []string
	fwmarks    []uint32
	size, seed uint32
	entries    []uint32
}

// TableCaches holds the table caches of one stream, by family.
type TableCaches [len(vip.Families)]tableCache

// table divides size entries among targets and returns the fwmark of each entry.
func (c *tableCache) table(names []string, targets map[string]InstalledTarget, size, seed uint32) []uint32 {
	fwmarks := make([]uint32, len(names))
	for i, name := range names {
		fwmarks[i] = targets[name].FWMark
	}
	// Compare the fwmarks, too: a target that was removed and added again has another fwmark.
	if c.entries == nil || c.size != size || c.seed != seed ||
		!slices.Equal(c.names, names) || !slices.Equal(c.fwmarks, fwmarks) {
		*c = tableCache{names, fwmarks, size, seed, make([]uint32, size)}
		for i, which := range maglev(names, size, seed) {
			c.entries[i] = fwmarks[which]
		}
	}
	return c.entries
}
