package readinessfile

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// rescanTime is the interval of scans without a notification: a file system may not support
	// inotify, and replacing a symlink further up in the path sends no event.
	rescanTime = time.Second
	// raiseQuiet is the time without a further file after which new files count, maxRaiseWait the
	// longest wait: a thousand files cause one decision.
	raiseQuiet   = 10 * time.Millisecond
	maxRaiseWait = 100 * time.Millisecond
	// scanGap is the shortest time between two scans, so that events cannot keep a core busy. It does
	// not delay removals, which need no scan.
	scanGap = 5 * time.Millisecond
	// hangTime bounds a scan. hangTime plus rescanTime is less than MaxListingAge, so that the
	// directory is reported as gone before its listing is too old.
	hangTime = 1500 * time.Millisecond

	leaveTime       = time.Second // bounds the wait for a hanging scan when the reader stops
	futureTolerance = time.Second // an mtime further in the future is a problem
	maxProblems     = 20          // in a Listing
	notifications   = 4096        // capacity of the event queue
	// maxFiles is the number of readiness files beyond which the directory counts as gone: which ones
	// a scan finds first is the file system's choice.
	maxFiles = 2 * trench.MaxVIPs
)

// MinMaxAge is the smallest Options.MaxAge: [Writer] touches its files once a second, and some file
// systems round mtimes to two seconds.
const MinMaxAge = 2 * time.Second

// DirectoryGonePolicy selects the treatment of ready VIPs while the directory cannot be read.
type DirectoryGonePolicy string

const (
	Hold  DirectoryGonePolicy = "hold"  // VIPs stay ready
	Drain DirectoryGonePolicy = "drain" // VIPs stay ready for Options.DrainTime
	Drop  DirectoryGonePolicy = "drop"  // VIPs become not ready immediately
)

// Options configure a Reader.
type Options struct {
	Path string
	// MissingReady makes every VIP ready as long as the directory has not existed since the start, for
	// pods whose writer starts late. Afterwards OnGone applies: the replacement of a directory must
	// not make every VIP advertised.
	MissingReady bool
	// MaxAge is the age from which a file does not count, for writers that touch their files. 0
	// disables it; the minimum is MinMaxAge.
	MaxAge time.Duration
	// OnGone applies while the directory cannot be read. DrainTime is the drain time of Drain.
	OnGone    DirectoryGonePolicy
	DrainTime time.Duration
	Log       *slog.Logger
}

// Reader reads a readiness directory. It implements task.Task.
//
// Regular files and symlinks to them count, whatever their content: Reader never opens them. Other
// file types with the name of a readiness file are problems; other names are ignored.
type Reader struct {
	o     Options
	log   *slog.Logger
	value *latest.Value[Listing]
	known *latest.Value[known]

	// Replaced in tests: fsnotify's constructor, rescanTime, and a hook before each scan.
	notifier   func() (*fsnotify.Watcher, error)
	rescan     time.Duration
	beforeScan func()
	scans      atomic.Uint64
}

// NewReader returns a Reader, which is idle until Run.
func NewReader(options Options) *Reader {
	options.Path = filepath.Clean(options.Path)
	return &Reader{
		o: options, log: options.Log.With("directory", options.Path),
		value: latest.New(Listing{path: options.Path}), known: latest.New(known{}),
		notifier:   func() (*fsnotify.Watcher, error) { return fsnotify.NewBufferedWatcher(notifications) },
		rescan:     rescanTime,
		beforeScan: func() {},
	}
}

// Value returns the listing. Each rescan replaces it; see Listing.Revision.
func (reader *Reader) Value() *latest.Value[Listing] { return reader.value }

// Configure sets the streams and VIPs of the trench file. Without streams, every group is known. It
// does not block.
func (reader *Reader) Configure(streams []string, vips []vip.VIP) {
	files := make(map[string]struct{}, len(streams)+len(vips))
	for _, stream := range streams {
		files[groupFile(stream)] = struct{}{}
	}
	for _, v := range vips { // first addresses are unique
		files[vipFile(v.Prefix().Addr())] = struct{}{}
	}
	reader.known.Set(known{files, len(streams) > 0})
}

// String implements task.Task.
func (reader *Reader) String() string { return "readiness-directory" }

// Run reads the directory until ctx ends. It is called once. When it returns, one goroutine may
// remain blocked in a file system that hangs.
func (reader *Reader) Run(ctx context.Context) error {
	notifier, err := reader.notifier()
	var events <-chan fsnotify.Event
	var failures <-chan error
	if err != nil {
		reader.log.Warn("file notifications are not available, polling only", "interval", reader.rescan, "error", err)
		notifier = nil
	} else {
		events, failures = notifier.Events, notifier.Errors
	}
	scanner := &scanner{
		path: reader.o.Path, times: reader.o.MaxAge > 0, notifier: notifier, before: reader.beforeScan, log: reader.log,
		watched: true, most: maxFiles,
	}
	requests, results := make(chan scanRequest, 1), make(chan scanResult, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		scanner.run(requests, results)
	}()
	defer func() {
		close(requests) // the scanner then closes the notifier
		select {
		case <-done:
		case <-time.After(leaveTime):
			reader.log.Warn("a scan of the readiness directory hangs and was abandoned")
		}
	}()

	_, knownChanged := reader.known.Get()
	loop := newReadLoop(reader, requests, results)
	for {
		loop.act(time.Now())
		select {
		case <-ctx.Done():
			return ctx.Err()
		case found := <-results:
			loop.onScan(time.Now(), found)
		case event := <-events:
			loop.onEvent(time.Now(), event)
			for range len(events) { // all queued events cause one decision
				loop.onEvent(time.Now(), <-events)
			}
		case err := <-failures:
			// The event queue may have overflowed, so scan the directory.
			reader.log.Warn("file notifications failed", "error", err)
			loop.scan = true
		case <-knownChanged:
			loop.known, knownChanged = reader.known.Get()
			loop.evaluate(time.Now(), false)
		case <-time.After(time.Until(loop.next())):
		}
	}
}
