package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/record"
	"github.com/vipgate/vipgate/pkg/vip"
)

// rebuiltDrain is the drain time of streams that were made anew from the kernel,
// which does not know it, until they are configured; rebuiltSize is the size of their
// tables if the chain does not tell.
const (
	rebuiltDrain = 30 * time.Second
	rebuiltSize  = 1009
)

var errNoRecords = errors.New("there are no records, but something of ours is in the kernel")

// nobodys is the stream of numbers of ours that belong to no target any more.
const nobodys = "-"

// rebuild makes the records anew from what the kernel has with our marks, if they were
// damaged, or if there are none although something of ours is there: somebody removed
// the file. Chains count as well: a stream without targets has no rules and routes.
func (e *engine) rebuild(d *record.Damage) error {
	why, from := errNoRecords, ""
	if d != nil {
		why, from = d.Err, d.Path
	} else {
		old, err := e.store.Load()
		if err != nil {
			return fmt.Errorf("read the records: %w", err)
		}
		if len(old.Targets)+len(old.Streams) > 0 {
			return e.renew(old)
		}
	}
	r, err := gather(e.kernel, e.o)
	if err != nil {
		return fmt.Errorf("make the records anew from the kernel (%w): %w", why, err)
	}
	if d == nil && len(r.Targets)+len(r.Streams) == 0 {
		return nil // the first start
	}
	c := record.Change{Targets: slices.Collect(maps.Values(r.Targets)), Streams: slices.Collect(maps.Values(r.Streams))}
	if err := e.store.Write(c); err != nil {
		return fmt.Errorf("%w (%w): the data plane stays as it is", errRecords, err)
	}
	e.log.Error("THE RECORDS OF THE DATA PLANE WERE DAMAGED OR GONE and were made anew from what is in the kernel",
		"moved_to", from, "error", why, "streams", len(r.Streams), "targets", len(r.Targets))
	return nil
}

// renew has everything that is written down made again, if nothing at all of it is in
// the kernel. Then the network namespace is a new one, and the records outlived the
// old one: the sandbox of a pod is made anew while its volumes stay. Otherwise it
// would be drift. A hand that removed all of it finds it again after the next start.
func (e *engine) renew(r record.Records) error {
	numbers, err := ownedNumbers(e.kernel, e.o)
	if err != nil {
		return err
	}
	c, err := e.kernel.read(slices.Sorted(maps.Keys(r.Targets)))
	if err != nil {
		return fmt.Errorf("read the data plane: %w", err)
	}
	there := c.base || len(numbers)+len(c.streams)+len(c.vips) > 0
	for _, s := range c.slots {
		there = there || s.chain || !sameWays(*s, slotContent{})
	}
	if there {
		return nil
	}
	var again record.Change
	for _, t := range r.Targets {
		if t.Stage == record.Applied {
			t.Stage = record.Pending
			again.Targets = append(again.Targets, t)
		}
	}
	for _, s := range r.Streams {
		if s.Stage == record.Applied {
			s.Stage = record.Pending
			again.Streams = append(again.Streams, s)
		}
	}
	if len(again.Targets)+len(again.Streams) == 0 {
		return nil
	}
	if err := e.store.Write(again); err != nil {
		return fmt.Errorf("%w (%w): the data plane stays as it is", errRecords, err)
	}
	e.log.Warn("nothing of what the records name is in the kernel: the network namespace seems to be a new one, and all of it is made again",
		"streams", len(r.Streams), "targets", len(r.Targets))
	return nil
}

// ownedNumbers are those of rules and routes of ours that a target may have. Somebody
// else may use the protocol number in other tables.
func ownedNumbers(k kernelSide, o Options) ([]uint32, error) {
	numbers, err := k.owned()
	if err != nil {
		return nil, fmt.Errorf("look for rules and routes of ours: %w", err)
	}
	return slices.DeleteFunc(numbers, func(n uint32) bool { return n < o.First || n > o.Mask }), nil
}

