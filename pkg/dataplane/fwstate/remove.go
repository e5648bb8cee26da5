package fwstate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

// RemoveAll removes the common objects: base chains, common maps, the common policy rules, and the
// table unless it contains objects of another process.
func (f *Conn) RemoveAll() error {
	// Repeat the removal if another process changes the ruleset between read and commit.
	var err error
	for range readAttempts {
		if err = f.removeTable(); !errors.Is(err, unix.ERESTART) {
			break
		}
	}
	return errors.Join(err, f.removeRules(func(rtnetlink.Rule) bool { return false }))
}

// removeTable empties the table. The kernel rejects the transaction if the ruleset changed since
// it was read.
func (f *Conn) removeTable() error {
	generation, err := f.Generation()
	if err != nil {
		return err
	}
	r, err := f.readRuleset(true)
	if err != nil || !r.exists {
		return err
	}
	var t, objects transaction
	shared := false
	for name := range r.chains {
		if !slices.Contains(commonChains, name) {
			shared = true
			continue
		}
		t.removeRules(r.rules[name])
		if slices.ContainsFunc(r.rules[name], func(r rule) bool { return !r.owned() }) {
			shared = true
		} else {
			objects.removeChain(name)
		}
	}
	for name, got := range r.sets {
		removable, err := f.removableSet(name, got)
		if err != nil {
			return err
		}
		if removable {
			objects.removeSet(name)
		}
		shared = shared || !removable
	}
	// The kernel rejects the removal of referenced objects, so rules are removed first.
	t.append(&objects)
	others, err := f.objects()
	if err != nil {
		return err
	}
	if !shared && others == 0 {
		t.removeTable()
	}
	if err := f.commit(&t, &generation); err != nil {
		return fmt.Errorf("failed to remove table inet %s: %w", plan.TableName, err)
	}
	return nil
}

// removableSet reports whether a set is a common set without elements of other processes.
func (f *Conn) removableSet(name string, got setSpec) (bool, error) {
	loose := Conn{config: Config{Conntrack: ConntrackLoose}} // includes all common sets
	specs := loose.commonSets()
	i := slices.IndexFunc(specs, func(s setSpec) bool { return s.name == name })
	if i < 0 || specs[i].mismatch(got) != "" {
		return false, nil
	}
	if got.flags&unix.NFT_SET_EVAL != 0 {
		return true, nil // contains only flows
	}
	foreign := false
	err := f.dumpElements(name, func(e nlmsg.Attributes) {
		owned := strings.HasPrefix(chainOf(e), plan.StreamPrefix) || strings.HasPrefix(chainOf(e), plan.TargetPrefix)
		foreign = foreign || got.flags&unix.NFT_SET_MAP != 0 && !owned && !endsInterval(e)
	})
	return !foreign, err
}

// objects counts stateful objects and flow tables. All of them belong to other processes.
func (f *Conn) objects() (n int, err error) {
	for _, kind := range []uint16{unix.NFT_MSG_GETOBJ, unix.NFT_MSG_GETFLOWTABLE} {
		err := f.list("objects", kind, 0, "", func(nlmsg.Attributes) { n++ })
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
			return n, err
		}
	}
	return n, nil
}

// removeRules removes the data plane's policy rules, regardless of their options, unless keep
// returns true.
func (f *Conn) removeRules(keep func(rtnetlink.Rule) bool) error {
	rules, err := f.rules()
	if err != nil {
		return err
	}
	// The kernel lists rules by priority, so the goto is removed before its target. A goto without a
	// target would remain unresolved.
	var b routeBatch
	for _, r := range rules {
		if ownedRule(r) && !keep(r) {
			b.add(RouteKey{r.Table, r.Family}, r.Delete())
		}
	}
	return f.execute(b).Err()
}

// RemoveOldRules removes policy rules that an earlier process installed with different options.
func (f *Conn) RemoveOldRules() error {
	return f.removeRules(func(r rtnetlink.Rule) bool {
		// Nearly all rules are target rules: compare with the target rule first.
		return r == f.targetPolicyRule(RouteKey{r.Table, r.Family}) || slices.Contains(f.commonRules(r.Family), r)
	})
}
