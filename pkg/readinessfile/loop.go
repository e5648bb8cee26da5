package readinessfile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/vipgate/vipgate/pkg/logs"
)

// readLoop is the state of Reader.Run. Its methods do no I/O and get the time from their caller.
type readLoop struct {
	*Reader
	Listing  // the next listing to publish
	known    known
	requests chan<- scanRequest
	results  <-chan scanResult

	files    map[string]foundFile // by name, from the newest scan
	shown    map[string]string    // name to canonical name of the files that count
	problems []string             // of the newest scan
	seenDir  bool                 // the directory was read once; never reset
	link     bool                 // the path itself is a symlink
	links    bool                 // some files are symlinks

	goneSince time.Time

	scan    bool                // a scan is due
	settled bool                // the due scan ends a wait for further files
	removed map[string]struct{} // names whose removal must be verified

	busy  bool      // a request is being answered
	begun time.Time // of the newest scan
	hung  bool

	// Deadlines, with DrainEnd; zero: none.
	tickAt time.Time
	hangAt time.Time
	agesAt time.Time // when the next file becomes stale
	// quietAt ends the wait for further files; each new file defers it, at most to quietBy.
	quietAt, quietBy time.Time
}

func newReadLoop(reader *Reader, requests chan<- scanRequest, results <-chan scanResult) *readLoop {
	return &readLoop{
		Reader: reader, Listing: reader.value.Load(), known: reader.known.Load(), requests: requests, results: results,
		shown: map[string]string{},
	}
}

// next returns the earliest deadline.
func (loop *readLoop) next() time.Time {
	deadlines := []time.Time{loop.tickAt, loop.hangAt, loop.agesAt, loop.quietAt, loop.DrainEnd}
	if loop.scan && !loop.busy {
		deadlines = append(deadlines, loop.begun.Add(scanGap))
	}
	deadlines = slices.DeleteFunc(deadlines, time.Time.IsZero)
	return slices.MinFunc(deadlines, time.Time.Compare)
}

// due reports whether a deadline has expired, and clears an expired one.
func due(deadline *time.Time, now time.Time) bool {
	if deadline.IsZero() || deadline.After(now) {
		return false
	}
	*deadline = time.Time{}
	return true
}

// act handles expired deadlines and sends the next request to the scanner.
func (loop *readLoop) act(now time.Time) {
	if due(&loop.hangAt, now) {
		select {
		case found := <-loop.results: // this goroutine was delayed, not the scan
			loop.onScan(now, found)
		default:
			loop.hung = true
			loop.onGone(now, fmt.Errorf("the readiness directory %s does not answer: its file system hangs", loop.o.Path))
		}
	}
	if due(&loop.quietAt, now) {
		loop.scan, loop.settled = true, true
	}
	if due(&loop.agesAt, now) {
		loop.scan = true
	}
	if due(&loop.DrainEnd, now) {
		clear(loop.shown)
		loop.publish(now)
	}
	if !loop.tickAt.After(now) {
		loop.tickAt = now.Add(loop.rescan)
		loop.scan = loop.scan || !loop.busy
		// A hung scan has no result. Advance At to show that the reader itself does not hang.
		if loop.hung {
			loop.At = now
			loop.publish(now)
		}
	}
	switch {
	case loop.busy:
	case loop.scan && !now.Before(loop.begun.Add(scanGap)):
		loop.scans.Add(1)
		loop.request(now, scanRequest{settled: loop.settled})
		loop.scan, loop.settled, loop.removed = false, false, nil
		loop.begun = now
	case len(loop.removed) > 0:
		loop.request(now, scanRequest{names: loop.removed})
		loop.removed = nil
	}
}

func (loop *readLoop) request(now time.Time, request scanRequest) {
	loop.requests <- request // does not block: at most one request is outstanding
	loop.busy, loop.hangAt = true, now.Add(hangTime)
}

