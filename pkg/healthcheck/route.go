package healthcheck

import (
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
)

// Routed schedules an immediate check of the waiting targets that have a fwmark now. It is called
// when the data plane may have assigned fwmarks.
func (c *Checker) Routed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.routings++
	now := time.Now()
	for k, e := range c.waiting {
		if _, problem := c.FWMark(k); problem != "" || e.index < 0 {
			continue
		}
		delete(c.waiting, k)
		e.due = now
		c.schedule.fix(e.index)
		latest.Wake(c.entered)
		latest.Wake(c.rescheduled)
	}
}
