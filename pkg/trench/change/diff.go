package change

import (
	"net/netip"
	"reflect"
	"slices"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Change lists the differences between two configurations.
type Change struct {
	VIPs     Names `json:"vips"`
	Gateways Names `json:"gateways"`
	Streams  Names `json:"streams"`
	// ChangedGateways and ChangedStreams differ, and are in both configurations.
	ChangedGateways []Gateway `json:"changedGateways,omitempty"`
	ChangedStreams  []Stream  `json:"changedStreams,omitempty"`
	// Others are the changed fields outside of gateways and streams.
	Others []string `json:"others,omitempty"`
}

// Names are the names that only one of two configurations has, in the order of its file.
type Names struct {
	Added   []string `json:"added,omitempty"`
	Removed []string `json:"removed,omitempty"`
}

// Fields are the changed fields of an object, by their names in the file.
type Fields struct {
	Name   string   `json:"name"`
	Fields []string `json:"fields"`
}

// Gateway is a gateway of both configurations that differs, by its old name; see [Successor].
type Gateway struct {
	Fields
	// Restarts reports whether BIRD restarts the session.
	Restarts bool `json:"restarts"`
}

// Stream is a stream of both configurations that differs. Addresses identify its targets.
type Stream struct {
	Fields
	// Table reports whether flows may reach another target than before, or none.
	Table bool `json:"table"`
	// Check reports whether targets are checked in another way: the old check decides until enough
	// targets pass the new one.
	Check          bool `json:"check"`
	TargetsAdded   int  `json:"targetsAdded"`
	TargetsRemoved int  `json:"targetsRemoved"`
}

// Between returns the differences between two complete configurations.
func Between(old, next *trench.Config) Change {
	var change Change
	added, removed := compare(old.Attractor.VIPs, next.Attractor.VIPs, sameVIP, nil)
	change.VIPs = Names{names(added, (*vip.VIP).String), names(removed, (*vip.VIP).String)}

	change.compareGateways(&old.Attractor, &next.Attractor)
	streams, ended := compare(old.Streams, next.Streams, streamName, change.compareStreams)
	change.Streams = Names{names(streams, streamName), names(ended, streamName)}

	change.Others = changed(old, next, "attractor", "streams")
	for _, field := range changed(&old.Attractor, &next.Attractor, "vips", "gateways") {
		change.Others = append(change.Others, "attractor."+field)
	}
	return change
}

// compareGateways records the differences of the gateways. A renamed one is changed.
func (change *Change) compareGateways(old, next *trench.Attractor) {
	// Every session has the address of this interface.
	moved := old.Interface != next.Interface
	kept := map[string]bool{}
	for i := range old.Gateways {
		was := &old.Gateways[i]
		is, found := Successor(*was, old.Gateways, next.Gateways)
		if !found {
			change.Gateways.Removed = append(change.Gateways.Removed, was.Name)
			continue
		}
		kept[is.Name] = true
		fields := changed(was, &is)
		if moved {
			fields = append(fields, "attractor.interface")
		}
		if len(fields) > 0 {
			restarts := len(Reset(*was, is)) > 0 || moved && is.Protocol == trench.BGP
			change.ChangedGateways = append(change.ChangedGateways, Gateway{Fields{was.Name, fields}, restarts})
		}
	}
	for _, gateway := range next.Gateways {
		if !kept[gateway.Name] {
			change.Gateways.Added = append(change.Gateways.Added, gateway.Name)
		}
	}
}

// compareStreams records a stream that differs.
func (change *Change) compareStreams(was, is *trench.Stream) {
	// The order of VIPs and targets has no effect, so they are compared as sets.
	fields := changed(was, is, "vips", "targets")
	if added, removed := compare(was.VIPs, is.VIPs, sameVIP, nil); len(added)+len(removed) > 0 {
		fields = append(fields, "vips")
	}
	differ := false
	added, removed := compare(was.Targets, is.Targets, addresses, func(before, after *trench.Target) {
		differ = differ || before.Name != after.Name || before.Terminating != after.Terminating
	})
	if differ || len(added)+len(removed) > 0 {
		fields = append(fields, "targets")
	}
	if len(fields) == 0 {
		return
	}
	change.ChangedStreams = append(change.ChangedStreams, Stream{
		Fields: Fields{is.Name, fields}, TargetsAdded: len(added), TargetsRemoved: len(removed),
		Table: slices.ContainsFunc(fields, func(field string) bool {
			return slices.Contains([]string{"vips", "maglev", "match", "targets"}, field)
		}),
		Check: !reflect.DeepEqual(untimed(was.Check), untimed(is.Check)),
	})
}

// untimed returns the parts of a check whose change makes verdicts obsolete.
func untimed(check trench.Check) (parts []any) {
	members, anyPasses := check.Members()
	for _, member := range members {
		parts = append(parts, member.Untimed(), member.Sources, member.Via, anyPasses)
	}
	return parts
}

// Empty reports whether both configurations have the same effect.
func (change *Change) Empty() bool { return reflect.ValueOf(*change).IsZero() }

func streamName(stream *trench.Stream) string { return stream.Name }

func sameVIP(prefix *vip.VIP) vip.VIP { return *prefix }

// addresses returns the addresses of a target as a key.
func addresses(target *trench.Target) (key [len(vip.Families)]netip.Addr) {
	for _, address := range target.IPs {
		key[vip.FamilyOf(address)] = address
	}
	return key
}

// compare returns the items whose key only next has, and those whose key only old has. It calls
// both, unless nil, for the other items.
func compare[Item any, Key comparable](old, next []Item, key func(*Item) Key, both func(was, is *Item)) (added,
	removed []*Item,
) {
	left := make(map[Key]*Item, len(old))
	for i := range old {
		left[key(&old[i])] = &old[i]
	}
	for i := range next {
		item := &next[i]
		was, ok := left[key(item)]
		switch delete(left, key(item)); {
		case !ok:
			added = append(added, item)
		case both != nil:
			both(was, item)
		}
	}
	for i := range old {
		if _, ok := left[key(&old[i])]; ok {
			removed = append(removed, &old[i])
		}
	}
	return added, removed
}

func names[Item any](items []*Item, name func(*Item) string) (list []string) {
	for _, item := range items {
		list = append(list, name(item))
	}
	return list
}

// changed returns the fields of the file in which two objects differ, without those in except.
func changed[Object any](was, is *Object, except ...string) (fields []string) {
	before, after := reflect.ValueOf(was).Elem(), reflect.ValueOf(is).Elem()
	described := trench.FieldsOf(before.Type())
	for i := range described {
		field := &described[i]
		if !slices.Contains(except, field.Key) &&
			!reflect.DeepEqual(field.Of(before).Interface(), field.Of(after).Interface()) {
			fields = append(fields, field.Key)
		}
	}
	return fields
}
