package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/midstream"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Cleanup removes the data plane from the kernel, in the network namespace of the calling
// thread, regardless of the options at its installation. It returns one line per removed
// object. No data plane may run concurrently.
func Cleanup(ctx context.Context, options Options) (removed []string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("clean up the data plane: %w", err)
		}
	}()
	options.Log = nil // the caller logs the removed objects
	options = options.withDefaults()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	conn, err := fwstate.Dial(options.Config)
	if err != nil {
		return nil, fmt.Errorf("open netlink sockets: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	removed, err = cleanUp(conn, options)
	return removed, errors.Join(err, midstream.Remove(conn.NFTables()))
}

func cleanUp(kernel kernelConn, o Options) (removed []string, err error) {
	engine := newEngine(o, kernel)
	engine.holds.until[allStreams] = time.Time{} // do not repair objects before their removal
	if err := engine.load(); err != nil {
		return nil, err
	}
	if engine.observe(true); engine.readErr != nil {
		return nil, engine.readErr
	}
	removed, base := engine.list(), engine.observed.Base
	if engine.converge(&plan.Desired{}, false); engine.readErr != nil {
		return nil, engine.readErr
	}
	for _, m := range engine.streams {
		for _, p := range m.problems {
			err = errors.Join(err, fmt.Errorf("%s: %s", p.Object, p.Detail))
		}
	}
	if err != nil {
		return nil, err
	}
	if err := kernel.RemoveAll(); err != nil {
		return removed, fmt.Errorf("remove common objects: %w", err)
	}
	if base {
		removed = append(removed, "table inet "+plan.TableName+
			" with its base chains and common maps, unless another process has objects in it", "rules that no target owns")
	}
	return removed, nil
}

// list names the objects of streams and targets in the kernel.
func (engine *engine) list() (names []string) {
	add := func(format string, args ...any) { names = append(names, fmt.Sprintf(format, args...)) }
	for _, v := range slices.SortedFunc(maps.Keys(engine.observed.VIPs), vip.Compare) {
		// Chains and elements that another process created stay in the kernel.
		if m := engine.streams[engine.observed.VIPs[v]]; m != nil && m.installed != nil {
			add("element %s of map %s (to stream %s)", v, plan.VIPMap(v), m.installed.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(engine.streams)) {
		if stream := engine.observed.Streams[name]; stream != nil && engine.streams[name].installed != nil {
			add("chain %s", plan.StreamChain(name))
			for _, f := range stream.Families() {
				add("map %s", plan.MaglevMap(f, name))
			}
			if stream.Match != nil {
				add("set %s", plan.MatchSet(name))
			}
		}
	}
	for _, number := range engine.installedFWMarks() {
		// After a crash a target may have only some of its objects: list those that exist.
		target, kernel := engine.targets[number], orNone(engine.observed.Targets[number])
		if !plan.SameNFTables(kernel, plan.KernelTarget{}) {
			add("chain %s (%s/%s) and its elements", plan.TargetChain(number), target.Stream, target.Name)
		}
		for _, family := range vip.Families {
			if kernel.Rules[family] {
				add("%s", plan.RuleName(number, family))
			}
			if kernel.NextHops[family].IsValid() {
				add("%s", plan.RouteName(number, kernel.NextHops[family], family))
			}
			if kernel.Blackhole[family] {
				add("%s", plan.BlackholeName(number, family))
			}
		}
	}
	return names
}
