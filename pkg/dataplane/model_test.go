package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// errKilled simulates a kill of the process.
var errKilled = errors.New("killed")

// killable counts the kernel operations of a process and kills it at a limit.
type killable struct {
	// left is the number of operations before the kill; negative: no kill.
	left int
}

func (m *killable) act() {
	if m.left == 0 {
		panic(errKilled)
	}
	m.left--
}

// modelKernel is a model of the kernel that implements kernelConn.
type modelKernel struct {
	killable
	plan.KernelState
	gen uint32
	// unruled: the common policy rules are missing. unchecked: chain checks is.
	unruled, unchecked bool
	net                plan.Network
	births             map[uint32]int // of chains of targets
	writes             int
	conns              map[uint32]bool // connection-tracking marks
	// refuse names a stream whose transactions fail.
	refuse string
	// flushErr is returned by FlushConntrack.
	flushErr error
	inUse    map[uint32]string
	// oldRules counts calls of RemoveOldRules, which returns oldRulesErr.
	oldRules    int
	oldRulesErr error
}

func newModelKernel() *modelKernel {
	return &modelKernel{
		killable: killable{left: -1},
		KernelState: plan.KernelState{
			Streams: map[string]*plan.KernelStream{}, Targets: map[uint32]*plan.KernelTarget{},
			VIPs: map[vip.VIP]string{}, Guests: map[plan.Guest]bool{},
		},
		births: map[uint32]int{}, conns: map[uint32]bool{}, inUse: map[uint32]string{},
		net: plan.Network{
			LocalAddrs: map[netip.Addr]struct{}{}, FailedNeighbors: map[netip.Addr]struct{}{},
			Links: []plan.Link{{
				Name: "eth1", Index: 2, Up: true,
				Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/16")},
			}},
		},
	}
}

func (k *modelKernel) Generation() (uint32, error) { return k.gen, nil }

func (k *modelKernel) Transactions() uint32 { return uint32(k.writes) }

func (k *modelKernel) Read(numbers []uint32) (*plan.KernelState, error) {
	base, checks, problem, _ := k.ReadBase()
	c := plan.KernelState{
		Base: base, Checks: checks, Problem: problem, Streams: map[string]*plan.KernelStream{},
		Targets: map[uint32]*plan.KernelTarget{}, VIPs: maps.Clone(k.VIPs), Guests: maps.Clone(k.Guests),
	}
	for name := range k.Streams {
		c.Streams[name], _ = k.ReadStream(name)
	}
	for n, s := range k.Targets {
		x := *s
		if !slices.Contains(numbers, n) {
			if !s.ChainIntact {
				continue
			}
			none := plan.KernelTarget{}
			x.Rules, x.NextHops, x.Blackhole = none.Rules, none.NextHops, none.Blackhole
		}
		c.Targets[n] = &x
	}
	return &c, nil
}

func (k *modelKernel) ReadBase() (base, checks bool, problem string, err error) {
	if !k.Base {
		return false, false, "the table is missing", nil
	}
	return !k.unruled, !k.unchecked, "", nil
}

func (k *modelKernel) AddCommonRules() fwstate.RouteErrors {
	k.act()
	k.unruled = false
	return nil
}

func (k *modelKernel) ReadStream(name string) (*plan.KernelStream, error) {
	s := k.Streams[name]
	if s == nil {
		return nil, nil
	}
	x := *s
	for _, f := range vip.Families {
		x.Tables[f] = slices.Clone(s.Tables[f])
	}
	x.Match = slices.Clone(s.Match)
	return &x, nil
}

func (k *modelKernel) ReadTargets(numbers []uint32) (map[uint32]*plan.KernelTarget, error) {
	out := map[uint32]*plan.KernelTarget{}
	for _, n := range numbers {
		if s := k.Targets[n]; s != nil && s.ChainIntact {
			out[n] = &plan.KernelTarget{FWMark: n, Label: s.Label, ChainIntact: s.ChainIntact, Flows: s.Flows}
		}
	}
	return out, nil
}

