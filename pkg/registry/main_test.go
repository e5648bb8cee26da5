package registry

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/trench"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var discard = slog.New(slog.DiscardHandler)

// patience bounds every wait for an expected event.
const patience = 20 * time.Second

var testCheck = trench.Check{
	TCP: trench.TCPCheck{Port: 5000}, Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3,
}

// inBubble runs the test on a fake clock.
func inBubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// advance lets the fake clock run on and everything settle.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// eventually waits until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	timeout := time.After(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("%s did not happen in %v", what, patience)
		}
	}
}
