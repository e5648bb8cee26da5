package plan

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestBlocksCoverExactMarks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		numbers := rapid.SliceOf(rapid.Uint32Range(5000, 5100)).Draw(t, "numbers")
		var covered []uint32
		for _, b := range Blocks(numbers) {
			if b.Length&(b.Length-1) != 0 || b.First%b.Length != 0 {
				t.Fatalf("block %+v", b)
			}
			for i := range b.Length {
				covered = append(covered, b.First+i)
			}
		}
		slices.Sort(numbers)
		if want := slices.Compact(numbers); !slices.Equal(covered, want) {
			t.Fatalf("covered %v, want %v", covered, want)
		}
	})
	thousand := make([]uint32, 1000)
	for i := range thousand {
		thousand[i] = uint32(5000 + i)
	}
	if n := len(Blocks(thousand)); n > 2*10 {
		t.Errorf("%d blocks for a thousand numbers in a row", n)
	}
}
