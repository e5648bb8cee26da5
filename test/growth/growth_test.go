package growth

import "testing"

// sum is not a constant, so that the compiler keeps the loops.
var sum int

func TestSquare(t *testing.T) {
	if ratio := measure(t, 500, func(t *testing.T, n int) func() {
		return func() {
			for i := range n * n {
				sum += i
			}
		}
	}); ratio < 3.5 {
		t.Errorf("growth %.2f, want 4", ratio)
	}
}

func TestProportional(t *testing.T) {
	Check(t, "sum", 100_000, 1_000_000, func(t *testing.T, n int) func() {
		return func() {
			for i := range n {
				sum += i
			}
		}
	})
}
