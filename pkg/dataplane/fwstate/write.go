package fwstate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// changeWriter turns a change into transactions. Objects that are not referred to yet come
// first, then entries of tables, then the rest.
type changeWriter struct {
	*Conn
	first, last transaction
	fills       []tableEntries
	// live has the live maps by name with the change applied; nil is a missing map.
	live map[string]map[uint32]string
}

// tableEntries are the entries of one Maglev map to change.
type tableEntries struct {
	set     string
	entries []entry
}

// entry is one entry to change; number 0 removes it.
type entry struct {
	index, number uint32
	// had: the entry exists and is removed first.
	had bool
}

// MaxElements bounds the elements of one transaction. While a process listens for changes the
// kernel holds 4 KiB for each until the end and takes 10 µs: 200 000 at once took 1.8 GB and
// 4 s (Linux 6.18). This number also fits a send buffer of the default size.
const MaxElements = 6000

// elementsOf counts the elements to change.
func elementsOf(fills []tableEntries) (n int) {
	for _, f := range fills {
		for _, e := range f.entries {
			if e.had {
				n++
			}
			if e.number != 0 {
				n++
			}
		}
	}
	return n
}

// Write applies a change in one transaction, or in several if it has more than MaxElements
// elements. Between those every packet has a target, old or new.
func (f *Conn) Write(c plan.Change) error {
	c, err := f.resize(c)
	if err != nil {
		return err
	}
	w := &changeWriter{Conn: f, live: map[string]map[uint32]string{}}
	w.last.sets = 1 << 16 // apart from those of the first
	if c.Base {
		if err := w.base(); err != nil {
			return err
		}
	}
	if err := w.targetChains(c.Targets); err != nil {
		return err
	}
	for _, s := range c.Streams {
		if err := w.startLive(s); err != nil {
			return fmt.Errorf("stream %s: %w", s.Desired.Name, err)
		}
	}
	if err := w.targetFlows(c.Targets); err != nil {
		return err
	}
	for _, s := range c.Streams {
		if err := w.stream(s); err != nil {
			return fmt.Errorf("stream %s: %w", s.Desired.Name, err)
		}
	}
	if err := w.vips(c.VIPs); err != nil {
		return err
	}
	if err := w.removals(c); err != nil {
		return err
	}
	return w.commit()
}

// commit sends the transactions.
func (w *changeWriter) commit() error {
	if elementsOf(w.fills) <= MaxElements {
		for _, f := range w.fills {
			w.first.fill(f)
		}
		w.first.Append(&w.last.Messages)
		return w.Conn.commit(&w.first, nil)
	}
	if err := w.Conn.commit(&w.first, nil); err != nil {
		return err
	}
	if err := w.writeEntries(w.fills); err != nil {
		return err
	}
	return w.Conn.commit(&w.last, nil)
}

// writeEntries writes entries in one or more transactions. Removal and addition of one entry
// are in the same one.
func (f *Conn) writeEntries(fills []tableEntries) error {
	var t transaction
	n := 0
	for _, x := range fills {
		for part := range slices.Chunk(x.entries, MaxElements/2) {
			if n += 2 * len(part); n > MaxElements {
				if err := f.commit(&t, nil); err != nil {
					return err
				}
				t, n = transaction{}, 2*len(part)
			}
			t.fill(tableEntries{x.set, part})
		}
	}
	return f.commit(&t, nil)
}

// fill writes entries.
func (t *transaction) fill(f tableEntries) {
	var add, remove []element
	for _, e := range f.entries {
		key := nlmsg.Uint32Bytes(e.index)
		if e.had {
			remove = append(remove, element{key: key})
		}
		if e.number != 0 {
			add = append(add, element{key: key, data: e.number, hasData: true})
		}
	}
	t.removeElements(f.set, remove)
	t.addElements(f.set, add)
}

