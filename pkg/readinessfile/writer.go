package readinessfile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// touchInterval is how often files are touched at most.
	touchInterval = time.Second
	// minFileBackoff and maxFileBackoff bound the wait after a failure.
	minFileBackoff = 100 * time.Millisecond
	maxFileBackoff = 5 * time.Second
	// tidyTime is how long the end waits for the files to be removed.
	tidyTime = 2 * time.Second
)

// Writer writes readiness files for others, such as a router of Meridio
// 2, and keeps them as wanted. It implements task.Task.
//
// Files that exist at the start are removed before anything is written, and all of
// them again at the end. The files are empty and readable by all. Of one decision
// files are removed before others are created, those of groups before those of VIPs;
// and those of VIPs are created first, so that a reader never takes a group for all
// of its VIPs. [Writer.Beat] touches them: without its calls they age.
type Writer struct {
	path   string
	log    *slog.Logger
	wanted *latest.Value[uint64] // counts the changes of names
	beats  *latest.Value[uint64]
	state  *latest.Value[writeResult]
	ready  chan struct{}

	mu    sync.Mutex
	names map[string]struct{} // of the files that are wanted

	failures atomic.Uint64 // attempts
	// Replaced in tests.
	files   writerFiles
	backoff time.Duration
}

// writeResult is the result of the newest attempt; zero before the first.
type writeResult struct {
	written bool
	err     error
}

// writerFiles is what a Writer does to files.
type writerFiles struct {
	create, remove, touch func(path string) error
}

// NewDirectoryWriter returns a writer of the directory, which is created if it is
// missing (mode 0755). It does nothing before Run.
func NewWriter(path string, log *slog.Logger) *Writer {
	path = filepath.Clean(path)
	return &Writer{
		path: path, log: log.With("directory", path),
		wanted: latest.New(uint64(0)), names: map[string]struct{}{}, beats: latest.New(uint64(0)),
		state:   latest.New(writeResult{}),
		ready:   make(chan struct{}),
		files:   writerFiles{create: createFile, remove: os.Remove, touch: setTimes},
		backoff: minFileBackoff,
	}
}

// Want says which groups and VIPs are ready, the latter by their first addresses;
// it replaces what was wanted before. It never blocks: only the newest counts.
func (w *Writer) Want(groups []string, vips ...netip.Addr) {
	names := make(map[string]struct{}, len(groups)+len(vips))
	for _, g := range groups {
		names[GroupFile(g)] = struct{}{}
	}
	for _, a := range vips {
		names[VIPFile(a)] = struct{}{}
	}
	w.mu.Lock()
	changed := !maps.Equal(names, w.names)
	w.names = names
	w.mu.Unlock()
	if changed {
		w.wanted.Update(func(n uint64) uint64 { return n + 1 })
	}
}

// Change is Want for what changed: files of these names, as [GroupFile] and
// [VIPFile] make them, are wanted (true) or no longer. Its cost follows the changes.
func (w *Writer) Change(names map[string]bool) {
	if len(names) == 0 {
		return
	}
	w.mu.Lock()
	for name, wanted := range names {
		if wanted {
			w.names[name] = struct{}{}
		} else {
			delete(w.names, name)
		}
	}
	w.mu.Unlock()
	w.wanted.Update(func(n uint64) uint64 { return n + 1 })
}

// list returns the names that are wanted, sorted.
func (w *Writer) list() []string {
	w.mu.Lock()
	names := slices.Collect(maps.Keys(w.names))
	w.mu.Unlock()
	slices.Sort(names)
	return names
}

// Beat says that the caller of Want is alive. It never blocks, and may be called
// often: files are touched once a second.
func (w *Writer) Beat() { w.beats.Update(func(n uint64) uint64 { return n + 1 }) }

// Ready is closed once leftovers are removed, or were tried to be.
func (w *Writer) Ready() <-chan struct{} { return w.ready }

// String names the task.
func (w *Writer) String() string { return "readiness-directory-writer" }

// Run keeps the files until ctx ends, and removes them then. It is called once. A
// file system that hangs may keep one goroutine of it beyond the end.
func (w *Writer) Run(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.run(ctx)
	}()
	<-ctx.Done()
	select {
	case <-done:
	case <-time.After(tidyTime):
		w.log.Warn("removing the readiness files hangs and is left behind")
	}
	return ctx.Err()
}

// writing is what run knows.
type writeLoop struct {
	*Writer
	clean   bool                // leftovers are removed
	created map[string]struct{} // files of isReadinessFile that stand
	touched time.Time
}

func (w *Writer) run(ctx context.Context) {
	r := &writeLoop{Writer: w, created: map[string]struct{}{}}
	_, wantedChanged := w.wanted.Get()
	wanted := w.list()
	_, beat := w.beats.Get()
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	pause := w.backoff
	for first := true; ; first = false {
		err := r.write(wanted)
		r.show(err)
		if first {
			close(w.ready)
		}
		if err == nil {
			pause = w.backoff
			timer.Stop()
		} else {
			timer.Reset(pause)
			pause = min(2*pause, max(maxFileBackoff, w.backoff))
		}
		for again := false; !again; {
			select {
			case <-ctx.Done():
				r.tidy()
				return
			case <-wantedChanged:
				_, wantedChanged = w.wanted.Get()
				wanted, again = w.list(), true
			case <-timer.C:
				again = true
			case <-beat:
				_, beat = w.beats.Get()
				again = r.touch(time.Now())
			}
		}
	}
}

