package bird

import (
	"testing"
	"testing/synctest"
	"time"
)

// A stall of more than a second is noticed wherever it begins in a wait, and one of half a second
// is none.
func TestStallsWithinAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // in which the timers of the watch do not fire by themselves
		const wait = 2 * time.Second
		began := time.Now()
		for begin := time.Duration(0); begin <= wait; begin += 100 * time.Millisecond {
			for _, stall := range []time.Duration{0, starved, 2*starved + 1, time.Minute} {
				watch := watchStalls()
				after := func(d time.Duration) time.Time { // when a timer that is due fires
					if begin <= d && d < begin+stall {
						d = begin + stall
					}
					return began.Add(d)
				}
				end := after(wait)
				for due := watch.due; due.Before(end); due = watch.due {
					fires := after(due.Sub(began))
					if !fires.Before(end) {
						break // the deadline ends the wait first
					}
					watch.look(fires, false)
				}
				if got := watch.look(end, true); got != (stall > 2*starved) {
					t.Errorf("a stall of %v after %v: %v", stall, begin, got)
				}
			}
		}
	})
}
