package file

import (
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"reflect"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// quietTime is how long the directory must be quiet before the file is read: an editor
	// truncates, writes and renames in several steps. maxQuietWait limits the wait.
	quietTime    = 100 * time.Millisecond
	maxQuietWait = time.Second
	// stableTime is how long size and times of a file must stay unchanged before it is read, unless
	// it was renamed into place: a writer may be half done, and its partial content valid.
	// maxStableWait limits the wait.
	stableTime    = time.Second
	maxStableWait = 10 * time.Second
	// pollTime is the read interval without events: for a target of a symlink, a file system
	// without notifications, or a node without free inotify watches.
	pollTime = 3 * time.Second
)

// Watcher reads the trench file again when it changes. While the file is rejected or missing, the
// last valid configuration stays in force. It implements task.Task.
type Watcher struct {
	path     string
	defaults trench.Defaults
	log      *slog.Logger
	loaded   latest.Value[trench.Loaded]
	stale    latest.Value[*trench.Stale]
	ready    chan struct{}
	notifier func() (*fsnotify.Watcher, error) // fails on a node without free inotify instances
	read     func(path string) ([]byte, error)
	poll     time.Duration
	calls    files.Calls
	pulse    task.Pulse
	// staleCalls reads the stale file, watchCalls watches the directory. They are separate because
	// each may be on a mount that hangs, and a hanging watch holds the lock of the notifier.
	staleCalls, watchCalls files.Calls

	// State of Run: the result of the last read, to detect repetitions.
	content   [sha256.Size]byte
	failure   string
	begun     bool        // a valid file was read before
	unwatched bool        // the last attempt to watch the directory failed
	stamp     files.Stamp // of content; zero if a later change may leave it equal
	writing   writing
}

// NewWatcher returns a watcher of the file at path. initial is the configuration in force, as
// returned by [Read] at the start, or nil.
func NewWatcher(path string, d trench.Defaults, initial *trench.Config, log *slog.Logger) *Watcher {
	w := &Watcher{
		path: path, defaults: d, log: log.With("file", path), ready: make(chan struct{}),
		notifier: fsnotify.NewWatcher, read: readFile, poll: pollTime,
		calls: files.Calls{Path: path}, staleCalls: files.Calls{Path: path + trench.StaleSuffix},
	}
	w.loaded.Set(trench.Loaded{
		Config: &trench.Config{Attractor: trench.Attractor{Interface: d.Interface}},
	})
	if initial != nil {
		w.loaded.Set(trench.Loaded{Config: initial, Generation: 1, At: time.Now()})
		// Do not parse the file again: with many VIPs, parsing takes most of the memory of the start.
		w.content, w.begun = initial.Digest, initial.Digest != [sha256.Size]byte{}
	}
	return w
}

// Value returns the configuration in force.
func (w *Watcher) Value() *latest.Value[trench.Loaded] { return &w.loaded }

// Stale returns why the trench file may be outdated. It does not affect the configuration in
// force.
func (w *Watcher) Stale() *latest.Value[*trench.Stale] { return &w.stale }

// Ready is closed after the first read, when the file is watched.
func (w *Watcher) Ready() <-chan struct{} { return w.ready }

// String names the task.
func (w *Watcher) String() string { return "trench-watcher" }

// Overdue implements task.Loop.
func (w *Watcher) Overdue() time.Duration { return w.pulse.Overdue() }

