package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// errKilled stands for a kill at some instant.
var errKilled = errors.New("killed")

// mortal counts what a process does to the world, and ends it.
type mortal struct {
	// left is how many more things it does; negative: it never dies.
	left int
}

func (m *mortal) act() {
	if m.left == 0 {
		panic(errKilled)
	}
	m.left--
}

// modelKernel is a kernel as the engine sees it: what a fabric is on the real one.
type modelKernel struct {
	mortal
	content
	gen uint32
	// unruled: the policy rules that no target owns are missing.
	unruled bool
	net     surroundings
	births  map[uint32]int // of chains of targets
	writes  int
	conns   map[uint32]bool // connection-tracking marks
	// refuse fails transactions about a stream.
	refuse string
	inUse  map[uint32]string
}

func newModelKernel() *modelKernel {
	return &modelKernel{
		mortal:  mortal{left: -1},
		content: content{streams: map[string]*streamContent{}, slots: map[uint32]*slotContent{}, vips: map[vip.VIP]string{}},
		births:  map[uint32]int{}, conns: map[uint32]bool{}, inUse: map[uint32]string{},
		net: surroundings{
			local: map[netip.Addr]struct{}{}, failed: map[netip.Addr]struct{}{},
			links: []link{{name: "eth1", index: 2, up: true, prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/16")}}},
		},
	}
}

func (k *modelKernel) generation() (uint32, error) { return k.gen, nil }

func (k *modelKernel) transactions() uint32 { return uint32(k.writes) }

func (k *modelKernel) read(numbers []uint32) (*content, error) {
	base, problem, _ := k.readBase()
	c := content{base: base, problem: problem, streams: map[string]*streamContent{}, slots: map[uint32]*slotContent{}, vips: maps.Clone(k.vips)}
	for name := range k.streams {
		c.streams[name], _ = k.readStream(name)
	}
	for n, s := range k.slots {
		x := *s
		if !slices.Contains(numbers, n) {
			if !s.chain {
				continue
			}
			x.rules, x.hops, x.blackhole = slotContent{}.rules, slotContent{}.hops, slotContent{}.blackhole
		}
		c.slots[n] = &x
	}
	return &c, nil
}

func (k *modelKernel) readBase() (bool, string, error) {
	if !k.base {
		return false, "the table is missing", nil
	}
	return !k.unruled, "", nil
}

func (k *modelKernel) addCommonRules() wayErrors {
	k.act()
	k.unruled = false
	return nil
}

func (k *modelKernel) readStream(name string) (*streamContent, error) {
	s := k.streams[name]
	if s == nil {
		return nil, nil
	}
	x := *s
	for _, f := range vip.Families {
		x.tables[f] = slices.Clone(s.tables[f])
	}
	return &x, nil
}

func (k *modelKernel) readSlots(numbers []uint32) (map[uint32]*slotContent, error) {
	out := map[uint32]*slotContent{}
	for _, n := range numbers {
		if s := k.slots[n]; s != nil && s.chain {
			out[n] = &slotContent{number: n, label: s.label, chain: s.chain, flows: s.flows}
		}
	}
	return out, nil
}

func (k *modelKernel) readWays(numbers []uint32) (map[uint32]*slotContent, error) {
	out := map[uint32]*slotContent{}
	for _, n := range numbers {
		if s := k.slots[n]; s != nil {
			out[n] = &slotContent{number: n, rules: s.rules, hops: s.hops, blackhole: s.blackhole}
		}
	}
	return out, nil
}

func (k *modelKernel) readVIPs() (map[vip.VIP]string, error) { return maps.Clone(k.vips), nil }

// write refuses what the real one does: verdicts that lead nowhere, chains in use.
func (k *modelKernel) write(c change) error {
	k.act()
	old, _ := k.read(slices.Collect(maps.Keys(k.slots)))
	if err := k.transact(c); err != nil {
		k.streams, k.slots, k.vips, k.base = old.streams, old.slots, old.vips, old.problem == ""
		return err
	}
	k.gen++
	k.writes++
	return nil
}

func (k *modelKernel) transact(c change) error {
	k.base = k.base || c.base
	if !k.base && len(c.slots)+len(c.streams) > 0 {
		return errors.New("no table")
	}
	for _, w := range c.slots {
		if k.refuse != "" && w.stream == k.refuse {
			return fmt.Errorf("stream %s is refused", w.stream)
		}
		s := k.slot(w.number)
		if !s.chain {
			k.births[w.number]++
		}
		s.chain, s.label, s.flows = true, w.label, w.flows
	}
	for _, w := range c.streams {
		if k.refuse != "" && w.want.name == k.refuse {
			return fmt.Errorf("stream %s is refused", w.want.name)
		}
		x := w.want
		for _, f := range vip.Families {
			x.tables[f] = slices.Clone(x.tables[f])
			for _, n := range x.tables[f] {
				s := k.slots[n]
				known := k.streams[x.name] != nil && slices.Contains(k.streams[x.name].tables[f], n)
				if n != 0 && !known && (s == nil || !s.rules[f] || !s.hops[f].IsValid()) {
					return fmt.Errorf("a new entry of stream %s leads to %d before its rule and route", x.name, n)
				}
			}
		}
		x.ours = true
		k.streams[x.name] = &x
	}
	for v, s := range c.vips {
		if s == "" {
			delete(k.vips, v)
		} else {
			k.vips[v] = s
		}
	}
	for _, name := range c.removeStreams {
		delete(k.streams, name)
	}
	for _, n := range c.removeSlots {
		if s := k.slots[n]; s != nil {
			s.chain, s.label, s.flows = false, label{}, [2]bool{}
			k.sweep(n)
		}
	}
	for v, s := range k.vips {
		if k.streams[s] == nil {
			return fmt.Errorf("VIP %s leads to stream %q, which is not there", v, s)
		}
	}
	for name, s := range k.streams {
		for _, f := range vip.Families {
			for _, n := range s.tables[f] {
				if n != 0 && (k.slots[n] == nil || !k.slots[n].flows[f]) {
					return fmt.Errorf("an entry of stream %s leads to %d, which has no flows", name, n)
				}
			}
		}
	}
	return nil
}

func (k *modelKernel) slot(n uint32) *slotContent {
	if k.slots[n] == nil {
		k.slots[n] = &slotContent{number: n}
	}
	return k.slots[n]
}

func (k *modelKernel) sweep(n uint32) {
	s := k.slots[n]
	if s != nil && !s.chain && *s == (slotContent{number: n}) {
		delete(k.slots, n)
	}
}

func (k *modelKernel) addWays(slots []slotContent) wayErrors {
	errs := wayErrors{}
	for _, w := range slots {
		k.act()
		for _, f := range vip.Families {
			if l, ok := k.net.leadsTo(w.hops[f]); w.hops[f].IsValid() && (!ok || !l.up) {
				errs[wayKey{w.number, f}] = errors.New("not connected")
				continue
			}
			s := k.slot(w.number)
			s.rules[f], s.hops[f], s.blackhole[f] = w.rules[f], w.hops[f], w.blackhole[f]
		}
	}
	return errs
}

func (k *modelKernel) way(n uint32, f vip.Family) (netip.Addr, error) {
	if s := k.slots[n]; s != nil && s.rules[f] {
		return s.hops[f], nil
	}
	return netip.Addr{}, nil
}

func (k *modelKernel) removeWays(numbers []uint32) error {
	for _, n := range numbers {
		k.act()
		for name, s := range k.streams {
			if slices.Contains(s.tables[vip.IPv4], n) || slices.Contains(s.tables[vip.IPv6], n) {
				return fmt.Errorf("entries of stream %s lead to %d, whose rules and routes are to be removed", name, n)
			}
		}
		if s := k.slots[n]; s != nil {
			s.rules, s.hops, s.blackhole = slotContent{}.rules, slotContent{}.hops, slotContent{}.blackhole
			k.sweep(n)
		}
	}
	return nil
}

func (k *modelKernel) takenAmong([]uint32) (map[uint32]string, error) { return k.inUse, nil }

func (k *modelKernel) forget(numbers []uint32) error {
	k.act()
	for _, n := range numbers {
		delete(k.conns, n)
	}
	return nil
}

func (k *modelKernel) owned() ([]uint32, error) {
	var out []uint32
	for n, s := range k.slots {
		if s.rules != [2]bool{} || s.hops != [2]netip.Addr{} {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return out, nil
}

func (k *modelKernel) removeAll() error {
	k.act()
	k.base = false
	return nil
}

func (k *modelKernel) surroundings() (*surroundings, error) {
	s := k.net
	s.local, s.failed = maps.Clone(k.net.local), maps.Clone(k.net.failed)
	s.links = slices.Clone(k.net.links)
	return &s, nil
}

func (k *modelKernel) close() error { return nil }

// linkGoes does what the kernel does when a link goes down, or comes up.
func (k *modelKernel) linkGoes(up bool) {
	k.net.links[0].up = up
	if up {
		return
	}
	for _, s := range k.slots {
		s.hops = [2]netip.Addr{}
	}
}
