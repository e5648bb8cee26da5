package plan

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// vacant is an entry that no name has taken.
	vacant = math.MaxUint16
	// maxShares is how many names can have entries: indices below vacant.
	maxShares = vacant
)

// maglev divides size entries among names, as in section 3.4 of the Maglev paper (Eisenbud et al.,
// NSDI 2016). The result depends on the set of names, on size and on seed only: it holds indices
// into names, which must be sorted and distinct. size is prime, since otherwise a name's steps do
// not come to every entry. It returns nil for no names. Of more names than entries, or than 65535,
// those that sort last get none.
//
// The shares of two names differ by at most one entry. When one of 10 names goes, 12.6 % on average
// of 1009 entries move, 11.7 % of 2003, 10.7 % of 10 007, 10.2 % of 65 537, with any hash.
//
// Pods with different versions must compute equal tables, so the algorithm can never change. A name
// walks the entries from offset on in steps of skip, both out of the SHA-256 of seed (4 bytes, most
// significant first) and name:
//
//	offset = bytes 0 to 7, most significant first, mod size
//	skip   = bytes 8 to 15, most significant first, mod (size - 1), plus 1
//
// and in the order of the names each takes in turn the next vacant entry on its walk.
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
	for taken := uint32(0); ; {
		for i := range walks {
			w := &walks[i]
			for table[w.next] != vacant {
				w.step(size)
			}
			table[w.next] = uint16(i)
			w.step(size)
			if taken++; taken == size {
				return table
			}
		}
	}
}

// walk is the order in which a name wants the entries of a table.
type walk struct{ next, skip uint32 }

func newWalk(name string, size, seed uint32) walk {
	var stack [128]byte // a name has at most 60 bytes
	sum := sha256.Sum256(append(binary.BigEndian.AppendUint32(stack[:0], seed), name...))
	return walk{
		next: uint32(binary.BigEndian.Uint64(sum[0:8]) % uint64(size)),
		skip: uint32(binary.BigEndian.Uint64(sum[8:16])%uint64(size-1)) + 1,
	}
}

func (w *walk) step(size uint32) {
	if w.next += w.skip; w.next >= size {
		w.next -= size
	}
}

// TableCache keeps the last Maglev table of one stream and family, with all that it depends on.
type TableCache struct {
	names      []string
	fwmarks    []uint32
	size, seed uint32
	entries    []uint32
}

// TableCaches are the caches of one stream, by family.
type TableCaches [len(vip.Families)]TableCache

// table divides size entries among targets and returns the fwmark of each entry.
func (c *TableCache) table(names []string, targets map[string]InstalledTarget, size, seed uint32) []uint32 {
	fwmarks := make([]uint32, len(names))
	for i, name := range names {
		fwmarks[i] = targets[name].FWMark
	}
	if c.entries == nil || c.size != size || c.seed != seed ||
		!slices.Equal(c.names, names) || !slices.Equal(c.fwmarks, fwmarks) {
		*c = TableCache{names, fwmarks, size, seed, make([]uint32, size)}
		for i, which := range maglev(names, size, seed) {
			c.entries[i] = fwmarks[which]
		}
	}
	return c.entries
}
