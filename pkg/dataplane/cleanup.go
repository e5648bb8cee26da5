package dataplane

import (
	"cmp"
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
	defer func() {
		if err != nil {
			err = fmt.Errorf("clean up the data plane: %w", err)
		}
	}()
	if err := cmp.Or(o.Validate(), ctx.Err()); err != nil {
		return nil, err
	}
	conn, err := fwstate.Dial(o.Config.WithDefaults())
	if err != nil {
		return nil, fmt.Errorf("open netlink sockets: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	return cleanUp(conn, o.withDefaults())
}

func cleanUp(k kernelConn, o Options) (removed []string, err error) {
	owned, err := recoverInstalled(k, o, time.Now())
	if err != nil {
		return nil, err
	}
	numbers := slices.Sorted(maps.Keys(owned.Targets))
	c, err := k.Read(numbers)
	if err != nil {
		return nil, fmt.Errorf("read the data plane: %w", err)
	}
	x := plan.Change{VIPs: map[vip.VIP]string{}}
	add := func(format string, args ...any) { removed = append(removed, fmt.Sprintf(format, args...)) }
	for _, v := range slices.SortedFunc(maps.Keys(c.VIPs), vip.Compare) {
		if s, ok := owned.Streams[c.VIPs[v]]; ok {
			x.VIPs[v] = ""
			add("element %s of map %s (to stream %s)", v, plan.VIPMap(v), s.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(owned.Streams)) {
		s := c.Streams[name]
		if s == nil {
			continue
		}
		x.RemoveStreams = append(x.RemoveStreams, name)
		add("chain %s", plan.StreamChain(name))
		for _, f := range s.Families() {
			add("map %s", plan.MaglevMap(f, name))
		}
	}
	for _, number := range numbers {
		t := owned.Targets[number]
		if !plan.SameNFTables(orNone(c.Targets[number]), plan.KernelTarget{}) {
			x.RemoveTargets = append(x.RemoveTargets, number)
			add("chain %s (%s/%s) and its elements", plan.TargetChain(number), t.Stream, t.Name)
		}
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
			s := orNone(c.Targets[number])
			for _, f := range vip.Families {
				if s.Rules[f] {
					add("%s", plan.RuleName(number, f))
				}
				if s.NextHops[f].IsValid() {
					add("%s", plan.RouteName(number, s.NextHops[f], f))
				}
				if s.Blackhole[f] {
					add("%s", plan.BlackholeName(number, f))
				}
			}
		}
		if err := k.RemoveRoutes(numbers); err != nil {
			return removed, fmt.Errorf("remove rules and routes: %w", err)
		}
	}
	if err := k.RemoveAll(); err != nil {
		return removed, fmt.Errorf("remove common objects: %w", err)
	}
	if c.Base {
		add("table inet %s with its base chains and common maps, unless another process has objects in it", TableName)
		add("rules that no target owns")
	}
	return removed, nil
}
