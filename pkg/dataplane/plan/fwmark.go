package plan

import "fmt"

// fwmarkRange is the number of fwmarks, from the first on, for targets.
const fwmarkRange = 1 << 16

// FWMarks allocates fwmarks from First on within Mask, the least recently used first.
type FWMarks struct {
	First, Mask uint32
	// Next is tried first.
	Next uint32
}

// Allocate returns the next fwmark for which used returns false.
func (n *FWMarks) Allocate(used func(uint32) (bool, error)) (uint32, error) {
	end := min(uint64(n.First)+fwmarkRange, uint64(n.Mask)+1)
	for range end - uint64(n.First) {
		candidate := n.Next
		if uint64(candidate) >= end || candidate < n.First {
			candidate = n.First
		}
		n.Next = candidate + 1
		// Tables 253 to 255 are default, main and local.
		if candidate&^n.Mask != 0 || candidate >= 253 && candidate <= 255 {
			continue
		}
		if taken, err := used(candidate); err != nil || !taken {
			return candidate, err
		}
	}
	return 0, fmt.Errorf("all fwmarks from %d to %d are used", n.First, end-1)
}
