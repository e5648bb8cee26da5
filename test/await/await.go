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
