package target

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
)

var _ task.Task = (*DirectoryWriter)(nil)

// scribe is a DirectoryWriter that runs, and what it did to files.
type scribe struct {
	*DirectoryWriter
	t    *testing.T
	path string
	stop func()

	mu     sync.Mutex
	deeds  []string
	broken map[string]error // by deed
}

// openScribe runs a writer; before runs before it starts.
func openScribe(t *testing.T, path string, before func(*scribe)) *scribe {
	t.Helper()
	s := &scribe{DirectoryWriter: NewDirectoryWriter(path, discard), t: t, path: path}
	s.backoff = time.Millisecond
	real := s.files
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
	s.files = writerFiles{make: noted("make", real.make), remove: noted("remove", real.remove), touch: noted("touch", real.touch)}
	if before != nil {
		before(s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Guard(ctx, s.String(), s.Run) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { s.stop() })
	<-s.Ready()
	return s
}

func (s *scribe) wait(what string, wanted func() bool) {
	s.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(liveness)
	defer deadline.Stop()
	for !wanted() {
		select {
		case <-tick.C:
		case <-deadline.C:
			s.t.Fatalf("never %s: %v, %+v", what, s.listed(), s.State())
		}
	}
}

func (s *scribe) listed() []string {
	entries, _ := os.ReadDir(s.path)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (s *scribe) waitFiles(names ...string) {
	s.t.Helper()
	s.wait(strings.Join(names, " "), func() bool { return slices.Equal(s.listed(), names) })
}

func (s *scribe) breakFiles(err error, deeds ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = map[string]error{}
	for _, what := range deeds {
		s.broken[what] = err
	}
}

func (s *scribe) done() []string {
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
	s := openScribe(t, path, nil)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("%v %v", info, err)
	}
	s.Want([]string{"b", "a"}, addr6, addr4)
	s.waitFiles("lb-ready-a", "lb-ready-b", "lb-vip-ready-20.0.0.1", "lb-vip-ready-2000::2")
	want := []string{"make lb-vip-ready-20.0.0.1", "make lb-vip-ready-2000::2", "make lb-ready-a", "make lb-ready-b"}
	if got := s.done(); !slices.Equal(got, want) {
		t.Errorf("in this order: %q, want %q", got, want)
	}
	s.wait("at peace", func() bool { return s.State().Live })
	// Only what differs is touched, and what falls does so first.
	s.Want([]string{"a", "c"}, addr6)
	s.waitFiles("lb-ready-a", "lb-ready-c", "lb-vip-ready-2000::2")
	want = []string{"remove lb-ready-b", "remove lb-vip-ready-20.0.0.1", "make lb-ready-c"}
	if got := s.done(); !slices.Equal(got, want) {
		t.Errorf("in this order: %q, want %q", got, want)
	}
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
	s := openScribe(t, path, func(s *scribe) { s.Want([]string{"a"}) })
	s.waitFiles("lb-ready-a", "other")
	want := []string{"remove lb-ready-a", "remove lb-ready-old", "remove lb-vip-ready-20.0.0.9", "remove lb-vip-ready-rubbish", "make lb-ready-a"}
	if got := s.done(); !slices.Equal(got, want) {
		t.Errorf("in this order: %q, want %q", got, want)
	}
}

func TestWriterTouchesItsFilesWhileSomebodyBeats(t *testing.T) {
	s := openScribe(t, t.TempDir(), nil)
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
	// Once a second, however often it beats.
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
	// What somebody removed, even with the directory, is made again.
	must(t, os.RemoveAll(s.path))
	s.wait("made again", func() bool {
		s.Beat()
		return slices.Equal(s.listed(), []string{"lb-ready-a"})
	})
}

func TestWriterTriesAgainAndSaysWhatIsWrong(t *testing.T) {
	s := openScribe(t, t.TempDir(), nil)
	s.breakFiles(syscall.ENOSPC, "make")
	s.Want([]string{"a"})
	s.wait("failing", func() bool { return s.Failures() > 2 })
	if st := s.State(); st.Live || len(st.Problems) != 1 || !strings.Contains(st.Problems[0], `"lb-ready-a"`) || !strings.Contains(st.Problems[0], "no space left") {
		t.Errorf("%+v", st)
	}
	s.breakFiles(nil)
	s.waitFiles("lb-ready-a")
	s.wait("at peace", func() bool { return s.State().Live })
	// While one cannot be removed nothing is made.
	s.breakFiles(syscall.EPERM, "remove")
	s.Want([]string{"b"})
	s.wait("failing", func() bool { return !s.State().Live })
	if got := s.listed(); !slices.Equal(got, []string{"lb-ready-a"}) {
		t.Errorf("%q stand, although one of them was to go first", got)
	}
	s.breakFiles(nil)
	s.waitFiles("lb-ready-b")
}

func TestWhatIsInTheWayOfAFileIsNamed(t *testing.T) {
	path := t.TempDir()
	must(t, os.Mkdir(filepath.Join(path, "lb-ready-a"), 0o755))
	s := openScribe(t, path, nil)
	s.Want([]string{"a", "b"})
	s.wait("failing", func() bool { return len(s.State().Problems) > 0 })
	if p := s.State().Problems; len(p) != 1 || !strings.Contains(p[0], "lb-ready-a") || !strings.Contains(p[0], "in its way") {
		t.Errorf("%q", p)
	}
	s.waitFiles("lb-ready-a", "lb-ready-b") // the others go on
}

func TestWriterOfAMissingFileSystemBlocksNobody(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	touchFile(t, file)
	s := openScribe(t, filepath.Join(file, "d"), nil)
	for range 1000 {
		s.Want([]string{"a"})
		s.Beat()
	}
	s.wait("failing", func() bool { return s.Failures() > 2 })
	must(t, os.Remove(file))
	s.waitFiles("lb-ready-a")
}

func TestReaderFollowsWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	f := openFolder(t, path, DirectoryOptions{}, nil)
	s := openScribe(t, path, nil)
	s.Want([]string{"a", "b"}, addr6)
	f.wantReady(vipTwo)
	s.Want([]string{"b"}, addr4)
	f.wantReady(vipOne)
	s.stop()
	f.wantReady()
}
