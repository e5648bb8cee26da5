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
	// Trial, unless nil, is the trial of the files. It is set before Run.
	Trial *Trial
	// Hold, unless nil, returns the configuration to put in force for a valid file, and the removals
	// that wait; see [change.Hold]. It is set before Run, which calls it.
	Hold func(inForce, next *trench.Config, before trench.Held, confirmed string) (*trench.Config, trench.Held)
	// Waits, unless nil, reports whether Hold would hold a part of the configuration in force.
	Waits func() bool

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
	confirmed              latest.Value[string] // identifiers of held removals

	// State of Run: the result of the last read, to detect repetitions.
	content   [sha256.Size]byte
	next      *trench.Config // content, unless it was rejected
	failure   string
	begun     bool        // a valid file was read before
	unwatched bool        // the last attempt to watch the directory failed
	stamp     files.Stamp // of content; zero if a later change may leave it equal
	writing   writing
}

// NewWatcher returns a watcher of the file at path. initial is the configuration in force, as
// returned by [Read] at the start, or nil.
func NewWatcher(path string, defaults trench.Defaults, initial *trench.Config, log *slog.Logger) *Watcher {
	watcher := &Watcher{
		path: path, defaults: defaults, log: log.With("file", path), ready: make(chan struct{}),
		notifier: fsnotify.NewWatcher, read: readFile, poll: pollTime,
		calls: files.Calls{Path: path}, staleCalls: files.Calls{Path: path + trench.StaleSuffix},
	}
	watcher.loaded.Set(trench.Loaded{
		Config: &trench.Config{Attractor: trench.Attractor{Interface: defaults.Interface}},
	})
	if initial != nil {
		watcher.loaded.Set(trench.Loaded{Config: initial, Generation: 1, At: time.Now()})
		// Do not parse the file again: with many VIPs, parsing takes most of the memory of the start.
		watcher.content, watcher.begun = initial.Digest, initial.Digest != [sha256.Size]byte{}
	}
	return watcher
}

// Resume holds the removals of the file at the start, compared with the configuration that an
// earlier process had in force. It is called after Hold and Trial are set and before Run.
func (watcher *Watcher) Resume() {
	now, base := watcher.loaded.Load(), watcher.Trial.Base()
	if base == nil || watcher.Hold == nil {
		return
	}
	config := now.Config
	if now.Config, now.Held = watcher.Hold(base, config, trench.Held{}, ""); now.Held.ID == "" {
		return
	}
	watcher.next = config
	watcher.Trial.Accept(watcher.content, now.Config, true)
	watcher.loaded.Set(now)
	watcher.logHeld(now.Held)
}

// logHeld logs removals that wait.
func (watcher *Watcher) logHeld(held trench.Held) {
	watcher.log.Error("removals held until they are confirmed", "id", held.ID, "removals", held.String(),
		"remedy", "correct the file, or confirm")
}

// Value returns the configuration in force.
func (watcher *Watcher) Value() *latest.Value[trench.Loaded] { return &watcher.loaded }

// Stale returns why the trench file may be outdated, which does not affect what is in force.
func (watcher *Watcher) Stale() *latest.Value[*trench.Stale] { return &watcher.stale }

// Confirm puts the held removals in force, if the identifier is theirs or "".
func (watcher *Watcher) Confirm(identifier string) (trench.Held, error) {
	return watcher.loaded.Load().Confirm(identifier, &watcher.confirmed)
}

// Ready is closed after the first read, when the file is watched.
func (watcher *Watcher) Ready() <-chan struct{} { return watcher.ready }

// String names the task.
func (watcher *Watcher) String() string { return "trench-watcher" }

// Overdue implements task.Loop.
func (watcher *Watcher) Overdue() time.Duration { return watcher.pulse.Overdue() }