// liveOf returns a live map with the change applied so far.
func (w *changeWriter) liveOf(family vip.Family, stream string) (map[uint32]string, error) {
	name := plan.LiveMap(family, stream)
	if live, ok := w.live[name]; ok {
		return live, nil
	}
	live, err := w.readLive(family, stream)
	w.live[name] = live
	return live, err
}

// createLiveMap creates the live map of a stream if it is missing.
func (w *changeWriter) createLiveMap(family vip.Family, stream string, size uint32) error {
	live, err := w.liveOf(family, stream)
	if err != nil || live != nil {
		return err
	}
	w.first.addSet(liveSpec(family, stream, size))
	w.live[plan.LiveMap(family, stream)] = map[uint32]string{}
	return nil
}

// base creates and repairs the objects that no stream owns.
func (w *changeWriter) base() error {
	r, err := w.readRuleset(false)
	if err != nil {
		return err
	}
	problem, err := w.inspectBase(r)
	if err != nil || problem == "" {
		return err
	}
	w.first.addTable()
	for _, want := range w.commonSets() {
		missing := want.fixed
		if _, ok := r.sets[want.name]; !ok {
			w.first.addSet(want)
		} else if want.fixed != nil {
			if missing, err = w.missingFixed(want); err != nil {
				return err
			}
		}
		var list []element
		for _, b := range missing {
			list = append(list, element{key: []byte{b}})
		}
		w.first.addElements(want.name, list)
	}
	for _, want := range w.baseChains() {
		if got, ok := r.chains[want.name]; !ok || got.policy != want.policy {
			w.first.addChain(want)
		}
		rules, err := w.baseRules(want.name)
		if err != nil {
			return err
		}
		if err := w.first.setRules(want.name, r.rules[want.name], rules); err != nil {
			return err
		}
	}
	if !w.config.Stateless {
		// Chains stay for rules of other processes, sets for their elements.
		for _, name := range []string{notrackChain, defragmentChain} {
			w.first.removeRules(r.rules[name])
		}
	}
	return nil
}

// targetChains creates and repairs the chains of targets.
func (w *changeWriter) targetChains(slots []plan.KernelTarget) error {
	numbers := make([]uint32, 0, len(slots))
	for _, s := range slots {
		numbers = append(numbers, s.FWMark)
	}
	rules, err := w.targetRules(numbers)
	if err != nil {
		return err
	}
	for _, s := range slots {
		chain := plan.TargetChain(s.FWMark)
		want, err := w.targetRule(s)
		if err != nil {
			return err
		}
		if len(rules[chain]) == 0 {
			w.first.addChain(chainSpec{name: chain})
		}
		if err := w.first.setRules(chain, rules[chain], []ruleSpec{want}); err != nil {
			return err
		}
	}
	return nil
}

