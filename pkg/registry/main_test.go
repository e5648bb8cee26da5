package registry

import (
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/trench"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testCheck = trench.Check{
	SingleCheck: trench.SingleCheck{
		TCP: trench.TCPCheck{Port: 5000}, Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3,
	},
}

// inBubble runs the test on a fake clock.
func inBubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// advance advances the fake clock and waits until all goroutines are blocked.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}
