package cluster

import (
	"errors"
	"fmt"
	"net/url"
	"sync"
	"time"
)

// condition records the failure of one operation, and counts its errors.
type condition struct {
	changed func() // called after every change, without mu held

	mu     sync.Mutex
	failed Failure
	errors uint64
}

// Failure is the start time and cause of a failure. It is zero without one.
type Failure struct {
	Since time.Time
	Cause string
}

// report records the result of an attempt; a nil error ends the failure.
func (c *condition) report(what string, err error) {
	if request := (*url.Error)(nil); errors.As(err, &request) {
		err = request.Err // what already names the request
	}
	c.mu.Lock()
	before := c.failed
	if err == nil {
		c.failed = Failure{}
	} else {
		c.errors++
		c.failed.Cause = fmt.Sprintf("%s: %v", what, err)
		if c.failed.Since.IsZero() {
			c.failed.Since = time.Now()
		}
	}
	differs := c.failed != before
	c.mu.Unlock()
	if differs {
		c.changed()
	}
}

func (c *condition) failure() (Failure, uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failed, c.errors
}
