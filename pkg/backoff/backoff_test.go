package backoff

import (
	"context"
	"slices"
	"testing"
	"time"
)

func TestDelayDoublesUntilMax(t *testing.T) {
	b := Backoff{Min: 100 * time.Millisecond, Max: time.Second}
	var got []time.Duration
	for range 6 {
		got = append(got, b.Next()/time.Millisecond)
	}
	if want := []time.Duration{100, 200, 400, 800, 1000, 1000}; !slices.Equal(got, want) {
		t.Errorf("delays are %v ms, want %v", got, want)
	}
	b.Reset()
	if d := b.Next(); d != b.Min {
		t.Errorf("first delay after Reset is %v, want %v", d, b.Min)
	}
}

func TestMaxBelowMin(t *testing.T) {
	b := Backoff{Min: time.Second, Max: time.Millisecond}
	for range 3 {
		if d := b.Next(); d != b.Min {
			t.Errorf("delay is %v, want %v", d, b.Min)
		}
	}
}

func TestJitterStaysInRange(t *testing.T) {
	b := Backoff{Min: time.Second, Max: time.Second, Jitter: 0.1}
	seen := map[time.Duration]bool{}
	for range 100 {
		d := b.Next()
		if d < 900*time.Millisecond || d > 1100*time.Millisecond {
			t.Fatalf("delay %v is not within 10 %% of 1 s", d)
		}
		seen[d] = true
	}
	if len(seen) < 2 {
		t.Error("delays do not vary")
	}
}

func TestWaitEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := Backoff{Min: time.Hour, Max: time.Hour}
	if err := b.Wait(ctx); err != context.Canceled {
		t.Errorf("Wait returned %v, want %v", err, context.Canceled)
	}
}
