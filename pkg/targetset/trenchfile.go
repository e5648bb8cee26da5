package targetset

import (
	"cmp"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// TrenchFile is the source of the targets that the trench file lists. It offers targets that left
// the file as Leaving. It belongs to one goroutine, which passes the configurations to it.
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
func (file *TrenchFile) Configure(now time.Time, streams []trench.Stream) {
	if file.gone != nil {
		file.gone, file.since = nil, now
	}
	old := file.lists
	file.lists, file.streams = make(map[string][]Offer, len(streams)), streams
	// A removed stream is offered with an empty list, which removes its targets.
	for name := range old {
		file.changed[name] = struct{}{}
	}
	for _, stream := range streams {
		file.lists[stream.Name] = succeed(now, old[stream.Name], stream)
		file.changed[stream.Name] = struct{}{}
	}
}

// succeed derives the offers of a stream from the file and from the previous offers.
func succeed(now time.Time, old []Offer, stream trench.Stream) []Offer {
	ending := map[string]time.Time{}
	for _, offer := range old {
		if offer.Lifecycle == Terminating {
			ending[offer.Name] = offer.DrainEnd
		}
	}
	list := make([]Offer, 0, len(stream.Targets))
	stays := make(map[string]trench.Target, len(stream.Targets))
	for _, target := range stream.Targets {
		stays[target.Name] = target
		offer := Offer{Name: target.Name, IPs: target.IPs}
		if target.Terminating {
			// Reading the file again must not restart a drain.
			offer.Lifecycle, offer.DrainEnd = Terminating, cmp.Or(ending[target.Name], now.Add(stream.DrainTime))
			offer.Cause = "marked as terminating in the trench file"
		}
		list = append(list, offer)
	}
	for _, offer := range old {
		// A target with new addresses drains on its old ones.
		if t, ok := stays[offer.Name]; ok && SameAddresses(t.IPs, offer.IPs) {
			continue
		}
		if offer = offer.left("no longer in the trench file", now.Add(stream.DrainTime)); offer.DrainEnd.After(now) {
			list = append(list, offer)
		}
	}
	return list
}

// left returns the offer after its source withdrew it. A running drain continues, but is no longer
// announced: another source may offer the target.
func (offer Offer) left(cause string, end time.Time) Offer {
	if offer.Lifecycle == Leaving {
		return offer
	}
	if offer.Lifecycle == Active {
		offer.DrainEnd = end
	}
	offer.Lifecycle, offer.Cause = Leaving, cause
	return offer
}

// Lose records why the file cannot be read. It is not called for a file with errors: the last
// accepted one stays in force.
func (file *TrenchFile) Lose(now time.Time, why error) {
	first := file.gone == nil
	file.gone = why
	// A repeated failure must not restart the drains.
	if !first {
		return
	}
	file.since = now
	if file.onGone != Drain && file.onGone != Drop {
		return
	}
	for _, stream := range file.streams {
		file.changed[stream.Name] = struct{}{}
		if file.onGone == Drop {
			file.lists[stream.Name] = nil
		}
		for i, o := range file.lists[stream.Name] {
			file.lists[stream.Name][i] = o.left("the trench file is gone", now.Add(stream.DrainTime))
		}
	}
}

// Take returns the changes since the last Take, at the cost of the targets of changed streams.
//
// A target that the file marks as terminating is offered even after its end, as long as it is
// marked, which removes the target whatever other sources offer.
func (file *TrenchFile) Take() Offers {
	changed := make(Offers, len(file.changed))
	for name := range file.changed {
		// Lose modifies the lists in place, and the Set keeps the offers.
		changed[name] = slices.Clone(file.lists[name])
	}
	clear(file.changed)
	return changed
}

// State describes the source.
func (file *TrenchFile) State() SourceState {
	s := SourceState{Name: OriginFile.String(), Live: file.gone == nil, Since: file.since, OnGone: file.onGone}
	if file.gone != nil {
		s.Detail = file.gone.Error()
	}
	return s
}
