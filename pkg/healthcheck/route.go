package healthcheck

import (
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
)

// Routed is called when there may be more fwmarks: the targets that waited for theirs are checked
// at once.
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
