package dataplane

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

func TestFWMarksAreNotReusedSoon(t *testing.T) {
	e := newModelFixture().e
	e.o.First, e.o.Mask, e.probed, e.probing = 5000, 0xffff, map[uint32]string{}, 1
	e.targets[5002] = plan.InstalledTarget{FWMark: 5002}
	take := func() uint32 {
		x, err := e.allocateFWMark()
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
	e.nextFWMark = 0xffff
	if a, b := take(), take(); a != 0xffff || b != 5000 {
		t.Fatalf("got %d and %d around the end", a, b)
	}
	e.o.First, e.o.Mask, e.nextFWMark = 252, 0xff, 252
	if a, b := take(), take(); a != 252 || b != 252 {
		t.Fatalf("got %d and %d: the kernel's own tables", a, b)
	}
	e.targets[252] = plan.InstalledTarget{FWMark: 252}
	if _, err := e.allocateFWMark(); err == nil {
		t.Fatal("no error when all are used")
	}
}
