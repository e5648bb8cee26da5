package file

import (
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ task.Task = (*Watcher)(nil)

// patience is the timeout of an expected event.
const patience = 30 * time.Second

// named returns a valid file with this trench name.
func named(name string) string { return strings.Replace(good, "trench-a", name, 1) }

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// replace atomically replaces the file at path.
func replace(t *testing.T, path, content string) {
	t.Helper()
	write(t, path+".tmp", content)
	if err := os.Rename(path+".tmp", path); err != nil {
		t.Fatal(err)
	}
}

// watch starts a watcher without polling.
func watch(t *testing.T, path string) *Watcher {
	t.Helper()
	return watchWith(t, path, fsnotify.NewWatcher, never)
}

// With the interval never, a test depends on notifications; with soon, polling suffices.
const (
	never = time.Hour
	soon  = 3 * quietTime
)

func watchWith(t *testing.T, path string, notifier func() (*fsnotify.Watcher, error), poll time.Duration) *Watcher {
	t.Helper()
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
	w.notifier, w.poll = notifier, poll
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Guard(ctx, w.String(), w.Run) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	<-w.Ready()
	return w
}

// awaitLoaded waits until the loaded state satisfies cond.
func awaitLoaded(t *testing.T, w *Watcher, what string, cond func(trench.Loaded) bool) trench.Loaded {
	t.Helper()
	timeout := time.After(patience)
	for {
		loaded, changed := w.Value().Get()
		if cond(loaded) {
			return loaded
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("%s did not happen in %v: %+v", what, patience, loaded)
		}
	}
}

// inForce returns a condition: a valid file with this trench name is in force.
func inForce(name string) func(trench.Loaded) bool {
	return func(l trench.Loaded) bool { return l.Err == nil && l.Config.Trench == name }
}

func TestFileReplacement(t *testing.T) {
	tests := map[string]func(t *testing.T, path, content string){
		"in place":                      write,
		"rename over it, as editors do": replace,
		"rename away and write again, as editors with backups do": func(t *testing.T, path, content string) {
			if err := os.Rename(path, path+"~"); err != nil {
				t.Fatal(err)
			}
			write(t, path, content)
		},
		"remove and write again": func(t *testing.T, path, content string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			write(t, path, content)
		},
	}
	for name, replace := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "trench.yaml")
			write(t, path, named("one"))
			w := watch(t, path)
			replace(t, path, named("two"))
			awaitLoaded(t, w, "the first change", inForce("two"))
			replace(t, path, named("three"))
			awaitLoaded(t, w, "the second change", inForce("three"))
		})
	}
}

// The kubelet creates a new directory and swaps the symlink ..data to it. The file itself is a
// symlink that never changes.
func TestConfigMapUpdate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	publish := func(version, content string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, version, "trench.yaml"), content)
		if err := os.Symlink(version, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	publish("..2026_1", named("one"))
	path := filepath.Join(dir, "trench.yaml")
	if err := os.Symlink(filepath.Join("..data", "trench.yaml"), path); err != nil {
		t.Fatal(err)
	}
	w := watch(t, path)
	for i, name := range []string{"two", "three"} {
		publish("..2026_"+name, named(name))
		if l := awaitLoaded(t, w, "the update", inForce(name)); l.Generation != uint64(i+2) {
			t.Errorf("generation %d of %s", l.Generation, name)
		}
	}
	// The kubelet removes the old versions afterwards.
	if err := os.RemoveAll(filepath.Join(dir, "..2026_1")); err != nil {
		t.Fatal(err)
	}
	publish("..2026_four", named("four"))
	if l := awaitLoaded(t, w, "the update", inForce("four")); l.Refused != 0 {
		t.Errorf("%d states were refused", l.Refused)
	}
}

