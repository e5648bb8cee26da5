package main

import (
	"testing"
	"time"
)

func TestMilestone(t *testing.T) {
	const log = `time=2026-01-02T03:04:05.678Z level=INFO msg="starting frontend"
BIRD started, says a line without a time
time=2026-01-02T03:04:06.001Z level=INFO msg="BIRD started" pid=1
time=2026-01-02T03:04:09.001Z level=INFO msg="BIRD started" pid=2
`
	for _, c := range []struct {
		text string
		want time.Time
		ok   bool
	}{
		{`msg="BIRD started"`, time.Date(2026, 1, 2, 3, 4, 6, 1_000_000, time.UTC), true},
		{`starting frontend`, time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.UTC), true},
		{`BIRD started,`, time.Time{}, false},
		{`never said`, time.Time{}, false},
	} {
		at, ok := logTime(log, c.text)
		if ok != c.ok || !at.Equal(c.want) {
			t.Errorf("logTime(%q) = %v, %v; want %v, %v", c.text, at, ok, c.want, c.ok)
		}
	}
}
