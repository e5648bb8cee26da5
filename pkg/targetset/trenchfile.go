package targetset

import (
	"cmp"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// TrenchFile is the source of the targets that the trench file lists. It offers targets that left
// the file as Leaving. It belongs to one goroutine, which passes configurations of package trench
// to it.
type TrenchFile struct {
	onGone  SourceGonePolicy
	lists   map[string][]Offer
	streams []trench.Stream
	changed map[string]struct{}
	gone    error
	since   time.Time
}

// NewTrenchFile returns a source that offers nothing before [TrenchFile.Configure].
func NewTrenchFile(onGone SourceGonePolicy) *TrenchFile {
	return &TrenchFile{
		onGone: onGone, lists: map[string][]Offer{}, changed: map[string]struct{}{}, since: time.Now(),
	}
}

// Configure applies the content of the file. A target that the file no longer lists, or whose
// addresses changed, leaves; so does a target that is marked as terminating. Targets of a removed
// stream are removed immediately.
func (f *TrenchFile) Configure(now time.Time, streams []trench.Stream) {
	if f.gone != nil {
		f.gone, f.since = nil, now
	}
	old := f.lists
	f.lists, f.streams = make(map[string][]Offer, len(streams)), streams
	for name := range old {
		f.changed[name] = struct{}{}
	}
	for _, s := range streams {
		f.lists[s.Name] = succeed(now, old[s.Name], s)
		f.changed[s.Name] = struct{}{}
	}
}

// succeed derives the offers of a stream from the file and from the previous offers.
func succeed(now time.Time, old []Offer, s trench.Stream) []Offer {
	ending := map[string]time.Time{}
	for _, o := range old {
		if o.Lifecycle == Terminating {
			ending[o.Name] = o.DrainEnd
		}
	}
	list := make([]Offer, 0, len(s.Targets))
	stays := make(map[string]trench.Target, len(s.Targets))
	for _, t := range s.Targets {
		stays[t.Name] = t
		o := Offer{Name: t.Name, IPs: t.IPs}
		if t.Terminating {
			// Reading the file again must not restart a drain.
			o.Lifecycle, o.DrainEnd = Terminating, cmp.Or(ending[t.Name], now.Add(s.DrainTime))
			o.Cause = "marked as terminating in the trench file"
		}
		list = append(list, o)
	}
	for _, o := range old {
		if t, ok := stays[o.Name]; ok && SameAddresses(t.IPs, o.IPs) {
			continue
		}
		if o = o.left("no longer in the trench file", now.Add(s.DrainTime)); o.DrainEnd.After(now) {
			list = append(list, o)
		}
	}
	return list
}

// left returns the offer after its source withdrew it. A running drain continues, but is no longer
// announced: another source may offer the target.
func (o Offer) left(cause string, end time.Time) Offer {
	if o.Lifecycle == Leaving {
		return o
	}
	if o.Lifecycle == Active {
		o.DrainEnd = end
	}
	o.Lifecycle, o.Cause = Leaving, cause
	return o
}

// Lose records why the file cannot be read. It is not called for a file with errors: the last
// accepted one stays in force.
func (f *TrenchFile) Lose(now time.Time, why error) {
	first := f.gone == nil
	f.gone = why
	if !first {
		return
	}
	f.since = now
	if f.onGone != Drain && f.onGone != Drop {
		return
	}
	for _, s := range f.streams {
		f.changed[s.Name] = struct{}{}
		if f.onGone == Drop {
			f.lists[s.Name] = nil
		}
		for i, o := range f.lists[s.Name] {
			f.lists[s.Name][i] = o.left("the trench file is gone", now.Add(s.DrainTime))
		}
	}
}

// Take returns the changes since the last Take. Its cost follows the targets of the streams that
// changed.
//
// A target that the file marks as terminating is offered even after its end, as long as it is
// marked, which removes the target whatever other sources offer.
func (f *TrenchFile) Take() Offers {
	changed := make(Offers, len(f.changed))
	for name := range f.changed {
		changed[name] = slices.Clone(f.lists[name])
	}
	clear(f.changed)
	return changed
}

// State describes the source.
func (f *TrenchFile) State() SourceState {
	s := SourceState{Name: OriginFile.String(), Live: f.gone == nil, Since: f.since, OnGone: f.onGone}
	if f.gone != nil {
		s.Detail = f.gone.Error()
	}
	return s
}