func (loop *readLoop) onEvent(now time.Time, event fsnotify.Event) {
	child, inside := strings.CutPrefix(event.Name, loop.o.Path+"/")
	switch {
	case event.Name == loop.o.Path:
		loop.scan = true
	case !inside:
		// A change in the parent directory may have replaced the symlink.
		loop.scan = loop.scan || loop.link
	case !isReadinessFile(child):
		// For example ..data, the symlink that kubelet replaces to update all files of a volume.
		loop.scan = loop.scan || loop.links
	case event.Has(fsnotify.Remove), event.Has(fsnotify.Rename):
		if loop.removed == nil {
			loop.removed = map[string]struct{}{}
		}
		loop.removed[child] = struct{}{}
	case event.Has(fsnotify.Create), loop.o.MaxAge > 0:
		loop.appears(now)
	}
}

// appears starts or extends the wait for further files.
func (loop *readLoop) appears(now time.Time) {
	if loop.quietBy.IsZero() {
		loop.quietBy = now.Add(maxRaiseWait)
	}
	loop.quietAt = now.Add(raiseQuiet)
	if loop.quietAt.After(loop.quietBy) {
		loop.quietAt = loop.quietBy
	}
}

func (loop *readLoop) onScan(now time.Time, found scanResult) {
	loop.busy, loop.hung, loop.hangAt = false, false, time.Time{}
	if found.request.names != nil {
		for name := range found.request.names {
			if _, exists := found.files[name]; exists {
				loop.appears(now) // removed and created again
			} else {
				delete(loop.files, name)
			}
		}
		loop.evaluate(now, false)
		return
	}
	loop.At, loop.link = found.begun, found.link
	// A result may also be the end of a hang; At was set above.
	if found.err != nil {
		loop.onGone(now, found.err)
		return
	}
	if loop.Gone {
		loop.log.Info("readiness directory can be read again", "gone", now.Sub(loop.goneSince).Round(time.Millisecond))
	}
	loop.Gone, loop.Err, loop.DrainEnd = false, nil, time.Time{}
	loop.seenDir, loop.links = true, false
	// Without symlinks, events of other names cannot concern a readiness file.
	for name, file := range found.files {
		loop.links = loop.links || file.link
		found.files[name] = loop.aged(now, file, loop.files[name])
	}
	loop.files, loop.problems = found.files, found.problems
	loop.evaluate(now, found.request.settled)
}

// aged sets the time at which a file becomes stale. It compares an mtime with the wall clock only
// once, because the wall clock may jump. An mtime in the future counts as now, so that such a file
// becomes stale, too.
func (loop *readLoop) aged(now time.Time, file, before foundFile) foundFile {
	switch {
	case loop.o.MaxAge == 0:
	case !before.expires.IsZero() && before.mtime.Equal(file.mtime):
		file.expires, file.future = before.expires, before.future
	default:
		age := now.Sub(file.mtime)
		file.future = age < -futureTolerance
		file.expires = now.Add(loop.o.MaxAge - max(0, age))
	}
	return file
}

// onGone handles a directory that cannot be read.
func (loop *readLoop) onGone(now time.Time, err error) {
	if loop.hung {
		loop.At = now
	}
	// The scan of each second fails alike: log a reason once.
	if logs.Text(loop.Err) != err.Error() {
		loop.log.Warn("readiness directory cannot be read", "on_gone", loop.o.OnGone, "error", err)
	}
	if !loop.Gone {
		loop.Gone, loop.goneSince = true, now
		loop.quietAt, loop.quietBy, loop.agesAt = time.Time{}, time.Time{}, time.Time{}
		switch {
		case loop.o.OnGone == Drop, loop.o.OnGone == Drain && loop.o.DrainTime <= 0:
			clear(loop.shown)
		case loop.o.OnGone == Drain && len(loop.shown) > 0:
			loop.DrainEnd = now.Add(loop.o.DrainTime)
		}
	}
	loop.Err, loop.problems = err, nil
	loop.publish(now)
}

