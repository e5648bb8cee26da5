package vip

import (
	"iter"
	"slices"
)

// Table holds a value for each of its VIPs, in the order of [Compare]. Looking up or adding a batch
// in that order, which batches have, costs little more than iterating a slice. The zero Table is
// empty and ready for use. It must not be copied, and is not safe for concurrent use.
type Table[T any] struct {
	entries []tableEntry[T]
	next    int // expected index of the next VIP of an ascending batch
}

type tableEntry[T any] struct {
	vip   VIP
	value T
}

// Len returns the number of VIPs.
func (t *Table[T]) Len() int { return len(t.entries) }

// Get returns the value of vip, nil if the table does not have it. The pointer is valid until the
// table gets or loses a VIP. Calls of Get may be concurrent.
func (t *Table[T]) Get(vip VIP) *T {
	if index, found := t.search(vip); found {
		return &t.entries[index].value
	}
	return nil
}

// Next is Get for lookups in ascending order, most without a search. Calls must not be concurrent.
func (t *Table[T]) Next(vip VIP) *T {
	// The batch may skip one VIP of the table without a search.
	for index := t.next; index < min(t.next+2, len(t.entries)); index++ {
		if t.entries[index].vip == vip {
			t.next = index + 1
			return &t.entries[index].value
		}
	}
	if index, found := t.search(vip); found {
		t.next = index + 1
		return &t.entries[index].value
	}
	return nil
}

func (t *Table[T]) search(vip VIP) (int, bool) {
	return slices.BinarySearchFunc(t.entries, vip, func(e tableEntry[T], vip VIP) int { return Compare(e.vip, vip) })
}

// Add adds the missing VIPs with the zero value. It iterates vips twice.
func (t *Table[T]) Add(vips iter.Seq[VIP]) {
	missing := 0
	t.next = 0
	for vip := range vips {
		if t.Next(vip) == nil {
			missing++
		}
	}
	if missing == 0 {
		return
	}
	// Look up in the sorted entries while new ones are appended unsorted.
	old := Table[T]{entries: t.entries}
	t.entries = slices.Grow(t.entries, missing)
	ascending := true // successive batches may be in order
	for vip := range vips {
		if old.Next(vip) == nil {
			ascending = ascending && (len(t.entries) == 0 || Compare(t.entries[len(t.entries)-1].vip, vip) < 0)
			t.entries = append(t.entries, tableEntry[T]{vip: vip})
		}
	}
	t.next = 0
	if ascending {
		return
	}
	slices.SortFunc(t.entries, func(a, b tableEntry[T]) int { return Compare(a.vip, b.vip) })
	// A batch may contain a VIP twice.
	t.entries = slices.CompactFunc(t.entries, func(a, b tableEntry[T]) bool { return a.vip == b.vip })
}

// DeleteFunc removes the VIPs for which remove returns true.
func (t *Table[T]) DeleteFunc(remove func(VIP, *T) bool) {
	t.entries = slices.DeleteFunc(t.entries, func(e tableEntry[T]) bool { return remove(e.vip, &e.value) })
	t.next = 0
}

// All returns the VIPs in ascending order with their values, which may be modified.
func (t *Table[T]) All() iter.Seq2[VIP, *T] {
	return func(yield func(VIP, *T) bool) {
		for index := range t.entries {
			if entry := &t.entries[index]; !yield(entry.vip, &entry.value) {
				return
			}
		}
	}
}
