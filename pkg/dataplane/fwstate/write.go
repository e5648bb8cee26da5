package fwstate

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// changeWriter converts a change into transactions. It writes new objects without references
// first, then table entries, then all other changes.
type changeWriter struct {
	*Conn
	first, last *nft.Transaction
	fills       []tableEntries
	// observed holds the objects of the streams whose rules change.
	observed map[string]*ruleset
	// live holds the live maps by name with the change applied; nil is a missing map.
	live map[string]map[uint32]string
}

// tableEntries holds the entries to change in one Maglev map.
type tableEntries struct {
	set     string
	entries []entry
	// known: the unchanged entries are known, so the kernel's echo of the changes replaces a read.
	known bool
}

// entry is a table entry to change; fwmark 0 removes it.
type entry struct {
	index, fwmark uint32
	// had: the entry exists and is removed first.
	had bool
}

// MaxElements limits the elements of one transaction. While a process subscribes to changes, the
// kernel allocates 4 KiB per element until the commit and takes 10 µs: a transaction of 200 000
// took 1.8 GB and 4 s (Linux 6.18). This number also fits a send buffer of the default size.
const MaxElements = 6000

// maxReported limits the elements that the kernel echoes for one transaction. In a user namespace
// the receive buffer has the default size of 208 KiB: 1 000 elements fit, 1 200 do not (Linux
// 6.18).
const maxReported = 700

func elementsOf(fills []tableEntries) (n int) {
	for _, f := range fills {
		for _, e := range f.entries {
			if e.had {
				n++
			}
			if e.fwmark != 0 {
				n++
			}
		}
	}
	return n
}

// Write applies a change in one transaction, or in several if it has more than MaxElements
// elements. Between the transactions every packet has a target, old or new.
func (f *Conn) Write(c plan.Change) error {
	f.reported = report{}
	c, err := f.resize(c)
	if err != nil {
		return err
	}
	w := &changeWriter{
		Conn: f, first: newTransaction(), last: newTransaction(), observed: map[string]*ruleset{},
		live: map[string]map[uint32]string{},
	}
	w.last.Sets = 1 << 16 // set IDs must not collide with IDs in first
	// Objects precede their references: target chains precede live map elements, live maps precede
	// stream rules, and stream chains precede VIP elements. Removals are last.
	for _, step := range []func(plan.Change) error{
		w.base, w.readStreams, w.targetChains, w.startLive, w.targetFlows, w.streams, w.vips, w.removals,
	} {
		if err := step(c); err != nil {
			return err
		}
	}
	return w.commit()
}

func (w *changeWriter) commit() error {
	if n := elementsOf(w.fills); n <= MaxElements {
		for _, f := range w.fills {
			f.known = f.known && n <= maxReported
			fill(w.first, f)
		}
		w.first.Append(w.last)
		return w.Conn.commit(w.first)
	}
	w.first.Err = errors.Join(w.first.Err, w.last.Err)
	if err := w.Conn.commit(w.first); err != nil {
		return err
	}
	if err := w.writeEntries(w.fills); err != nil {
		return err
	}
	return w.Conn.commit(w.last)
}

// writeEntries writes entries in several transactions. An entry is replaced within one
// transaction.
func (f *Conn) writeEntries(fills []tableEntries) error {
	t, n := newTransaction(), 0
	for _, x := range fills {
		for part := range slices.Chunk(x.entries, MaxElements/2) {
			if n += 2 * len(part); n > MaxElements {
				if err := f.commit(t); err != nil {
					return err
				}
				t, n = newTransaction(), 2*len(part)
			}
			fill(t, tableEntries{set: x.set, entries: part})
		}
	}
	return f.commit(t)
}

func fill(t *nft.Transaction, f tableEntries) {
	var add, remove []nft.Element
	for _, e := range f.entries {
		key := markKey(e.index)
		if e.had {
			remove = append(remove, nft.Element{Key: key})
		}
		if e.fwmark != 0 {
			add = append(add, nft.Element{Key: key, Data: markKey(e.fwmark)})
		}
	}
	t.Echo = f.known
	t.DeleteElements(f.set, remove)
	t.AddElements(f.set, add)
	t.Echo = false
}

func (f *Conn) commit(t *nft.Transaction) error { return f.nft.Commit(t, nil) }

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

func (w *changeWriter) createLiveMap(family vip.Family, stream string) error {
	live, err := w.liveOf(family, stream)
	if err == nil && live == nil {
		w.first.AddSet(liveSpec(family, stream))
		w.live[plan.LiveMap(family, stream)] = map[uint32]string{}
	}
	return err
}

// base creates and repairs the common objects.
func (w *changeWriter) base(c plan.Change) error {
	if !c.Base {
		return nil
	}
	r, err := w.readRuleset(false)
	if err != nil {
		return err
	}
	problem, err := w.inspectBase(r)
	if err != nil || problem == "" {
		return err
	}
	w.first.AddTable()
	for _, want := range w.config.commonSets() {
		if !r.has(want.Name) {
			w.first.AddSet(want)
			continue
		}
		missing, err := w.missingFixed(want)
		if err != nil {
			return err
		}
		w.first.AddElements(want.Name, missing)
	}
	for _, want := range w.config.baseChains() {
		if got, ok := r.Chains[want.Name]; !ok || got.Policy != want.Policy {
			w.first.AddChain(want)
		}
		setRules(w.first, want.Name, r.Rules[want.Name], w.config.baseRules(want.Name)...)
	}
	if w.config.Conntrack == ConntrackOn {
		// Keep the chains and sets, which may contain rules and elements of other processes.
		for _, name := range commonChains[1:] {
			deleteRules(w.first, r.Rules[name])
		}
	}
	return nil
}

