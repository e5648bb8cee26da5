package feedback

import (
	"fmt"
	"strings"
	"time"
)

const (
	// minWait and maxWait bound how long a VIP remains suspected after the last verdict. A VIP that
	// was not suspected for maxWait begins with minWait again.
	minWait = 10 * time.Second
	maxWait = 5 * time.Minute
)

// suspicion is the state of one VIP. Its zero value is not suspected.
type suspicion struct {
	detail string // names the probes; "" if the VIP is not suspected
	until  time.Time
	wait   time.Duration
	ended  time.Time
}

// update applies the verdicts at one moment: dead lists the live probes that find the VIP dead.
func (s *suspicion) update(now time.Time, quorum, live int, dead []string) {
	suspected := s.detail != ""
	switch {
	case live >= quorum && len(dead) >= quorum:
		if !suspected {
			if s.wait == 0 || now.Sub(s.ended) > maxWait {
				s.wait = minWait / 2
			}
			s.wait = min(2*s.wait, maxWait)
		}
		s.until = now.Add(s.wait)
		s.detail = fmt.Sprintf("%d of %d probes reach no target through this pod: %s", len(dead), live,
			strings.Join(dead, ", "))
	case suspected && (live < quorum || !now.Before(s.until)):
		s.detail, s.ended = "", now
	}
}

// verdict is the verdict of one probe on a VIP, reduced to the paths through this pod.
type verdict struct{ reachable, dead int }

// isDead reports whether all of at least one path are dead.
func (v verdict) isDead() bool { return v.dead > 0 && v.reachable == 0 }
