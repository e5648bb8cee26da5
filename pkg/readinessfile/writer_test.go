package readinessfile

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

var _ task.Task = (*Writer)(nil)

// testWriter is a running Writer that records its file operations.
type testWriter struct {
	*Writer
	t    *testing.T
	path string
	stop func()

	mu     sync.Mutex
	deeds  []string
	broken map[string]error // by operation
}

// runWriter runs a writer; before runs before it starts.
func runWriter(t *testing.T, path string, before func(*testWriter)) *testWriter {
	t.Helper()
	s := &testWriter{Writer: NewWriter(path, discard), t: t, path: path}
	s.backoff.Min, s.backoff.Max = time.Millisecond, time.Millisecond
	noted := func(what string, do func(string) error) func(string) error {
		return func(path string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if err := s.broken[what]; err != nil {
				return err
			}
			s.deeds = append(s.deeds, what+" "+filepath.Base(path))
			return do(path)
		}
	}
	s.create, s.unlink, s.touch = noted("create", s.create), noted("remove", s.unlink), noted("touch", s.touch)
	if before != nil {
		before(s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Guard(ctx, s.String(), s.Run) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		harness.Check(t, <-done)
	})
	t.Cleanup(func() { s.stop() })
	s.wait("the first attempt", func() bool { return s.state.Load() != writeResult{} })
	return s
}

func (s *testWriter) wait(what string, wanted func() bool) {
	s.t.Helper()
	await.True(s.t, what, wanted)
}

func (s *testWriter) listed() []string {
	entries, _ := os.ReadDir(s.path)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (s *testWriter) waitFiles(names ...string) {
	s.t.Helper()
	s.wait(strings.Join(names, " "), func() bool { return slices.Equal(s.listed(), names) })
}

func (s *testWriter) breakFiles(err error, deeds ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = map[string]error{}
	for _, what := range deeds {
		s.broken[what] = err
	}
}

func (s *testWriter) done() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.deeds
	s.deeds = nil
	return d
}

var (
	addr4 = netip.MustParseAddr("20.0.0.1")
	addr6 = netip.MustParseAddr("2000::2")
)

func TestWriterKeepsTheFilesThatAreWanted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "meridio")
	s := runWriter(t, path, nil)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("%v %v", info, err)
	}
	s.Want([]string{"b", "a"}, addr6, addr4)
	s.waitFiles("lb-ready-a", "lb-ready-b", "lb-vip-ready-20.0.0.1", "lb-vip-ready-2000::2")
	want := []string{
		"create lb-vip-ready-20.0.0.1", "create lb-vip-ready-2000::2", "create lb-ready-a",
		"create lb-ready-b",
	}
	if got := s.done(); !slices.Equal(got, want) {
		t.Errorf("in this order: %q, want %q", got, want)
	}
	s.wait("at peace", func() bool { return s.state.Load().written })
	// Only changed files are written, and removals come first.
	s.Want([]string{"a", "c"}, addr6)
	s.waitFiles("lb-ready-a", "lb-ready-c", "lb-vip-ready-2000::2")
	want = []string{"remove lb-ready-b", "remove lb-vip-ready-20.0.0.1", "create lb-ready-c"}
	if got := s.done(); !slices.Equal(got, want) {
		t.Errorf("in this order: %q, want %q", got, want)
	}
	s.Want([]string{"a", "c"}, addr4) // only another VIP
	s.waitFiles("lb-ready-a", "lb-ready-c", "lb-vip-ready-20.0.0.1")
	s.Want([]string{"a"}, addr4) // only another group
	s.waitFiles("lb-ready-a", "lb-vip-ready-20.0.0.1")
	s.stop()
	if got := s.listed(); len(got) > 0 {
		t.Errorf("left behind: %q", got)
	}
}

func TestWriterRemovesLeftoversBeforeItWrites(t *testing.T) {
	path := t.TempDir()
	for _, name := range []string{"lb-ready-a", "lb-ready-old", "lb-vip-ready-20.0.0.9", "lb-vip-ready-rubbish", "other"} {
		touchFile(t, filepath.Join(path, name))
	}
	s := runWriter(t, path, func(s *testWriter) { s.Want([]string{"a"}) })
	s.waitFiles("lb-ready-a", "other")
	want := []string{
		"remove lb-ready-a", "remove lb-ready-old", "remove lb-vip-ready-20.0.0.9",
		"remove lb-vip-ready-rubbish", "create lb-ready-a",
	}
	if got := s.done(); !slices.Equal(got, want) {
		t.Errorf("in this order: %q, want %q", got, want)
	}
}

