package target

import (
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// TrenchFile is the source of the targets that the trench file lists. It keeps
// those that left the file for as long as they drain. It belongs to one
// goroutine, which tells it what was read; pkg/trench does the reading.
type TrenchFile struct {
	onGone Gone
	lists  map[string][]Offer
	// drainTimes are those of the streams.
	drainTimes map[string]time.Duration
	changed    map[string]struct{}
	gone       error
	since      time.Time
}

// NewTrenchFile returns a source that has nothing before [TrenchFile.Configure].
func NewTrenchFile(onGone Gone) *TrenchFile {
	return &TrenchFile{
		onGone: onGone, lists: map[string][]Offer{}, drainTimes: map[string]time.Duration{},
		changed: map[string]struct{}{}, since: time.Now(),
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
	before := make(map[string]Offer, len(was))
	for _, o := range was {
		before[o.Name] = o // with two of a name the leaving one is the later: it is only asked for its end
	}
	stays := make(map[string]trench.Target, len(s.Targets))
	for _, t := range s.Targets {
		stays[t.Name] = t
		o := Offer{Name: t.Name, IPs: t.IPs}
		if t.Terminating {
			o.Stay, o.Cause, o.DrainEnd = Terminating, "marked as terminating in the trench file", now.Add(s.DrainTime)
			if old, known := before[t.Name]; known && old.Stay == Terminating {
				o.DrainEnd = old.DrainEnd
			}
		}
		list = append(list, o)
	}
	for _, o := range was {
		if t, ok := stays[o.Name]; ok && slices.Equal(t.IPs, o.IPs) {
			continue
		}
		if o.Stay == Staying {
			o.Stay, o.Cause, o.DrainEnd = Leaving, "no longer in the trench file", now.Add(s.DrainTime)
		}
		if o.DrainEnd.After(now) {
			list = append(list, o)
		}
	}
	return list
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
			if list[i].Stay == Staying {
				list[i].Stay, list[i].Cause, list[i].DrainEnd = Leaving, "the trench file is gone", now.Add(f.drainTimes[name])
			}
		}
	}
}

// Take returns what changed since the last Take, and when to come again because a
// drain ends; zero when none runs.
func (f *TrenchFile) Take(now time.Time) (changed Offers, next time.Time) {
	changed = Offers{}
	for name, list := range f.lists {
		kept := slices.DeleteFunc(slices.Clone(list), func(o Offer) bool { return o.Stay == Leaving && !o.DrainEnd.After(now) })
		_, told := f.changed[name]
		offered := slices.DeleteFunc(slices.Clone(kept), func(o Offer) bool { return o.Stay == Terminating && !o.DrainEnd.After(now) })
		if told || len(kept) != len(list) || ended(list, now) {
			changed[name] = offered
		}
		f.lists[name] = kept
		for _, o := range kept {
			if o.Stay != Staying && o.DrainEnd.After(now) && (next.IsZero() || o.DrainEnd.Before(next)) {
				next = o.DrainEnd
			}
		}
		delete(f.changed, name)
	}
	for name := range f.changed {
		changed[name] = nil
	}
	clear(f.changed)
	return changed, next
}

// ended tells whether a drain has just ended of a target that the file still has.
// It stays in the list, so that another reading does not start its drain anew.
func ended(list []Offer, now time.Time) bool {
	return slices.ContainsFunc(list, func(o Offer) bool { return o.Stay == Terminating && !o.DrainEnd.After(now) })
}

// State describes the source.
func (f *TrenchFile) State() SourceState {
	s := SourceState{Name: File.String(), Live: f.gone == nil, Since: f.since, OnGone: f.onGone}
	if f.gone != nil {
		s.Detail = f.gone.Error()
	}
	return s
}
