package feedback

import (
	"testing"
	"time"
)

func TestQuorum(t *testing.T) {
	a, b, c := "spiffe://example.org/a", "spiffe://example.org/b", "spiffe://example.org/c"
	type step struct {
		after     time.Duration
		live      int
		dead      []string
		suspected bool
	}
	for name, steps := range map[string][]step{
		"no probe":                     {{live: 0}},
		"one of two":                   {{live: 2, dead: []string{a}}, {after: time.Hour, live: 2, dead: []string{a}}},
		"two of two":                   {{live: 2, dead: []string{a, b}, suspected: true}},
		"two of three":                 {{live: 3, dead: []string{a, c}, suspected: true}},
		"one that is alone":            {{live: 1, dead: []string{a}}},
		"more verdicts than live ones": {{live: 1, dead: []string{a, b}}},
		"a lost probe ends it": {
			{live: 2, dead: []string{a, b}, suspected: true},
			{live: 1, dead: []string{a}},
			{after: time.Second, live: 2, dead: []string{a}},
		},
		"a lost probe of three does not": {
			{live: 3, dead: []string{a, b, c}, suspected: true},
			{live: 2, dead: []string{a, b}, suspected: true},
			{live: 2, dead: []string{b}, suspected: true}, // waits
		},
		"trial after the first wait": {
			{live: 2, dead: []string{a, b}, suspected: true},
			{live: 2, suspected: true},
			{after: minWait - 1, live: 2, suspected: true},
			{after: 1, live: 2},
		},
		"a failed trial doubles the wait": {
			{live: 2, dead: []string{a, b}, suspected: true},
			{after: minWait, live: 2},
			{after: time.Second, live: 2, dead: []string{a, b}, suspected: true},
			{after: 2*minWait - 1, live: 2, suspected: true},
			{after: 1, live: 2},
		},
		"a verdict extends the wait": {
			{live: 2, dead: []string{a, b}, suspected: true},
			{after: minWait, live: 2, dead: []string{a, b}, suspected: true},
			{after: minWait - 1, live: 2, suspected: true},
			{after: 1, live: 2},
		},
		"a long recovery resets the wait": {
			{live: 2, dead: []string{a, b}, suspected: true},
			{after: minWait, live: 2},
			{after: maxWait + 1, live: 2, dead: []string{a, b}, suspected: true},
			{after: minWait, live: 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var s suspicion
			now := time.Now()
			for i, step := range steps {
				now = now.Add(step.after)
				if s.update(now, 2, step.live, step.dead); (s.detail != "") != step.suspected {
					t.Fatalf("step %d: %+v", i, s)
				}
			}
		})
	}
}

func TestWaitIsBounded(t *testing.T) {
	var s suspicion
	now := time.Now()
	for range 20 {
		s.update(now, 1, 1, []string{"a"})
		if s.wait > maxWait {
			t.Fatalf("waits %v", s.wait)
		}
		now = now.Add(s.wait)
		s.update(now, 1, 1, nil)
	}
	if s.wait != maxWait {
		t.Errorf("waits %v at last", s.wait)
	}
}
