package tick

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestUntil(t *testing.T) {
	second := time.Unix(1_000_000_000, 0)
	for _, c := range []struct {
		after, every, want time.Duration
	}{
		{0, time.Second, time.Second},
		{time.Nanosecond, time.Second, time.Second - 1},
		{600 * time.Millisecond, time.Second, 400 * time.Millisecond},
		{875 * time.Millisecond, time.Second, 125 * time.Millisecond},
		{876 * time.Millisecond, time.Second, 1124 * time.Millisecond},
		{time.Second - 1, time.Second, time.Second + 1},
		{600 * time.Millisecond, 250 * time.Millisecond, 150 * time.Millisecond},
		{0, 5 * time.Millisecond, 5 * time.Millisecond},
	} {
		if got := Until(second.Add(c.after), c.every); got != c.want {
			t.Errorf("%v after a second, every %v: %v, want %v", c.after, c.every, got, c.want)
		}
	}
}

func TestSharedInstants(t *testing.T) {
	for offset := range 1000 {
		now := time.Unix(1_000_000_000, int64(offset)*1_234_567)
		beat := now
		for beat.Sub(now) < Until(now, time.Second) {
			beat = beat.Add(Until(beat, 250*time.Millisecond))
		}
		if end := now.Add(Until(now, time.Second)); !beat.Equal(end) {
			t.Fatalf("from %v: beats end at %v, the second at %v", now, beat, end)
		}
	}
}

func TestUntilPart(t *testing.T) {
	second := time.Unix(1_000_000_000, 0)
	for _, c := range []struct {
		after time.Duration
		parts int
		want  time.Duration // since second
	}{
		{0, 3, 333_333_333},
		{333_333_333, 3, 666_666_666},
		{666_666_666, 3, time.Second},
		{600 * time.Millisecond, 3, 666_666_666},
		{630 * time.Millisecond, 3, time.Second},
		{999 * time.Millisecond, 3, 1_333_333_333},
		{900 * time.Millisecond, 7, time.Second},
	} {
		now := second.Add(c.after)
		if got := c.after + UntilPart(now, time.Second, c.parts); got != c.want {
			t.Errorf("%v after a second, %d parts: %v, want %v", c.after, c.parts, got, c.want)
		}
	}
	for now, i := second, 1; i <= 3000; i++ {
		now = now.Add(UntilPart(now, time.Second, 3))
		if want := time.Duration(i) * time.Second / 3; now.Sub(second) != want {
			t.Fatalf("instant %d is %v after the first, want %v", i, now.Sub(second), want)
		}
	}
}