func (w *changeWriter) targetChains(c plan.Change) error {
	rules, err := w.targetRules(fwmarksOf(c.Targets))
	if err != nil {
		return err
	}
	for _, t := range c.Targets {
		chain := plan.TargetChain(t.FWMark)
		if len(rules[chain]) == 0 {
			w.first.AddChain(nft.Chain{Name: chain})
		}
		setRules(w.first, chain, rules[chain], w.config.targetRule(t))
	}
	return nil
}

type elementLists map[string][]nft.Element

func (l elementLists) add(set string, e nft.Element) { l[set] = append(l[set], e) }

// each calls put for each set, sorted by name.
func (l elementLists) each(put func(set string, list []nft.Element)) {
	for _, set := range slices.Sorted(maps.Keys(l)) {
		put(set, l[set])
	}
}

func (w *changeWriter) targetFlows(c plan.Change) error {
	added, removed := elementLists{}, elementLists{}
	for _, t := range c.Targets {
		for _, family := range vip.Families {
			name, chain := plan.LiveMap(family, t.Stream), plan.TargetChain(t.FWMark)
			if t.Flows[family] {
				if err := w.createLiveMap(family, t.Stream); err != nil {
					return err
				}
			}
			live, err := w.liveOf(family, t.Stream)
			if err != nil {
				return err
			}
			have, exists := live[t.FWMark]
			switch {
			case exists && have != chain:
				return conflict(fmt.Sprintf("element %d of map", t.FWMark), name, fmt.Sprintf("it leads to %q", have))
			case t.Flows[family] && !exists:
				live[t.FWMark] = chain
				added.add(name, nft.Element{Key: markKey(t.FWMark), Chain: chain})
			case !t.Flows[family] && exists:
				delete(live, t.FWMark)
				removed.add(name, nft.Element{Key: markKey(t.FWMark)})
			}
		}
	}
	removed.each(w.last.DeleteElements)
	added.each(w.first.AddElements)
	return nil
}

func (w *changeWriter) vips(c plan.Change) error {
	if len(c.VIPs) == 0 {
		return nil
	}
	chains, untracked, err := w.readVIPs()
	if err != nil {
		return err
	}
	// Removals are first, because they free elements of a full map within the transaction.
	for _, v := range slices.SortedFunc(maps.Keys(c.VIPs), func(a, b vip.VIP) int {
		return cmp.Or(min(1, len(c.VIPs[a]))-min(1, len(c.VIPs[b])), vip.Compare(a, b))
	}) {
		set, chain := setOf(v, plan.HostMaps, plan.NetMaps), ""
		if c.VIPs[v] != "" {
			chain = plan.StreamChain(c.VIPs[v])
		}
		had, exists := chains[v]
		switch {
		case exists && !strings.HasPrefix(had, plan.StreamPrefix):
			if chain != "" {
				return conflict(fmt.Sprintf("element %s of map", v), set, fmt.Sprintf("it leads to %q", had))
			}
			continue
		case exists && had != chain:
			w.last.DeleteElements(set, prefixElements(v, ""))
		}
		if chain != "" && had != chain {
			w.last.AddElements(set, prefixElements(v, chain))
		}
		_, exists = untracked[v]
		switch set := setOf(v, ownHosts, ownNets); {
		case w.config.Conntrack == ConntrackOn || exists == (chain != ""):
		case exists:
			w.last.DeleteElements(set, prefixElements(v, ""))
		default:
			w.last.AddElements(set, prefixElements(v, ""))
		}
	}
	return nil
}

func (w *changeWriter) removals(c plan.Change) error {
	for _, stream := range c.RemoveStreams {
		r, err := w.readStreamObjects(stream)
		if err != nil {
			return err
		}
		for name := range r.Chains {
			w.last.DeleteChain(name)
		}
		for _, spec := range streamSets(stream) {
			if got, ok := r.Sets[spec.Name]; ok && spec.Mismatch(got) == "" {
				w.last.DeleteSet(spec.Name)
			}
		}
		for _, family := range vip.Families {
			w.live[plan.LiveMap(family, stream)] = nil
		}
	}
	return w.removeTargets(c.RemoveTargets)
}

// removeTargets removes the chains of targets and the elements that reference them.
func (w *changeWriter) removeTargets(fwmarks []uint32) error {
	if len(fwmarks) == 0 {
		return nil
	}
	rules, err := w.targetRules(fwmarks)
	if err != nil {
		return err
	}
	removed := elementLists{}
	for _, n := range fwmarks {
		t, found := w.config.targetFrom(n, rules[plan.TargetChain(n)])
		for _, family := range vip.Families {
			if !found {
				continue
			}
			live, err := w.liveOf(family, t.Stream)
			if err != nil {
				return err
			}
			if live[n] == plan.TargetChain(n) {
				removed.add(plan.LiveMap(family, t.Stream), nft.Element{Key: markKey(n)})
			}
		}
	}
	removed.each(w.last.DeleteElements)
	for _, n := range fwmarks {
		got, err := w.nft.Chain(inet, plan.TargetChain(n))
		if err != nil {
			return err
		}
		if got != nil {
			w.last.DeleteChain(got.Name)
		}
	}
	return nil
}
