package trench

import (
	"fmt"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
)

// Loaded is the configuration in force and the state of the file.
type Loaded struct {
	// Config is in force. It is empty, with Generation 0, until the first valid file if the watcher
	// was started without one.
	Config *Config
	// Generation counts the configurations in force, 0 for none. It increases when Config changes.
	Generation uint64
	// Err is why the file on disk is not in force, or nil; a *file.Errors for invalid content.
	Err error
	// Partial reports whether Err concerns objects that were left out of Config, which is in force.
	Partial bool
	// Held lists the removals of the file that wait for a confirmation. Config has the rest.
	Held Held
	// Refused counts the rejected states of the file.
	Refused uint64
	// At is when Config or Err last changed.
	At time.Time
}

// Confirm passes the identifier of the held removals to confirmed, if identifier is theirs or "".
func (loaded Loaded) Confirm(identifier string, confirmed *latest.Value[string]) (Held, error) {
	held, err := loaded.Held.confirm(identifier)
	if err == nil && loaded.Err != nil && !loaded.Partial {
		err = fmt.Errorf("the newest configuration is refused, correct it first: %w", loaded.Err)
	}
	if err == nil {
		confirmed.Set(held.ID)
	}
	return held, err
}

// StaleSuffix is the suffix of the stale file. The writer of a trench file keeps it next to the
// trench file while it cannot refresh that: one line with an RFC 3339 time, a space and the cause.
const StaleSuffix = ".stale"

// Stale is the reason why the trench file may be older than its source. It is nil if the file is
// current, or if its writer keeps no stale file.
type Stale struct {
	// Since is when the writer began to fail. With Err, it is the time of the first error, or Since
	// of a stale file that was read before.
	Since time.Time
	// Cause is printable and short; empty with Err.
	Cause string
	// Err is the error of reading or parsing the stale file, or nil.
	Err error
}

// Age returns the time since the last refresh: 0 if s is nil, otherwise at least a second, even
// if the clock of the writer is ahead.
func (s *Stale) Age(now time.Time) time.Duration {
	if s == nil {
		return 0
	}
	return max(time.Second, now.Sub(s.Since))
}

// Problem returns the text for status, or "" if s is nil. The text changes once a minute.
func (s *Stale) Problem(now time.Time) string {
	if s == nil {
		return ""
	}
	if s.Err != nil {
		return "may not be refreshed: " + s.Err.Error()
	}
	ago := ""
	if age := s.Age(now).Truncate(time.Minute); age > 0 {
		ago = " (" + strings.TrimSuffix(age.String(), "0s") + " ago)"
	}
	return "not refreshed since " + s.Since.UTC().Format(time.RFC3339) + ago + ": " + s.Cause
}