func (k *modelKernel) ReadRoutes(numbers []uint32) (map[uint32]*plan.KernelTarget, error) {
	out := map[uint32]*plan.KernelTarget{}
	for _, n := range numbers {
		if s := k.Targets[n]; s != nil {
			out[n] = &plan.KernelTarget{FWMark: n, Rules: s.Rules, NextHops: s.NextHops, Blackhole: s.Blackhole}
		}
	}
	return out, nil
}

func (k *modelKernel) ReadUnmatched([]string) (map[string]uint64, error) { return nil, nil }

func (k *modelKernel) ReadVIPs() (map[vip.VIP]string, error) { return maps.Clone(k.VIPs), nil }

func (k *modelKernel) ReadTables(w plan.StreamWrite) (*plan.KernelStream, error) {
	s, err := k.ReadStream(w.Desired.Name)
	if s != nil {
		x := *w.Observed
		x.Tables, x.Match = s.Tables, s.Match
		s = &x
	}
	return s, err
}

// Write rejects the same changes as the real kernel: verdicts without a chain, removal of chains
// in use.
func (k *modelKernel) Write(c plan.Change) error {
	k.act()
	old, _ := k.Read(slices.Collect(maps.Keys(k.Targets)))
	if err := k.transact(c); err != nil {
		k.Streams, k.Targets, k.VIPs, k.Base = old.Streams, old.Targets, old.VIPs, old.Problem == ""
		k.Guests, k.unchecked = old.Guests, k.Base && !old.Checks
		return err
	}
	k.gen++
	k.writes++
	return nil
}

func (k *modelKernel) transact(c plan.Change) error {
	k.Base, k.unchecked = k.Base || c.Base, k.unchecked && !c.Base
	if !k.Base && len(c.Targets)+len(c.Streams) > 0 {
		return errors.New("no table")
	}
	for _, w := range c.Targets {
		if k.refuse != "" && w.Stream == k.refuse {
			return fmt.Errorf("stream %s is refused", w.Stream)
		}
		s := k.slot(w.FWMark)
		if !s.ChainIntact {
			k.births[w.FWMark]++
		}
		s.ChainIntact, s.Label, s.Flows = true, w.Label, w.Flows
	}
	for _, w := range c.Streams {
		if k.refuse != "" && w.Desired.Name == k.refuse {
			return fmt.Errorf("stream %s is refused", w.Desired.Name)
		}
		x := w.Desired
		for _, f := range vip.Families {
			x.Tables[f] = slices.Clone(x.Tables[f])
			for _, n := range x.Tables[f] {
				s := k.Targets[n]
				known := k.Streams[x.Name] != nil && slices.Contains(k.Streams[x.Name].Tables[f], n)
				if n != 0 && !known && (s == nil || !s.Rules[f] || !s.NextHops[f].IsValid()) {
					return fmt.Errorf("a new entry of stream %s leads to %d before its rule and route", x.Name, n)
				}
			}
		}
		x.Owned = true
		k.Streams[x.Name] = &x
	}
	for _, guest := range c.RemoveGuests {
		delete(k.Guests, guest)
	}
	for _, guest := range c.AddGuests {
		if k.Streams[guest.Stream] != nil {
			k.Guests[guest] = true
		}
	}
	for v, s := range c.VIPs {
		if s == "" {
			delete(k.VIPs, v)
		} else {
			k.VIPs[v] = s
		}
	}
	for _, name := range c.RemoveStreams {
		delete(k.Streams, name)
	}
	for _, n := range c.RemoveTargets {
		if s := k.Targets[n]; s != nil {
			s.ChainIntact, s.Label, s.Flows = false, plan.Label{}, [2]bool{}
			k.sweep(n)
		}
	}
	maps.DeleteFunc(k.Guests, func(guest plan.Guest, _ bool) bool {
		target := k.Targets[guest.FWMark]
		return k.Streams[guest.Stream] == nil || target != nil && target.Stream == guest.Stream
	})
	for guest := range k.Guests {
		if s := k.Targets[guest.FWMark]; s == nil || !s.ChainIntact {
			return fmt.Errorf("stream %s leads to %d, whose chain is removed", guest.Stream, guest.FWMark)
		}
	}
	for v, s := range k.VIPs {
		if k.Streams[s] == nil {
			return fmt.Errorf("VIP %s leads to stream %q, which is not there", v, s)
		}
	}
	for name, s := range k.Streams {
		for _, f := range vip.Families {
			for _, n := range s.Tables[f] {
				if n != 0 && (k.Targets[n] == nil || !k.Targets[n].Flows[f]) {
					return fmt.Errorf("an entry of stream %s leads to %d, which has no flows", name, n)
				}
			}
		}
	}
	return nil
}

