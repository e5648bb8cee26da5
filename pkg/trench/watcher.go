package trench

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
)

const (
	// quietTime is how long the directory must be quiet before the file is read: an editor
	// truncates, writes and renames in several steps.
	quietTime = 100 * time.Millisecond
	// maxQuietWait bounds the wait when the directory is never quiet.
	maxQuietWait = time.Second
	// pollTime is when the file is read although nothing was heard: a file behind a symlink, a file
	// system without notifications, a node that has no inotify watches left.
	pollTime = 3 * time.Second
)

// Loaded is what is in force, and what is wrong with the file.
type Loaded struct {
	// Config is in force. It is empty, with Generation 0, before the first good file, when the
	// watcher was started without one.
	Config *Config
	// Generation counts the configurations that were in force; 0 is none. It rises only when Config
	// says something else than before.
	Generation uint64
	// Err is why the file on disk is not in force, or nil. A user's mistake is an [*Errors].
	Err error
	// Refused counts the file's states that were refused.
	Refused uint64
	// At is when Config or Err last changed.
	At time.Time
}

// Watcher reads the trench file again whenever it changes. A bad file, or none, leaves in force
// what was. It implements task.Task.
type Watcher struct {
	path     string
	defaults Defaults
	log      *slog.Logger
	loaded   latest.Value[Loaded]
	ready    chan struct{}
	// notifier is fsnotify.NewWatcher; a node may have no inotify instance left.
	notifier func() (*fsnotify.Watcher, error)
	read     func(path string) ([]byte, error)
	poll     time.Duration
	calls    files.Calls

	// Of Run only: what the last reading found, to tell news from repetition.
	content [sha256.Size]byte
	failure string
	begun   bool // the file was read before
	blind   bool // the directory could not be watched
}

// NewWatcher returns a watcher of the file at path, of which initial is in force: what [Read]
// returned at the start, or nil.
func NewWatcher(path string, d Defaults, initial *Config, log *slog.Logger) *Watcher {
	w := &Watcher{
		path:     path,
		defaults: d,
		log:      log.With("file", path),
		ready:    make(chan struct{}),
		notifier: fsnotify.NewWatcher,
		read:     readFile,
		poll:     pollTime,
	}
	w.loaded.Set(Loaded{Config: &Config{}})
	if initial != nil {
		w.loaded.Set(Loaded{Config: initial, Generation: 1, At: time.Now()})
	}
	return w
}

// Value returns the configuration in force.
func (w *Watcher) Value() *latest.Value[Loaded] { return &w.loaded }

// Ready is closed once changes are watched for.
func (w *Watcher) Ready() <-chan struct{} { return w.ready }

// String names the task.
func (w *Watcher) String() string { return "trench-watcher" }

// Run watches until ctx ends. It watches the directory, not the file: the kubelet replaces a
// ConfigMap by swapping the symlink ..data, and editors rename a new file over the old one. Run is
// called once.
func (w *Watcher) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var failures <-chan error
	notifier, err := w.notifier()
	if err != nil {
		w.log.Warn("file notifications are not available, polling only", "interval", w.poll, "error", err)
	} else {
		defer func() {
			// A watch of a directory that hangs holds the lock that Close takes.
			_, err := files.Do(context.WithoutCancel(ctx), &files.Calls{}, "file notifications", func() (struct{}, error) { return struct{}{}, notifier.Close() })
			if err != nil {
				w.log.Warn("failed to close file notifications", "error", err)
			}
		}()
		events, failures = notifier.Events, notifier.Errors
	}
	w.reload(ctx, notifier)
	close(w.ready)

	poll := time.NewTicker(w.poll)
	defer poll.Stop()
	quiet := time.NewTimer(0)
	quiet.Stop()
	defer quiet.Stop()
	var quietness settling
	heard := func() { quiet.Reset(quietness.heard(time.Now())) }
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-events:
			if !ok {
				w.log.Warn("the file notifications ended, polling only", "interval", w.poll)
				events = nil
			}
			heard()
		case err, ok := <-failures:
			if !ok {
				failures = nil
				continue
			}
			// Events may have been lost: look at the file itself.
			w.log.Warn("file notifications failed", "error", err)
			heard()
		case <-quiet.C:
			quietness = settling{}
			w.reload(ctx, notifier)
		case <-poll.C:
			// Not read at once: the poll may fall between two steps of an editor.
			heard()
		}
	}
}

