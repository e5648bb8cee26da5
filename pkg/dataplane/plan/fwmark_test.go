package plan

import "testing"

func TestFWMarksAreNotReusedSoon(t *testing.T) {
	n := FWMarks{First: 5000, Mask: 0xffff, Next: 5000}
	used := map[uint32]bool{5002: true}
	take := func() uint32 {
		x, err := n.Allocate(func(n uint32) (bool, error) { return used[n], nil })
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	for _, want := range []uint32{5000, 5001, 5003, 5004} {
		if got := take(); got != want {
			t.Fatalf("got %d, want %d", got, want)
		}
	}
	n.Next = 0xffff
	if a, b := take(), take(); a != 0xffff || b != 5000 {
		t.Fatalf("got %d and %d around the end", a, b)
	}
	n = FWMarks{First: 252, Mask: 0xff, Next: 252}
	if a, b := take(), take(); a != 252 || b != 252 {
		t.Fatalf("got %d and %d: the kernel's own tables", a, b)
	}
	if _, err := n.Allocate(func(uint32) (bool, error) { return true, nil }); err == nil {
		t.Fatal("no error when all are used")
	}
}
