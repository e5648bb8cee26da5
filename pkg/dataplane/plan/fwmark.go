package plan

import "fmt"

// FWMarks allocates fwmarks, the least recently used first.
type FWMarks struct {
	first, mask, next uint32
}

// NewFWMarks returns an allocator of fwmarks from first on within a mask; next is tried first.
func NewFWMarks(first, mask, next uint32) FWMarks {
	return FWMarks{first: first, mask: mask, next: next}
}

// fwmarkRange is the number of fwmarks, from the first on, for targets.
const fwmarkRange = 1 << 16

// Allocate returns the next fwmark for which used returns false.
func (n *FWMarks) Allocate(used func(uint32) (bool, error)) (uint32, error) {
	end := min(uint64(n.first)+fwmarkRange, uint64(n.mask)+1)
	for range end - uint64(n.first) {
		candidate := n.next
		if uint64(candidate) >= end || candidate < n.first {
			candidate = n.first
		}
		n.next = candidate + 1
		// Tables 253 to 255 are default, main and local.
		if candidate&^n.mask != 0 || candidate >= 253 && candidate <= 255 {
			continue
		}
		switch taken, err := used(candidate); {
		case err != nil:
			return 0, err
		case !taken:
			return candidate, nil
		}
	}
	return 0, fmt.Errorf("all fwmarks from %d to %d are used", n.first, end-1)
}
