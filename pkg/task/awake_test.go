package task

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

const awakeTime = 2 * maxLate

// stall makes the next look late: the clock of a bubble does not jump, so the last one was earlier.
func (watch *awake) stall(d time.Duration) {
	watch.mu.Lock()
	defer watch.mu.Unlock()
	watch.last = watch.last.Add(-d)
}

// A long stall does not count, wherever it begins, and one that would end the wait leaves a step.
func TestAwakeTimeout(t *testing.T) {
	for _, stall := range []time.Duration{
		0, awakeStep / 2, awakeStep, awakeStep + 1, maxLate - awakeStep, maxLate - awakeStep + 1, time.Hour,
	} {
		for step := range awakeTime / awakeStep {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				watch := watchAwake(t.Context(), awakeTime)
				defer watch.end()
				begin := step*awakeStep + awakeStep/5
				time.Sleep(begin)
				watch.stall(stall)
				<-watch.Done()
				want, next := awakeTime, (step+1)*awakeStep
				switch late, left := awakeStep+stall, awakeTime-step*awakeStep; {
				case late <= maxLate && (late <= 2*awakeStep || late <= left-awakeStep): // counts
					want = max(next, awakeTime-stall)
				case late <= maxLate:
					want = next + awakeStep
				case next == awakeTime:
					want += awakeStep
				}
				if got := time.Since(began); got != want {
					t.Errorf("a stall of %v after %v: the context ended after %v without it, want %v", stall, begin, got, want)
				}
				if !errors.Is(watch.Err(), context.DeadlineExceeded) {
					t.Errorf("the context ended with %v", watch.Err())
				}
			})
		}
	}
}

// A process that is starved again and again waits for three stalls, and no longer.
func TestAwakeTimeoutIsBounded(t *testing.T) {
	for _, stalls := range []int{maxStalls - 1, maxStalls, maxStalls + 1, 100} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			watch := watchAwake(t.Context(), awakeTime)
			defer watch.end()
			for range stalls {
				watch.stall(time.Second)
				time.Sleep(awakeStep)
				synctest.Wait()
			}
			<-watch.Done()
			want := awakeTime
			if stalls > maxStalls {
				want = max((maxStalls+1)*awakeStep, time.Duration(stalls)*awakeStep)
			}
			if got := time.Since(began); got != want {
				t.Errorf("%d stalls: the context ended after %v without them, want %v", stalls, got, want)
			}
		})
	}
}

// Short stalls count, and use up nothing.
func TestAwakeTimeoutCountsShortStalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		watch := watchAwake(t.Context(), awakeTime)
		defer watch.end()
		const short, stalls = 2 * awakeStep, maxStalls + 1
		for range stalls {
			watch.stall(short)
			time.Sleep(awakeStep)
			synctest.Wait()
		}
		watch.stall(time.Hour)
		<-watch.Done()
		if got, want := time.Since(began), awakeTime-stalls*short; got != want {
			t.Errorf("the context ended after %v without the stalls, want %v", got, want)
		}
	})
}

func TestAwakeTimeoutEnds(t *testing.T) {
	for _, timeout := range []time.Duration{-1, 0, 1, awakeStep + 1} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			watch := watchAwake(t.Context(), timeout)
			defer watch.end()
			<-watch.Done()
			if got := time.Since(began); got != max(0, timeout) {
				t.Errorf("a timeout of %v ended after %v", timeout, got)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		watch := watchAwake(t.Context(), awakeTime)
		watch.end()
		watch.end()
		watch.look() // whose timer fired at the end
		time.Sleep(awakeTime)
		if watch.Err() != context.Canceled || watch.left != awakeTime {
			t.Errorf("after its end: %v, %v left", watch.Err(), watch.left)
		}
		derived, endDerived := context.WithCancel(watchAwake(t.Context(), awakeStep))
		defer endDerived()
		if <-derived.Done(); derived.Err() != context.Canceled || context.Cause(derived) != context.DeadlineExceeded {
			t.Errorf("derived: %v, caused by %v", derived.Err(), context.Cause(derived))
		}
		ctx, cancel := context.WithCancel(t.Context())
		watch = watchAwake(ctx, awakeTime)
		defer watch.end()
		cancel()
		if <-watch.Done(); watch.Err() != context.Canceled {
			t.Errorf("canceled: %v", watch.Err())
		}
	})
}
