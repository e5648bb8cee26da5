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
// thread, regardless of the options at its installation. It returns one line per removed
// object. No data plane may run concurrently.
func Cleanup(ctx context.Context, o Options) (removed []string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("clean up the data plane: %w", err)
		}
	}()
	o.Log = nil // the caller logs the removed objects
	o = o.withDefaults()
	if err := cmp.Or(o.Validate(), ctx.Err()); err != nil {
		return nil, err
	}
	conn, err := fwstate.Dial(o.Config)
	if err != nil {
		return nil, fmt.Errorf("open netlink sockets: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	return cleanUp(conn, o)
}

func cleanUp(k kernelConn, o Options) (removed []string, err error) {
	e := newEngine(o, k)
	e.holds.until[allStreams] = time.Time{} // do not repair objects before their removal
	if err := e.load(); err != nil {
		return nil, err
	}
	if e.observe(true); e.readErr != nil {
		return nil, e.readErr
	}
	removed, base := e.list(), e.observed.Base
	if e.converge(&plan.Desired{}, false); e.readErr != nil {
		return nil, e.readErr
	}
	for _, m := range e.streams {
		for _, p := range m.problems {
			err = errors.Join(err, fmt.Errorf("%s: %s", p.Object, p.Detail))
		}
	}
	if err != nil {
		return nil, err
	}
	if err := k.RemoveAll(); err != nil {
		return removed, fmt.Errorf("remove common objects: %w", err)
	}
	if base {
		removed = append(removed, "table inet "+plan.TableName+
			" with its base chains and common maps, unless another process has objects in it", "rules that no target owns")
	}
	return removed, nil
}

// list names the objects of streams and targets in the kernel.
func (e *engine) list() (names []string) {
	add := func(format string, args ...any) { names = append(names, fmt.Sprintf(format, args...)) }
	for _, v := range slices.SortedFunc(maps.Keys(e.observed.VIPs), vip.Compare) {
		if m := e.streams[e.observed.VIPs[v]]; m != nil && m.installed != nil {
			add("element %s of map %s (to stream %s)", v, plan.VIPMap(v), m.installed.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		if s := e.observed.Streams[name]; s != nil && e.streams[name].installed != nil {
			add("chain %s", plan.StreamChain(name))
			for _, f := range s.Families() {
				add("map %s", plan.MaglevMap(f, name))
			}
			if s.Match != nil {
				add("set %s", plan.MatchSet(name))
			}
		}
	}
	for _, number := range e.installedFWMarks() {
		t, s := e.targets[number], orNone(e.observed.Targets[number])
		if !plan.SameNFTables(s, plan.KernelTarget{}) {
			add("chain %s (%s/%s) and its elements", plan.TargetChain(number), t.Stream, t.Name)
		}
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
	return names
}
