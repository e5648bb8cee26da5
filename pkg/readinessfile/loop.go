package readinessfile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/vipgate/vipgate/pkg/vip"
)

// readinessFile is a file that was seen.
type trackedFile struct {
	foundFile
	// expires is when it is too old; zero: never.
	expires time.Time
	// future says that its mtime was in the future when it was first seen.
	future bool
}

// reading is what Run knows.
type readLoop struct {
	*Reader
	known    *names
	requests chan<- scanRequest
	results  <-chan scanResult

	files    map[string]trackedFile // by name, as seen last
	shown    map[string]fileName    // those that count
	problems []string               // of the newest scan
	seenVIP  bool                   // sticky
	seenDir  bool                   // sticky
	link     bool                   // the path itself is a symlink
	links    bool                   // some files are

	at        time.Time // of the newest scan that ended
	gone      bool
	goneSince time.Time
	drainEnd  time.Time
	err       error
	first     bool // the first scan ended

	// What is to be done.
	scan    bool
	settled bool                // the scan to come ends a wait for quiet
	removed map[string]struct{} // names to look at

	busy   bool
	begun  time.Time // of the newest scan
	hung   bool
	hangAt time.Time
	tickAt time.Time
	agesAt time.Time // the next file is too old
	// quietAt is when no further file will have appeared, quietBy when it counts as quiet
	// anyhow; zero while nothing appears.
	quietAt, quietBy time.Time

	shownChanged bool // since the newest listing
	shownKnown   *names
}

// next is when something is to be done although nothing is heard.
func (r *readLoop) next() time.Time {
	at := r.tickAt
	sooner := func(t time.Time) {
		if !t.IsZero() && t.Before(at) {
			at = t
		}
	}
	sooner(r.hangAt)
	sooner(r.agesAt)
	sooner(r.quietAt)
	sooner(r.drainEnd)
	if r.scan && !r.busy {
		sooner(r.begun.Add(scanGap))
	}
	return at
}

// act does what is due.
func (r *readLoop) act(now time.Time) {
	if due(r.hangAt, now) {
		r.hangAt = time.Time{}
		select {
		case found := <-r.results: // we were late, not the scan
			r.onScan(now, found)
		default:
			r.hung = true
			r.onGone(now, fmt.Errorf("the readiness directory %s does not answer: its file system hangs", r.o.Path))
		}
	}
	if due(r.quietAt, now) {
		r.quietAt = time.Time{}
		r.scan, r.settled = true, true
	}
	if due(r.agesAt, now) {
		r.agesAt = time.Time{}
		r.scan = true
	}
	if due(r.drainEnd, now) {
		r.drainEnd = time.Time{}
		r.drop()
		r.publish(now)
	}
	if !r.tickAt.After(now) {
		r.tickAt = now.Add(r.rescan)
		if !r.busy {
			r.scan = true
		}
		if r.hung {
			r.at = now
			r.publish(now)
		}
	}
	switch {
	case r.busy:
	case r.scan && !now.Before(r.begun.Add(scanGap)):
		r.request(now, scanRequest{settled: r.settled})
		r.scan, r.settled, r.removed = false, false, nil
		r.begun = now
	case len(r.removed) > 0:
		r.request(now, scanRequest{names: r.removed})
		r.removed = nil
	}
}

func due(at, now time.Time) bool { return !at.IsZero() && !at.After(now) }

func (r *readLoop) request(now time.Time, q scanRequest) {
	if q.names == nil {
		r.scans.Add(1)
	}
	r.requests <- q // there is room: the one before was answered
	r.busy, r.hangAt = true, now.Add(hangTime)
}

// onEvent processes a notification.
func (r *readLoop) onEvent(now time.Time, e fsnotify.Event) {
	child, inside := strings.CutPrefix(e.Name, r.o.Path+"/")
	switch {
	case e.Name == r.o.Path:
		r.scan = true
		return
	case !inside:
		// Beside the directory: a symlink that the path goes through may have moved.
		r.scan = r.scan || r.link
		return
	}
	if _, isReadinessFile, _ := parseName(child); !isReadinessFile {
		// As kubelet's ..data, behind which the files are.
		r.scan = r.scan || r.links
		return
	}
	switch {
	case e.Has(fsnotify.Remove), e.Has(fsnotify.Rename):
		if r.removed == nil {
			r.removed = map[string]struct{}{}
		}
		r.removed[child] = struct{}{}
	case e.Has(fsnotify.Create), r.o.MaxAge > 0:
		r.appears(now)
	}
}

