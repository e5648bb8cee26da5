package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/vipgate/vipgate/test/harness"
)

func TestErrorsOfCallsHaveNoWordsOfGRPC(t *testing.T) {
	conn, err := grpc.NewClient("unix:"+filepath.Join(t.TempDir(), "none.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Must(t, err)
	defer conn.Close()
	unreachable := conn.Invoke(t.Context(), "/a.B/C", nil, nil)
	for want, err := range map[string]error{
		"no such file or directory": unreachable,
		"did not answer within 5s":  grpcstatus.Error(codes.DeadlineExceeded, "context deadline exceeded"),
		"not in the attractor":      grpcstatus.Error(codes.NotFound, "VIP 20.0.0.9/32 is not in the attractor"),
		"has no prefix length":      grpcstatus.Error(codes.InvalidArgument, "VIP 20.0.0.9 has no prefix length"),
	} {
		got := Explain(err)
		if !strings.Contains(got.Error(), want) || strings.Contains(got.Error(), "desc =") ||
			strings.Contains(got.Error(), "rpc error") {
			t.Errorf("got %q, want %q", got, want)
		}
		var usage *UsageError
		if errors.As(got, &usage) != (grpcstatus.Code(err) == codes.InvalidArgument) {
			t.Errorf("%v: usage error is %v", got, usage != nil)
		}
	}
}

type failingLine struct {
	Status failingCommand `cmd:"" default:"1"`
}

type failingCommand struct{}

func (failingCommand) Run() error { return grpcstatus.Error(codes.InvalidArgument, "no prefix length") }

func TestErrorOfACommandIsExplained(t *testing.T) {
	if status := run(t.Context(), Program{Name: "test"}, &failingLine{}, nil); status != ExitUsage {
		t.Errorf("exit status %d", status)
	}
}

// openTerminal returns both ends of a pseudo-terminal.
func openTerminal(t *testing.T) (controller, terminal *os.File) {
	t.Helper()
	controller, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	harness.Must(t, err)
	t.Cleanup(func() { _ = controller.Close() })
	n, err := unix.IoctlGetInt(int(controller.Fd()), unix.TIOCGPTN)
	if err = errors.Join(err, unix.IoctlSetPointerInt(int(controller.Fd()), unix.TIOCSPTLCK, 0)); err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	harness.Must(t, err)
	t.Cleanup(func() { _ = terminal.Close() })
	return controller, terminal
}

func TestWatchedStatus(t *testing.T) {
	watch := func(out io.Writer, format string, end error) error {
		texts := []string{"one\n", "two\n"}
		next := func() (*wrapperspb.StringValue, error) {
			if len(texts) == 0 {
				return nil, end
			}
			text := texts[0]
			texts = texts[1:]
			return wrapperspb.String(text), nil
		}
		return ShowStatus(t.Context(), &Output{out}, StatusFlags{Watch: true, Output: format}, next,
			func(s *wrapperspb.StringValue) (string, bool) { return s.GetValue(), false })
	}
	end := errors.New("the process ended")
	controller, terminal := openTerminal(t)
	if err := watch(terminal, "table", end); !errors.Is(err, end) {
		t.Errorf("got %v", err)
	}
	const want = "\x1b[?1049h\x1b[H\x1b[2Jone\r\n\x1b[H\x1b[2Jtwo\r\n\x1b[?1049l"
	got := make([]byte, 1000)
	n, err := io.ReadAtLeast(controller, got, len(want))
	if err != nil || string(got[:n]) != want {
		t.Errorf("terminal: got %q, %v", got[:n], err)
	}
	wantScreen(t, controller, terminal)
	for format, want := range map[string]string{"table": "one\n\ntwo\n", "json": "\"one\\n\"\n\"two\\n\"\n"} {
		var pipe bytes.Buffer
		if err := watch(&pipe, format, end); !errors.Is(err, end) || pipe.String() != want {
			t.Errorf("%s in a pipe: got %q, %v", format, pipe.String(), err)
		}
	}
}

// wantScreen prints a status on a terminal of 17 columns, with and without colour.
func wantScreen(t *testing.T, controller, terminal *os.File) {
	t.Helper()
	harness.Must(t, unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: 17, Row: 3}))
	t.Setenv("TERM", "xterm")
	for noColour, want := range map[string]string{
		"":  "a  \x1b[31mNO\x1b[39m  much too\r\n       long\r\n1\r\n2\r\n",
		"1": "a  NO  much too\r\n       long\r\n1\r\n2\r\n",
	} {
		t.Setenv("NO_COLOR", noColour)
		next := func() (*wrapperspb.StringValue, error) { return wrapperspb.String("a  NO  much too long\n1\n2\n"), nil }
		err := ShowStatus(t.Context(), &Output{terminal}, StatusFlags{Output: "table"}, next,
			func(s *wrapperspb.StringValue) (string, bool) { return s.GetValue(), false })
		var exit ExitError
		if !errors.As(err, &exit) || exit != ExitFailed {
			t.Errorf("got %v", err)
		}
		got := make([]byte, 1000)
		if n, err := io.ReadAtLeast(controller, got, len(want)); err != nil || string(got[:n]) != want {
			t.Errorf("NO_COLOR=%s: got %q, %v", noColour, got[:n], err)
		}
	}
}
