package dataplane

import (
	"fmt"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// allocateFWMark returns an unused fwmark for a new target.
func (e *engine) allocateFWMark() (uint32, error) {
	return e.fwmarks.Allocate(func(n uint32) (bool, error) {
		if _, ok := e.installed.Targets[n]; ok {
			return true, nil
		}
		if _, ok := e.refused[n]; ok {
			return true, nil
		}
		if _, ok := e.observed.Targets[n]; ok {
			e.refused[n] = "chain inet " + TableName + " " + plan.TargetChain(n) + ", or an element for it, exists already"
			return true, nil
		}
		if _, ok := e.probed[n]; !ok {
			if err := e.probeFWMarks(n); err != nil {
				return false, err
			}
		}
		who := e.probed[n]
		if who != "" {
			e.refused[n] = who
			e.log.Warn("fwmark used by another process, skipping it", "fwmark", n, "by", who)
		}
		return who != "", nil
	})
}

// maxProbed bounds the fwmarks that are checked at once.
const maxProbed = 1024

// probeFWMarks checks whether other processes use a fwmark and its successors, more of them at
// each call of a pass.
func (e *engine) probeFWMarks(first uint32) error {
	var numbers []uint32
	for n := uint64(first); n <= uint64(e.o.Mask) && len(numbers) < e.probing; n++ {
		numbers = append(numbers, uint32(n))
	}
	e.probing = min(4*e.probing, maxProbed)
	by, err := e.kernel.UsedByOthers(numbers)
	if err != nil {
		return fmt.Errorf("check for other users of fwmarks %d to %d: %w", first, numbers[len(numbers)-1], err)
	}
	for _, n := range numbers {
		e.probed[n] = by[n]
	}
	return nil
}