// gather makes records of all that has our marks in the kernel: the names of chains
// and the comments of their rules, and the protocol of rules and routes. What stands
// whole is Applied, what is torn Pending; numbers that belong to no target, or of
// which nobody knows where they led, are Removing: if they are wanted, they come back.
func gather(k kernelSide, o Options) (record.Records, error) {
	r := record.Records{Targets: map[uint32]record.Target{}, Streams: map[string]record.Stream{}}
	numbers, err := ownedNumbers(k, o)
	if err != nil {
		return r, err
	}
	c, err := k.read(numbers)
	if err != nil {
		return r, fmt.Errorf("read the data plane: %w", err)
	}
	if more := slices.Sorted(maps.Keys(c.slots)); !slices.Equal(more, numbers) {
		// Targets of which only chains are there.
		if c, err = k.read(more); err != nil {
			return r, fmt.Errorf("read the data plane: %w", err)
		}
	}
	names := map[[2]string]bool{}
	for _, number := range slices.Sorted(maps.Keys(c.slots)) {
		s := c.slots[number]
		t := record.Target{Number: number, Stream: s.stream, Name: s.name, Flows: s.flows, Stage: record.Applied}
		for _, f := range vip.Families {
			if s.hops[f].IsValid() {
				t.IPs = append(t.IPs, s.hops[f])
			}
		}
		key := [2]string{s.stream, s.name}
		switch {
		case !s.chain && !slices.Contains(numbers, number):
			continue // Nothing of it says that it is ours.
		case !s.chain || s.stream == "" || s.name == "" || names[key]:
			t.Stream, t.Name, t.Stage = nobodys, fmt.Sprint(number), record.Removing
		case len(t.IPs) == 0:
			t.Stage = record.Removing
		case len(slotDrift(t, s, false)) > 0:
			t.Stage = record.Pending
		}
		if len(t.IPs) == 0 {
			t.IPs = []netip.Addr{netip.IPv4Unspecified()}
		}
		names[key] = true
		r.Targets[number] = t
	}
	for name, s := range c.streams {
		// A chain that only has such a name is somebody else's.
		ours := s.size > 0 || len(s.families()) > 0
		for _, t := range r.Targets {
			ours = ours || t.Stream == name
		}
		if ours {
			r.Streams[name] = gatherStream(s, r.Targets, c.vips)
		}
	}
	return r, nil
}

func gatherStream(s *streamContent, all map[uint32]record.Target, vips map[vip.VIP]string) record.Stream {
	x := record.Stream{Name: s.name, Size: s.size, Seed: s.seed, DrainTime: rebuiltDrain, Stage: record.Applied}
	for v, stream := range vips {
		if stream == s.name {
			x.VIPs = append(x.VIPs, v)
		}
	}
	slices.SortFunc(x.VIPs, vip.Compare)
	targets := map[string]record.Target{}
	for _, t := range all {
		if t.Stream == s.name {
			targets[t.Name] = t
		}
	}
	torn := s.size < 2 || s.seed == 0
	var tables [len(vip.Families)][]uint32
	for _, f := range vip.Families {
		if s.tables[f] == nil {
			continue
		}
		in := map[string]struct{}{}
		for _, number := range s.tables[f] {
			if t := all[number]; t.Stream == s.name && t.Stage != record.Removing {
				in[t.Name] = struct{}{}
			}
		}
		x.Tables[f] = slices.Sorted(maps.Keys(in))
		if !torn {
			tables[f] = tableOf(x.Tables[f], targets, s.size, s.seed)
		}
	}
	if torn {
		// Whatever they are made, the stream is not as it was and is written anew.
		x.Size, x.Seed = rebuiltSize, 1
	}
	if torn || len(streamDrift(x, tables, s, vips).drift) > 0 {
		x.Stage = record.Pending
	}
	return x
}
