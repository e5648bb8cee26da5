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
		return "", fmt.Errorf("failed to read nftables table inet %s: %w", TableName, err)
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
	observed, err := t.nft.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", fmt.Errorf("failed to list chains: %w", err)
	}
	for _, c := range t.chains() {
		problem, err := t.inspectChain(c, observed)
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
		return "", fmt.Errorf("failed to read set %s: %w", want.Name, err)
	}
	if !got.Interval || got.KeyType.Bytes != want.KeyType.Bytes || got.IsMap || got.Constant ||
		got.HasTimeout || got.Dynamic || got.Concatenation {
		return "set " + want.Name + " has another type", nil
	}
	return "", nil
}

func (t *table) inspectChain(want *nftables.Chain, observed []*nftables.Chain) (string, error) {
	i := slices.IndexFunc(observed, func(c *nftables.Chain) bool {
		return c.Table.Name == TableName && c.Name == want.Name
	})
	if i < 0 {
		return "chain " + want.Name + " is missing", nil
	}
	got := observed[i]
	if got.Type != want.Type || !equal(got.Hooknum, want.Hooknum) || !equal(got.Priority, want.Priority) ||
		!equal(got.Policy, want.Policy) {
		return "chain " + want.Name + " has another type", nil
	}
	rules, err := t.nft.GetRules(want.Table, want)
	if err != nil {
		return "", fmt.Errorf("failed to read the rules of chain %s: %w", want.Name, err)
	}
	if !slices.EqualFunc(rules, t.rules(want), sameRule) {
		return "chain " + want.Name + " has other rules", nil
	}
	return "", nil
}

// equal reports whether an attribute, absent if it is nil, has the desired value.
func equal[T comparable](got, want *T) bool { return got != nil && *got == *want }

func sameRule(got, want *nftables.Rule) bool {
	return slices.EqualFunc(got.Exprs, want.Exprs, func(g, w expr.Any) bool {
		if l, ok := w.(*expr.Lookup); ok {
			// The kernel does not keep the number that named the set in the transaction.
			l.SetID = 0
		}
		return reflect.DeepEqual(g, w)
	})
}
