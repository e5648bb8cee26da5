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

	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// quietTime is how long the directory must be quiet before the file is
	// read: an editor truncates, writes and renames in several steps.
	quietTime = 100 * time.Millisecond
	// maxQuietWait bounds the wait when the directory is never quiet.
	maxQuietWait = time.Second
	// pollTime is when the file is read although nothing was heard: a file
	// behind a symlink, a file system without notifications, a node that has
	// no inotify watches left.
	pollTime = 3 * time.Second
)

// Loaded is what is in force, and what is wrong with the file.
type Loaded struct {
	// Config is in force. It is nil only before the first good file, when the
	// watcher was started without one.
	Config *Config
	// Generation counts the configurations that were in force; 0 is none. It
	// rises only when Config says something else than before.
	Generation uint64
	// Err is why the file on disk is not in force, or nil. A user's mistake is
	// an [*Errors].
	Err error
	// Refused counts the file's states that were refused.
	Refused uint64
	// At is when Config or Err last changed.
	At time.Time
}

// Watcher reads the trench file again whenever it changes. A bad file, or none,
// leaves in force what was. It implements task.Task.
type Watcher struct {
	path     string
	defaults Defaults
	log      *slog.Logger
	loaded   latest.Value[Loaded]
	ready    chan struct{}
	// notifier is fsnotify.NewWatcher; a node may have no inotify instance left.
	notifier func() (*fsnotify.Watcher, error)
	poll     time.Duration

	// Of Run only: what the last reading found, to tell news from repetition.
	content [sha256.Size]byte
	failure string
}

// NewWatcher returns a watcher of the file at path, of which initial is in
// force: what [Read] returned at the start.
func NewWatcher(path string, d Defaults, initial *Config, log *slog.Logger) *Watcher {
	w := &Watcher{
		path:     path,
		defaults: d,
		log:      log.With("file", path),
		ready:    make(chan struct{}),
		notifier: fsnotify.NewWatcher,
		poll:     pollTime,
	}
	if initial != nil {
		w.loaded.Set(Loaded{Config: initial, Generation: 1, At: time.Now()})
	}
	return w
}

// Value tells what is in force.
func (w *Watcher) Value() *latest.Value[Loaded] { return &w.loaded }

// Ready is closed once changes are watched for.
func (w *Watcher) Ready() <-chan struct{} { return w.ready }

// String names the task.
func (w *Watcher) String() string { return "trench-watcher" }

// Run watches until ctx ends. It watches the directory, not the file: the
// kubelet replaces a ConfigMap by swapping the symlink ..data, and editors
// rename a new file over the old one. Run is called once.
func (w *Watcher) Run(ctx context.Context) error {
	dir := filepath.Dir(w.path)
	var events <-chan fsnotify.Event
	var failures <-chan error
	notifier, err := w.notifier()
	if err != nil {
		w.log.Warn("file notifications are not available, polling only", "interval", w.poll, "error", err)
	} else {
		defer func() {
			if err := notifier.Close(); err != nil {
				w.log.Warn("closing the file notifications", "error", err)
			}
		}()
		events, failures = notifier.Events, notifier.Errors
	}
	// The directory is added before the file is read, and again at each poll,
	// since it may have been removed and made anew.
	watched := true
	watch := func() {
		if notifier == nil {
			return
		}
		err := notifier.Add(dir)
		if err != nil && watched {
			w.log.Warn("the directory cannot be watched, polling only", "directory", dir, "interval", w.poll, "error", err)
		}
		watched = err == nil
	}
	watch()
	w.reload()
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
			w.reload()
		case <-poll.C:
			watch()
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

// reload reads the file and publishes what is news.
func (w *Watcher) reload() {
	data, err := readFile(w.path)
	if err != nil {
		w.refuse([sha256.Size]byte{}, err)
		return
	}
	content := sha256.Sum256(data)
	if content == w.content {
		return
	}
	config, err := Parse(w.path, data, w.defaults)
	if err != nil {
		w.refuse(content, err)
		return
	}
	w.content, w.failure = content, ""
	before := w.loaded.Load()
	if reflect.DeepEqual(config, before.Config) {
		if before.Err != nil {
			w.log.Info("the trench file is good again and says what is in force", "generation", before.Generation)
			before.Err, before.At = nil, time.Now()
			w.loaded.Set(before)
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
	if errors.Is(err, fs.ErrNotExist) {
		remedy = "put the file back"
	}
	w.log.Error("trench file refused, the old configuration stays in force",
		"error", err, "remedy", remedy, "generation", before.Generation)
}