func TestRefusedFileKeepsConfiguration(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	w := watch(t, path)
	before := w.Value().Load()

	replace(t, path, strings.Replace(good, "name: gw4", "name: g 4", 1))
	l := awaitLoaded(t, w, "the refusal", func(l trench.Loaded) bool { return l.Err != nil })
	if want := path + ":6: attractor.gateways[0].name: is \"g 4\""; !strings.HasPrefix(l.Err.Error(), want) {
		t.Errorf("got %q, want %q…", l.Err, want)
	}
	var errs *Errors
	if l.Config != before.Config || l.Generation != 1 || l.Refused != 1 || !errors.As(l.Err, &errs) {
		t.Errorf("got %+v", l)
	}

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	l = awaitLoaded(t, w, "the removal", func(l trench.Loaded) bool { return errors.Is(l.Err, fs.ErrNotExist) })
	if l.Config != before.Config || l.Generation != 1 {
		t.Errorf("got %+v", l)
	}

	// The configuration in force returns: the error is cleared, the generation unchanged.
	replace(t, path, "# a comment says nothing new\n"+named("one"))
	l = awaitLoaded(t, w, "the return", func(l trench.Loaded) bool { return l.Err == nil })
	if l.Config != before.Config || l.Generation != 1 {
		t.Errorf("got %+v", l)
	}

	replace(t, path, named("two"))
	if l = awaitLoaded(t, w, "the next file", inForce("two")); l.Generation != 2 {
		t.Errorf("generation %d", l.Generation)
	}
}

// Inotify does not follow symlinks and loses a directory that is created again; the poll covers
// both cases.
func TestPollWithoutNotification(t *testing.T) {
	t.Parallel()
	t.Run("behind a symlink", func(t *testing.T) {
		t.Parallel()
		elsewhere := filepath.Join(t.TempDir(), "real.yaml")
		write(t, elsewhere, named("one"))
		path := filepath.Join(t.TempDir(), "trench.yaml")
		if err := os.Symlink(elsewhere, path); err != nil {
			t.Fatal(err)
		}
		w := watchWith(t, path, fsnotify.NewWatcher, soon)
		write(t, elsewhere, named("two"))
		awaitLoaded(t, w, "the change", inForce("two"))
	})
	t.Run("a directory created again", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(t.TempDir(), "conf")
		path := filepath.Join(dir, "trench.yaml")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, path, named("one"))
		var notifier *fsnotify.Watcher
		w := watchWith(t, path, func() (*fsnotify.Watcher, error) {
			var err error
			notifier, err = fsnotify.NewWatcher()
			return notifier, err
		}, soon)
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		await.True(t, "the end of the watch", func() bool { return len(notifier.WatchList()) == 0 })
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, path, named("two"))
		awaitLoaded(t, w, "the change", inForce("two"))
		await.True(t, "another watch", func() bool { return len(notifier.WatchList()) == 1 })
	})
}

func TestRefusedFileIsReportedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	var log strings.Builder
	w := NewWatcher(path, trench.DefaultDefaults(), nil, slog.New(slog.NewTextHandler(&log, nil)))
	for i, content := range []string{"bad", "bad: 2", "bad", "" /* no file */, "bad"} {
		if write(t, path, content); content == "" {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		for range 3 {
			w.reload(t.Context(), nil, true)
			if l := w.Value().Load(); l.Refused != uint64(i+1) || l.Err == nil || l.Config.Trench != "" || l.Generation != 0 {
				t.Errorf("file %d: %+v", i, l)
			}
		}
	}
	if got := strings.Count(log.String(), "\n"); got != 5 {
		t.Errorf("%d lines in the log, want 5:\n%s", got, log.String())
	}
}

func TestPollWithoutInotify(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	w := watchWith(t, path, func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE }, soon)
	write(t, path, named("two"))
	awaitLoaded(t, w, "the change", inForce("two"))
}

// Files of other processes may change continuously in the same directory.
func TestBusyDirectoryDelayIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "trench.yaml")
	write(t, path, named("one"))
	w := watch(t, path)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(quietTime / 10)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if err := os.WriteFile(filepath.Join(dir, "other"), []byte("x"), 0o600); err != nil {
					t.Error(err)
				}
			case <-stop:
				return
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	write(t, path, named("two"))
	awaitLoaded(t, w, "the change", inForce("two"))
}

