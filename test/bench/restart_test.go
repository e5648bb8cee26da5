package main

import (
	"strings"
	"testing"
	"time"
)

func TestMilestone(t *testing.T) {
	const log = `time=2026-01-02T03:04:05.678Z level=INFO msg="starting frontend"
BIRD started, says a line without a time
time=2026-01-02T03:04:06.001Z level=INFO msg="BIRD started" pid=1
time=2026-01-02T03:04:09.001Z level=INFO msg="BIRD started" pid=2
time=2026-01-02T03:04:10.001Z level=INFO msg="VIPs changed" count=60 transitions="60 IPv4 withdrawn to announced"
time=2026-01-02T03:04:11.001Z level=INFO msg="VIP changed" vip=20.0.0.1/32 from=withdrawn to=announced
`
	last := milestones[len(milestones)-1]
	if last.what != "first VIP announced" {
		t.Fatalf("the last milestone is %q", last.what)
	}
	for from, want := range map[int]int{0: 10, strings.LastIndex(log, "time="): 11} {
		if at, ok := logTime(log[from:], last.lines...); !ok || at.Second() != want {
			t.Errorf("%s at %v, %t; want second %d", last.what, at, ok, want)
		}
	}
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
