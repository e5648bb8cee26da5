package midstream

import (
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/nft"
)

// writer writes the differences of a table. Each element is valid without the rest, so a large
// change takes several transactions.
type writer struct {
	conn        *nft.Conn
	transaction nft.Transaction
	elements    int
}

// write adds the differences of one map of slots, and reports whether there are any.
func (w *writer) write(set string, have, want map[uint32]netip.Addr) (changed bool, err error) {
	if sameMap(have, want) {
		return false, nil
	}
	var removed, added []nft.Element
	for slot, address := range have {
		if want[slot] != address {
			removed = append(removed, nft.Element{Key: number(slot)})
		}
	}
	for slot, address := range want {
		if have[slot] != address {
			added = append(added, nft.Element{Key: number(slot), Data: address.AsSlice()})
		}
	}
	return len(removed)+len(added) > 0, w.change(set, removed, added)
}

// writeObjects adds the differences of two descriptions of some objects. New objects come first and
// gone ones go last, because rules and elements lead to them.
func (w *writer) writeObjects(have, want nft.Table) error {
	chains, sets := map[string]*nft.Chain{}, map[string]*nft.Set{}
	for i := range have.Chains {
		chains[have.Chains[i].Name] = &have.Chains[i]
	}
	for i := range have.Sets {
		sets[have.Sets[i].Name] = &have.Sets[i]
	}
	for _, chain := range want.Chains {
		if chains[chain.Name] == nil {
			w.transaction.AddChain(chain)
		}
	}
	for _, set := range want.Sets {
		if sets[set.Name] == nil {
			set.Elements = nil
			w.transaction.AddSet(set)
		}
	}
	for _, chain := range want.Chains {
		before := chains[chain.Name]
		delete(chains, chain.Name)
		if before == nil || !slices.EqualFunc(before.Rules, chain.Rules, nft.Rule.Same) {
			if before != nil {
				w.transaction.FlushChain(chain.Name)
			}
			w.transaction.AddRules(chain.Name, chain.Rules...)
		}
	}
	for _, set := range want.Sets {
		var elements []nft.Element
		if before := sets[set.Name]; before != nil {
			elements = before.Elements
		}
		delete(sets, set.Name)
		if err := w.writeElements(set.Name, elements, set.Elements); err != nil {
			return err
		}
	}
	for name := range chains {
		w.transaction.FlushChain(name)
	}
	for name := range chains {
		w.transaction.DeleteChain(name)
	}
	for name := range sets {
		w.transaction.DeleteSet(name)
	}
	return nil
}

// writeElements adds the differences of one set.
func (w *writer) writeElements(set string, have, want []nft.Element) error {
	text := func(element nft.Element) string {
		return string(element.Key) + "/" + string(element.Data) + "/" + element.Chain
	}
	missing := func(list, than []nft.Element) (missing []nft.Element) {
		known := map[string]bool{}
		for _, element := range than {
			known[text(element)] = true
		}
		for _, element := range list {
			if !known[text(element)] {
				missing = append(missing, element)
			}
		}
		return missing
	}
	removed := missing(have, want)
	for i := range removed {
		removed[i] = nft.Element{Key: removed[i].Key}
	}
	return w.change(set, removed, missing(want, have))
}

// change adds a change of a set. An element that changes is deleted before it is added.
func (w *writer) change(set string, removed, added []nft.Element) error {
	for part := range slices.Chunk(removed, fwstate.MaxElements) {
		if err := w.reserve(len(part)); err != nil {
			return err
		}
		w.transaction.DeleteElements(set, part)
	}
	for part := range slices.Chunk(added, fwstate.MaxElements) {
		if err := w.reserve(len(part)); err != nil {
			return err
		}
		w.transaction.AddElements(set, part)
	}
	return nil
}

// reserve commits the transaction unless it has room for more elements.
func (w *writer) reserve(elements int) error {
	if w.elements += elements; w.elements <= fwstate.MaxElements {
		return nil
	}
	err := w.commit()
	w.elements = elements
	return err
}

func (w *writer) commit() error {
	err := w.conn.Commit(&w.transaction, nil)
	w.transaction, w.elements = nft.Transaction{Table: w.transaction.Table}, 0
	return err
}