// write makes the files those that are wanted.
func (r *writeLoop) write(wanted []string) error {
	if !r.clean {
		if err := r.createDirectory(); err != nil {
			return err
		}
		if err := r.removeLeftovers(); err != nil {
			return err
		}
		r.clean, r.touched = true, time.Now()
	}
	var errs []error
	for _, name := range order(r.created, groupFilePrefix) {
		if _, keep := slices.BinarySearch(wanted, name); keep {
			continue
		}
		if err := r.remove(name); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(r.created, name)
	}
	if len(errs) > 0 {
		return errors.Join(errs...) // nothing is raised before all that fell has fallen
	}
	missing := map[string]struct{}{}
	for _, name := range wanted {
		if _, created := r.created[name]; !created {
			missing[name] = struct{}{}
		}
	}
	for _, name := range order(missing, vipFilePrefix) {
		err := r.files.create(filepath.Join(r.path, name))
		if errors.Is(err, fs.ErrNotExist) { // another process removed the directory
			if err = r.createDirectory(); err == nil {
				err = r.files.create(filepath.Join(r.path, name))
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("make readiness file %q: %w", name, err))
			if !errors.Is(err, fs.ErrExist) {
				break // the others would fail as well
			}
			continue
		}
		r.created[name] = struct{}{}
	}
	return errors.Join(errs...)
}

// createDirectory creates the directory if it is missing. Who reads it may be another
// user, whatever our umask.
func (r *writeLoop) createDirectory() error {
	if _, err := os.Stat(r.path); err == nil {
		return nil
	}
	if err := os.MkdirAll(r.path, 0o755); err != nil {
		return fmt.Errorf("make the readiness directory %s: %w", r.path, err)
	}
	if err := os.Chmod(r.path, 0o755); err != nil {
		return fmt.Errorf("open the readiness directory %s to readers: %w", r.path, err)
	}
	return nil
}

// order sorts names, those with the prefix first.
func order(names map[string]struct{}, prefix string) []string {
	list := make([]string, 0, len(names))
	for name := range names {
		list = append(list, name)
	}
	slices.SortFunc(list, func(a, b string) int {
		if x, y := strings.HasPrefix(a, prefix), strings.HasPrefix(b, prefix); x != y {
			if x {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
	return list
}

func (r *writeLoop) remove(name string) error {
	if err := r.files.remove(filepath.Join(r.path, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove readiness file %q: %w", name, err)
	}
	return nil
}

// removeLeftovers removes what a writer before us left.
func (r *writeLoop) removeLeftovers() error {
	entries, err := os.ReadDir(r.path)
	if err != nil {
		return fmt.Errorf("look for old readiness files in %s: %w", r.path, err)
	}
	left := map[string]struct{}{}
	for _, e := range entries {
		if _, isReadinessFile, _ := parseName(e.Name()); isReadinessFile && !e.IsDir() {
			left[e.Name()] = struct{}{}
		}
	}
	var errs []error
	for _, name := range order(left, groupFilePrefix) {
		errs = append(errs, r.remove(name))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if len(left) > 0 {
		r.log.Info("removed old readiness files", "count", len(left))
	}
	return nil
}

// touch touches the files once a second, and reports whether something must be
// written again: another process removed a file.
func (r *writeLoop) touch(now time.Time) (again bool) {
	if !r.clean || now.Sub(r.touched) < touchInterval {
		return false
	}
	r.touched = now
	var failed error
	for name := range r.created {
		err := r.files.touch(filepath.Join(r.path, name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			delete(r.created, name)
			again = true
		case err != nil:
			failed = fmt.Errorf("touch readiness file %q: %w", name, err)
		}
	}
	if failed != nil {
		r.show(failed)
	}
	return again
}

// tidy removes all that is isReadinessFile, at the end.
func (r *writeLoop) tidy() {
	var errs []error
	for _, name := range order(r.created, groupFilePrefix) {
		errs = append(errs, r.remove(name))
	}
	if err := errors.Join(errs...); err != nil {
		r.failures.Add(1)
		r.log.Error("readiness files stay behind: remove them, or others go on taking us for ready", "error", err)
	}
}

// show records the result of an attempt, and logs when it differs from the one before.
func (r *writeLoop) show(err error) {
	was := r.state.Load()
	switch {
	case err != nil:
		failures := r.failures.Add(1)
		if was.err == nil || was.err.Error() != err.Error() {
			r.log.Error("failed to write readiness files, retrying", "error", err, "failures", failures)
		}
	case was.err != nil:
		r.log.Info("readiness files written again")
	}
	r.state.Set(writeResult{written: err == nil, err: err})
}

// makeReadinessFile makes an empty file. One that exists is taken over if it is a
// regular file; anything else is in the way.
func createFile(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("what is no regular file is in its way: %w", fs.ErrExist)
		}
		return setTimes(path)
	}
	if err != nil {
		return err
	}
	return f.Close()
}

func setTimes(path string) error {
	now := time.Now()
	return os.Chtimes(path, now, now)
}
