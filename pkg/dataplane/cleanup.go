package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/vipgate/vipgate/pkg/record"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Cleanup removes exactly what is ours from the kernel, in the network namespace of
// the calling thread, and then the records. It returns what it removed, one line
// each. What is ours the records say; without any, or with damaged ones, our marks in
// the kernel do. It refuses while a data plane runs on the records.
func Cleanup(ctx context.Context, o Options) (removed []string, err error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("clean up the data plane: %w", err)
	}
	o = o.withDefaults()
	store, damage, err := record.Open(o.StateDir, o.Log)
	if err != nil {
		return nil, fmt.Errorf("clean up the data plane: open the records in %s: %w", o.StateDir, err)
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	// What is there was written with the options of the last start.
	o = o.as(o.lastShape())
	f, err := newFabric(o)
	if err != nil {
		return nil, fmt.Errorf("clean up the data plane: open the way to the kernel: %w", err)
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("clean up the data plane: %w", err)
	}
	removed, err = cleanUp(f, store, damage, o)
	if err != nil {
		return removed, fmt.Errorf("clean up the data plane: %w", err)
	}
	if err := o.forgetShape(); err != nil {
		return removed, fmt.Errorf("clean up the data plane: %w", err)
	}
	return removed, nil
}

func cleanUp(k kernelSide, store ledger, damage *record.Damage, o Options) ([]string, error) {
	written, err := store.Load()
	if err != nil {
		return nil, fmt.Errorf("read the records: %w", err)
	}
	ours := written
	if damage != nil || len(written.Targets)+len(written.Streams) == 0 {
		if ours, err = gather(k, o); err != nil {
			return nil, err
		}
	}
	numbers := slices.Sorted(maps.Keys(ours.Targets))
	c, err := k.read(numbers)
	if err != nil {
		return nil, fmt.Errorf("read the data plane: %w", err)
	}
	x := change{removeSlots: present(c, numbers), vips: map[vip.VIP]string{}}
	var removed []string
	say := func(format string, args ...any) { removed = append(removed, fmt.Sprintf(format, args...)) }
	for _, v := range slices.SortedFunc(maps.Keys(c.vips), vip.Compare) {
		if s, ok := ours.Streams[c.vips[v]]; ok {
			x.vips[v] = ""
			say("element %s of map %s (to stream %s)", v, vipMap(v), s.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(ours.Streams)) {
		s := c.streams[name]
		if s == nil {
			continue
		}
		x.removeStreams = append(x.removeStreams, name)
		say("chain %s", streamChain(name))
		for _, f := range s.families() {
			say("map %s", maglevMap(f, name))
		}
	}
	for _, number := range x.removeSlots {
		t := ours.Targets[number]
		say("chain %s (%s/%s) and its elements", targetChain(number), t.Stream, t.Name)
	}
	if !x.empty() {
		if err := k.write(x); err != nil {
			return nil, fmt.Errorf("remove chains and maps: %w", err)
		}
	}
	if len(numbers) > 0 {
		if err := k.forget(numbers); err != nil {
			return removed, fmt.Errorf("forget the connections of targets: %w", err)
		}
		for _, number := range numbers {
			removed = append(removed, waysOf(number, c.slots[number])...)
		}
		if err := k.removeWays(numbers); err != nil {
			return removed, fmt.Errorf("remove rules and routes: %w", err)
		}
	}
	if err := k.removeAll(); err != nil {
		return removed, fmt.Errorf("remove what no target owns: %w", err)
	}
	if c.base {
		say("table inet %s with its base chains and common maps, unless somebody else's things are in it", TableName)
		say("rules that no target owns")
	}
	err = store.Write(record.Change{RemoveTargets: slices.Sorted(maps.Keys(written.Targets)), RemoveStreams: slices.Sorted(maps.Keys(written.Streams))})
	if err != nil {
		return removed, fmt.Errorf("%w: %w", errRecords, err)
	}
	return removed, nil
}

// present leaves out the numbers of which nftables has nothing.
func present(c *content, numbers []uint32) []uint32 {
	return slices.DeleteFunc(slices.Clone(numbers), func(n uint32) bool {
		s := c.slots[n]
		return s == nil || !s.chain && s.flows == [len(vip.Families)]bool{} && s.stream == ""
	})
}

// waysOf lists the rules and routes of a number for people.
func waysOf(number uint32, s *slotContent) (list []string) {
	if s == nil {
		return nil
	}
	for _, f := range vip.Families {
		if s.rules[f] {
			list = append(list, fmt.Sprintf("rule fwmark %d lookup %d (%s)", number, number, familyName(f)))
		}
		if s.hops[f].IsValid() {
			list = append(list, fmt.Sprintf("route default via %s table %d (%s)", s.hops[f], number, familyName(f)))
		}
		if s.blackhole[f] {
			list = append(list, fmt.Sprintf("route blackhole default table %d (%s)", number, familyName(f)))
		}
	}
	return list
}
