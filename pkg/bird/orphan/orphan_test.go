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
		"PID":            {write: func(path string) error { return os.WriteFile(path, []byte("123\n"), 0o600) }, want: 123},
		"FIFO":           {write: func(path string) error { return unix.Mkfifo(path, 0o600) }, err: "not a regular file"},
		"directory":      {write: func(path string) error { return os.Mkdir(path, 0o700) }, err: "not a regular file"},
		"device":         {write: func(path string) error { return os.Symlink("/dev/zero", path) }, err: "not a regular file"},
		"text":           {write: func(path string) error { return os.WriteFile(path, []byte("x"), 0o600) }, err: "invalid syntax"},
		"at the limit":   {write: padded(maxPIDFile), want: 1},
		"over the limit": {write: padded(maxPIDFile + 1), err: "larger"},
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

// padded writes PID 1 and spaces.
func padded(size int) func(path string) error {
	return func(path string) error {
		return os.WriteFile(path, []byte("1"+strings.Repeat(" ", size-1)), 0o600)
	}
}
