package task

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPulse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Pulse
		want := func(what string, overdue time.Duration) {
			t.Helper()
			if got := p.Overdue(); got != overdue {
				t.Errorf("%s: overdue by %v, want %v", what, got, overdue)
			}
		}
		<-time.After(time.Hour)
		want("before the start", 0)
		p.Next(time.Minute)
		<-time.After(time.Minute)
		want("after a long wait", 0)
		<-time.After(5 * time.Second)
		want("after its end", 5*time.Second)
		p.Next(0)
		want("at a bounded step", 0)
		<-time.After(time.Second)
		want("in the step", time.Second)
		p.End()
		<-time.After(time.Hour)
		want("after the end", 0)
	})
}
