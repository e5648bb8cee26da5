package healthcheck

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// Rounds with few checks are not followed by a rest, quickRounds of a pace at most.
func TestFewChecksNeedNoRest(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := New(Options{Log: discard, dial: newNetwork().DialContext})
		check := testCheck
		check.Rise = 1
		c.Configure([]trench.Stream{stream(2*quickChecks, check)})
		l := loop{Checker: c}
		defer l.probes.Wait()
		for c.unjudged > 0 {
			l.round(t.Context())
			advance(pace)
		}
		// round returns the rest after a round in which some checks are due.
		round := func(due int) time.Duration {
			for i, h := range c.List() {
				e := c.streams[h.Stream][h.Key].members[0]
				if e.due = time.Now(); i >= due {
					e.due = e.due.Add(time.Hour)
				}
				c.schedule.fix(e.index)
			}
			rest := l.round(t.Context())
			synctest.Wait()
			return rest
		}
		for range 2 { // paces
			for i := range quickRounds {
				if rest := round(quickChecks - i); rest != 0 {
					t.Errorf("%v of rest after round %d with %d checks", rest, i+1, quickChecks-i)
				}
			}
			if rest := round(1); rest != restPer {
				t.Errorf("%v of rest after one round more", rest)
			}
			advance(pace)
			if rest := round(quickChecks + 1); rest != (quickChecks+1)*restPer {
				t.Errorf("%v of rest after many checks", rest)
			}
			advance(pace)
		}
	})
}
