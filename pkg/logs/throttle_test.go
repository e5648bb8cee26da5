package logs

import (
	"testing"
	"time"
)

func TestThrottle(t *testing.T) {
	var q Throttle
	t0 := time.Now()
	for i := range 1000 {
		if _, ok := q.Allow(t0.Add(time.Duration(i) * 100 * time.Microsecond)); ok != (i == 0) {
			t.Fatalf("line %d: %v", i, ok)
		}
	}
	if missed, ok := q.Allow(t0.Add(2 * time.Second)); !ok || missed != 999 {
		t.Fatalf("a second later: %d, %v", missed, ok)
	}
}
