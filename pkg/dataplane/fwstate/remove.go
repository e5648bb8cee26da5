package fwstate

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// RemoveAll removes the objects that no stream and no target owns: base chains, common maps,
// the table unless another process has objects in it, and the common policy rules.
func (f *Conn) RemoveAll() error {
	// Another process may change the table between read and removal; then it is repeated.
	var err error
	for range readAttempts {
		if err = f.removeTable(); !errors.Is(err, unix.ERESTART) {
			break
		}
	}
	return errors.Join(err, f.removeRules(func(policyRule) bool { return false }))
}

// removeTable empties the table in one transaction, which the kernel refuses if the
// ruleset changed since it was read.
func (f *Conn) removeTable() error {
	number, err := f.Generation()
	if err != nil {
		return err
	}
	r, err := f.readRuleset(true)
	if err != nil || !r.exists {
		return err
	}
	var t transaction
	shared := false
	var chains []string
	for name := range r.chains {
		rules := r.rules[name]
		foreign := slices.ContainsFunc(rules, func(r rule) bool { return !r.owned() })
		switch {
		case !slices.Contains([]string{preroutingChain, notrackChain, defragmentChain}, name):
			shared = true
		case foreign:
			shared = true
			t.removeRules(rules)
		default:
			t.removeRules(rules)
			chains = append(chains, name)
		}
	}
	var sets []string
	for name, got := range r.sets {
		ours, err := f.removableSet(&t, name, got)
		if err != nil {
			return err
		}
		if ours {
			sets = append(sets, name)
		}
		shared = shared || !ours
	}
	for _, name := range chains {
		t.removeChain(name)
	}
	for _, name := range sets {
		t.removeSet(name)
	}
	objects, err := f.objects()
	if err != nil {
		return err
	}
	if !shared && objects == 0 {
		t.removeTable()
	}
	if err := f.commit(&t, &number); err != nil {
		return fmt.Errorf("remove table inet %s: %w", plan.TableName, err)
	}
	return nil
}

// removableSet reports whether a set is a common one without elements of other processes.
func (f *Conn) removableSet(t *transaction, name string, got setSpec) (bool, error) {
	stateless := *f
	stateless.config.Stateless = true
	specs := stateless.commonSets()
	i := slices.IndexFunc(specs, func(s setSpec) bool { return s.name == name })
	if i < 0 || specs[i].mismatch(got) != "" {
		return false, nil
	}
	foreign := false
	err := f.dumpElements(name, func(e []byte) {
		chain := verdictOf(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_DATA))
		if got.flags&unix.NFT_SET_MAP == 0 || strings.HasPrefix(chain, plan.StreamPrefix) || strings.HasPrefix(chain, plan.TargetPrefix) {
			return
		}
		end := nlmsg.Uint32BE(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_FLAGS))&unix.NFT_SET_ELEM_INTERVAL_END != 0
		foreign = foreign || !end
	})
	return !foreign, err
}

// objects counts stateful objects and flow tables, which belong to other processes.
func (f *Conn) objects() (n int, err error) {
	for _, kind := range []uint16{unix.NFT_MSG_GETOBJ, unix.NFT_MSG_GETFLOWTABLE} {
		// Attribute 1 is the table in messages of both kinds.
		err := f.list(kind, unix.NFTA_OBJ_TABLE, nil, func([]byte) { n++ })
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EOPNOTSUPP) {
			return n, fmt.Errorf("list objects of inet %s: %w", plan.TableName, err)
		}
	}
	return n, nil
}

// removeRules removes the policy rules of the data plane, with any options that they were
// installed with, except those to keep.
func (f *Conn) removeRules(keep func(policyRule) bool) error {
	var a routeBatch
	for _, family := range f.families() {
		var list []policyRule
		if err := f.listPolicyRules(family, func(r policyRule) {
			if r.owned() && !keep(r) && !slices.Contains(list, r) {
				list = append(list, r)
			}
		}); err != nil {
			return err
		}
		// The goto first: without its target the kernel would leave it unresolved.
		slices.SortStableFunc(list, func(a, b policyRule) int { return int(a.priority) - int(b.priority) })
		for _, r := range list {
			putPolicyRule(&a.Messages, unix.RTM_DELRULE, 0, r)
			a.add(RouteKey{}, unix.ENOENT, fmt.Sprintf("delete %s policy rule of priority %d", family, r.priority), netip.Addr{})
		}
	}
	return f.execute(&a).Err()
}

// RemoveOldRules removes the policy rules that were installed with other options.
func (f *Conn) RemoveOldRules() error {
	return f.removeRules(func(r policyRule) bool {
		return slices.Contains(f.commonRules(r.family), r) || r == f.targetPolicyRule(r.family, r.table)
	})
}

// ReadBase reports whether the objects that no stream and no target owns are intact. A
// problem is why nothing is forwarded.
func (f *Conn) ReadBase() (base bool, problem string, err error) {
	err = f.readConsistently("table inet "+plan.TableName, func() error {
		r, err := f.readRuleset(false)
		if err != nil {
			return err
		}
		problem, err = f.inspectBase(r)
		return err
	})
	if err != nil || problem != "" {
		return false, problem, err
	}
	base, err = f.commonRulesInstalled()
	return base, "", err
}
