package plan

import "slices"

// Block is a range of numbers whose length is a power of two that divides the first number, so
// that a mask matches it.
type Block struct{ First, Length uint32 }

// Blocks returns the minimal list of blocks that cover exactly these numbers.
func Blocks(numbers []uint32) []Block {
	var list []Block
	for _, number := range slices.Compact(slices.Sorted(slices.Values(numbers))) {
		list = append(list, Block{number, 1})
		// Merge aligned neighbors of equal length.
		for len(list) > 1 {
			a, b := list[len(list)-2], list[len(list)-1]
			if a.Length != b.Length || a.First+a.Length != b.First || a.First%(2*a.Length) != 0 {
				break
			}
			list = append(list[:len(list)-2], Block{a.First, 2 * a.Length})
		}
	}
	return list
}
