package target

import (
	"testing"
	"time"
)

// BenchmarkSuddenLossOf10000 is one whole outage: all fall one by one, are held,
// and return one by one.
func BenchmarkSuddenLossOf10000(b *testing.B) {
	for b.Loop() {
		s, net, now := NewSudden(holding), networks{}, time.Unix(1000, 0)
		report := func(state State, silent bool) {
			for i := range 10_000 {
				k := key(i/250, i%250)
				s.Evaluate(now, []Health{{Key: k, State: state, Since: now, LastCheck: now, Silent: silent}}, nil, checkOf, fakeView{net, 1})
				now = now.Add(100 * time.Microsecond)
			}
		}
		report(Ready, false)
		for seg := range 40 {
			net[segmentNumber(seg)] = networkState{dark: true, known: true}
		}
		report(NotReady, true)
		report(Ready, false)
	}
}
