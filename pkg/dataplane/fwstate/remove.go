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
func (conn *Conn) RemoveAll() error {
	// Repeat the removal if another process changes the ruleset between read and commit, or has rules
	// that use the timeouts (EBUSY), which then stay.
	var err error
	for range removeAttempts {
		if err = conn.removeTable(!errors.Is(err, unix.EBUSY)); err == nil {
			break
		}
	}
	return errors.Join(err, conn.removeRules(func(rtnetlink.Rule) bool { return false }))
}

// removeTable empties the table. The kernel rejects that if the ruleset changed since it was read.
func (conn *Conn) removeTable(timeouts bool) error {
	// The generation precedes the read, so that the kernel rejects a removal of objects added since.
	generation, err := conn.Generation()
	if err != nil {
		return err
	}
	content, err := conn.readRuleset(true)
	if err != nil || !content.Exists {
		return err
	}
	transaction, objects := newTransaction(), newTransaction()
	shared := false
	for name := range content.Chains {
		if !slices.Contains(commonChains, name) {
			shared = true
			continue
		}
		deleteRules(transaction, content.Rules[name])
		// A chain with rules of another process stays, and so does the table.
		if slices.ContainsFunc(content.Rules[name], func(content nft.Rule) bool { return !owned(content) }) {
			shared = true
		} else {
			objects.DeleteChain(name)
		}
	}
	for name, got := range content.Sets {
		removable, err := conn.removableSet(name, got)
		if err != nil {
			return err
		}
		if removable {
			objects.DeleteSet(name)
		}
		shared = shared || !removable
	}
	// The kernel rejects the removal of referenced objects, so rules are removed first.
	transaction.Append(objects)
	// The kernel deletes a table with all its objects, also the objects of other processes.
	others, err := conn.objects(transaction, timeouts)
	if err != nil {
		return err
	}
	if !shared && others == 0 {
		transaction.DeleteTable()
	}
	if err := conn.nft.Commit(transaction, &generation); err != nil {
		return fmt.Errorf("failed to remove table inet %s: %w", plan.TableName, err)
	}
	return nil
}

// removableSet reports whether a set is a common set without elements of other processes.
func (conn *Conn) removableSet(name string, got nft.Set) (bool, error) {
	specs := Config{Conntrack: ConntrackLoose}.commonSets() // all of them
	index := slices.IndexFunc(specs, func(set nft.Set) bool { return set.Name == name })
	if index < 0 || specs[index].Mismatch(got) != "" {
		return false, nil
	}
	if got.Flags&unix.NFT_SET_EVAL != 0 {
		return true, nil // contains only flows
	}
	foreign := false
	err := conn.nft.elements(name, func(element nft.Element) {
		owned := strings.HasPrefix(element.Chain, plan.StreamPrefix) || strings.HasPrefix(element.Chain, plan.TargetPrefix)
		foreign = foreign || got.Flags&unix.NFT_SET_MAP != 0 && !owned && !element.End
	})
	return !foreign, err
}

// objects deletes the timeouts of checks. It counts the other stateful objects and the flow tables,
// which belong to other processes.
func (conn *Conn) objects(transaction *nft.Transaction, timeouts bool) (count int, err error) {
	for _, kind := range []uint16{unix.NFT_MSG_GETOBJ, unix.NFT_MSG_GETFLOWTABLE} {
		err := conn.nft.List(inet, kind, 0, "", func(object nlmsg.Attributes) {
			name := object.Text(unix.NFTA_OBJ_NAME)
			if timeouts && object.Uint32BE(unix.NFTA_OBJ_TYPE) == unix.NFT_OBJECT_CT_TIMEOUT &&
				slices.ContainsFunc(checkTimeouts, func(own nft.Timeouts) bool { return own.Name == name }) {
				transaction.DeleteTimeouts(name)
			} else {
				count++
			}
		})
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOENT) {
			return count, err
		}
	}
	return count, nil
}
