package fwstate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

// removeAttempts limits the repetitions while another process changes the ruleset.
const removeAttempts = 10

// RemoveAll removes the common objects: base chains, common maps, the common policy rules, and the
// table unless it contains objects of another process.
func (f *Conn) RemoveAll() error {
	// Repeat the removal if another process changes the ruleset between read and commit.
	var err error
	for range removeAttempts {
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
	if err != nil || !r.Exists {
		return err
	}
	t, objects := newTransaction(), newTransaction()
	shared := false
	for name := range r.Chains {
		if !slices.Contains(commonChains, name) {
			shared = true
			continue
		}
		deleteRules(t, r.Rules[name])
		if slices.ContainsFunc(r.Rules[name], func(r nft.Rule) bool { return !owned(r) }) {
			shared = true
		} else {
			objects.DeleteChain(name)
		}
	}
	for name, got := range r.Sets {
		removable, err := f.removableSet(name, got)
		if err != nil {
			return err
		}
		if removable {
			objects.DeleteSet(name)
		}
		shared = shared || !removable
	}
	// The kernel rejects the removal of referenced objects, so rules are removed first.
	t.Append(objects)
	others, err := f.objects()
	if err != nil {
		return err
	}
	if !shared && others == 0 {
		t.DeleteTable()
	}
	if err := f.nft.Commit(t, &generation); err != nil {
		return fmt.Errorf("failed to remove table inet %s: %w", plan.TableName, err)
	}
	return nil
}

// removableSet reports whether a set is a common set without elements of other processes.
func (f *Conn) removableSet(name string, got nft.Set) (bool, error) {
	specs := Config{Conntrack: ConntrackLoose}.commonSets() // all of them
	i := slices.IndexFunc(specs, func(s nft.Set) bool { return s.Name == name })
	if i < 0 || specs[i].Mismatch(got) != "" {
		return false, nil
	}
	if got.Flags&unix.NFT_SET_EVAL != 0 {
		return true, nil // contains only flows
	}
	foreign := false
	err := f.elements(name, func(e nft.Element) {
		owned := strings.HasPrefix(e.Chain, plan.StreamPrefix) || strings.HasPrefix(e.Chain, plan.TargetPrefix)
		foreign = foreign || got.Flags&unix.NFT_SET_MAP != 0 && !owned && !e.End
	})
	return !foreign, err
}

// objects counts stateful objects and flow tables. All of them belong to other processes.
func (f *Conn) objects() (n int, err error) {
	for _, kind := range []uint16{unix.NFT_MSG_GETOBJ, unix.NFT_MSG_GETFLOWTABLE} {
		err := f.nft.List(inet, kind, 0, "", func(nlmsg.Attributes) { n++ })
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOENT) {
			return n, err
		}
	}
	return n, nil
}
