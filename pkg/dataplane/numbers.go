package dataplane

import "fmt"

// number finds a number for a new target.
func (e *engine) number() (uint32, error) {
	return e.numbers.take(func(n uint32) (bool, error) {
		if _, ok := e.installed.Targets[n]; ok {
			return true, nil
		}
		if _, ok := e.refused[n]; ok {
			return true, nil
		}
		if _, ok := e.actual.slots[n]; ok {
			e.refused[n] = "chain inet " + TableName + " " + targetChain(n) + ", or an element for it, exists already"
			return true, nil
		}
		if _, ok := e.probed[n]; !ok {
			if err := e.probe(n); err != nil {
				return false, err
			}
		}
		who := e.probed[n]
		if who != "" {
			e.refused[n] = who
			e.log.Warn("a number is used by somebody else and is left out", "number", n, "by", who)
		}
		return who != "", nil
	})
}

// maxProbed bounds the numbers that are asked about at once.
const maxProbed = 1024

// probe asks who else uses a number and those after it, more of them each time in a pass.
func (e *engine) probe(first uint32) error {
	var numbers []uint32
	for n := uint64(first); n <= uint64(e.o.Mask) && len(numbers) < e.probing; n++ {
		numbers = append(numbers, uint32(n))
	}
	e.probing = min(4*e.probing, maxProbed)
	by, err := e.kernel.takenAmong(numbers)
	if err != nil {
		return fmt.Errorf("find out who uses the numbers from %d to %d: %w", first, numbers[len(numbers)-1], err)
	}
	for _, n := range numbers {
		e.probed[n] = by[n]
	}
	return nil
}

// numbering hands out numbers, those that were not used for the longest time first.
type numbering struct {
	first, mask, next uint32
}

// numberRange is how many numbers, from the first on, targets get.
const numberRange = 1 << 16

// take returns the next number that nobody uses.
func (n *numbering) take(used func(uint32) (bool, error)) (uint32, error) {
	end := min(uint64(n.first)+numberRange, uint64(n.mask)+1)
	for range end - uint64(n.first) {
		candidate := n.next
		if uint64(candidate) >= end || candidate < n.first {
			candidate = n.first
		}
		n.next = candidate + 1
		// 253 to 255 are the kernel's own tables.
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
	return 0, fmt.Errorf("all numbers from %d to %d are used", n.first, end-1)
}
