package targetset

import (
	"log/slog"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/trench"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var discard = slog.New(slog.DiscardHandler)

var testCheck = trench.Check{
	SingleCheck: trench.SingleCheck{
		TCP: trench.TCPCheck{Port: 5000}, Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3,
	},
}