// settling is the wait for a quiet directory.
type settling struct {
	// deadline is when the wait ends at the latest, zero when nothing was heard.
	deadline time.Time
}

// heard returns how long to wait for quiet from now on.
func (s *settling) heard(now time.Time) time.Duration {
	if s.deadline.IsZero() {
		s.deadline = now.Add(maxQuietWait)
	}
	return max(0, min(quietTime, s.deadline.Sub(now)))
}

// sight is what one look at the file found.
type sight struct {
	data     []byte
	watching error // why the directory cannot be watched
}

// look watches the directory and reads the file, within a deadline. The directory is added before
// the file is read, and each time, since it may have been replaced.
func (w *Watcher) look(ctx context.Context, notifier *fsnotify.Watcher) (sight, error) {
	return files.Do(ctx, &w.calls, "trench file "+w.path, func() (s sight, err error) {
		if notifier != nil {
			s.watching = notifier.Add(filepath.Dir(w.path))
		}
		s.data, err = w.read(w.path)
		return s, err
	})
}

// reload reads the file and publishes what is news. notifier may be nil.
func (w *Watcher) reload(ctx context.Context, notifier *fsnotify.Watcher) {
	seen, err := w.look(ctx, notifier)
	if ctx.Err() != nil {
		return
	}
	if seen.watching != nil && !w.blind {
		w.log.Warn("failed to watch directory, polling only", "directory", filepath.Dir(w.path), "interval", w.poll, "error", seen.watching)
	}
	w.blind = seen.watching != nil
	if err != nil {
		w.refuse([sha256.Size]byte{}, err)
		return
	}
	content := sha256.Sum256(seen.data)
	if content == w.content {
		return
	}
	config, err := Parse(w.path, seen.data, w.defaults)
	if err != nil {
		w.refuse(content, err)
		return
	}
	edited := w.begun
	w.content, w.failure, w.begun = content, "", true
	before := w.loaded.Load()
	if reflect.DeepEqual(config, before.Config) {
		switch {
		case before.Err != nil:
			w.log.Info("trench file valid again, no effect", "generation", before.Generation)
			before.Err, before.At = nil, time.Now()
			w.loaded.Set(before)
		case edited:
			w.log.Info("trench file changed, no effect", "generation", before.Generation)
		}
		return
	}
	now := Loaded{Config: config, Generation: before.Generation + 1, Refused: before.Refused, At: time.Now()}
	w.loaded.Set(now)
	w.log.Info("new configuration in force", "generation", now.Generation,
		"vips", len(config.Attractor.VIPs), "gateways", len(config.Attractor.Gateways), "streams", len(config.Streams))
}

// refuse publishes why the file is not in force, once for each of its states.
func (w *Watcher) refuse(content [sha256.Size]byte, err error) {
	if err.Error() == w.failure && content == w.content {
		return
	}
	w.content, w.failure = content, err.Error()
	before := w.loaded.Load()
	before.Err, before.At = err, time.Now()
	before.Refused++
	w.loaded.Set(before)
	remedy := "correct the file"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		remedy = "put the file back"
	case errors.Is(err, files.ErrHung):
		remedy = "restore the mount"
	}
	what := "trench file refused, the old configuration stays in force"
	if before.Generation == 0 {
		what = "trench file refused, running without VIPs"
	}
	w.log.Error(what, "error", err, "remedy", remedy, "generation", before.Generation)
}
