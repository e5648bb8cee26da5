package task

import (
	"testing"
	"testing/synctest"
	"time"
)

// Only the time counts in which the process runs, wherever a stall begins.
func TestAwakeTimeout(t *testing.T) {
	const timeout = 500 * time.Millisecond
	for _, stall := range []time.Duration{0, awakeStep / 2, 2*awakeStep + 1, time.Hour} {
		for begin := time.Duration(0); begin < timeout; begin += 10 * time.Millisecond {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				ctx, watch := watchAwake(t.Context(), timeout)
				defer watch.end()
				<-time.After(begin)
				// The clock of the bubble does not jump: the last look was earlier.
				watch.mu.Lock()
				watch.last = watch.last.Add(-stall)
				watch.mu.Unlock()
				<-ctx.Done()
				forgiven := time.Duration(0)
				if stall > 2*awakeStep {
					forgiven = stall
				}
				if ran := time.Since(began) + stall - forgiven; ran < timeout-awakeStep || ran > timeout+awakeStep {
					t.Errorf("a stall of %v after %v: the context ended after %v without it", stall, begin, ran)
				}
			})
		}
	}
}
