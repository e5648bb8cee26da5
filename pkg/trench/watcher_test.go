package trench

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/task"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ task.Task = (*Watcher)(nil)

// patience is how long tests wait for what must happen.
const patience = 30 * time.Second

// named is a good file with that trench name.
func named(name string) string { return strings.Replace(good, "trench-a", name, 1) }

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// watch starts a watcher of the file.
func watch(t *testing.T, path string) *Watcher {
	t.Helper()
	initial, err := Read(path, DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
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

// await waits until what is loaded satisfies cond.
func await(t *testing.T, w *Watcher, what string, cond func(Loaded) bool) Loaded {
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

// inForce is true of a good file with that trench name.
func inForce(name string) func(Loaded) bool {
	return func(l Loaded) bool { return l.Err == nil && l.Config.Trench == name }
}

func TestWatcherSeesEachWayToReplaceAFile(t *testing.T) {
	tests := map[string]func(t *testing.T, path, content string){
		"in place": write,
		"rename over it, as editors do": func(t *testing.T, path, content string) {
			write(t, path+".tmp", content)
			if err := os.Rename(path+".tmp", path); err != nil {
				t.Fatal(err)
			}
		},
		"rename away and write anew, as editors with backups do": func(t *testing.T, path, content string) {
			if err := os.Rename(path, path+"~"); err != nil {
				t.Fatal(err)
			}
			write(t, path, content)
		},
		"remove and write anew": func(t *testing.T, path, content string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			write(t, path, content)
		},
	}
	for name, replace := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "trench.yaml")
			write(t, path, named("one"))
			w := watch(t, path)
			replace(t, path, named("two"))
			await(t, w, "the first change", inForce("two"))
			replace(t, path, named("three"))
			await(t, w, "the second change", inForce("three"))
		})
	}
}

// The kubelet makes a new directory and swaps the symlink ..data over to it;
// the file itself is a symlink that never changes.
func TestWatcherSeesAConfigMapUpdate(t *testing.T) {
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
		if l := await(t, w, "the update", inForce(name)); l.Generation != uint64(i+2) {
			t.Errorf("generation %d of %s", l.Generation, name)
		}
	}
	// The kubelet removes the old versions afterwards.
	if err := os.RemoveAll(filepath.Join(dir, "..2026_1")); err != nil {
		t.Fatal(err)
	}
	publish("..2026_four", named("four"))
	if l := await(t, w, "the update", inForce("four")); l.Refused != 0 {
		t.Errorf("%d states were refused", l.Refused)
	}
}

func TestABadFileLeavesTheOldOneInForce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	w := watch(t, path)
	before := w.Value().Load()

	write(t, path, strings.Replace(good, "name: gw4", "name: g 4", 1))
	l := await(t, w, "the refusal", func(l Loaded) bool { return l.Err != nil })
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
	l = await(t, w, "the removal", func(l Loaded) bool { return errors.Is(l.Err, fs.ErrNotExist) })
	if l.Config != before.Config || l.Generation != 1 {
		t.Errorf("got %+v", l)
	}

	// What was in force comes back: the error goes, and nothing is new.
	write(t, path, "# a comment says nothing new\n"+named("one"))
	l = await(t, w, "the return", func(l Loaded) bool { return l.Err == nil })
	if l.Config != before.Config || l.Generation != 1 {
		t.Errorf("got %+v", l)
	}

	write(t, path, named("two"))
	if l = await(t, w, "the next file", inForce("two")); l.Generation != 2 {
		t.Errorf("generation %d", l.Generation)
	}
}

// Inotify does not follow symlinks, and a directory can be made anew: the poll
// is the net below both.
func TestThePollSeesWhatIsNotNotified(t *testing.T) {
	t.Run("behind a symlink", func(t *testing.T) {
		elsewhere := filepath.Join(t.TempDir(), "real.yaml")
		write(t, elsewhere, named("one"))
		path := filepath.Join(t.TempDir(), "trench.yaml")
		if err := os.Symlink(elsewhere, path); err != nil {
			t.Fatal(err)
		}
		w := watch(t, path)
		write(t, elsewhere, named("two"))
		await(t, w, "the change", inForce("two"))
	})
	t.Run("a directory made anew", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "conf")
		path := filepath.Join(dir, "trench.yaml")
		renew := func(content string) {
			t.Helper()
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			write(t, path, content)
		}
		renew(named("one"))
		w := watch(t, path)
		renew(named("two"))
		await(t, w, "the change", inForce("two"))
		write(t, path, named("three"))
		await(t, w, "the change after", inForce("three"))
	})
}

func TestAChangeBetweenReadAndRunIsSeen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	initial, err := Read(path, DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
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
