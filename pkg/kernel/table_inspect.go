package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/vipgate/vipgate/pkg/vip"
)

// inspect returns how table, sets, chains and rules differ from their desired form; "" if they do
// not.
func (t *table) inspect() (string, error) {
	got, err := t.nft.ListTableOfFamily(TableName, nftables.TableFamilyINet)
	if errors.Is(err, fs.ErrNotExist) {
		return "the table is missing", nil
	}
	if err != nil {
		return "", fmt.Errorf("read nftables table inet %s: %w", TableName, err)
	}
	if got.Flags != 0 {
		return fmt.Sprintf("the table has flags %#x (1: dormant)", got.Flags), nil
	}
	for _, f := range vip.Families {
		problem, err := t.inspectSet(t.set(f))
		if problem != "" || err != nil {
			return problem, err
		}
	}
	for _, c := range t.chains() {
		problem, err := t.inspectChain(c)
		if problem != "" || err != nil {
			return problem, err
		}
	}
	return "", nil
}

func (t *table) inspectSet(want *nftables.Set) (string, error) {
	got, err := t.nft.GetSetByName(want.Table, want.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return "set " + want.Name + " is missing", nil
	}
	if err != nil {
		return "", fmt.Errorf("read set %s: %w", want.Name, err)
	}
	if !got.Interval || got.KeyType.Bytes != want.KeyType.Bytes || got.IsMap || got.Constant ||
		got.HasTimeout || got.Dynamic || got.Concatenation {
		return "set " + want.Name + " has another type", nil
	}
	return "", nil
}

func (t *table) inspectChain(want *nftables.Chain) (string, error) {
	got, err := t.findChain(want.Name)
	if err != nil {
		return "", err
	}
	if got == nil {
		return "chain " + want.Name + " is missing", nil
	}
	if !sameHook(got, want) || got.Policy == nil || *got.Policy != *want.Policy {
		return "chain " + want.Name + " has another type", nil
	}
	rules, err := t.nft.GetRules(want.Table, want)
	if err != nil {
		return "", fmt.Errorf("read the rules of chain %s: %w", want.Name, err)
	}
	if !slices.EqualFunc(rules, t.rules(want), sameRule) {
		return "chain " + want.Name + " has other rules", nil
	}
	return "", nil
}

// findChain returns the table's chain of that name, or nil.
func (t *table) findChain(name string) (*nftables.Chain, error) {
	chains, err := t.nft.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list chains: %w", err)
	}
	for _, c := range chains {
		if c.Table.Name == TableName && c.Name == name {
			return c, nil
		}
	}
	return nil, nil
}

// sameHook reports whether two base chains have the same type, hook and priority.
func sameHook(got, want *nftables.Chain) bool {
	return got.Type == want.Type && got.Hooknum != nil && *got.Hooknum == *want.Hooknum &&
		got.Priority != nil && *got.Priority == *want.Priority
}

func sameRule(got, want *nftables.Rule) bool {
	return slices.EqualFunc(got.Exprs, want.Exprs, func(g, w expr.Any) bool {
		if l, ok := w.(*expr.Lookup); ok {
			// The kernel does not keep the number that named the set in the transaction.
			l.SetID = 0
		}
		return reflect.DeepEqual(g, w)
	})
}

// mustRebuild reports whether an object of the table has a type that cannot be changed in place.
func (t *table) mustRebuild() (bool, error) {
	for _, f := range vip.Families {
		want := t.set(f)
		problem, err := t.inspectSet(want)
		if err != nil {
			return false, err
		}
		if problem == "" {
			continue
		}
		if _, err := t.nft.GetSetByName(want.Table, want.Name); err == nil {
			return true, nil
		}
	}
	for _, want := range t.chains() {
		got, err := t.findChain(want.Name)
		if err != nil {
			return false, err
		}
		if got != nil && !sameHook(got, want) {
			return true, nil
		}
	}
	return false, nil
}
