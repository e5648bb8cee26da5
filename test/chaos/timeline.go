package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// state is the state of a subject of the timeline.
type state int

const (
	healthy     state = iota
	disturbed         // it may be late, and need not end anything
	terminating       // it received SIGTERM, and drains
	stopped           // exists, but does not run
	down
)

func (s state) String() string {
	return []string{"healthy", "disturbed", "terminating", "stopped", "down"}[s]
}

// change is a subject's new state.
type change struct {
	At      time.Time
	Subject string
	State   state
}

func (c change) String() string {
	return fmt.Sprintf("%s %s is %s", c.At.Format(timeFormat), c.Subject, c.State)
}

// Subjects of the timeline, besides "lb", "stream", "frontend", "speaker", "svid",
// "announcer", "net/internal", "trench", "disk", "kernel/FAMILY".
func targetSubject(target, family int) string   { return fmt.Sprintf("target/%d/%d", target, family) }
func vipSubject(v int) string                   { return fmt.Sprintf("vip/%d", v) }
func gatewaySubject(g int) string               { return fmt.Sprintf("gateway/%d", g) }
func pathSubject(g int, how string) string      { return fmt.Sprintf("path/%d/*/%s", g, how) }
func familySubject(g, f int, how string) string { return fmt.Sprintf("path/%d/%d/%s", g, f, how) }

// timeline records the states of the subjects. A subject without an entry is healthy.
type timeline struct {
	mu      sync.Mutex
	changes []change
	now     map[string]state
}

func newTimeline() *timeline { return &timeline{now: map[string]state{}} }

// set records that a subject is in a state from now on.
func (t *timeline) set(subject string, s state) { t.setAt(time.Now(), subject, s) }

// set2 is set of several subjects.
func (t *timeline) set2(s state, subjects ...string) {
	for _, subject := range subjects {
		t.set(subject, s)
	}
}

func (t *timeline) setAt(at time.Time, subject string, s state) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now[subject] == s {
		return
	}
	t.now[subject] = s
	t.changes = append(t.changes, change{at, subject, s})
}

// get returns the current state of a subject.
func (t *timeline) get(subject string) state {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.now[subject]
}

// wasDown reports whether a subject was down at any moment since a time, within the changes that
// take has not returned yet.
func (t *timeline) wasDown(subject string, since time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := false
	for _, c := range t.changes {
		if c.Subject == subject {
			if !c.At.Before(since) && was {
				return true
			}
			was = c.State == down
		}
	}
	return t.now[subject] == down
}

// wasHealthy reports whether every subject with one of these prefixes has been healthy since a
// moment, within the changes that take has not returned yet.
func (t *timeline) wasHealthy(since time.Time, prefixes ...string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	concerns := func(subject string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(subject, p) })
	}
	for subject, s := range t.now {
		if s != healthy && concerns(subject) {
			return false
		}
	}
	return !slices.ContainsFunc(t.changes, func(c change) bool { return concerns(c.Subject) && !c.At.Before(since) })
}

// unhealthy returns the subjects that are not healthy now.
func (t *timeline) unhealthy() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for subject, s := range t.now {
		if s != healthy {
			all = append(all, subject+" is "+s.String())
		}
	}
	slices.Sort(all)
	return all
}

// take returns the changes so far and discards them; the last state of a subject
// is kept.
func (t *timeline) take() []change {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.changes
	t.changes = nil
	for subject, s := range t.now {
		if s != healthy { // it began before the next window
			t.changes = append(t.changes, change{time.Now(), subject, s})
		}
	}
	slices.SortStableFunc(all, func(a, b change) int { return a.At.Compare(b.At) })
	return all
}

// interval is a stretch of time.
type interval struct{ from, to time.Time }

func (i interval) length() time.Duration { return i.to.Sub(i.from) }

// history answers questions about the changes of a window that ends at its end.
type history struct {
	end       time.Time
	bySubject map[string][]change
}

