package targetset

import (
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// TrenchFile is the source of the targets that the trench file lists. It keeps
// those that left the file for as long as they drain. It belongs to one
// goroutine, which tells it what was read; pkg/trench does the reading.
type TrenchFile struct {
	onGone GonePolicy
	lists  map[string][]Offer
	// drainTimes are those of the streams.
	drainTimes map[string]time.Duration
	changed    map[string]struct{}
	// ends is when the next drain of a stream ends, for those in which one runs.
	ends  map[string]time.Time
	gone  error
	since time.Time
}

// NewTrenchFile returns a source that has nothing before [TrenchFile.Configure].
func NewTrenchFile(onGone GonePolicy) *TrenchFile {
	return &TrenchFile{
		onGone: onGone, lists: map[string][]Offer{}, drainTimes: map[string]time.Duration{},
		changed: map[string]struct{}{}, ends: map[string]time.Time{}, since: time.Now(),
	}
}

// Configure takes over what the file says. A target that is no longer in it, or
// has another address there, leaves; so does one that is marked as terminating.
// Those of a stream that is gone are gone as well.
func (f *TrenchFile) Configure(now time.Time, streams []trench.Stream) {
	if f.gone != nil {
		f.gone, f.since = nil, now
	}
	was := f.lists
	f.lists, f.drainTimes = make(map[string][]Offer, len(streams)), make(map[string]time.Duration, len(streams))
	for name := range was {
		f.changed[name] = struct{}{}
	}
	for _, s := range streams {
		f.lists[s.Name], f.drainTimes[s.Name] = succeed(now, was[s.Name], s), s.DrainTime
		f.changed[s.Name] = struct{}{}
	}
}

// succeed makes the list of a stream from what the file says and what it said before.
func succeed(now time.Time, was []Offer, s trench.Stream) []Offer {
	list := make([]Offer, 0, len(s.Targets))
	ending := map[string]time.Time{} // drains that another reading must not begin again
	for _, o := range was {
		if o.Lifecycle == Terminating {
			ending[o.Name] = o.DrainEnd
		}
	}
	stays := make(map[string]trench.Target, len(s.Targets))
	for _, t := range s.Targets {
		stays[t.Name] = t
		o := Offer{Name: t.Name, IPs: t.IPs}
		if t.Terminating {
			o.Lifecycle, o.Cause, o.DrainEnd = Terminating, "marked as terminating in the trench file", now.Add(s.DrainTime)
			if end, known := ending[t.Name]; known {
				o.DrainEnd = end
			}
		}
		list = append(list, o)
	}
	for _, o := range was {
		if t, ok := stays[o.Name]; ok && SameAddresses(t.IPs, o.IPs) {
			continue
		}
		if o = o.left("no longer in the trench file", now.Add(s.DrainTime)); o.DrainEnd.After(now) {
			list = append(list, o)
		}
	}
	return list
}

// left is an offer that its source takes back. A drain that runs continues as it is,
// but what announced it is gone: others may offer the target.
func (o Offer) left(cause string, end time.Time) Offer {
	switch o.Lifecycle {
	case Active:
		o.Lifecycle, o.Cause, o.DrainEnd = Leaving, cause, end
	case Terminating:
		o.Lifecycle, o.Cause = Leaving, cause
	case Leaving:
	}
	return o
}

// Lose notes that the file cannot be read, and why. What a bad file says does not
// count as that: it leaves in force what was.
func (f *TrenchFile) Lose(now time.Time, why error) {
	if f.gone != nil {
		f.gone = why
		return
	}
	f.gone, f.since = why, now
	if f.onGone == Hold {
		return
	}
	for name, list := range f.lists {
		f.changed[name] = struct{}{}
		if f.onGone == Drop {
			f.lists[name] = nil
			continue
		}
		for i := range list {
			list[i] = list[i].left("the trench file is gone", now.Add(f.drainTimes[name]))
		}
	}
}

// Take returns what changed since the last Take, and when to come again because a
// drain ends; zero when none runs. It costs as much as the streams that changed
// have targets.
//
// What the file marks as terminating is offered beyond its end, as long as the
// file says so: it is over, whatever other sources say.
func (f *TrenchFile) Take(now time.Time) (changed Offers, next time.Time) {
	for name, end := range f.ends {
		if !end.After(now) {
			f.changed[name] = struct{}{}
		}
	}
	changed = make(Offers, len(f.changed))
	for name := range f.changed {
		delete(f.ends, name)
		list, known := f.lists[name]
		if !known {
			changed[name] = nil
			continue
		}
		list = slices.DeleteFunc(list, func(o Offer) bool { return o.Lifecycle == Leaving && !o.DrainEnd.After(now) })
		f.lists[name], changed[name] = list, slices.Clone(list)
		for _, o := range list {
			if o.Lifecycle != Active && o.DrainEnd.After(now) {
				f.ends[name] = Soonest(f.ends[name], o.DrainEnd)
			}
		}
	}
	clear(f.changed)
	for _, end := range f.ends {
		next = Soonest(next, end)
	}
	return changed, next
}

// Soonest returns the earlier of two times, of which zero means never.
func Soonest(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

// State describes the source.
func (f *TrenchFile) State() SourceState {
	s := SourceState{Name: OriginFile.String(), Live: f.gone == nil, Since: f.since, OnGone: f.onGone}
	if f.gone != nil {
		s.Detail = f.gone.Error()
	}
	return s
}
