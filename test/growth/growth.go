// Package growth lets tests refuse work whose time grows with the square of the objects.
package growth

import (
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
)

const (
	// Most is the accepted growth from n to 2n objects: 2 if the time is proportional, 2.2 with sorting
	// or with more misses of the processor's cache, and 4 for a square.
	Most = 2.5
	// samples are taken in a round, and a round costs at most patience. Noise only lengthens a sample,
	// so the shortest one counts, of all rounds.
	samples, rounds = 5, 6
	patience        = 500 * time.Millisecond
	// shortest is long enough for the clock, and for the first misses of the cache not to count.
	shortest = time.Millisecond
)

// AtScale reports whether tests have the sizes of `make bench SCALE=1`.
func AtScale() bool { return os.Getenv("VIPGATE_TEST_SCALE") == "1" }

// Check compares the processor time of the work that prepare returns for n objects, and for 2n: n
// is few, or many at scale. Calls repeat the same steps; other goroutines are not measured.
func Check(t *testing.T, name string, few, many int, prepare func(t *testing.T, n int) (work func())) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		n := few
		if AtScale() {
			n = many
		}
		// Caches of the processor may exceed it at one size, but a square does at both.
		if ratio := measure(t, n, prepare); ratio > Most && measure(t, 2*n, prepare) > Most {
			t.Errorf("twice as many take %.2f times as long, at most %.1f are accepted", ratio, Most)
		}
	})
}

// measure returns the growth from n to 2n.
func measure(t *testing.T, n int, prepare func(t *testing.T, n int) (work func())) (ratio float64) {
	t.Helper()
	single, double := newSeries(t, prepare(t, n)), newSeries(t, prepare(t, 2*n))
	// A collection of garbage would lengthen some samples, also for the rest of the heap.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	for range rounds {
		for took, i := time.Duration(0), 0; i < samples && took < patience; i++ {
			runtime.GC()
			took += single.sample(t) + double.sample(t)
		}
		if ratio = float64(double.least) / float64(single.least); ratio <= Most {
			break
		}
	}
	t.Logf("%d: %v, %d: %v, growth %.2f", n, single.least, 2*n, double.least, ratio)
	return ratio
}

// series is the work for one number of objects.
type series struct {
	work  func()
	calls int           // in a sample
	least time.Duration // of one call
}

// newSeries also warms the work up: its first call often allocates.
func newSeries(t *testing.T, work func()) *series {
	t.Helper()
	s := &series{work: work, calls: 1}
	s.sample(t)
	for s.sample(t) < shortest {
		s.calls *= 2
	}
	return s
}

// sample returns the processor time of some calls. A thread that is locked runs no other goroutine,
// and its clock does not run while the machine stalls.
func (s *series) sample(t *testing.T) time.Duration {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime(t)
	for range s.calls {
		s.work()
	}
	took := threadTime(t) - began
	if one := took / time.Duration(s.calls); s.least == 0 || one < s.least {
		s.least = one
	}
	return took
}

// threadTime returns the processor time of the calling thread.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var now unix.Timespec
	harness.Must(t, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now))
	return time.Duration(now.Nano())
}