// Run watches until ctx ends; it is called once. It watches the directory, not the file: the
// kubelet replaces a ConfigMap by swapping the symlink ..data, and editors rename a new file to it.
func (watcher *Watcher) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var failures <-chan error
	notifier, err := watcher.notifier()
	if err != nil {
		watcher.log.Warn("file notifications are not available, polling only", "interval", watcher.poll, "error", err)
	} else {
		defer watcher.close(ctx, notifier)
		events, failures = notifier.Events, notifier.Errors
	}
	watcher.pulse.Next(0)
	defer watcher.pulse.End()
	if err := watcher.Trial.Refused(); err != nil {
		watcher.refuse(watcher.content, err)
	}
	watcher.reload(ctx, notifier, true)
	close(watcher.ready)

	poll := time.After(tick.Until(time.Now(), watcher.poll))
	var quiet <-chan time.Time // nil until the file changes
	var wait settling
	confirmed := watcher.takeConfirmation()
	for {
		watcher.pulse.Next(watcher.poll + watcher.poll/8) // at most, see tick.Until
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-confirmed:
			confirmed = watcher.takeConfirmation()
			continue
		case event, ok := <-events:
			if !ok {
				watcher.log.Warn("file notifications ended, polling only", "interval", watcher.poll)
				// A nil channel blocks, so the loop continues with the poll timer.
				events = nil
			}
			wait.note(event, watcher.path)
		case err, ok := <-failures:
			if !ok {
				failures = nil
				continue
			}
			// Events may have been lost, so read the file.
			watcher.log.Warn("file notifications failed", "error", err)
		case <-poll:
			now := time.Now()
			poll = time.After(tick.Until(now, watcher.poll))
			watcher.reviewHold()
			if wait.deadline.IsZero() {
				// Wait before reading: the poll may fall between two steps of an editor. The wait
				// ends at an instant at which periodic work wakes the process anyway.
				quiet = time.After(tick.UntilPart(now, time.Second, 3))
			}
			continue
		case <-quiet:
			complete := wait.complete()
			wait = settling{}
			if again := watcher.reload(ctx, notifier, complete); again > 0 {
				quiet = time.After(again)
			}
			continue
		}
		quiet = time.After(wait.event(time.Now()))
	}
}

// close limits the time of Close, which needs the lock that a hanging watch holds.
func (watcher *Watcher) close(ctx context.Context, notifier *fsnotify.Watcher) {
	_, err := files.Do(context.WithoutCancel(ctx), &files.Calls{}, "file notifications",
		func() (struct{}, error) { return struct{}{}, notifier.Close() })
	if err != nil {
		watcher.log.Warn("failed to close file notifications", "error", err)
	}
}

// settling is the wait for a quiet directory until a deadline, which is zero before an event.
type settling struct {
	deadline         time.Time
	renamed, written bool // a directory entry was created; the file was written in place
}

// note records whether an event creates a directory entry or writes the file.
func (wait *settling) note(event fsnotify.Event, path string) {
	wait.renamed = wait.renamed || event.Has(fsnotify.Create)
	wait.written = wait.written || event.Has(fsnotify.Write) && filepath.Base(event.Name) == filepath.Base(path)
}

// complete reports whether the file, or a symlink to it, was renamed into place, so that no
// process is still writing it.
func (wait *settling) complete() bool { return wait.renamed && !wait.written }

// event returns the remaining wait after an event.
func (wait *settling) event(now time.Time) time.Duration {
	if wait.deadline.IsZero() {
		wait.deadline = now.Add(maxQuietWait)
	}
	return max(0, min(quietTime, wait.deadline.Sub(now)))
}

// writing tracks a file that changes in place until it can be read.
type writing struct {
	stamp        files.Stamp // zero without a wait
	begin, since time.Time   // start of the wait; first observation of stamp
}

// remaining returns the wait before a file with this stamp is read.
func (file *writing) remaining(stamp files.Stamp, now time.Time) time.Duration {
	switch {
	case file.stamp == files.Stamp{}:
		*file = writing{stamp: stamp, begin: now, since: now}
	case file.stamp != stamp:
		file.stamp, file.since = stamp, now
	}
	return max(0, min(stableTime-now.Sub(file.since), maxStableWait-now.Sub(file.begin)))
}

// reload reads both files and publishes changes. complete reports whether no process is writing
// the trench file. It returns the delay until the next call, 0 after a read. notifier may be nil.
func (watcher *Watcher) reload(ctx context.Context, notifier *fsnotify.Watcher, complete bool) (again time.Duration) {
	again = watcher.readTrench(ctx, notifier, complete)
	watcher.readStale(ctx)
	return again
}

// readTrench publishes the trench file, or the reason why it is rejected; see reload.
func (watcher *Watcher) readTrench(ctx context.Context, notifier *fsnotify.Watcher,
	complete bool,
) (again time.Duration) {
	// Watch before reading, so that no change between the two is missed.
	watcher.watchDirectory(ctx, notifier)
	// The function below may outlive this call on a hanging mount, so it works on copies.
	known, wait := watcher.stamp, watcher.writing
	type state struct {
		data    []byte
		stamp   files.Stamp
		same    bool // as in the last read
		writing writing
		again   time.Duration
	}
	file, err := files.Do(ctx, &watcher.calls, "trench file "+watcher.path, func() (s state, err error) {
		// Take the stamp before reading, so that it is not newer than the content.
		now := time.Now()
		stamp, err := files.StampOf(watcher.path)
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
		s.data, err = watcher.read(watcher.path)
		return s, err
	})
	if ctx.Err() != nil {
		return
	}
	watcher.writing = file.writing
	switch {
	case file.same || file.again > 0:
	case err != nil:
		// The next poll reads the file again.
		watcher.stamp = files.Stamp{}
		watcher.refuse([sha256.Size]byte{}, err)
	default:
		watcher.stamp = file.stamp
		watcher.publish(file.data)
	}
	return file.again
}

