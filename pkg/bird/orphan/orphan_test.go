package orphan

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
)

func TestRecordedPID(t *testing.T) {
	for name, tt := range map[string]struct {
		write func(path string) error
		want  int
		err   string
	}{
		"none":           {write: func(string) error { return nil }},
		"PID":            {write: content("123\n"), want: 123},
		"FIFO":           {write: func(path string) error { return unix.Mkfifo(path, 0o600) }, err: "regular"},
		"directory":      {write: func(path string) error { return os.Mkdir(path, 0o700) }, err: "regular"},
		"device":         {write: func(path string) error { return os.Symlink("/dev/zero", path) }, err: "regular"},
		"text":           {write: content("x"), err: "syntax"},
		"at the limit":   {write: content("1" + strings.Repeat(" ", maxPIDFile-1)), want: 1},
		"over the limit": {write: content("1" + strings.Repeat(" ", maxPIDFile)), err: "larger"},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "bird.ctl")
			harness.Must(t, tt.write(PIDFile(socket)))
			pid, err := recordedPID(t.Context(), socket)
			if tt.err == "" {
				harness.Must(t, err)
			} else {
				harness.WantError(t, err, tt.err)
			}
			if pid != tt.want {
				t.Errorf("PID %d, want %d", pid, tt.want)
			}
		})
	}
}

func content(text string) func(path string) error {
	return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
}
