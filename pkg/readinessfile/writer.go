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
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
)

const (
	// touchInterval is the shortest time between two touches of the files.
	touchInterval = time.Second
	// tidyTime bounds the wait for the removal of the files when the writer stops.
	tidyTime = 2 * time.Second
)

// Writer is a task that writes readiness files for other processes, such as a router of Meridio 2.
//
// It removes the files of the previous process when it starts, and its own files when it stops.
// The files are empty and world-readable. For each decision Writer removes obsolete files before
// it creates new ones, and creates the files of VIPs before the files of groups, so that a reader
// never applies the file of a group to all of its VIPs. [Writer.Beat] touches the files; without
// it they become stale.
type Writer struct {
	path    string
	log     *slog.Logger
	desired latest.Value[ready]
	beat    chan struct{} // holds a token: Beat was called
	state   latest.Value[writeResult]

	// Owned by run.
	clean   bool                // the files of the previous process are removed
	created map[string]struct{} // readiness files that exist
	touched time.Time

	// Replaced in tests.
	create, unlink, touch func(path string) error
	backoff               backoff.Backoff
}

// ready holds the groups and VIPs that have files. It is immutable.
type ready struct {
	groups []string
	vips   []netip.Addr // the first addresses of VIPs
}

func (ready ready) names() map[string]struct{} {
	names := make(map[string]struct{}, len(ready.groups)+len(ready.vips))
	for _, group := range ready.groups {
		names[groupFile(group)] = struct{}{}
	}
	for _, addr := range ready.vips {
		names[vipFile(addr)] = struct{}{}
	}
	return names
}

// writeResult is the result of the newest attempt.
type writeResult struct {
	written  bool
	err      error
	failures uint64 // since the start
}

// NewWriter returns a Writer, idle until Run, which creates a missing directory with mode 0755.
func NewWriter(path string, log *slog.Logger) *Writer {
	path = filepath.Clean(path)
	return &Writer{
		path: path, log: log.With("directory", path), beat: make(chan struct{}, 1), created: map[string]struct{}{},
		create: createFile, unlink: os.Remove, touch: setTimes,
		backoff: backoff.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second},
	}
}

// Want sets the ready groups and the first addresses of the ready VIPs. The order must not change
// between calls. Want does not block, retains the lists, and is not safe for concurrent use.
func (writer *Writer) Want(groups []string, vips ...netip.Addr) {
	was := writer.desired.Load()
	// An unchanged list must not interrupt a back-off.
	if !slices.Equal(groups, was.groups) || !slices.Equal(vips, was.vips) {
		writer.desired.Set(ready{groups, vips})
	}
}

// Beat confirms that the caller of Want is alive. It does not block and may be called often: files
// are touched at most once a second.
func (writer *Writer) Beat() { latest.Wake(writer.beat) }

// String implements task.Task.
func (writer *Writer) String() string { return "readiness-directory-writer" }

// Run maintains the files until ctx ends, and then removes them. It is called once. When it
// returns, one goroutine may remain blocked in a file system that hangs.
func (writer *Writer) Run(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		writer.run(ctx)
	}()
	<-ctx.Done()
	select {
	case <-done:
	case <-time.After(tidyTime):
		writer.log.Warn("the removal of readiness files hangs and was abandoned")
	}
	return ctx.Err()
}

func (writer *Writer) run(ctx context.Context) {
	for {
		desired, changed := writer.desired.Get()
		err := writer.write(desired.names())
		writer.record(err)
		var retry <-chan time.Time
		if err == nil {
			writer.backoff.Reset()
		} else {
			retry = time.After(writer.backoff.Next())
		}
		for again := false; !again; {
			select {
			case <-ctx.Done():
				if err := writer.remove(slices.Sorted(maps.Keys(writer.created))); err != nil {
					writer.log.Error("failed to remove readiness files: remove them, or their readers continue to forward",
						"error", err)
				}
				return
			case <-changed:
				again = true
			case <-retry:
				again = true
			case <-writer.beat:
				again = writer.touchAll(time.Now())
			}
		}
	}
}

