package task

import (
	"sync/atomic"
	"time"
)

// Loop is a Task that reports whether its loop still runs.
type Loop interface {
	Task
	// Overdue returns how late the next iteration is; 0 if it is not due, and before and after Run.
	Overdue() time.Duration
}

// Pulse records when the next iteration of a loop is due. A waiting loop is not overdue, a blocked
// loop is. The zero Pulse is ready for use.
type Pulse struct {
	due atomic.Pointer[time.Time] // nil while the loop does not run
}

// Next records that the loop runs and begins its next iteration, or bounded step, within a time.
func (p *Pulse) Next(within time.Duration) {
	due := time.Now().Add(within)
	p.due.Store(&due)
}

// End records that the loop has ended.
func (p *Pulse) End() { p.due.Store(nil) }

// Overdue implements [Loop].
func (p *Pulse) Overdue() time.Duration {
	if due := p.due.Load(); due != nil {
		return max(0, time.Since(*due))
	}
	return 0
}
