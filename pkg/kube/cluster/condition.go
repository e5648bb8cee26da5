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
func (condition *condition) report(what string, err error) {
	if request := (*url.Error)(nil); errors.As(err, &request) {
		err = request.Err // what already names the request
	}
	condition.mu.Lock()
	before := condition.failed
	if err == nil {
		condition.failed = Failure{}
	} else {
		condition.errors++
		condition.failed.Cause = fmt.Sprintf("%s: %v", what, err)
		if condition.failed.Since.IsZero() {
			condition.failed.Since = time.Now()
		}
	}
	differs := condition.failed != before
	condition.mu.Unlock()
	if differs {
		condition.changed()
	}
}

func (condition *condition) failure() (Failure, uint64) {
	condition.mu.Lock()
	defer condition.mu.Unlock()
	return condition.failed, condition.errors
}
