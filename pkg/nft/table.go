package nft

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"
)

// Inspect compares a table with its description, and returns its content and a difference or "".
func (conn *Conn) Inspect(want Table) (have *Ruleset, difference string, err error) {
	have, err = conn.Dump(want)
	switch {
	case err != nil:
		return nil, "", err
	case !have.Exists:
		return have, "table " + want.String(), nil
	case have.Flags != 0: // 1: dormant
		return have, fmt.Sprintf("table %s without flags %#x", want, have.Flags), nil
	}
	for _, chain := range want.Chains {
		got, found := have.Chains[chain.Name]
		if !found || chain.Mismatch(got) != "" || got.Policy != chain.Policy {
			return have, "chain " + want.String() + " " + chain.Name, nil
		}
		if !slices.EqualFunc(have.Rules[chain.Name], chain.Rules, Rule.Same) {
			return have, "rules of chain " + want.String() + " " + chain.Name, nil
		}
	}
	for _, set := range want.Sets {
		got, found := have.Sets[set.Name]
		if !found || !set.same(got) {
			return have, "set " + want.String() + " " + set.Name, nil
		}
		if set.Volatile {
			continue
		}
		if same, err := conn.Holds(want, set); err != nil || !same {
			return have, "elements of set " + want.String() + " " + set.Name, err
		}
	}
	// All described objects exist, so more objects are of another process.
	if len(have.Chains) > len(want.Chains) || len(have.Sets) > len(want.Sets) {
		return have, "table " + want.String() + " without foreign objects", nil
	}
	return have, "", nil
}

// Holds reports whether a set has exactly the described elements, without regard to timeouts.
func (conn *Conn) Holds(table Table, want Set) (bool, error) {
	var list []Element
	_, err := conn.Elements(table, want.Name, func(element Element) { list = append(list, element) })
	return slices.EqualFunc(normalElements(list), normalElements(want.Elements), sameElement), err
}

// normalElements sorts elements. It omits the end of an interval that the next one follows, which
// some kernels do not list.
func normalElements(list []Element) []Element {
	list = slices.SortedFunc(slices.Values(list), compareElements)
	starts := map[string]bool{}
	for _, e := range list {
		starts[string(e.Key)] = starts[string(e.Key)] || !e.End
	}
	return slices.DeleteFunc(list, func(e Element) bool { return e.End && starts[string(e.Key)] })
}

func sameElement(a, b Element) bool {
	return slices.Equal(a.Key, b.Key) && slices.Equal(a.Data, b.Data) && a.Chain == b.Chain && a.End == b.End
}

// Replace adds the messages that give a table its described content. Volatile sets of have keep
// their elements; nil replaces the whole table. A dormant table is only activated.
func (transaction *Transaction) Replace(want Table, have *Ruleset) {
	transaction.Table = want
	// The kernel rejects the deletion of a missing table, and adding an existing one has no effect.
	transaction.AddTable()
	kept := map[string]bool{}
	if have == nil {
		transaction.DeleteTable()
		transaction.AddTable()
	} else if have.Flags != 0 {
		return // the kernel rejects a change of chains in the transaction that activates the table
	} else if have.Exists {
		// Rules reference chains and sets, and elements reference chains.
		transaction.begin("delete rules of table", unix.NFT_MSG_DELRULE, 0, 0, "")
		for _, set := range want.Sets {
			got, found := have.Sets[set.Name]
			kept[set.Name] = found && set.Volatile && set.same(got)
		}
		for _, name := range slices.Sorted(maps.Keys(have.Sets)) {
			if !kept[name] {
				transaction.DeleteSet(name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(have.Chains)) {
			transaction.DeleteChain(name)
		}
	}
	// Chains precede the elements that lead to them, and sets the rules that look them up.
	for _, chain := range want.Chains {
		transaction.AddChain(chain)
	}
	for _, set := range want.Sets {
		if !kept[set.Name] {
			transaction.AddSet(set)
		}
	}
	for _, chain := range want.Chains {
		transaction.AddRules(chain.Name, chain.Rules...)
	}
}

// Remove deletes a table with its content, and reports whether it existed.
func (conn *Conn) Remove(table Table) (removed bool, err error) {
	transaction := Transaction{Table: table}
	transaction.DeleteTable()
	if err = conn.Commit(&transaction, nil); absent(err) {
		return false, nil
	}
	return err == nil, err
}

// Ensure gives tables their described content in one transaction and reads them back. It returns
// the first difference that it found, or "", and the generation of the ruleset that was read.
func (conn *Conn) Ensure(tables ...Table) (difference string, generation uint32, err error) {
	for range readAttempts {
		if generation, err = conn.Generation(); err != nil {
			return difference, 0, err
		}
		var transaction Transaction
		for _, want := range tables {
			have, found, err := conn.Inspect(want)
			if err != nil {
				return difference, 0, err
			}
			if found != "" {
				transaction.Replace(want, have)
				difference = cmp.Or(difference, found)
			}
		}
		// The tables match. After a commit, this iteration confirms the written content.
		if transaction.Len() == 0 {
			return difference, generation, nil
		}
		// The kernel rejects the transaction if another process changed the ruleset after the read.
		if err := conn.Commit(&transaction, &generation); err != nil && !errors.Is(err, unix.ERESTART) {
			return difference, 0, err
		}
	}
	return difference, 0, fmt.Errorf("nftables still differs after %d writes: %s", readAttempts, difference)
}