func newHistory(changes []change, end time.Time) *history {
	h := &history{end: end, bySubject: map[string][]change{}}
	for _, c := range changes {
		h.bySubject[c.Subject] = append(h.bySubject[c.Subject], c)
	}
	return h
}

// while returns the intervals in which a subject was in one of the states.
func (h *history) while(subject string, is func(state) bool) []interval {
	var all []interval
	var open time.Time
	for _, c := range h.bySubject[subject] {
		switch {
		case is(c.State) && open.IsZero():
			open = c.At
		case !is(c.State) && !open.IsZero():
			all = append(all, interval{open, c.At})
			open = time.Time{}
		}
	}
	if !open.IsZero() {
		all = append(all, interval{open, h.end})
	}
	return all
}

// disturbed returns the intervals in which one of the subjects with these prefixes was not
// healthy, each extended by the grace of the subject.
func (h *history) disturbed(is func(state) bool, prefixes ...string) []interval {
	var all []interval
	for subject := range h.bySubject {
		for _, p := range prefixes {
			if !strings.HasPrefix(subject, p) {
				continue
			}
			for _, i := range h.while(subject, is) {
				all = append(all, interval{i.from, i.to.Add(grace(subject, i.length()))})
			}
			break
		}
	}
	return merge(all)
}

// merge merges overlapping intervals, in order.
func merge(all []interval) []interval {
	slices.SortFunc(all, func(a, b interval) int { return a.from.Compare(b.from) })
	var merged []interval
	for _, i := range all {
		if n := len(merged); n > 0 && !i.from.After(merged[n-1].to) {
			if i.to.After(merged[n-1].to) {
				merged[n-1].to = i.to
			}
			continue
		}
		merged = append(merged, i)
	}
	return merged
}

// intersect returns the intervals that are in both lists, one for each pair: overlapping
// intervals of one list are not merged.
func intersect(a, b []interval) []interval {
	var all []interval
	for _, x := range a {
		for _, y := range b {
			from, to := x.from, x.to
			if y.from.After(from) {
				from = y.from
			}
			if y.to.Before(to) {
				to = y.to
			}
			if from.Before(to) {
				all = append(all, interval{from, to})
			}
		}
	}
	return all
}

// without returns the parts of a that are in no interval of b.
func without(a, b []interval) []interval {
	b = merge(slices.Clone(b))
	var all []interval
	for _, x := range a {
		for _, y := range b {
			if !y.to.After(x.from) || !y.from.Before(x.to) {
				continue
			}
			if y.from.After(x.from) {
				all = append(all, interval{x.from, y.from})
			}
			x.from = y.to
		}
		if x.from.Before(x.to) {
			all = append(all, x)
		}
	}
	return all
}

// unserved returns the intervals in which no stream could serve a VIP: each had fewer than
// minReady targets of its family that accept connections.
func (h *history) unserved(v service) []interval {
	var all []interval
	for i, n := range v.streams {
		down := h.streamDown(n, v.family)
		if i == 0 {
			all = down
		} else {
			all = intersect(all, down)
		}
	}
	return all
}

// streamDown returns the intervals in which a stream had too few targets.
func (h *history) streamDown(n, family int) []interval {
	is := func(s state) bool { return s == down }
	var perTarget [][]interval
	for t := n * targetsPerStream; t < (n+1)*targetsPerStream; t++ {
		subject := targetSubject(t, family)
		down := append(h.while(subject, is), h.while(subject+"/silent", is)...)
		perTarget = append(perTarget, merge(append(down, h.while("net/internal", is)...)))
	}
	if streams[n].minReady == targetsPerStream {
		// Each target is a separate cause with a separate clock, also where the intervals overlap: the
		// rise of one target may be detected before the fall of the other.
		return slices.Concat(perTarget...)
	}
	return intersect(perTarget[0], perTarget[1])
}
