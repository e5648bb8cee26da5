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

	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestReadRejectsBlockingFiles(t *testing.T) {
	dir := t.TempDir()
	file, fifo, link := filepath.Join(dir, "file"), filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	harness.Must(t, errors.Join(os.WriteFile(file, []byte("12345"), 0o600), unix.Mkfifo(fifo, 0o600),
		os.Symlink(fifo, link)))
	if data, err := Read(file, 5); err != nil || string(data) != "12345" {
		t.Errorf("file of the limit: %q, %v", data, err)
	}
	for path, want := range map[string]string{
		fifo: "not a regular file", link: "not a regular file", dir: "not a regular file", "/dev/zero": "not a regular file",
		filepath.Join(dir, "none"): "no such file",
	} {
		_, err := Read(path, 5)
		harness.WantError(t, err, want)
	}
	_, err := Read(file, 4)
	harness.WantError(t, err, "larger")
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
		// A call without a path may write, so it never runs concurrently with another call.
		time.Sleep(time.Hour)
		if _, err := Do(t.Context(), &c, "state", call); !errors.Is(err, ErrHung) || started.Load() != 1 {
			t.Errorf("got %v after %d calls", err, started.Load())
		}
		close(release)
		synctest.Wait()
		if n, err := Do(t.Context(), &c, "state", call); n != 1 || err != nil {
			t.Errorf("after the hang: %d, %v", n, err)
		}
	})
}

// hung is a reader of a file whose calls hang until release is closed.
type hung struct {
	calls   Calls
	started atomic.Int32
	release chan struct{}
	healthy atomic.Bool
}

func newHung(t *testing.T) *hung {
	t.Helper()
	h := &hung{release: make(chan struct{}), calls: Calls{Path: filepath.Join(t.TempDir(), "file")}}
	h.put(t)
	return h
}

// put replaces the file by another inode.
func (h *hung) put(t *testing.T) {
	t.Helper()
	next := h.calls.Path + ".new"
	harness.Must(t, errors.Join(os.WriteFile(next, nil, 0o600), os.Rename(next, h.calls.Path)))
}

func (h *hung) read(t *testing.T) error {
	t.Helper()
	_, err := Do(t.Context(), &h.calls, "file", func() (int, error) {
		if h.started.Add(1); !h.healthy.Load() {
			<-h.release
		}
		return 0, nil
	})
	synctest.Wait()
	return err
}

func TestHungReadIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHung(t)
		defer close(h.release)
		begin, last, longest := time.Now(), time.Now(), time.Duration(0)
		for n := int32(0); time.Since(begin) < 24*time.Hour; time.Sleep(10 * time.Second) {
			now := time.Now()
			if err := h.read(t); !errors.Is(err, ErrHung) {
				t.Fatalf("got %v", err)
			}
			if h.started.Load() == n {
				continue
			}
			gap := now.Sub(last)
			if n++; n > 1 && (gap < retryTime || gap > max(retryTime, last.Sub(begin)/4)+20*time.Second) {
				t.Errorf("attempt %d came %v after the one before, %v after the first", n, gap, now.Sub(begin))
			}
			last, longest = now, max(longest, gap)
		}
		if n := h.started.Load(); n > 35 || longest < time.Hour {
			t.Errorf("%d attempts in a day, with pauses of up to %v", n, longest)
		}
		// The file answers new calls, while the old ones still hang.
		h.healthy.Store(true)
		time.Sleep(12 * time.Hour)
		for range 2 {
			harness.Check(t, h.read(t))
		}
	})
}

func TestReplacedFileIsReadWithoutPause(t *testing.T) {
	for name, replace := range map[string]func(t *testing.T, h *hung){
		"another inode": func(t *testing.T, h *hung) { h.put(t) },
		"no file": func(t *testing.T, h *hung) {
			harness.Check(t, os.Remove(h.calls.Path))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHung(t)
				defer close(h.release)
				for range 3 {
					if err := h.read(t); !errors.Is(err, ErrHung) {
						t.Fatalf("got %v", err)
					}
				}
				replace(t, h)
				h.healthy.Store(true)
				begin := time.Now()
				for range 2 {
					if err := h.read(t); err != nil || !time.Now().Equal(begin) {
						t.Errorf("after %v: %v", time.Since(begin), err)
					}
				}
				if n := h.started.Load(); n != 3 {
					t.Errorf("%d calls, want 3", n)
				}
			})
		})
	}
}

func TestHungCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHung(t)
		for range 2 * maxRunning {
			if err := h.read(t); !errors.Is(err, ErrHung) {
				t.Fatalf("got %v", err)
			}
			h.put(t)
		}
		if n := h.started.Load(); n < maxRunning-1 || n > maxRunning {
			t.Errorf("%d calls hang, want about %d", n, maxRunning)
		}
		close(h.release)
		synctest.Wait()
		if err := h.read(t); err != nil {
			t.Errorf("after the end of the hang: %v", err)
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

func TestStamp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	stamp := func() Stamp {
		t.Helper()
		s, err := StampOf(path)
		harness.Must(t, err)
		return s
	}
	if _, err := StampOf(path); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("missing file: %v", err)
	}
	write := func(name, content string) {
		t.Helper()
		harness.Must(t, os.WriteFile(name, []byte(content), 0o600))
	}
	write(path, "a")
	first := stamp()
	if again := stamp(); again != first {
		t.Error("an unchanged file has another stamp")
	}
	changed := time.Unix(first.changed.Unix())
	if first.Settled(changed.Add(settleTime)) || !first.Settled(changed.Add(settleTime+1)) || (Stamp{}).Settled(changed) {
		t.Error("a stamp is settled at another age")
	}
	for _, c := range []struct {
		name   string
		change func()
	}{
		{"size", func() { write(path, "ab") }},
		{"rename", func() {
			write(path+".new", "ab")
			harness.Must(t, os.Rename(path+".new", path))
		}},
	} {
		before := stamp()
		if c.change(); stamp() == before {
			t.Errorf("%s: the stamp did not change", c.name)
		}
	}
}
