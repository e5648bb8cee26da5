package target

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
type readinessFile struct {
	foundFile
	// expires is when it is too old; zero: never.
	expires time.Time
	// future says that its mtime was in the future when it was first seen.
	future bool
}

// reading is what Run knows.
type reading struct {
	*Directory
	known    *names
	requests chan<- scanRequest
	sights   <-chan sight

	files    map[string]readinessFile // by name, as seen last
	shown    map[string]readinessName // those that count
	problems []string                 // of the newest scan
	sawVIP   bool                     // sticky
	sawDir   bool                     // sticky
	link     bool                     // the path itself is a symlink
	links    bool                     // some files are

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
func (r *reading) next() time.Time {
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
func (r *reading) act(now time.Time) {
	if due(r.hangAt, now) {
		r.hangAt = time.Time{}
		select {
		case found := <-r.sights: // we were late, not the scan
			r.saw(now, found)
		default:
			r.hung = true
			r.lose(now, fmt.Errorf("the readiness directory %s does not answer: its file system hangs", r.o.Path))
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

func (r *reading) request(now time.Time, q scanRequest) {
	if q.names == nil {
		r.scans.Add(1)
	}
	r.requests <- q // there is room: the one before was answered
	r.busy, r.hangAt = true, now.Add(hangTime)
}

// heard takes a notification.
func (r *reading) heard(now time.Time, e fsnotify.Event) {
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
	if _, ours, _ := parseReadinessName(child); !ours {
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
func (r *reading) appears(now time.Time) {
	if r.quietBy.IsZero() {
		r.quietBy = now.Add(maxRaiseWait)
	}
	r.quietAt = now.Add(raiseQuiet)
	if r.quietAt.After(r.quietBy) {
		r.quietAt = r.quietBy
	}
}

// saw takes what the scanner found.
func (r *reading) saw(now time.Time, found sight) {
	r.busy, r.hung, r.hangAt = false, false, time.Time{}
	if found.request.names != nil {
		for name := range found.request.names {
			if _, there := found.files[name]; there {
				r.appears(now) // it was made anew meanwhile
			} else {
				delete(r.files, name)
			}
		}
		r.evaluate(now, false)
		return
	}
	r.at, r.link = found.begun, found.link
	if found.err != nil {
		r.lose(now, found.err)
		return
	}
	if r.gone {
		r.log.Info("the readiness directory can be read again", "gone", now.Sub(r.goneSince).Round(time.Millisecond))
	}
	r.gone, r.err, r.goneSince, r.drainEnd, r.sawDir = false, nil, time.Time{}, time.Time{}, true
	files := make(map[string]readinessFile, len(found.files))
	r.links = false
	for name, f := range found.files {
		files[name] = r.aged(now, f, r.files[name])
		r.links = r.links || f.link
	}
	r.files, r.problems = files, found.problems
	r.evaluate(now, found.request.settled)
}

// aged notes when a file will be too old. As long as its mtime is the same this
// is not judged anew: the wall clock may have jumped.
func (r *reading) aged(now time.Time, f foundFile, before readinessFile) readinessFile {
	is := readinessFile{foundFile: f}
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

// lose notes that the directory cannot be read, and why.
func (r *reading) lose(now time.Time, err error) {
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

func (r *reading) drop() {
	r.shown, r.shownChanged = map[string]readinessName{}, true
}

// evaluate decides which files count. quiet says that the wait for quiet is over
// unless something appeared meanwhile.
func (r *reading) evaluate(now time.Time, quiet bool) {
	if r.gone || r.at.IsZero() {
		r.publish(now)
		return
	}
	fresh := func(f readinessFile) bool { return f.expires.IsZero() || now.Before(f.expires) }
	for name := range r.shown {
		if f, there := r.files[name]; !there || !fresh(f) {
			delete(r.shown, name)
			r.shownChanged = true
		}
	}
	appeared := false
	sawVIP := false
	r.agesAt = time.Time{}
	for name, f := range r.files {
		sawVIP = sawVIP || f.name.vip.IsValid()
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
		r.sawVIP = r.sawVIP || sawVIP
	}
	r.publish(now)
}

// publish makes a listing of what is known.
func (r *reading) publish(now time.Time) {
	was := r.value.Load()
	l := Listing{
		Scanned: true, Groups: was.Groups, VIPs: was.VIPs, PerVIP: r.sawVIP,
		Everything: r.gone && !r.sawDir && r.o.MissingReady && errors.Is(r.err, fs.ErrNotExist),
		Gone:       r.gone, Err: r.err, GoneSince: r.goneSince, DrainEnd: r.drainEnd, At: r.at,
		Revision: was.Revision, shown: was.shown, path: was.path, byStream: len(r.known.streams) > 0, since: was.since,
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
	if live := !l.Gone; !was.Scanned || live == was.Gone {
		l.since = now
	}
	r.tell(was, l)
	r.value.Set(l)
	if !r.first {
		r.first = true
		close(r.ready)
	}
}

// trouble fills in the groups and VIPs that count, and returns what does not.
func (r *reading) trouble(now time.Time, l *Listing) (problems []string, stale map[readinessName]struct{}) {
	if r.shownChanged || r.shownKnown != r.known || l.Groups == nil {
		l.Groups, l.VIPs, l.shown = map[string]struct{}{}, vip.Set{}, make([]readinessName, 0, len(r.shown))
		for _, n := range r.shown {
			l.shown = append(l.shown, n)
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
			note(name, "its mtime lies in the future: the clock of its writer is ahead, or ours jumped back; it counts as touched when first seen")
		} else if !counts && !f.expires.IsZero() && !now.Before(f.expires) {
			note(name, fmt.Sprintf("was last touched more than %v ago and does not count (--readiness-max-age)", r.o.MaxAge))
			if stale == nil {
				stale = map[readinessName]struct{}{}
			}
			stale[f.name] = struct{}{}
		}
	}
	slices.Sort(problems)
	if n := len(problems); n > maxFileProblems {
		problems = append(problems[:maxFileProblems:maxFileProblems], fmt.Sprintf("and %d more", n-maxFileProblems))
	}
	return problems, stale
}

// tell logs what is new.
func (r *reading) tell(was, l Listing) {
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
	r.log.Info("readiness files", "groups", len(l.Groups), "vips", len(l.VIPs), "gone", l.Gone, "problems", len(l.Problems),
		"reason", cmp.Or(errorWords(l.Err), "read"))
}

func errorWords(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
