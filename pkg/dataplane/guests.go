package dataplane

import (
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// restoredGuests is the drain of guests of an earlier process, whose ends are not in the kernel.
const restoredGuests = time.Minute

// guests holds the drains of flows whose target left their stream, or whose VIP did: the target
// belongs to another stream, and keeps them as a guest until the end.
type guests map[plan.Guest]time.Time

// add prolongs the drain of a guest; a time that is not in the future adds none.
func (guests guests) add(guest plan.Guest, now, end time.Time) {
	if end.After(now) && end.After(guests[guest]) {
		guests[guest] = end
	}
}

// addGuests lets the flows of VIPs that move to another stream drain on their targets.
func (engine *engine) addGuests(now time.Time) {
	for transfer := range engine.transfers {
		from, to := transfer[0], transfer[1]
		record := engine.streams[from]
		if record == nil || record.desired == nil {
			continue
		}
		for _, target := range record.targets {
			engine.guests.add(plan.Guest{Stream: to, FWMark: target.FWMark}, now, now.Add(record.desired.DrainTime))
		}
		for guest, end := range maps.Clone(engine.guests) {
			if guest.Stream == from {
				engine.guests.add(plan.Guest{Stream: to, FWMark: guest.FWMark}, now, end)
			}
		}
	}
	clear(engine.transfers)
}

// guestChange returns the difference between the guests in the kernel and those that drain.
func (engine *engine) guestChange(now time.Time) (change plan.Change) {
	maps.DeleteFunc(engine.guests, func(guest plan.Guest, end time.Time) bool {
		target, installed := engine.targets[guest.FWMark]
		return !end.After(now) || !installed || target.Stage == plan.StageRemoving || target.Stream == guest.Stream ||
			target.Flows == [len(vip.Families)]bool{} || engine.desired.Streams[guest.Stream] == nil
	})
	for guest := range engine.guests {
		if !engine.observed.Guests[guest] {
			change.AddGuests = append(change.AddGuests, guest)
		}
	}
	for guest := range engine.observed.Guests {
		// The element of a guest that became a target of the stream stays.
		if _, drains := engine.guests[guest]; !drains && engine.targets[guest.FWMark].Stream != guest.Stream {
			change.RemoveGuests = append(change.RemoveGuests, guest)
		}
	}
	return change
}

// noteGuests updates the observed guests after a successful write.
func (engine *engine) noteGuests(change plan.Change) {
	observed := maps.Clone(engine.observed.Guests)
	if observed == nil {
		observed = map[plan.Guest]bool{}
	}
	for _, guest := range change.AddGuests {
		observed[guest] = true
	}
	maps.DeleteFunc(observed, func(guest plan.Guest, _ bool) bool {
		return slices.Contains(change.RemoveGuests, guest) || engine.targets[guest.FWMark].Stream == guest.Stream
	})
	engine.observed.Guests = observed
}
