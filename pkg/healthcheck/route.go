package healthcheck

import (
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
)

// Routed schedules an immediate check of the waiting targets that have a fwmark now. It is called
// when the data plane may have assigned fwmarks.
func (checker *Checker) Routed() {
	checker.mu.Lock()
	defer checker.mu.Unlock()
	checker.routings++
	now := time.Now()
	for entry := range checker.waiting {
		if _, problem := checker.FWMark(entry.Key); problem != "" || entry.index < 0 {
			continue
		}
		delete(checker.waiting, entry)
		entry.due = now
		checker.schedule.fix(entry.index)
		latest.Wake(checker.entered)
		latest.Wake(checker.rescheduled)
	}
}
