package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Cleanup removes the data plane from the kernel, in the network namespace of the calling
// thread, with any options that it was installed with. It returns one line for each removed
// object. No data plane may run at the same time.
func Cleanup(ctx context.Context, o Options) (removed []string, err error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("clean up the data plane: %w", err)
	}
	o = o.withDefaults()
	f, err := fwstate.Dial(o.config())
	if err != nil {
		return nil, fmt.Errorf("clean up the data plane: open netlink sockets: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("clean up the data plane: %w", err)
	}
	if removed, err = cleanUp(f, o); err != nil {
		return removed, fmt.Errorf("clean up the data plane: %w", err)
	}
	return removed, nil
}

func cleanUp(k kernelConn, o Options) ([]string, error) {
	ours, err := recoverInstalled(k, o, time.Now())
	if err != nil {
		return nil, err
	}
	numbers := slices.Sorted(maps.Keys(ours.Targets))
	c, err := k.Read(numbers)
	if err != nil {
		return nil, fmt.Errorf("read the data plane: %w", err)
	}
	x := plan.Change{RemoveTargets: present(c, numbers), VIPs: map[vip.VIP]string{}}
	var removed []string
	say := func(format string, args ...any) { removed = append(removed, fmt.Sprintf(format, args...)) }
	for _, v := range slices.SortedFunc(maps.Keys(c.VIPs), vip.Compare) {
		if s, ok := ours.Streams[c.VIPs[v]]; ok {
			x.VIPs[v] = ""
			say("element %s of map %s (to stream %s)", v, plan.VIPMap(v), s.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(ours.Streams)) {
		s := c.Streams[name]
		if s == nil {
			continue
		}
		x.RemoveStreams = append(x.RemoveStreams, name)
		say("chain %s", plan.StreamChain(name))
		for _, f := range s.Families() {
			say("map %s", plan.MaglevMap(f, name))
		}
	}
	for _, number := range x.RemoveTargets {
		t := ours.Targets[number]
		say("chain %s (%s/%s) and its elements", plan.TargetChain(number), t.Stream, t.Name)
	}
	if !x.Empty() {
		if err := k.Write(x); err != nil {
			return nil, fmt.Errorf("remove chains and maps: %w", err)
		}
	}
	if len(numbers) > 0 {
		if err := k.FlushConntrack(numbers); err != nil {
			return removed, fmt.Errorf("flush connection tracking entries of targets: %w", err)
		}
		for _, number := range numbers {
			removed = append(removed, routesOf(number, c.Targets[number])...)
		}
		if err := k.RemoveRoutes(numbers); err != nil {
			return removed, fmt.Errorf("remove rules and routes: %w", err)
		}
	}
	if err := k.RemoveAll(); err != nil {
		return removed, fmt.Errorf("remove common objects: %w", err)
	}
	if c.Base {
		say("table inet %s with its base chains and common maps, unless another process has objects in it", TableName)
		say("rules that no target owns")
	}
	return removed, nil
}

// present returns the fwmarks with nftables objects.
func present(c *plan.KernelState, numbers []uint32) []uint32 {
	return slices.DeleteFunc(slices.Clone(numbers), func(n uint32) bool {
		s := c.Targets[n]
		return s == nil || !s.ChainIntact && s.Flows == [len(vip.Families)]bool{} && s.Stream == ""
	})
}

// routesOf lists the rules and routes of a fwmark for operators.
func routesOf(number uint32, s *plan.KernelTarget) (list []string) {
	if s == nil {
		return nil
	}
	for _, f := range vip.Families {
		if s.Rules[f] {
			list = append(list, fmt.Sprintf("rule fwmark %d lookup %d (%s)", number, number, plan.FamilyName(f)))
		}
		if s.NextHops[f].IsValid() {
			list = append(list, fmt.Sprintf("route default via %s table %d (%s)", s.NextHops[f], number, plan.FamilyName(f)))
		}
		if s.Blackhole[f] {
			list = append(list, fmt.Sprintf("route blackhole default table %d (%s)", number, plan.FamilyName(f)))
		}
	}
	return list
}
