package fwstate

import (
	"cmp"
	"encoding/binary"
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
	// before and after hold the large transactions before first and last.
	before, after []*nft.Transaction
	fills         []tableEntries
	// observed holds the objects of the streams whose rules change.
	observed map[string]*ruleset
	// live holds the live maps by name with the change applied; nil is a missing map.
	live map[string]map[uint32]string
	// moved holds the previous streams of targets that get another one, by fwmark.
	moved map[uint32]string
	// removed holds the elements of live maps to remove after all VIPs: until then a VIP that moves to
	// another stream leads to the chain that looks them up.
	removed elementLists
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

// partSize is the size in bytes from which a transaction takes no further target, stream or VIP: it
// has fewer than MaxElements elements. The kernel validates all VIPs in each transaction.
const partSize = 500 << 10

// split begins another transaction if one would exceed that size, or half of the send buffer's,
// with the entries of a stream, which have 28 bytes each.
func (writer *changeWriter) split(parts *[]*nft.Transaction, transaction **nft.Transaction, entries int) {
	size := (*transaction).Size()
	if size > 0 && size+28*entries > min(partSize, writer.nft.SendLimit/2) {
		*parts, *transaction = append(*parts, *transaction), newTransaction()
	}
}

// maxReported limits the elements that the kernel echoes for one transaction. In a user namespace
// the receive buffer has the default 208 KiB: 1 000 elements fit, 1 200 do not (Linux 6.18).
const maxReported = 700

func elementsOf(fills []tableEntries) (count int) {
	for _, changes := range fills {
		for _, entry := range changes.entries {
			if entry.had {
				count++
			}
			if entry.fwmark != 0 {
				count++
			}
		}
	}
	return count
}

// Write applies a change in one transaction, or in several if it has more than MaxElements
// elements or is larger than partSize. Between the transactions every packet has a target, old or
// new, unless that failed.
func (conn *Conn) Write(change plan.Change) error {
	conn.reported = report{}
	change, err := conn.resize(change)
	if err != nil {
		return err
	}
	writer := &changeWriter{
		Conn: conn, first: newTransaction(), last: newTransaction(), observed: map[string]*ruleset{},
		live: map[string]map[uint32]string{}, moved: map[uint32]string{}, removed: elementLists{},
	}
	writer.last.Sets = 1 << 16 // set IDs must not collide with IDs in first
	// Objects precede their references: target chains precede live map elements, live maps precede
	// stream rules, and stream chains precede VIP elements. Removals are last.
	for _, step := range []func(plan.Change) error{
		writer.base, writer.readStreams, writer.targetChains, writer.startLive, writer.targetFlows, writer.guests,
		writer.streams, writer.vips, writer.removals,
	} {
		if err := step(change); err != nil {
			return err
		}
	}
	return writer.commit()
}

func (writer *changeWriter) commit() error {
	// The common case: one transaction, which packets see as a whole.
	begin, end := append(writer.before, writer.first), append(writer.after, writer.last)
	if elements := elementsOf(writer.fills); elements <= MaxElements && len(begin)+len(end) == 2 {
		whole := newTransaction()
		whole.Append(writer.first)
		for _, changes := range writer.fills {
			changes.known = changes.known && elements <= maxReported
			fill(whole, changes)
		}
		if whole.Append(writer.last); writer.nft.Fits(whole) {
			return writer.Conn.commit(whole)
		}
	}
	// The rules of last reference objects of first: an encoding error must prevent both.
	for _, transaction := range end {
		begin[0].Err = errors.Join(begin[0].Err, transaction.Err)
	}
	if err := writer.Conn.commit(begin...); err != nil {
		return err
	}
	if err := writer.writeEntries(writer.fills); err != nil {
		return err
	}
	return writer.Conn.commit(end...)
}

// writeEntries writes entries in several transactions. An entry is replaced within one transaction.
func (conn *Conn) writeEntries(fills []tableEntries) error {
	transaction, elements := newTransaction(), 0
	for _, changes := range fills {
		// An entry takes up to two elements: one to delete and one to add.
		for part := range slices.Chunk(changes.entries, MaxElements/2) {
			if elements += 2 * len(part); elements > MaxElements {
				if err := conn.commit(transaction); err != nil {
					return err
				}
				transaction, elements = newTransaction(), 2*len(part)
			}
			fill(transaction, tableEntries{set: changes.set, entries: part})
		}
	}
	return conn.commit(transaction)
}

// fill adds the messages that change the entries of one Maglev map.
func fill(transaction *nft.Transaction, changes tableEntries) {
	// One buffer for the numbers of all elements: a table of 65 537 entries has 131 074.
	numbers := make([]byte, 0, 8*len(changes.entries))
	encode := func(number uint32) []byte {
		numbers = binary.NativeEndian.AppendUint32(numbers, number)
		return numbers[len(numbers)-4:]
	}
	add := make([]nft.Element, 0, len(changes.entries))
	var remove []nft.Element
	for _, entry := range changes.entries {
		key := encode(entry.index)
		if entry.had {
			remove = append(remove, nft.Element{Key: key})
		}
		if entry.fwmark != 0 {
			add = append(add, nft.Element{Key: key, Data: encode(entry.fwmark)})
		}
	}
	transaction.Echo = changes.known
	transaction.DeleteElements(changes.set, remove)
	transaction.AddElements(changes.set, add)
	transaction.Echo = false
}

// commit commits transactions in order.
func (conn *Conn) commit(transactions ...*nft.Transaction) error {
	for _, transaction := range transactions {
		if err := conn.nft.Commit(transaction, nil); err != nil {
			return err
		}
	}
	return nil
}

// liveOf returns a live map with the change applied so far.
func (writer *changeWriter) liveOf(family vip.Family, stream string) (map[uint32]string, error) {
	name := plan.LiveMap(family, stream)
	if live, cached := writer.live[name]; cached {
		return live, nil
	}
	live, err := writer.nft.readLive(family, stream)
	writer.live[name] = live
	return live, err
}

func (writer *changeWriter) createLiveMap(family vip.Family, stream string) error {
	live, err := writer.liveOf(family, stream)
	if err == nil && live == nil {
		writer.first.AddSet(liveSpec(family, stream))
		writer.live[plan.LiveMap(family, stream)] = map[uint32]string{}
	}
	return err
}

// base creates and repairs the common objects.
func (writer *changeWriter) base(change plan.Change) error {
	if !change.Base {
		return nil
	}
	// Another process may have changed the objects since the caller read them.
	content, err := writer.readRuleset(false)
	if err != nil {
		return err
	}
	problem, err := writer.inspectBase(content)
	if err != nil || problem == "" && content.assignsTimeouts(writer.config) {
		return err
	}
	writer.first.AddTable()
	for _, want := range writer.config.commonSets() {
		if !content.has(want.Name) {
			writer.first.AddSet(want)
			continue
		}
		missing, err := writer.missingFixed(want)
		if err != nil {
			return err
		}
		writer.first.AddElements(want.Name, missing)
	}
	writer.first.AddTimeouts(checkTimeouts[:writer.config.timeouts]...)
	for _, want := range writer.config.baseChains() {
		if content.checkChain(want) != nil {
			continue // chain checks of another process: see inspectForeign
		}
		if got, found := content.Chains[want.Name]; !found || got.Policy != want.Policy {
			writer.first.AddChain(want)
		}
		setRules(writer.first, want.Name, content.Rules[want.Name], writer.config.baseRules(want.Name)...)
	}
	if writer.config.Conntrack == ConntrackOn {
		// Keep the chains and sets, which may contain rules and elements of other processes.
		for _, name := range commonChains[2:] {
			deleteRules(writer.first, content.Rules[name])
		}
	}
	return nil
}

func (writer *changeWriter) targetChains(change plan.Change) error {
	rules, err := writer.targetRules(fwmarksOf(change.Targets))
	if err != nil {
		return err
	}
	for _, target := range change.Targets {
		chain := plan.TargetChain(target.FWMark)
		if len(rules[chain]) == 0 {
			writer.first.AddChain(nft.Chain{Name: chain})
		}
		if was, found := writer.config.targetFrom(target.FWMark, rules[chain]); found && was.Stream != target.Stream {
			writer.moved[target.FWMark] = was.Stream
		}
		setRules(writer.first, chain, rules[chain], writer.config.targetRule(target))
		writer.split(&writer.before, &writer.first, 0)
	}
	return nil
}

type elementLists map[string][]nft.Element

func (lists elementLists) add(set string, element nft.Element) {
	lists[set] = append(lists[set], element)
}

// each calls put for parts of each set, sorted by name.
func (lists elementLists) each(put func(set string, list []nft.Element)) {
	for _, set := range slices.Sorted(maps.Keys(lists)) {
		for part := range slices.Chunk(lists[set], maxReported) {
			put(set, part)
		}
	}
}

func (writer *changeWriter) addFirst(set string, list []nft.Element) {
	writer.first.AddElements(set, list)
	writer.split(&writer.before, &writer.first, 0)
}

func (writer *changeWriter) targetFlows(change plan.Change) error {
	added, failed := elementLists{}, elementLists{}
	for _, target := range change.Targets {
		for _, family := range vip.Families {
			name, chain := plan.LiveMap(family, target.Stream), plan.TargetChain(target.FWMark)
			if target.Flows[family] {
				if err := writer.createLiveMap(family, target.Stream); err != nil {
					return err
				}
			}
			live, err := writer.liveOf(family, target.Stream)
			if err != nil {
				return err
			}
			have, exists := live[target.FWMark]
			switch {
			case exists && have != chain:
				return conflict(fmt.Sprintf("element %d of map", target.FWMark), name, fmt.Sprintf("it leads to %q", have))
			case target.Flows[family] && !exists:
				live[target.FWMark] = chain
				added.add(name, nft.Element{Key: markKey(target.FWMark), Chain: chain})
			case !target.Flows[family] && exists:
				delete(live, target.FWMark)
				failed.add(name, nft.Element{Key: markKey(target.FWMark)})
			}
			was, moved := writer.moved[target.FWMark]
			if !moved || slices.Contains(change.AddGuests, plan.Guest{Stream: was, FWMark: target.FWMark}) {
				continue
			}
			if live, err = writer.liveOf(family, was); err != nil {
				return err
			}
			if live[target.FWMark] == chain {
				delete(live, target.FWMark)
				writer.removed.add(plan.LiveMap(family, was), nft.Element{Key: markKey(target.FWMark)})
			}
		}
	}
	// Entries that reference added targets are written in between. A target that failed gets no packet
	// while the entries are written: a connection that it refuses would not be retried.
	failed.each(writer.first.DeleteElements)
	added.each(writer.addFirst)
	return nil
}

// guests adds and removes elements of live maps that lead to targets of other streams.
func (writer *changeWriter) guests(change plan.Change) error {
	added := elementLists{}
	for _, family := range vip.Families {
		each := func(list []plan.Guest, to elementLists, exists bool) error {
			for _, guest := range list {
				live, err := writer.liveOf(family, guest.Stream)
				if err != nil {
					return err
				}
				chain := plan.TargetChain(guest.FWMark)
				// A stream without a VIP of the family has no live map.
				if live == nil || (live[guest.FWMark] == chain) != exists {
					continue
				}
				element := nft.Element{Key: markKey(guest.FWMark), Chain: chain}
				if delete(live, guest.FWMark); !exists {
					live[guest.FWMark] = chain
				} else {
					element.Chain = ""
				}
				to.add(plan.LiveMap(family, guest.Stream), element)
			}
			return nil
		}
		if err := errors.Join(each(change.RemoveGuests, writer.removed, true),
			each(change.AddGuests, added, false)); err != nil {
			return err
		}
	}
	added.each(writer.addFirst)
	return nil
}

func (writer *changeWriter) vips(change plan.Change) error {
	if len(change.VIPs) == 0 {
		return nil
	}
	chains, untracked, err := writer.readVIPs()
	if err != nil {
		return err
	}
	// Removals are first, because they free elements of a full map within the transaction.
	for _, address := range slices.SortedFunc(maps.Keys(change.VIPs), func(a, b vip.VIP) int {
		return cmp.Or(min(1, len(change.VIPs[a]))-min(1, len(change.VIPs[b])), vip.Compare(a, b))
	}) {
		// An empty stream name removes the VIP.
		set, chain := setOf(address, plan.HostMaps, plan.NetMaps), ""
		if change.VIPs[address] != "" {
			chain = plan.StreamChain(change.VIPs[address])
		}
		had, exists := chains[address]
		switch {
		case exists && !strings.HasPrefix(had, plan.StreamPrefix):
			if chain != "" {
				return conflict(fmt.Sprintf("element %s of map", address), set, fmt.Sprintf("it leads to %q", had))
			}
			// The removal of a VIP leaves an element of another process.
			continue
		case exists && had != chain:
			writer.last.DeleteElements(set, prefixElements(address, ""))
		}
		if chain != "" && had != chain {
			writer.last.AddElements(set, prefixElements(address, chain))
		}
		_, exists = untracked[address]
		switch set := setOf(address, ownHosts, ownNets); {
		case writer.config.Conntrack == ConntrackOn || exists == (chain != ""):
		case exists:
			writer.last.DeleteElements(set, prefixElements(address, ""))
		default:
			writer.last.AddElements(set, prefixElements(address, ""))
		}
		writer.split(&writer.after, &writer.last, 0)
	}
	return nil
}

func (writer *changeWriter) removals(change plan.Change) error {
	writer.removed.each(writer.last.DeleteElements)
	for _, stream := range change.RemoveStreams {
		content, err := writer.readStreamObjects(stream)
		if err != nil {
			return err
		}
		for name := range content.Chains {
			writer.last.DeleteChain(name)
		}
		for _, spec := range streamSets(stream) {
			if got, found := content.Sets[spec.Name]; found && spec.Mismatch(got) == "" {
				writer.last.DeleteSet(spec.Name)
			}
		}
		for _, family := range vip.Families {
			// removeTargets must not delete elements of a deleted map.
			writer.live[plan.LiveMap(family, stream)] = nil
		}
		writer.split(&writer.after, &writer.last, 0)
	}
	return writer.removeTargets(change.RemoveTargets)
}

// removeTargets removes the chains of targets and the elements that reference them.
func (writer *changeWriter) removeTargets(fwmarks []uint32) error {
	if len(fwmarks) == 0 {
		return nil
	}
	rules, err := writer.targetRules(fwmarks)
	if err != nil {
		return err
	}
	removed := elementLists{}
	for _, fwmark := range fwmarks {
		target, found := writer.config.targetFrom(fwmark, rules[plan.TargetChain(fwmark)])
		for _, family := range vip.Families {
			// Only the rule of the target contains its stream.
			if !found {
				continue
			}
			live, err := writer.liveOf(family, target.Stream)
			if err != nil {
				return err
			}
			// An element with a different chain belongs to another process.
			if live[fwmark] == plan.TargetChain(fwmark) {
				removed.add(plan.LiveMap(family, target.Stream), nft.Element{Key: markKey(fwmark)})
			}
		}
	}
	removed.each(writer.last.DeleteElements)
	// A chain can be deleted only after the elements that reference it.
	for _, fwmark := range fwmarks {
		got, err := writer.nft.Chain(inet, plan.TargetChain(fwmark))
		if err != nil {
			return err
		}
		if got != nil {
			writer.last.DeleteChain(got.Name)
			writer.split(&writer.after, &writer.last, 0)
		}
	}
	return nil
}