func (k *modelKernel) slot(n uint32) *plan.KernelTarget {
	if k.Targets[n] == nil {
		k.Targets[n] = &plan.KernelTarget{FWMark: n}
	}
	return k.Targets[n]
}

func (k *modelKernel) sweep(n uint32) {
	s := k.Targets[n]
	if s != nil && !s.ChainIntact && *s == (plan.KernelTarget{FWMark: n}) {
		delete(k.Targets, n)
	}
}

func (k *modelKernel) AddRoutes(slots []plan.KernelTarget, withCommon bool) fwstate.RouteErrors {
	errs := fwstate.RouteErrors{}
	if withCommon {
		k.AddCommonRules()
	}
	for _, w := range slots {
		k.act()
		for _, f := range vip.Families {
			if l, ok := k.net.LinkTo(w.NextHops[f]); w.NextHops[f].IsValid() && (!ok || !l.Up) {
				errs[fwstate.RouteKey{FWMark: w.FWMark, Family: f}] = errors.New("not connected")
				continue
			}
			s := k.slot(w.FWMark)
			s.Rules[f], s.NextHops[f], s.Blackhole[f] = w.Rules[f], w.NextHops[f], w.Blackhole[f]
		}
	}
	return errs
}

func (k *modelKernel) ResolveNextHop(n uint32, f vip.Family) (netip.Addr, error) {
	if s := k.Targets[n]; s != nil && s.Rules[f] {
		return s.NextHops[f], nil
	}
	return netip.Addr{}, nil
}

func (k *modelKernel) RemoveOldRules() error {
	k.oldRules++
	return k.oldRulesErr
}

func (k *modelKernel) RemoveRoutes(numbers []uint32) error {
	for _, n := range numbers {
		k.act()
		for name, s := range k.Streams {
			if slices.Contains(s.Tables[vip.IPv4], n) || slices.Contains(s.Tables[vip.IPv6], n) {
				return fmt.Errorf("entries of stream %s lead to %d, whose rules and routes are to be removed", name, n)
			}
		}
		if s := k.Targets[n]; s != nil {
			none := plan.KernelTarget{}
			s.Rules, s.NextHops, s.Blackhole = none.Rules, none.NextHops, none.Blackhole
			k.sweep(n)
		}
	}
	return nil
}

func (k *modelKernel) UsedByOthers([]uint32) (map[uint32]string, error) { return k.inUse, nil }

func (k *modelKernel) FlushConntrack(numbers []uint32) error {
	k.act()
	if k.flushErr != nil {
		return k.flushErr
	}
	for _, n := range numbers {
		delete(k.conns, n)
	}
	return nil
}

func (k *modelKernel) OwnedTables() ([]uint32, error) {
	var out []uint32
	for n, s := range k.Targets {
		if s.Rules != [2]bool{} || s.NextHops != [2]netip.Addr{} {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return out, nil
}

func (k *modelKernel) RemoveAll() error {
	k.act()
	k.Base = false
	return nil
}

func (k *modelKernel) ReadNetwork() (*plan.Network, error) {
	s := k.net
	s.LocalAddrs, s.FailedNeighbors = maps.Clone(k.net.LocalAddrs), maps.Clone(k.net.FailedNeighbors)
	s.Links = slices.Clone(k.net.Links)
	return &s, nil
}

// linkGoes simulates the kernel's actions when a link goes down or comes up.
func (k *modelKernel) linkGoes(up bool) {
	k.net.Links[0].Up = up
	if up {
		return
	}
	for _, s := range k.Targets {
		s.NextHops = [2]netip.Addr{}
	}
}
