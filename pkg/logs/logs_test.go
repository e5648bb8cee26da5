package logs

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/test/harness"
)

type state int

func (s state) String() string { return [...]string{"down", "up"}[s] }

func TestJSONTextValues(t *testing.T) {
	var b strings.Builder
	log, _, err := New("json", "info", &b)
	harness.Must(t, err)
	log.Info("changed", "from", state(0), "to", state(1), "address", netip.MustParseAddr("10.0.0.1"), "error",
		errors.New("cause"), "n", 7, "nothing", nil)
	harness.WantText(t, b.String(),
		`"from":"down"`, `"to":"up"`, `"address":"10.0.0.1"`, `"error":"cause"`, `"n":7`,
		`"nothing":null`,
	)
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLevelFilters(t *testing.T) {
	var out bytes.Buffer
	log, level, err := New("json", "warn", &out)
	harness.Must(t, err)
	log.Info("suppressed")
	harness.Must(t, level.Set("INFO"))
	log.Info("written")
	if got := out.String(); strings.Contains(got, "suppressed") || !strings.Contains(got, "written") {
		t.Fatalf("logged %q", got)
	}
	if err := level.Set("loud"); err == nil || !strings.Contains(err.Error(), "debug, info, warn or error") {
		t.Fatalf("got %v", err)
	}
}

func TestNewRejectsUnknownNames(t *testing.T) {
	for _, bad := range [][2]string{{"xml", "info"}, {"json", "loud"}} {
		if _, _, err := New(bad[0], bad[1], &bytes.Buffer{}); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}

// lines is a writer that forwards each line.
type lines chan string

func (l lines) Write(p []byte) (int, error) { l <- string(p); return len(p), nil }

func TestSignalsChangeLevel(t *testing.T) {
	type step struct {
		signal syscall.Signal
		want   string
	}
	for _, tt := range []struct {
		name  string
		task  func(*Level, *slog.Logger) *Signals
		steps []step
	}{
		{"own meaning", NewSignals, []step{
			{syscall.SIGUSR1, "info"}, {syscall.SIGUSR1, "debug"}, {syscall.SIGUSR1, "debug"}, {syscall.SIGUSR2, "warn"},
		}},
		{"other handlers", func(level *Level, log *slog.Logger) *Signals {
			return HandleSignals(level, log, map[os.Signal]func(){
				syscall.SIGUSR1: level.Reset, syscall.SIGUSR2: func() { _ = level.Set("debug") },
			})
		}, []step{
			{syscall.SIGUSR2, "debug"}, {syscall.SIGUSR2, "debug"}, {syscall.SIGUSR1, "warn"},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := make(lines)
			log, level, err := New("text", "warn", out)
			harness.Must(t, err)
			s := tt.task(level, log)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- s.Run(ctx) }()
			for _, step := range tt.steps {
				harness.Must(t, syscall.Kill(syscall.Getpid(), step.signal))
				if line := <-out; !strings.Contains(line, "to="+step.want) || level.String() != step.want {
					t.Errorf("after %v the level is %s, want %s; logged %q", step.signal, level, step.want, line)
				}
			}
			cancel()
			<-done
		})
	}
}

func TestThrottle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var throttle Throttle
		lines := map[string]int{}
		suppressed := 0
		log := func(key, message string) {
			throttle.Log(func(message string, attrs ...any) {
				lines[message+" "+key]++
				if len(attrs) == 3 { // the caller passes one, suppressed adds two
					suppressed = attrs[2].(int)
				}
			}, key, message, slog.Int("a", 1))
		}
		for range 100 {
			log("a", "refused")
			log("a", "ignored")
		}
		log("b", "refused")
		if want := map[string]int{"refused a": 3, "ignored a": 3, "refused b": 1}; !maps.Equal(lines, want) {
			t.Fatalf("%v lines, want %v", lines, want)
		}
		if suppressed != 0 {
			t.Fatalf("the first lines report %d suppressed ones", suppressed)
		}
		time.Sleep(10 * time.Second)
		log("a", "refused")
		if lines["refused a"] != 4 || suppressed != 97 {
			t.Fatalf("%d lines after 10 s, %d suppressed, want 4 and 97", lines["refused a"], suppressed)
		}
		for i := range 100_000 {
			log(strconv.Itoa(i), "refused many")
		}
		if n := len(throttle.keys); n > 300 {
			t.Fatalf("%d keys are stored", n)
		}
	})
}
