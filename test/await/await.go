package await

import (
	"testing"
	"time"
)

// Timeout is how long a test waits for a condition: far longer than any condition needs on a loaded
// machine.
const Timeout = 30 * time.Second

// True waits until condition returns true, and fails the test after [Timeout]. what names the
// condition in the failure.
func True(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Timeout); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out after %v: %s", Timeout, what)
		}
	}
}

// Receive waits for a value of a channel, or for its end, and fails the test after [Timeout]. what
// names the event in the failure.
func Receive[T any](t testing.TB, what string, values <-chan T) T {
	t.Helper()
	select {
	case value := <-values:
		return value
	case <-time.After(Timeout):
		t.Fatalf("timed out after %v: %s", Timeout, what)
		panic("unreachable")
	}
}