// appears begins or prolongs the wait for quiet.
func (r *readLoop) appears(now time.Time) {
	if r.quietBy.IsZero() {
		r.quietBy = now.Add(maxRaiseWait)
	}
	r.quietAt = now.Add(raiseQuiet)
	if r.quietAt.After(r.quietBy) {
		r.quietAt = r.quietBy
	}
}

// onScan processes what the scanner found.
func (r *readLoop) onScan(now time.Time, found scanResult) {
	r.busy, r.hung, r.hangAt = false, false, time.Time{}
	if found.request.names != nil {
		for name := range found.request.names {
			if _, there := found.files[name]; there {
				r.appears(now) // it was created again meanwhile
			} else {
				delete(r.files, name)
			}
		}
		r.evaluate(now, false)
		return
	}
	r.at, r.link = found.begun, found.link
	if found.err != nil {
		r.onGone(now, found.err)
		return
	}
	if r.gone {
		r.log.Info("the readiness directory can be read again", "gone", now.Sub(r.goneSince).Round(time.Millisecond))
	}
	r.gone, r.err, r.goneSince, r.drainEnd, r.seenDir = false, nil, time.Time{}, time.Time{}, true
	files := make(map[string]trackedFile, len(found.files))
	r.links = false
	for name, f := range found.files {
		files[name] = r.aged(now, f, r.files[name])
		r.links = r.links || f.link
	}
	r.files, r.problems = files, found.problems
	r.evaluate(now, found.request.settled)
}

// aged notes when a file will be too old. As long as its mtime is the same this
// is not judged again: the wall clock may have jumped.
func (r *readLoop) aged(now time.Time, f foundFile, before trackedFile) trackedFile {
	is := trackedFile{foundFile: f}
	if r.o.MaxAge == 0 {
		return is
	}
	if !before.expires.IsZero() && before.mtime.Equal(f.mtime) {
		is.expires, is.future = before.expires, before.future
		return is
	}
	age := now.Sub(f.mtime)
	is.future = age < -futureTolerance
	is.expires = now.Add(r.o.MaxAge - max(0, age))
	return is
}

// onGone notes that the directory cannot be read, and why.
func (r *readLoop) onGone(now time.Time, err error) {
	if r.hung {
		r.at = now
	}
	if !r.gone || r.err.Error() != err.Error() {
		r.log.Warn("the readiness directory cannot be read", "on_gone", r.o.OnGone, "error", err)
	}
	if !r.gone {
		r.gone, r.goneSince = true, now
		r.quietAt, r.quietBy, r.agesAt = time.Time{}, time.Time{}, time.Time{}
		switch {
		case r.o.OnGone == Drop, r.o.OnGone == Drain && r.o.DrainTime <= 0:
			r.drop()
		case r.o.OnGone == Drain && len(r.shown) > 0:
			r.drainEnd = now.Add(r.o.DrainTime)
		}
	}
	r.err, r.problems = err, nil
	r.publish(now)
}

func (r *readLoop) drop() {
	r.shown, r.shownChanged = map[string]fileName{}, true
}