// Run watches until ctx ends; it is called once. It watches the directory instead of the file:
// the kubelet replaces a ConfigMap by swapping the symlink ..data, and editors rename a new file
// over the old one.
func (w *Watcher) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var failures <-chan error
	notifier, err := w.notifier()
	if err != nil {
		w.log.Warn("file notifications are not available, polling only", "interval", w.poll, "error", err)
	} else {
		defer w.close(ctx, notifier)
		events, failures = notifier.Events, notifier.Errors
	}
	w.pulse.Next(0)
	defer w.pulse.End()
	w.reload(ctx, notifier, true)
	close(w.ready)

	poll := time.NewTimer(tick.Until(time.Now(), w.poll))
	defer poll.Stop()
	quiet := time.NewTimer(0)
	quiet.Stop()
	defer quiet.Stop()
	var wait settling
	for {
		w.pulse.Next(w.poll + w.poll/8) // at most, see tick.Until
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event, ok := <-events:
			if !ok {
				w.log.Warn("file notifications ended, polling only", "interval", w.poll)
				events = nil
			}
			wait.note(event, w.path)
		case err, ok := <-failures:
			if !ok {
				failures = nil
				continue
			}
			// Events may have been lost, so read the file.
			w.log.Warn("file notifications failed", "error", err)
		case <-poll.C:
			now := time.Now()
			poll.Reset(tick.Until(now, w.poll))
			if wait.deadline.IsZero() {
				// Wait before reading: the poll may fall between two steps of an editor. The wait
				// ends at an instant at which periodic work wakes the process anyway.
				quiet.Reset(tick.UntilPart(now, time.Second, 3))
			}
			continue
		case <-quiet.C:
			complete := wait.complete()
			wait = settling{}
			if again := w.reload(ctx, notifier, complete); again > 0 {
				quiet.Reset(again)
			}
			continue
		}
		quiet.Reset(wait.event(time.Now()))
	}
}

// close limits the time of Close, which needs the lock that a hanging watch holds.
func (w *Watcher) close(ctx context.Context, notifier *fsnotify.Watcher) {
	_, err := files.Do(context.WithoutCancel(ctx), &files.Calls{}, "file notifications",
		func() (struct{}, error) { return struct{}{}, notifier.Close() })
	if err != nil {
		w.log.Warn("failed to close file notifications", "error", err)
	}
}

// settling is the wait for a quiet directory. deadline limits it and is zero before the first
// event.
type settling struct {
	deadline         time.Time
	renamed, written bool // a directory entry was created; the file was written in place
}

// note records whether an event creates a directory entry or writes the file.
func (s *settling) note(event fsnotify.Event, path string) {
	s.renamed = s.renamed || event.Has(fsnotify.Create)
	s.written = s.written || event.Has(fsnotify.Write) && filepath.Base(event.Name) == filepath.Base(path)
}

// complete reports whether the file, or a symlink to it, was renamed into place, so that no
// process is still writing it.
func (s *settling) complete() bool { return s.renamed && !s.written }

// event returns the remaining wait after an event.
func (s *settling) event(now time.Time) time.Duration {
	if s.deadline.IsZero() {
		s.deadline = now.Add(maxQuietWait)
	}
	return max(0, min(quietTime, s.deadline.Sub(now)))
}

// writing tracks a file that changes in place until it can be read.
type writing struct {
	stamp        files.Stamp // zero without a wait
	begin, since time.Time   // start of the wait; first observation of stamp
}

// remaining returns the wait before a file with this stamp is read.
func (s *writing) remaining(stamp files.Stamp, now time.Time) time.Duration {
	switch {
	case s.stamp == files.Stamp{}:
		*s = writing{stamp: stamp, begin: now, since: now}
	case s.stamp != stamp:
		s.stamp, s.since = stamp, now
	}
	return max(0, min(stableTime-now.Sub(s.since), maxStableWait-now.Sub(s.begin)))
}

// reload reads both files and publishes changes. complete reports whether no process is writing
// the trench file. It returns the delay until the next call, or 0 if the file was read. notifier
// may be nil.
func (w *Watcher) reload(ctx context.Context, notifier *fsnotify.Watcher, complete bool) (again time.Duration) {
	again = w.readTrench(ctx, notifier, complete)
	w.readStale(ctx)
	return again
}

