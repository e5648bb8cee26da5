package readinessfile

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// rescanTime is when the directory is read although nothing was heard: a file
	// system without notifications, a symlink further up that was swapped.
	rescanTime = time.Second
	// raiseQuiet is how long no further file must appear before those that did
	// count, maxRaiseWait the longest wait: a thousand files are one decision.
	raiseQuiet   = 10 * time.Millisecond
	maxRaiseWait = 100 * time.Millisecond
	// scanGap is the least time between two scans, so that events cannot keep a
	// core busy. A removal needs no scan.
	scanGap = 5 * time.Millisecond
	// hangTime is how long a scan may take. With rescanTime it stays below
	// MaxListingAge: the directory is gone before its listing is too old.
	hangTime = 1500 * time.Millisecond
	// leaveTime is how long the end waits for a scan that hangs.
	leaveTime = time.Second
	// futureTolerance is how far in the future an mtime may lie without a word.
	futureTolerance = time.Second
	// maxFileProblems is how many problems are named.
	maxProblems = 20
	// notifications is how many of them may wait to be looked at.
	notifications = 4096
)

// MaxDirectoryEntries is how many entries of the directory are looked at.
const maxEntries = 20_000

// MinMaxAge is the least MaxAge: our own writer touches its files once
// a second, and some file systems keep mtimes to one or two seconds only.
const MinMaxAge = 2 * time.Second

// GonePolicy is what happens to ready VIPs when the directory is lost.
type GonePolicy string

const (
	// OnGoneHold keeps them ready.
	Hold GonePolicy = "hold"
	// OnGoneDrain keeps them ready for the drain time.
	Drain GonePolicy = "drain"
	// OnGoneDrop lets them become not ready at once.
	Drop GonePolicy = "drop"
)

// DirectoryOptions configure a Directory.
type Options struct {
	Path string
	// MissingReady makes every VIP ready as long as the directory was never there
	// since the start, for pods whose writer comes late. Once it was there OnGone
	// decides: a directory that is being replaced must not open the gate.
	MissingReady bool
	// MaxAge is how long ago a file may have been touched to count; 0 is off, at
	// least MinMaxAge otherwise. It is for writers that touch their files.
	//
	// The age is taken from the wall clock once, when an mtime is first seen, and
	// grows by the monotonic clock from there on. So a clock that jumps later ages
	// nothing, but a file touched just after a jump of the reader's clock, or by a
	// writer (or a file server) with another clock, is that much too old or too
	// young. An mtime in the future counts as now, so that such a file ages too. A
	// file system with coarse mtimes makes a file look older, by up to 2 s.
	MaxAge time.Duration
	// OnGone says what counts while the directory cannot be read.
	OnGone GonePolicy
	// DrainTime is how long Drain serves what was ready.
	DrainTime time.Duration
	Log       *slog.Logger
}

// Directory reads a readiness directory: files that are there while something is
// ready. It implements task.Task.
//
// What counts are regular files and symlinks to them, whatever they hold: they
// are never opened. Anything else with the name of a readiness file is a problem;
// other names mean nothing. Changes are heard by inotify, and the directory is
// read every second besides. What appears counts once nothing else has appeared
// for 10 ms, 100 ms at most; what disappears ceases to count at once.
//
// Files are no lease: those of a writer that died go on counting, unless MaxAge
// is set and the writer touches them.
type Reader struct {
	o     Options
	log   *slog.Logger
	value *latest.Value[Listing]
	known *latest.Value[*names]
	ready chan struct{}

	// notifier is fsnotify's; a node may have no inotify instance left.
	notifier func() (*fsnotify.Watcher, error)
	rescan   time.Duration
	// beforeScan runs before each scan, where a file system may hang.
	beforeScan func()
	scans      atomic.Uint64
}

// NewDirectory returns a Directory, which does nothing before Run.
func NewReader(o Options) *Reader {
	o.Path = filepath.Clean(o.Path)
	return &Reader{
		o: o, log: o.Log.With("directory", o.Path),
		value: latest.New(Listing{path: o.Path}), known: latest.New(newNames(Names{})),
		ready:      make(chan struct{}),
		notifier:   func() (*fsnotify.Watcher, error) { return fsnotify.NewBufferedWatcher(notifications) },
		rescan:     rescanTime,
		beforeScan: func() {},
	}
}

// Value tells what the directory says. It changes with every rescan, if only in
// At; see Listing.Revision.
func (d *Reader) Value() *latest.Value[Listing] { return d.value }

// Configure says what files may be about; to be called before Run and whenever
// that changes. It never blocks.
func (d *Reader) Configure(known Names) { d.known.Set(newNames(known)) }

// Ready is closed once the first scan ended, well or not.
func (d *Reader) Ready() <-chan struct{} { return d.ready }

// String names the task.
func (d *Reader) String() string { return "readiness-directory" }

// Run reads the directory until ctx ends. It is called once. A file system that
// hangs may keep one goroutine of it beyond the end: nothing can interrupt that.
func (d *Reader) Run(ctx context.Context) error {
	notifier, err := d.notifier()
	var events <-chan fsnotify.Event
	var failures <-chan error
	if err != nil {
		d.log.Warn("file notifications are not available, polling only", "interval", d.rescan, "error", err)
		notifier = nil
	} else {
		events, failures = notifier.Events, notifier.Errors
	}
	s := &scanner{
		path: d.o.Path, times: d.o.MaxAge > 0, notifier: notifier, before: d.beforeScan, log: d.log,
		watched: true,
	}
	requests, results := make(chan scanRequest, 1), make(chan scanResult, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.run(requests, results)
	}()
	defer func() {
		close(requests)
		select {
		case <-done:
		case <-time.After(leaveTime):
			d.log.Warn("a scan of the readiness directory hangs and is left behind")
		}
	}()

	known, knownChanged := d.known.Get()
	r := &readLoop{Reader: d, known: known, requests: requests, results: results, shown: map[string]fileName{}}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		r.act(time.Now())
		timer.Reset(time.Until(r.next()))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case found := <-results:
			r.onScan(time.Now(), found)
		case e, open := <-events:
			for more := true; more; {
				if !open {
					d.log.Warn("the file notifications ended, polling only", "interval", d.rescan)
					events = nil
					break
				}
				r.onEvent(time.Now(), e)
				select {
				case e, open = <-events:
				default:
					more = false
				}
			}
		case err, open := <-failures:
			if !open {
				failures = nil
				continue
			}
			// Events may have been lost: look at everything.
			d.log.Warn("file notifications failed", "error", err)
			r.scan = true
		case <-knownChanged:
			r.known, knownChanged = d.known.Get()
			r.evaluate(time.Now(), false)
		case <-timer.C:
		}
	}
}