// write removes obsolete files and creates missing ones.
func (writer *Writer) write(desired map[string]struct{}) error {
	if !writer.clean {
		if err := writer.createDirectory(); err != nil {
			return err
		}
		if err := writer.removeLeftovers(); err != nil {
			return err
		}
		writer.clean, writer.touched = true, time.Now()
	}
	obsolete, missing := namesWithout(writer.created, desired), namesWithout(desired, writer.created)
	// Create no file before all obsolete files are removed. Files of groups sort first: lb-ready-
	// precedes lb-vip-ready-.
	if err := writer.remove(obsolete); err != nil {
		return err
	}
	firstVIP, _ := slices.BinarySearch(missing, vipFilePrefix)
	var errs []error
	for _, name := range slices.Concat(missing[firstVIP:], missing[:firstVIP]) {
		path := filepath.Join(writer.path, name)
		err := writer.create(path)
		if errors.Is(err, fs.ErrNotExist) { // another process removed the directory
			if err = writer.createDirectory(); err == nil {
				err = writer.create(path)
			}
		}
		if err == nil {
			writer.created[name] = struct{}{}
			continue
		}
		errs = append(errs, fmt.Errorf("failed to create readiness file %q: %w", name, err))
		if !errors.Is(err, fs.ErrExist) {
			break // the remaining files would fail as well
		}
	}
	return errors.Join(errs...)
}

// createDirectory creates a missing directory, readable by other users.
func (writer *Writer) createDirectory() error {
	if _, err := os.Stat(writer.path); err == nil {
		return nil
	}
	err := os.MkdirAll(writer.path, 0o755)
	if err == nil {
		err = os.Chmod(writer.path, 0o755) // independent of the umask
	}
	if err != nil {
		return fmt.Errorf("failed to create the readiness directory %s: %w", writer.path, err)
	}
	return nil
}

// remove removes files in the given order.
func (writer *Writer) remove(names []string) error {
	var errs []error
	for _, name := range names {
		if err := writer.unlink(filepath.Join(writer.path, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("failed to remove readiness file %q: %w", name, err))
			continue
		}
		delete(writer.created, name)
	}
	return errors.Join(errs...)
}

// removeLeftovers removes the files of the previous process.
func (writer *Writer) removeLeftovers() error {
	entries, err := os.ReadDir(writer.path) // sorted
	if err != nil {
		return fmt.Errorf("failed to list old readiness files in %s: %w", writer.path, err)
	}
	var leftovers []string
	for _, entry := range entries {
		if isReadinessFile(entry.Name()) && !entry.IsDir() {
			leftovers = append(leftovers, entry.Name())
		}
	}
	if err := writer.remove(leftovers); err != nil {
		return err
	}
	if len(leftovers) > 0 {
		writer.log.Info("removed old readiness files", "count", len(leftovers))
	}
	return nil
}

// touchAll touches the files, at most once a second. It reports whether another process removed a
// file, so that write must run again.
func (writer *Writer) touchAll(now time.Time) (again bool) {
	if !writer.clean || now.Sub(writer.touched) < touchInterval {
		return false
	}
	writer.touched = now
	var failed error
	for name := range writer.created {
		err := writer.touch(filepath.Join(writer.path, name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			delete(writer.created, name)
			again = true
		case err != nil:
			failed = fmt.Errorf("failed to touch readiness file %q: %w", name, err)
		}
	}
	if failed != nil {
		writer.record(failed)
	}
	return again
}

// record records the result of an attempt and logs it if it differs from the previous result.
func (writer *Writer) record(err error) {
	previous := writer.state.Load()
	result := writeResult{written: err == nil, err: err, failures: previous.failures}
	switch {
	case err != nil:
		result.failures++
		if logs.Text(previous.err) != err.Error() {
			writer.log.Error("failed to write readiness files, retrying", "error", err, "failures", result.failures)
		}
	case previous.err != nil:
		writer.log.Info("readiness files written again")
	}
	writer.state.Set(result)
}

// namesWithout returns the sorted names that are not in others.
func namesWithout(names, others map[string]struct{}) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(names)), func(name string) bool {
		_, is := others[name]
		return is
	})
}

// createFile creates an empty file, or touches an existing regular file.
func createFile(path string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err == nil {
		return file.Close()
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("a file of this name exists and is not a regular file: %w", fs.ErrExist)
	}
	return setTimes(path)
}

func setTimes(path string) error {
	now := time.Now()
	return os.Chtimes(path, now, now)
}