// readTrench publishes the trench file, or the reason why it is rejected; see reload.
func (w *Watcher) readTrench(ctx context.Context, notifier *fsnotify.Watcher, complete bool) (again time.Duration) {
	// Watch before reading, so that no change between the two is missed.
	w.watchDirectory(ctx, notifier)
	// The function below may outlive this call on a hanging mount, so it works on copies.
	known, wait := w.stamp, w.writing
	type state struct {
		data    []byte
		stamp   files.Stamp
		same    bool // as in the last read
		writing writing
		again   time.Duration
	}
	file, err := files.Do(ctx, &w.calls, "trench file "+w.path, func() (s state, err error) {
		// Take the stamp before reading, so that it is not newer than the content.
		now := time.Now()
		stamp, err := files.StampOf(w.path)
		if err == nil && stamp == known {
			s.same = true
			return s, nil
		}
		// Wait until a file that may be written in place is stable; a wait continues even after a
		// rename of another entry.
		if err == nil && (!complete || stamp.Empty() || stamp.SameFile(wait.stamp)) {
			if s.again = wait.remaining(stamp, now); s.again > 0 {
				s.writing = wait
				return s, nil
			}
		}
		// Only a settled stamp changes with every later write.
		if stamp.Settled(now) {
			s.stamp = stamp
		}
		s.data, err = w.read(w.path)
		return s, err
	})
	if ctx.Err() != nil {
		return
	}
	w.writing = file.writing
	switch {
	case file.same || file.again > 0:
	case err != nil:
		w.stamp = files.Stamp{}
		w.refuse([sha256.Size]byte{}, err)
	default:
		w.stamp = file.stamp
		w.publish(file.data)
	}
	return file.again
}

// watchDirectory watches the directory again, since it may have been replaced.
func (w *Watcher) watchDirectory(ctx context.Context, notifier *fsnotify.Watcher) {
	if notifier == nil {
		return
	}
	directory := filepath.Dir(w.path)
	_, err := files.Do(ctx, &w.watchCalls, "directory "+directory,
		func() (struct{}, error) { return struct{}{}, notifier.Add(directory) })
	if err != nil && !w.unwatched && ctx.Err() == nil {
		w.log.Warn("failed to watch directory, polling only",
			"directory", directory, "interval", w.poll, "error", err)
	}
	w.unwatched = err != nil
}

// equal reports whether two configurations are equal except for Digest.
func equal(a, b *trench.Config) bool {
	x := *a
	x.Digest = b.Digest
	return reflect.DeepEqual(&x, b)
}

// publish puts the configuration in data in force, or records why it is rejected.
func (w *Watcher) publish(data []byte) {
	content := sha256.Sum256(data)
	if content == w.content {
		return
	}
	config, err := Parse(w.path, data, w.defaults)
	if err != nil {
		w.refuse(content, err)
		return
	}
	edited := w.begun
	w.content, w.failure, w.begun = content, "", true
	now := w.loaded.Load()
	unchanged, refused := equal(config, now.Config), now.Err != nil
	if unchanged && !refused {
		if edited {
			w.log.Info("trench file changed, no effect", "generation", now.Generation)
		}
		return
	}
	now.Err, now.At = nil, time.Now()
	if unchanged {
		w.loaded.Set(now)
		w.log.Info("trench file valid again, no effect", "generation", now.Generation)
		return
	}
	now.Config, now.Generation = config, now.Generation+1
	w.loaded.Set(now)
	w.log.Info("new configuration in force", "generation", now.Generation,
		"vips", len(config.Attractor.VIPs), "gateways", len(config.Attractor.Gateways), "streams", len(config.Streams))
}

// refuse publishes why the file is not in force, once per state of the file.
func (w *Watcher) refuse(content [sha256.Size]byte, err error) {
	if err.Error() == w.failure && content == w.content {
		return
	}
	w.content, w.failure = content, err.Error()
	now := w.loaded.Load()
	now.Err, now.At = err, time.Now()
	now.Refused++
	w.loaded.Set(now)
	remedy := "correct the file"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		remedy = "put the file back"
	case errors.Is(err, files.ErrHung):
		remedy = "restore the mount"
	}
	message := "trench file refused, the old configuration stays in force"
	if now.Generation == 0 {
		message = "trench file refused, running without VIPs"
	}
	w.log.Error(message, "error", err, "remedy", remedy, "generation", now.Generation)
}
