package frontendcmd

import (
	"log/slog"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The limit of a stop includes the drain time and the settle time of gateways.
func TestStopHasItsDrainTime(t *testing.T) {
	flags := &Flags{DrainTime: 40 * time.Second, Settle: 3 * time.Second}
	var limit time.Duration
	flags.untilStopped = func(drainTime time.Duration, _ func(<-chan struct{}) error) error {
		limit = drainTime
		return nil
	}
	harness.Must(t, lab.NewNetNS(t).Do(func() error {
		settings := process.Settings{Log: slog.New(slog.DiscardHandler)}
		return flags.RunUntilStopped(t.Context(), frontend.Options{Settings: settings})
	}))
	if limit != 43*time.Second {
		t.Errorf("a stop may take %v more than the margin, want 43s", limit)
	}
}
