package files

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestReadRejectsBlockingFiles(t *testing.T) {
	dir := t.TempDir()
	file, fifo, link := filepath.Join(dir, "file"), filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, []byte("12345"), 0o600), unix.Mkfifo(fifo, 0o600),
		os.Symlink(fifo, link)); err != nil {
		t.Fatal(err)
	}
	if data, err := Read(file, 5); err != nil || string(data) != "12345" {
		t.Errorf("file of the limit: %q, %v", data, err)
	}
	for path, want := range map[string]string{
		fifo: "not a regular file", link: "not a regular file", dir: "not a regular file", "/dev/zero": "not a regular file",
		filepath.Join(dir, "none"): "no such file",
	} {
		if _, err := Read(path, 5); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
	if _, err := Read(file, 4); err == nil || !strings.Contains(err.Error(), "larger") {
		t.Errorf("file above the limit: %v", err)
	}
}

func TestOneHungCallAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Calls
		release := make(chan struct{})
		var started atomic.Int32
		call := func() (int, error) { started.Add(1); <-release; return 1, nil }
		begin := time.Now()
		if _, err := Do(t.Context(), &c, "state", call); !errors.Is(err, ErrHung) ||
			!strings.HasPrefix(err.Error(), "state: ") {
			t.Errorf("got %v", err)
		}
		if after := time.Since(begin); after != Timeout {
			t.Errorf("hung after %v, want %v", after, Timeout)
		}
		for range 3 {
			if _, err := Do(t.Context(), &c, "state", call); !errors.Is(err, ErrHung) {
				t.Errorf("got %v", err)
			}
		}
		if started.Load() != 1 || time.Since(begin) != Timeout {
			t.Errorf("%d calls started, after %v", started.Load(), time.Since(begin))
		}
		close(release)
		synctest.Wait()
		if n, err := Do(t.Context(), &c, "state", call); n != 1 || err != nil {
			t.Errorf("after the hang: %d, %v", n, err)
		}
	})
}

func TestDoEndsWithContext(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var c Calls
	if _, err := Do(ctx, &c, "state", func() (int, error) { <-release; return 0, nil }); !errors.Is(err,
		context.Canceled) {
		t.Errorf("got %v", err)
	}
}