func TestQuietWaitIsRenewedAndBounded(t *testing.T) {
	begin := time.Now()
	var s settling
	for at := time.Duration(0); at <= 2*maxQuietWait; at += quietTime / 2 {
		want := quietTime
		if left := maxQuietWait - at; left < want {
			want = max(0, left)
		}
		if got := s.event(begin.Add(at)); got != want {
			t.Errorf("after %v: wait %v, want %v", at, got, want)
		}
	}
}

func TestFileInWritingIsNotRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
	for _, step := range []struct {
		name     string
		change   func()
		complete bool
		wait     bool
		want     string
	}{
		{"prefix in place", func() { write(t, path, named("two")) }, false, true, "one"},
		{"unchanged for less than the time", func() {}, false, true, "one"},
		{"event of another file", func() {}, true, true, "one"},
		{"the rest", func() { write(t, path, "# longer\n"+named("three")) }, false, true, "one"},
		{"unchanged for the time", func() { w.writing.since = w.writing.since.Add(-stableTime) }, false, false, "three"},
		{"new file without content", func() { replace(t, path, "") }, true, true, "three"},
		{"rename while the file is written", func() { replace(t, path, named("four")) }, true, false, "four"},
		{"poll", func() { replace(t, path, named("five")) }, false, true, "four"},
		{"never stable", func() {
			w.writing.begin = w.writing.begin.Add(-maxStableWait)
			write(t, path, "# longer\n"+named("five"))
		}, false, false, "five"},
	} {
		step.change()
		again := w.reload(t.Context(), nil, step.complete)
		if got := w.Value().Load().Config.Trench; got != step.want || again > 0 != step.wait || again > stableTime {
			t.Fatalf("%s: got %s, next read in %v", step.name, got, again)
		}
		if l := w.Value().Load(); l.Err != nil {
			t.Errorf("%s: %v", step.name, l.Err)
		}
	}
}

// A partial file, as between two steps of a slow writer, never comes into force.
func TestSlowWriter(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	w := watch(t, path)
	begin := time.Now()
	write(t, path, named("two"))
	time.Sleep(3 * quietTime) // the pause of the writer
	write(t, path, named("three"))
	inTime := time.Since(begin) < stableTime
	if l := awaitLoaded(t, w, "the change", inForce("three")); inTime && l.Generation != 2 {
		t.Errorf("generation %d: what was half written came into force", l.Generation)
	}
}

func TestEventsOfFile(t *testing.T) {
	created, written := fsnotify.Event{Name: "/d/trench.yaml", Op: fsnotify.Create},
		fsnotify.Event{Name: "/d/trench.yaml", Op: fsnotify.Write}
	data, other := fsnotify.Event{Name: "/d/..data", Op: fsnotify.Create}, fsnotify.Event{Name: "/d/x", Op: fsnotify.Write}
	for _, c := range []struct {
		name   string
		events []fsnotify.Event
		want   bool
	}{
		{"poll", nil, false},
		{"rename", []fsnotify.Event{created}, true},
		{"rename beside writes of another file", []fsnotify.Event{other, created, other}, true},
		{"symlink of a ConfigMap", []fsnotify.Event{data}, true},
		{"write", []fsnotify.Event{written}, false},
		{"create and write", []fsnotify.Event{created, written}, false},
		{"rename after a write", []fsnotify.Event{written, created}, false},
		{"another file", []fsnotify.Event{other}, false},
	} {
		var s settling
		for _, event := range c.events {
			s.note(event, "/d/trench.yaml")
		}
		if got := s.complete(); got != c.want {
			t.Errorf("%s: got %v", c.name, got)
		}
	}
}

func TestChangeBetweenReadAndRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
	write(t, path, named("two"))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	<-w.Ready()
	if l := w.Value().Load(); l.Config.Trench != "two" || l.Generation != 2 {
		t.Errorf("got %+v", l)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// While a mount hangs, the watcher reports it and ends with its context. It recovers with the
// mount.
func TestHungMountIsReported(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	release, hangs := make(chan struct{}), make(chan struct{}, 1)
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
	w.poll = soon
	w.read = func(path string) ([]byte, error) {
		select {
		case hangs <- struct{}{}:
		default:
		}
		<-release
		return readFile(path)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	<-hangs
	l := awaitLoaded(t, w, "the refusal", func(l trench.Loaded) bool { return errors.Is(l.Err, files.ErrHung) })
	if l.Config != initial || l.Generation != 1 || l.Refused != 1 {
		t.Errorf("got %+v", l)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	w.ready = make(chan struct{})
	go func() { done <- w.Run(ctx) }()
	replace(t, path, named("two"))
	close(release)
	awaitLoaded(t, w, "the recovery", inForce("two"))
	cancel()
	<-done
}

func TestEditWithoutEffectIsLogged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.NewTextHandler(&log, nil)))
	w.reload(t.Context(), nil, true)
	if log.Len() > 0 {
		t.Errorf("logged without an edit: %s", log.String())
	}
	write(t, path, "# a comment\n"+named("one"))
	for range 2 {
		w.reload(t.Context(), nil, true)
	}
	if got := strings.Count(log.String(), "trench file changed, no effect"); got != 1 ||
		strings.Count(log.String(), "\n") != 1 {
		t.Errorf("want one line:\n%s", log.String())
	}
}

func TestUnchangedFileIsNotReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, good)
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
	reads := 0
	w.read = func(path string) ([]byte, error) {
		reads++
		return readFile(path)
	}
	if w.content != sha256.Sum256([]byte(good)) {
		t.Error("the file of the start is parsed twice")
	}
	w.readTrench(t.Context(), nil, true)
	// The stamp of a new file is not settled, so the file would be read again: set the stamp of an
	// old one.
	if w.stamp, err = files.StampOf(path); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		name   string
		change func()
		reads  int
	}{
		{"unchanged", func() {}, 1},
		{"changed", func() { replace(t, path, named("trench-b")) }, 2},
		{"missing", func() { _ = os.Remove(path) }, 3},
		{"back", func() { write(t, path, good) }, 4},
	} {
		step.change()
		w.readTrench(t.Context(), nil, true)
		if reads != step.reads {
			t.Errorf("%s: %d reads, want %d", step.name, reads, step.reads)
		}
	}
	if l := w.Value().Load(); l.Config.Trench != "trench-a" || l.Err != nil {
		t.Errorf("in force: %q, %v", l.Config.Trench, l.Err)
	}
}

// The file is unchanged after its directory was renamed and restored, as after a short hang of a
// mount.
func TestUnchangedFileIsBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "config")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "trench.yaml")
	write(t, path, good)
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
	if w.stamp, err = files.StampOf(path); err != nil { // as for an older file
		t.Fatal(err)
	}
	for i, rename := range [][2]string{{dir, dir + ".old"}, {dir + ".old", dir}} {
		if err := os.Rename(rename[0], rename[1]); err != nil {
			t.Fatal(err)
		}
		w.readTrench(t.Context(), nil, true)
		if gone, err := i == 0, w.Value().Load().Err; errors.Is(err, fs.ErrNotExist) != gone || (err != nil) != gone {
			t.Errorf("file gone: %t, error %v", gone, err)
		}
	}
}

// A hanging mount does not block the loop: Liveness must not end a working process.
func TestHungMountLeavesLoopAlive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	synctest.Test(t, func(t *testing.T) {
		w := NewWatcher(path, trench.DefaultDefaults(), nil, slog.New(slog.DiscardHandler))
		hang := make(chan struct{})
		w.notifier = func() (*fsnotify.Watcher, error) { return nil, errors.New("no inotify instance") }
		w.read = func(path string) ([]byte, error) { <-hang; return readFile(path) }
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx) }()
		for range 300 {
			<-time.After(time.Second)
			if got := w.Overdue(); got > 2*files.Timeout {
				t.Fatalf("overdue by %v", got)
			}
		}
		if err := w.Value().Load().Err; !errors.Is(err, files.ErrHung) {
			t.Errorf("the file is not refused: %v", err)
		}
		close(hang)
		cancel()
		<-ended
	})
}
