package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Cleanup removes what has our marks from the kernel, in the network namespace of the
// calling thread, whatever the options it was installed with. It returns what it
// removed, one line each. No data plane may run meanwhile.
func Cleanup(ctx context.Context, o Options) (removed []string, err error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("clean up the data plane: %w", err)
	}
	o = o.withDefaults()
	f, err := newFabric(o)
	if err != nil {
		return nil, fmt.Errorf("clean up the data plane: open netlink sockets: %w", err)
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("clean up the data plane: %w", err)
	}
	if removed, err = cleanUp(f, o); err != nil {
		return removed, fmt.Errorf("clean up the data plane: %w", err)
	}
	return removed, nil
}

func cleanUp(k kernelSide, o Options) ([]string, error) {
	ours, err := gather(k, o, time.Now())
	if err != nil {
		return nil, err
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
