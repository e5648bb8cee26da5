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

// readLoop is the state of Reader.Run. Its methods perform no I/O and get the time from their
// caller.
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

func newReadLoop(r *Reader, requests chan<- scanRequest, results <-chan scanResult) *readLoop {
	return &readLoop{
		Reader: r, Listing: r.value.Load(), known: r.known.Load(), requests: requests, results: results,
		shown: map[string]string{},
	}
}

// next returns the earliest deadline.
func (r *readLoop) next() time.Time {
	deadlines := []time.Time{r.tickAt, r.hangAt, r.agesAt, r.quietAt, r.DrainEnd}
	if r.scan && !r.busy {
		deadlines = append(deadlines, r.begun.Add(scanGap))
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
func (r *readLoop) act(now time.Time) {
	if due(&r.hangAt, now) {
		select {
		case found := <-r.results: // this goroutine was delayed, not the scan
			r.onScan(now, found)
		default:
			r.hung = true
			r.onGone(now, fmt.Errorf("the readiness directory %s does not answer: its file system hangs", r.o.Path))
		}
	}
	if due(&r.quietAt, now) {
		r.scan, r.settled = true, true
	}
	if due(&r.agesAt, now) {
		r.scan = true
	}
	if due(&r.DrainEnd, now) {
		clear(r.shown)
		r.publish(now)
	}
	if !r.tickAt.After(now) {
		r.tickAt = now.Add(r.rescan)
		r.scan = r.scan || !r.busy
		// A hung scan has no result. Advance At to show that the reader itself does not hang.
		if r.hung {
			r.At = now
			r.publish(now)
		}
	}
	switch {
	case r.busy:
	case r.scan && !now.Before(r.begun.Add(scanGap)):
		r.scans.Add(1)
		r.request(now, scanRequest{settled: r.settled})
		r.scan, r.settled, r.removed = false, false, nil
		r.begun = now
	case len(r.removed) > 0:
		r.request(now, scanRequest{names: r.removed})
		r.removed = nil
	}
}

func (r *readLoop) request(now time.Time, q scanRequest) {
	r.requests <- q // does not block: at most one request is outstanding
	r.busy, r.hangAt = true, now.Add(hangTime)
}

// onEvent handles a notification.
func (r *readLoop) onEvent(now time.Time, e fsnotify.Event) {
	child, inside := strings.CutPrefix(e.Name, r.o.Path+"/")
	switch {
	case e.Name == r.o.Path:
		r.scan = true
	case !inside:
		// A change in the parent directory may have replaced the symlink.
		r.scan = r.scan || r.link
	case !isReadinessFile(child):
		// For example ..data, the symlink that kubelet replaces to update all files of a volume.
		r.scan = r.scan || r.links
	case e.Has(fsnotify.Remove), e.Has(fsnotify.Rename):
		if r.removed == nil {
			r.removed = map[string]struct{}{}
		}
		r.removed[child] = struct{}{}
	case e.Has(fsnotify.Create), r.o.MaxAge > 0:
		r.appears(now)
	}
}

// appears starts or extends the wait for further files.
func (r *readLoop) appears(now time.Time) {
	if r.quietBy.IsZero() {
		r.quietBy = now.Add(maxRaiseWait)
	}
	r.quietAt = now.Add(raiseQuiet)
	if r.quietAt.After(r.quietBy) {
		r.quietAt = r.quietBy
	}
}

// onScan handles the result of a request.
func (r *readLoop) onScan(now time.Time, found scanResult) {
	r.busy, r.hung, r.hangAt = false, false, time.Time{}
	if found.request.names != nil {
		for name := range found.request.names {
			if _, exists := found.files[name]; exists {
				r.appears(now) // removed and created again
			} else {
				delete(r.files, name)
			}
		}
		r.evaluate(now, false)
		return
	}
	r.At, r.link = found.begun, found.link
	if found.err != nil {
		r.onGone(now, found.err)
		return
	}
	if r.Gone {
		r.log.Info("readiness directory can be read again", "gone", now.Sub(r.goneSince).Round(time.Millisecond))
	}
	r.Gone, r.Err, r.DrainEnd = false, nil, time.Time{}
	r.seenDir, r.links = true, false
	for name, f := range found.files {
		r.links = r.links || f.link
		found.files[name] = r.aged(now, f, r.files[name])
	}
	r.files, r.problems = found.files, found.problems
	r.evaluate(now, found.request.settled)
}

// aged sets the time at which a file becomes stale. It compares an mtime with the wall clock only
// once, because the wall clock may jump. An mtime in the future counts as now, so that such a file
// becomes stale, too.
func (r *readLoop) aged(now time.Time, f, before foundFile) foundFile {
	switch {
	case r.o.MaxAge == 0:
	case !before.expires.IsZero() && before.mtime.Equal(f.mtime):
		f.expires, f.future = before.expires, before.future
	default:
		age := now.Sub(f.mtime)
		f.future = age < -futureTolerance
		f.expires = now.Add(r.o.MaxAge - max(0, age))
	}
	return f
}

// onGone handles a directory that cannot be read.
func (r *readLoop) onGone(now time.Time, err error) {
	if r.hung {
		r.At = now
	}
	if logs.Text(r.Err) != err.Error() {
		r.log.Warn("readiness directory cannot be read", "on_gone", r.o.OnGone, "error", err)
	}
	if !r.Gone {
		r.Gone, r.goneSince = true, now
		r.quietAt, r.quietBy, r.agesAt = time.Time{}, time.Time{}, time.Time{}
		switch {
		case r.o.OnGone == Drop, r.o.OnGone == Drain && r.o.DrainTime <= 0:
			clear(r.shown)
		case r.o.OnGone == Drain && len(r.shown) > 0:
			r.DrainEnd = now.Add(r.o.DrainTime)
		}
	}
	r.Err, r.problems = err, nil
	r.publish(now)
}

// evaluate selects the files that count. quiet reports whether a scan ended the wait for more
// files.
func (r *readLoop) evaluate(now time.Time, quiet bool) {
	if r.Gone || r.At.IsZero() {
		r.publish(now)
		return
	}
	maps.DeleteFunc(r.shown, func(name, _ string) bool {
		f, exists := r.files[name]
		return !exists || f.stale(now)
	})
	appeared, seenVIP := false, false
	r.agesAt = time.Time{}
	for name, f := range r.files {
		seenVIP = seenVIP || strings.HasPrefix(f.file, vipFilePrefix)
		if f.stale(now) {
			continue
		}
		if !f.expires.IsZero() && (r.agesAt.IsZero() || f.expires.Before(r.agesAt)) {
			r.agesAt = f.expires
		}
		_, counts := r.shown[name]
		appeared = appeared || !counts
	}
	// A file that appeared after the scan was requested extends the wait, up to quietBy. The first
	// scan takes effect without a wait.
	over := !r.Scanned || quiet && (r.quietAt.IsZero() || !now.Before(r.quietBy))
	if appeared && over {
		for name, f := range r.files {
			if !f.stale(now) {
				r.shown[name] = f.file
			}
		}
		appeared = false
	}
	switch {
	case appeared && r.quietAt.IsZero():
		r.appears(now)
	case quiet && !appeared && r.quietAt.IsZero():
		r.quietBy = time.Time{}
	case over && r.Scanned: // more files appeared: start another wait
		r.quietBy = time.Time{}
		r.appears(now)
	}
	// PerVIP changes together with the files that count. If it changed first, all VIPs would become
	// not ready until their own files count.
	r.PerVIP = r.PerVIP || (seenVIP && !appeared)
	r.publish(now)
}

// publish publishes a listing of the current state.
func (r *readLoop) publish(now time.Time) {
	if r.At.IsZero() {
		return // Configure was called before the first scan
	}
	r.Scanned, r.byStream = true, r.known.byStream
	r.Everything = r.Gone && !r.seenDir && r.o.MissingReady && errors.Is(r.Err, fs.ErrNotExist)
	// Allocate new maps: readers hold the maps of the published listing.
	r.Files, r.Problems, r.stale = map[string]struct{}{}, nil, map[string]struct{}{}
	for _, file := range r.shown {
		if r.known.problem(file) == "" {
			r.Files[file] = struct{}{}
		}
	}
	if !r.Gone {
		r.addProblems(now)
	}
	if previous := r.value.Load(); !r.same(previous) {
		r.Revision++
		r.logChanges(previous)
	}
	r.value.Set(r.Listing)
}

// addProblems adds the ignored files.
func (r *readLoop) addProblems(now time.Time) {
	r.Problems = slices.Clone(r.problems)
	add := func(name, problem string) { r.Problems = append(r.Problems, fmt.Sprintf("%q: %s", name, problem)) }
	for name, f := range r.files {
		if problem := r.known.problem(f.file); problem != "" {
			add(name, problem)
		}
		if _, counts := r.shown[name]; f.future {
			add(name, "its mtime is in the future: the clock of its writer is ahead, or the local clock jumped back; "+
				"it counts as touched when first seen")
		} else if !counts && f.stale(now) {
			add(name, fmt.Sprintf("was last touched more than %v ago and does not count (--readiness-max-age)", r.o.MaxAge))
			r.stale[f.file] = struct{}{}
		}
	}
	slices.Sort(r.Problems)
	if n := len(r.Problems); n > maxProblems {
		r.Problems = append(r.Problems[:maxProblems:maxProblems], fmt.Sprintf("and %d more", n-maxProblems))
	}
}

// logChanges logs the differences from the previous listing.
func (r *readLoop) logChanges(previous Listing) {
	for _, p := range r.Problems {
		if !slices.Contains(previous.Problems, p) {
			r.log.Warn("readiness file ignored", "problem", p)
		}
	}
	if r.Everything && !previous.Everything {
		r.log.Warn("readiness directory has never existed, every VIP counts as ready (--readiness-dir-missing=ready)",
			"error", r.Err)
	}
	if r.PerVIP && !previous.PerVIP {
		r.log.Info("readiness file of a VIP seen, files of groups no longer count")
	}
	r.log.Info("readiness files", "files", len(r.Files), "gone", r.Gone, "problems", len(r.Problems),
		"reason", cmp.Or(logs.Text(r.Err), "read"))
}
