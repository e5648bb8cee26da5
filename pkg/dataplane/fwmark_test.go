package dataplane

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/test/harness"
)

func TestFWMarksAreNotReusedSoon(t *testing.T) {
	e := newModelFixture().e
	e.fwmarks.first, e.fwmarks.mask = 5000, 0xffff
	e.fwmarks.begin()
	e.targets[5002] = plan.InstalledTarget{FWMark: 5002}
	take := func() uint32 {
		x, err := e.allocateFWMark()
		must(t, err)
		return x
	}
	for _, want := range []uint32{5000, 5001, 5003, 5004} {
		if got := take(); got != want {
			t.Fatalf("got %d, want %d", got, want)
		}
	}
	e.fwmarks.next = 0xffff
	if a, b := take(), take(); a != 0xffff || b != 5000 {
		t.Fatalf("got %d and %d around the end", a, b)
	}
	e.fwmarks.first, e.fwmarks.mask, e.fwmarks.next = 252, 0xff, 252
	if a, b := take(), take(); a != 252 || b != 252 {
		t.Fatalf("got %d and %d: the kernel's own tables", a, b)
	}
	e.targets[252] = plan.InstalledTarget{FWMark: 252}
	if _, err := e.allocateFWMark(); err == nil {
		t.Fatal("no error when all are used")
	}
}

// A target more than fwmarks is refused, also if the mask has room.
func TestFWMarksAreBounded(t *testing.T) {
	e := newModelFixture().e
	e.fwmarks.first, e.fwmarks.mask = 5000, 0xffffff
	e.fwmarks.begin()
	for n := range uint32(fwmarkRange) {
		x, err := e.allocateFWMark()
		if err != nil || x != 5000+n {
			t.Fatalf("target %d: %d, %v", n+1, x, err)
		}
		e.targets[x] = plan.InstalledTarget{FWMark: x}
	}
	_, err := e.allocateFWMark()
	harness.WantError(t, err, "all fwmarks from 5000 to 70535 are used")
}