// evaluate selects the files that count. quiet reports whether a scan ended the wait for files.
func (loop *readLoop) evaluate(now time.Time, quiet bool) {
	if loop.Gone || loop.At.IsZero() {
		loop.publish(now)
		return
	}
	// Removals take effect without a wait: a VIP must not stay advertised.
	maps.DeleteFunc(loop.shown, func(name, _ string) bool {
		file, exists := loop.files[name]
		return !exists || file.stale(now)
	})
	appeared, seenVIP := false, false
	loop.agesAt = time.Time{}
	for name, file := range loop.files {
		// A file of another address must not make the files of groups void.
		seenVIP = seenVIP || strings.HasPrefix(file.file, vipFilePrefix) && loop.known.problem(file.file) == ""
		if file.stale(now) {
			continue
		}
		if !file.expires.IsZero() && (loop.agesAt.IsZero() || file.expires.Before(loop.agesAt)) {
			loop.agesAt = file.expires
		}
		_, counts := loop.shown[name]
		appeared = appeared || !counts
	}
	// A file that appeared after the scan was requested extends the wait, up to quietBy. The first
	// scan takes effect without a wait.
	over := !loop.Scanned || quiet && (loop.quietAt.IsZero() || !now.Before(loop.quietBy))
	if appeared && over {
		for name, file := range loop.files {
			if !file.stale(now) {
				loop.shown[name] = file.file
			}
		}
		appeared = false
	}
	switch {
	case appeared && loop.quietAt.IsZero():
		loop.appears(now)
	case quiet && !appeared && loop.quietAt.IsZero():
		loop.quietBy = time.Time{}
	case over && loop.Scanned: // more files appeared: start another wait
		loop.quietBy = time.Time{}
		loop.appears(now)
	}
	// PerVIP changes together with the files that count. If it changed first, all VIPs would become
	// not ready until their own files count.
	loop.PerVIP = loop.PerVIP || (seenVIP && !appeared)
	loop.publish(now)
}

// publish publishes a listing of the current state.
func (loop *readLoop) publish(now time.Time) {
	if loop.At.IsZero() {
		return // Configure was called before the first scan
	}
	loop.Scanned, loop.byStream = true, loop.known.byStream
	loop.Everything = loop.Gone && !loop.seenDir && loop.o.MissingReady && errors.Is(loop.Err, fs.ErrNotExist)
	// Allocate new maps: readers hold the maps of the published listing.
	loop.Files, loop.Problems, loop.stale = map[string]struct{}{}, nil, map[string]struct{}{}
	for _, file := range loop.shown {
		if loop.known.problem(file) == "" {
			loop.Files[file] = struct{}{}
		}
	}
	if !loop.Gone {
		loop.addProblems(now)
	}
	if previous := loop.value.Load(); !loop.same(previous) {
		loop.Revision++
		loop.logChanges(previous)
	}
	loop.value.Set(loop.Listing)
}

// addProblems adds the ignored files.
func (loop *readLoop) addProblems(now time.Time) {
	loop.Problems = slices.Clone(loop.problems)
	add := func(name, problem string) {
		loop.Problems = append(loop.Problems, fmt.Sprintf("%q: %s", name, problem))
	}
	for name, file := range loop.files {
		if problem := loop.known.problem(file.file); problem != "" {
			add(name, problem)
		}
		if _, counts := loop.shown[name]; file.future {
			add(name, "its mtime is in the future: the clock of its writer is ahead, or the local clock jumped back; "+
				"it counts as touched when first seen")
		} else if !counts && file.stale(now) {
			add(name, fmt.Sprintf("was last touched more than %v ago and does not count (--readiness-max-age)", loop.o.MaxAge))
			loop.stale[file.file] = struct{}{}
		}
	}
	slices.Sort(loop.Problems)
	if count := len(loop.Problems); count > maxProblems {
		loop.Problems = append(loop.Problems[:maxProblems:maxProblems], fmt.Sprintf("and %d more", count-maxProblems))
	}
}

// logChanges logs the differences from the previous listing.
func (loop *readLoop) logChanges(previous Listing) {
	for _, problem := range loop.Problems {
		if !slices.Contains(previous.Problems, problem) {
			loop.log.Warn("readiness file ignored", "problem", problem)
		}
	}
	if loop.Everything && !previous.Everything {
		loop.log.Warn("readiness directory has never existed, every VIP counts as ready (--readiness-dir-missing=ready)",
			"error", loop.Err)
	}
	if loop.PerVIP && !previous.PerVIP {
		loop.log.Info("readiness file of a VIP seen, files of groups no longer count")
	}
	loop.log.Info("readiness files", "files", len(loop.Files), "gone", loop.Gone, "problems", len(loop.Problems),
		"reason", cmp.Or(logs.Text(loop.Err), "read"))
}
