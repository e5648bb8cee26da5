package frontendcmd

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
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

// A session without a password works as before the default, with a warning; any other file that is
// missing is a mistake.
func TestMissingPassword(t *testing.T) {
	for file, want := range map[string]string{
		"": "", "none": "", filepath.Join(t.TempDir(), "password"): "no such file",
	} {
		var log bytes.Buffer
		flags := SpeakerFlags{
			Speaker: "external", SpeakerAddress: "10.77.0.1", SpeakerPasswordFile: file, GatewayState: "none",
		}
		speaker, err := flags.External(netip.MustParseAddr("192.0.2.1"), slog.New(slog.NewTextHandler(&log, nil)))
		switch {
		case want != "":
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", file, err, want)
			}
		case err != nil || speaker.Session.Password != "" || !strings.Contains(log.String(), "has no password"):
			t.Errorf("%s: %v, log %q", file, err, log.String())
		}
	}
}
