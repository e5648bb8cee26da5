package frontendcmd

import (
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/frontend"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The limit of a stop includes the drain time and the settle time of gateways, and the start.
func TestStopHasItsDrainTime(t *testing.T) {
	flags := &Flags{DrainTime: 40 * time.Second, Settle: 3 * time.Second}
	var limit time.Duration
	flags.untilStopped = func(drainTime time.Duration, run func(<-chan struct{}) error) error {
		limit = drainTime
		return run(nil)
	}
	refused := errors.New("refused")
	err := flags.RunUntilStopped(t.Context(), func() (frontend.Options, error) {
		if limit != 43*time.Second {
			t.Errorf("at the start a stop may take %v more than the margin, want 43s", limit)
		}
		return frontend.Options{}, refused
	})
	if !errors.Is(err, refused) {
		t.Error(err)
	}
}