func TestWriterTouchesFilesWhileBeating(t *testing.T) {
	s := runWriter(t, t.TempDir(), nil)
	s.Want([]string{"a"})
	s.waitFiles("lb-ready-a")
	old := time.Now().Add(-time.Hour)
	file := filepath.Join(s.path, "lb-ready-a")
	must(t, os.Chtimes(file, old, old))
	s.wait("touched", func() bool {
		s.Beat()
		info, err := os.Stat(file)
		return err == nil && info.ModTime().After(old.Add(time.Minute))
	})
	// Files are touched once a second, even if Beat is called more often.
	begin := time.Now()
	s.done()
	s.wait("touched twice", func() bool {
		s.Beat()
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.deeds) >= 2
	})
	if d := time.Since(begin); d < touchInterval {
		t.Errorf("touched twice in %v", d)
	}
	// Files that another process removed, even with the directory, are created again.
	must(t, os.RemoveAll(s.path))
	s.wait("created again", func() bool {
		s.Beat()
		return slices.Equal(s.listed(), []string{"lb-ready-a"})
	})
}

func TestWriterTriesAgainAndSaysWhatIsWrong(t *testing.T) {
	s := runWriter(t, t.TempDir(), nil)
	s.breakFiles(syscall.ENOSPC, "create")
	s.Want([]string{"a"})
	s.wait("failing", func() bool { return s.state.Load().failures > 2 })
	if err := s.state.Load().err; err == nil || !strings.Contains(err.Error(), `"lb-ready-a"`) ||
		!strings.Contains(err.Error(), "no space left") {
		t.Errorf("%v", err)
	}
	s.breakFiles(nil)
	s.waitFiles("lb-ready-a")
	s.wait("at peace", func() bool { return s.state.Load().written })
	// No file is created while an obsolete file cannot be removed.
	s.breakFiles(syscall.EPERM, "remove")
	s.Want([]string{"b"})
	s.wait("failing", func() bool { return s.state.Load().err != nil })
	if got := s.listed(); !slices.Equal(got, []string{"lb-ready-a"}) {
		t.Errorf("%q stand, although one of them was to go first", got)
	}
	s.breakFiles(nil)
	s.waitFiles("lb-ready-b")
}

func TestWriterKeepsBackoff(t *testing.T) {
	s := runWriter(t, t.TempDir(), func(s *testWriter) { s.backoff.Min, s.backoff.Max = time.Hour, time.Hour })
	failures := func(n uint64) func() bool { return func() bool { return s.state.Load().failures == n } }
	s.breakFiles(syscall.ENOSPC, "create")
	s.Want([]string{"a"})
	s.wait("one failure", failures(1))
	_, changed := s.desired.Get()
	s.Want([]string{"a"})
	select {
	case <-changed:
		t.Error("the same files end the back-off")
	default:
	}
	s.Want([]string{"a", "b"})
	s.wait("another failure at once", failures(2))
}

func TestObstructedFileIsReported(t *testing.T) {
	path := t.TempDir()
	must(t, os.Mkdir(filepath.Join(path, "lb-ready-a"), 0o755))
	s := runWriter(t, path, nil)
	s.Want([]string{"a", "b"})
	s.wait("failing", func() bool { return s.state.Load().err != nil })
	if err := s.state.Load().err; !strings.Contains(err.Error(), "lb-ready-a") ||
		!strings.Contains(err.Error(), "exists and is not a regular file") {
		t.Errorf("%v", err)
	}
	s.waitFiles("lb-ready-a", "lb-ready-b") // other writable files are created
}

func TestWriterWithoutFileSystemDoesNotBlock(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	touchFile(t, file)
	s := runWriter(t, filepath.Join(file, "d"), nil)
	for range 1000 {
		s.Want([]string{"a"})
		s.Beat()
	}
	s.wait("failing", func() bool { return s.state.Load().failures > 2 })
	must(t, os.Remove(file))
	s.waitFiles("lb-ready-a")
}

func TestReaderFollowsWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	f := runReader(t, path, Options{}, nil)
	s := runWriter(t, path, nil)
	s.Want([]string{"a", "b"}, addr6)
	f.wantReady(vipTwo)
	s.Want([]string{"b"}, addr4)
	f.wantReady(vipOne)
	s.stop()
	f.wantReady()
}