// targetFlows adds targets to live maps, and removes them.
func (w *changeWriter) targetFlows(slots []plan.KernelTarget) error {
	add, remove := map[string][]element{}, map[string][]element{}
	for _, s := range slots {
		for _, family := range vip.Families {
			name, chain := plan.LiveMap(family, s.Stream), plan.TargetChain(s.FWMark)
			if s.Flows[family] {
				if err := w.createLiveMap(family, s.Stream, 0); err != nil {
					return err
				}
			}
			live, err := w.liveOf(family, s.Stream)
			if err != nil {
				return err
			}
			have, there := live[s.FWMark]
			if there && have != chain {
				return &ConflictError{Object: fmt.Sprintf("element %d of map inet %s %s", s.FWMark, plan.TableName, name), Detail: fmt.Sprintf("it leads to %q", have)}
			}
			e := element{key: nlmsg.Uint32Bytes(s.FWMark)}
			switch {
			case s.Flows[family] && !there:
				e.chain = chain
				live[s.FWMark] = chain
				add[name] = append(add[name], e)
			case !s.Flows[family] && there:
				delete(live, s.FWMark)
				remove[name] = append(remove[name], e)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(remove)) {
		w.last.removeElements(name, remove[name])
	}
	for _, name := range slices.Sorted(maps.Keys(add)) {
		w.first.addElements(name, add[name])
	}
	return nil
}

// vips changes the elements of the VIP maps.
func (w *changeWriter) vips(change map[vip.VIP]string) error {
	if len(change) == 0 {
		return nil
	}
	have, err := w.readVIPElements(plan.HostMaps, plan.NetMaps)
	if err != nil {
		return err
	}
	own := map[vip.VIP]string{}
	if w.config.Stateless {
		if own, err = w.readVIPElements(ownHosts, ownNets); err != nil {
			return err
		}
	}
	// Removals first: within a transaction they make room in a full map.
	for _, v := range slices.SortedFunc(maps.Keys(change), func(a, b vip.VIP) int {
		return cmp.Or(cmp.Compare(min(1, len(change[a])), min(1, len(change[b]))), vip.Compare(a, b))
	}) {
		set, chain := setOf(v, plan.HostMaps, plan.NetMaps), ""
		if change[v] != "" {
			chain = plan.StreamChain(change[v])
		}
		was, there := have[v]
		switch {
		case there && !strings.HasPrefix(was, plan.StreamPrefix):
			if chain != "" {
				return &ConflictError{Object: fmt.Sprintf("element %s of map inet %s %s", v, plan.TableName, set), Detail: fmt.Sprintf("it leads to %q", was)}
			}
			continue
		case there && was != chain:
			w.last.removeElements(set, prefixElements(v, ""))
		}
		if chain != "" && was != chain {
			w.last.addElements(set, prefixElements(v, chain))
		}
		if !w.config.Stateless {
			continue
		}
		set = setOf(v, ownHosts, ownNets)
		if _, there = own[v]; there != (chain != "") {
			if there {
				w.last.removeElements(set, prefixElements(v, ""))
			} else {
				w.last.addElements(set, prefixElements(v, ""))
			}
		}
	}
	return nil
}

// removals removes streams and targets.
func (w *changeWriter) removals(c plan.Change) error {
	for _, stream := range c.RemoveStreams {
		if got, err := w.readChain(plan.StreamChain(stream)); err != nil {
			return err
		} else if got != nil {
			w.last.removeChain(plan.StreamChain(stream))
		}
		for _, family := range vip.Families {
			for _, spec := range []setSpec{maglevSpec(family, stream, 0), liveSpec(family, stream, 0), shadowSpec(family, stream, 0)} {
				if got, err := w.readSet(spec.name); err != nil {
					return err
				} else if got != nil && spec.mismatch(*got) == "" {
					w.last.removeSet(spec.name)
				}
			}
			w.live[plan.LiveMap(family, stream)] = nil
		}
	}
	return w.removeTargets(c.RemoveTargets)
}

// removeTargets removes the chains of targets and the elements that lead to them.
func (w *changeWriter) removeTargets(numbers []uint32) error {
	if len(numbers) == 0 {
		return nil
	}
	rules, err := w.targetRules(numbers)
	if err != nil {
		return err
	}
	remove := map[string][]element{}
	for _, n := range numbers {
		s, ours, err := w.slotFrom(n, rules[plan.TargetChain(n)])
		if err != nil {
			return err
		}
		for _, family := range vip.Families {
			if !ours {
				continue
			}
			live, err := w.liveOf(family, s.Stream)
			if err != nil {
				return err
			}
			if live[n] == plan.TargetChain(n) {
				name := plan.LiveMap(family, s.Stream)
				remove[name] = append(remove[name], element{key: nlmsg.Uint32Bytes(n)})
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(remove)) {
		w.last.removeElements(name, remove[name])
	}
	for _, n := range numbers {
		if got, err := w.readChain(plan.TargetChain(n)); err != nil {
			return err
		} else if got != nil {
			w.last.removeChain(plan.TargetChain(n))
		}
	}
	return nil
}