// watchDirectory watches the directory again, since it may have been replaced.
func (watcher *Watcher) watchDirectory(ctx context.Context, notifier *fsnotify.Watcher) {
	if notifier == nil {
		return
	}
	directory := filepath.Dir(watcher.path)
	_, err := files.Do(ctx, &watcher.watchCalls, "directory "+directory,
		func() (struct{}, error) { return struct{}{}, notifier.Add(directory) })
	if err != nil && !watcher.unwatched && ctx.Err() == nil {
		watcher.log.Warn("failed to watch directory, polling only",
			"directory", directory, "interval", watcher.poll, "error", err)
	}
	watcher.unwatched = err != nil
}

// equal reports whether two configurations are equal except for the fields without an effect.
func equal(a, b *trench.Config) bool {
	same := *a
	same.Digest, same.Confirm, same.MaxRemoval = b.Digest, b.Confirm, b.MaxRemoval
	return reflect.DeepEqual(&same, b)
}

// publish puts the configuration in data in force, or records why it is rejected.
func (watcher *Watcher) publish(data []byte) {
	content := sha256.Sum256(data)
	// Parsing a large file takes most of the memory, so skip equal content.
	if content == watcher.content {
		return
	}
	// Before parsing, since a crash of the parser counts, too.
	watcher.Trial.Begin(content)
	config, err := Parse(watcher.path, data, watcher.defaults)
	if err != nil {
		watcher.Trial.Cancel()
		watcher.refuse(content, err)
		return
	}
	edited := watcher.begun
	watcher.content, watcher.failure, watcher.begun, watcher.next = content, "", true, config
	// A change of comments or formatting must not create a new generation.
	if !watcher.accept(config) && edited {
		watcher.log.Info("trench file changed, no effect", "generation", watcher.loaded.Load().Generation)
	}
}

// takeConfirmation puts confirmed removals in force. The next confirmation closes the channel.
func (watcher *Watcher) takeConfirmation() <-chan struct{} {
	_, changed := watcher.confirmed.Get()
	watcher.reviewHold()
	return changed
}

// reviewHold decides on held removals again: they were confirmed, or their targets failed.
func (watcher *Watcher) reviewHold() {
	now := watcher.loaded.Load()
	// A file that was rejected since then leaves nothing to review.
	if now.Held.ID == "" && (watcher.Waits == nil || !watcher.Waits()) || watcher.next == nil {
		return
	}
	_, held := watcher.Hold(now.Config, watcher.next, now.Held, watcher.confirmed.Load())
	if held.ID != now.Held.ID {
		watcher.Trial.Begin(watcher.content)
		watcher.accept(watcher.next)
	}
}

// accept puts a valid configuration in force, without the removals that wait for a confirmation. It
// reports whether anything changed.
func (watcher *Watcher) accept(config *trench.Config) bool {
	now := watcher.loaded.Load()
	var held trench.Held
	// The first configuration removes nothing.
	if now.Generation > 0 && watcher.Hold != nil {
		config, held = watcher.Hold(now.Config, config, now.Held, watcher.confirmed.Load())
	}
	if held.ID != now.Held.ID && now.Held.ID != "" {
		// A confirmation is for these removals: the same ones may be a mistake the next time.
		watcher.confirmed.Set("")
	}
	// Old checks are held beside the new ones, which are in force.
	watcher.Trial.Accept(watcher.content, config, held.Count() > len(held.Checks))
	unchanged, refused := equal(config, now.Config), now.Err != nil
	if unchanged && !refused && held.ID == now.Held.ID {
		return false
	}
	if held.ID != "" && held.ID != now.Held.ID {
		watcher.logHeld(held)
	}
	now.Err, now.At, now.Held = nil, time.Now(), held
	if unchanged {
		watcher.loaded.Set(now)
		watcher.log.Info("trench file valid, no effect", "generation", now.Generation)
		return true
	}
	now.Config, now.Generation = config, now.Generation+1
	watcher.loaded.Set(now)
	watcher.log.Info("new configuration in force", "generation", now.Generation,
		"vips", len(config.Attractor.VIPs), "gateways", len(config.Attractor.Gateways), "streams", len(config.Streams))
	return true
}

// refuse publishes why the file is not in force, once per state of the file.
func (watcher *Watcher) refuse(content [sha256.Size]byte, err error) {
	if err.Error() == watcher.failure && content == watcher.content {
		return
	}
	watcher.content, watcher.failure, watcher.next = content, err.Error(), nil
	now := watcher.loaded.Load()
	now.Err, now.At = err, time.Now()
	now.Refused++
	watcher.loaded.Set(now)
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
	watcher.log.Error(message, "error", err, "remedy", remedy, "generation", now.Generation)
}