// evaluate decides which files count. quiet says that the wait for quiet is over
// unless something appeared meanwhile.
func (r *readLoop) evaluate(now time.Time, quiet bool) {
	if r.gone || r.at.IsZero() {
		r.publish(now)
		return
	}
	fresh := func(f trackedFile) bool { return f.expires.IsZero() || now.Before(f.expires) }
	for name := range r.shown {
		if f, there := r.files[name]; !there || !fresh(f) {
			delete(r.shown, name)
			r.shownChanged = true
		}
	}
	appeared := false
	seenVIP := false
	r.agesAt = time.Time{}
	for name, f := range r.files {
		seenVIP = seenVIP || f.name.vip.IsValid()
		if !fresh(f) {
			continue
		}
		if !f.expires.IsZero() && (r.agesAt.IsZero() || f.expires.Before(r.agesAt)) {
			r.agesAt = f.expires
		}
		if _, counts := r.shown[name]; !counts {
			appeared = true
		}
	}
	over := !r.first || quiet && (r.quietAt.IsZero() || !now.Before(r.quietBy))
	if appeared && over {
		for name, f := range r.files {
			if fresh(f) {
				r.shown[name] = f.name
			}
		}
		r.shownChanged, appeared = true, false
	}
	switch {
	case appeared && r.quietAt.IsZero():
		r.appears(now)
	case quiet && !appeared && r.quietAt.IsZero():
		r.quietBy = time.Time{}
	case over && r.first:
		// More comes: that is a wait of its own.
		r.quietBy = time.Time{}
		r.appears(now)
	}
	// Together with the files that count, lest all VIPs fall before their own
	// files do.
	if !appeared {
		r.seenVIP = r.seenVIP || seenVIP
	}
	r.publish(now)
}

// publish makes a listing of what is known.
func (r *readLoop) publish(now time.Time) {
	was := r.value.Load()
	l := Listing{
		Scanned: true, Groups: was.Groups, VIPs: was.VIPs, PerVIP: r.seenVIP,
		Everything: r.gone && !r.seenDir && r.o.MissingReady && errors.Is(r.err, fs.ErrNotExist),
		Gone:       r.gone, Err: r.err, GoneSince: r.goneSince, DrainEnd: r.drainEnd, At: r.at,
		Revision: was.Revision, path: was.path, byStream: len(r.known.streams) > 0,
	}
	if r.at.IsZero() {
		return // Configure before the first scan
	}
	l.Problems, l.stale = r.trouble(now, &l)
	if l.same(was) {
		r.value.Set(l)
		return
	}
	l.Revision++
	r.logChanges(was, l)
	r.value.Set(l)
	if !r.first {
		r.first = true
		close(r.ready)
	}
}

// trouble fills in the groups and VIPs that count, and returns what does not.
func (r *readLoop) trouble(now time.Time, l *Listing) (problems []string, stale map[fileName]struct{}) {
	if r.shownChanged || r.shownKnown != r.known || l.Groups == nil {
		l.Groups, l.VIPs = map[string]struct{}{}, vip.Set{}
		for _, n := range r.shown {
			r.known.take(n, l)
		}
		r.shownChanged, r.shownKnown = false, r.known
	}
	if r.gone {
		return nil, nil
	}
	problems = slices.Clone(r.problems)
	note := func(name, problem string) { problems = append(problems, fmt.Sprintf("%q: %s", name, problem)) }
	for name, f := range r.files {
		if problem := r.known.problem(f.name); problem != "" {
			note(name, problem)
		}
		if _, counts := r.shown[name]; f.future {
			note(name, "its mtime lies in the future: the clock of its writer is ahead, or the local clock jumped back; it counts as touched when first seen")
		} else if !counts && !f.expires.IsZero() && !now.Before(f.expires) {
			note(name, fmt.Sprintf("was last touched more than %v ago and does not count (--readiness-max-age)", r.o.MaxAge))
			if stale == nil {
				stale = map[fileName]struct{}{}
			}
			stale[f.name] = struct{}{}
		}
	}
	slices.Sort(problems)
	if n := len(problems); n > maxProblems {
		problems = append(problems[:maxProblems:maxProblems], fmt.Sprintf("and %d more", n-maxProblems))
	}
	return problems, stale
}

// logChanges logs the differences between two listings.
func (r *readLoop) logChanges(was, l Listing) {
	for _, p := range l.Problems {
		if !slices.Contains(was.Problems, p) {
			r.log.Warn("readiness file not taken", "problem", p)
		}
	}
	if l.Everything && !was.Everything {
		r.log.Warn("THE READINESS DIRECTORY WAS NEVER THERE: every VIP counts as ready until it is (--readiness-dir-missing=ready)", "error", l.Err)
	}
	if l.PerVIP && !was.PerVIP {
		r.log.Info("a readiness file of a VIP was seen: from now on only such files count")
	}
	r.log.Info("readiness files", "groups", len(l.Groups), "vips", len(l.VIPs), "gone", l.Gone,
		"problems", len(l.Problems),
		"reason", cmp.Or(errorText(l.Err), "read"))
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
