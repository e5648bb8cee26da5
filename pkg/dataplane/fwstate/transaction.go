package fwstate

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// transaction gathers messages that the kernel applies atomically.
type transaction struct {
	nlmsg.Messages
	// sets is the last set id: rules of the same transaction refer to new sets by it.
	sets uint32
}

func (t *transaction) begin(kind, flags uint16) {
	t.Messages.Begin(nftMessage(kind), flags, familyInet, unix.NFNETLINK_V0, 0, 0)
}

func (t *transaction) addTable() {
	t.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	t.Text(unix.NFTA_TABLE_NAME, plan.TableName)
	t.Uint32BE(unix.NFTA_TABLE_FLAGS, 0) // reactivates a dormant table
	t.End()
}

func (t *transaction) removeTable() {
	t.begin(unix.NFT_MSG_DELTABLE, 0)
	t.Text(unix.NFTA_TABLE_NAME, plan.TableName)
	t.End()
}

func (t *transaction) addChain(c chainSpec) {
	t.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	t.Text(unix.NFTA_CHAIN_TABLE, plan.TableName)
	t.Text(unix.NFTA_CHAIN_NAME, c.name)
	if c.kind != "" {
		hook := t.BeginNested(unix.NFTA_CHAIN_HOOK)
		t.Uint32BE(unix.NFTA_HOOK_HOOKNUM, c.hook)
		t.Uint32BE(unix.NFTA_HOOK_PRIORITY, uint32(c.priority))
		t.EndNested(hook)
		t.Uint32BE(unix.NFTA_CHAIN_POLICY, c.policy)
		t.Text(unix.NFTA_CHAIN_TYPE, c.kind)
	}
	t.End()
}

func (t *transaction) removeChain(name string) {
	t.begin(unix.NFT_MSG_DELCHAIN, 0)
	t.Text(unix.NFTA_CHAIN_TABLE, plan.TableName)
	t.Text(unix.NFTA_CHAIN_NAME, name)
	t.End()
}

func (t *transaction) addRule(chain string, r ruleSpec) error {
	if len(r.comment) > plan.MaxLabel {
		return fmt.Errorf("rule %q of chain %s: a comment has at most %d bytes", r.comment, chain, plan.MaxLabel)
	}
	t.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
	t.Text(unix.NFTA_RULE_TABLE, plan.TableName)
	t.Text(unix.NFTA_RULE_CHAIN, chain)
	t.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.expressions)
	t.Bytes(unix.NFTA_RULE_USERDATA, append(append([]byte{commentType, byte(len(r.comment) + 1)}, r.comment...), 0))
	t.End()
	return nil
}

// setRules replaces the data plane's rules of a chain if they differ.
func (t *transaction) setRules(chain string, have []rule, want []ruleSpec) error {
	if sameRules(have, want) {
		return nil
	}
	t.removeRules(have)
	for _, r := range want {
		if err := t.addRule(chain, r); err != nil {
			return err
		}
	}
	return nil
}

// removeRules removes the data plane's rules.
func (t *transaction) removeRules(have []rule) {
	for _, r := range have {
		if !r.owned() {
			continue
		}
		t.begin(unix.NFT_MSG_DELRULE, 0)
		t.Text(unix.NFTA_RULE_TABLE, plan.TableName)
		t.Text(unix.NFTA_RULE_CHAIN, r.chain)
		t.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, r.handle))
		t.End()
	}
}

func (t *transaction) addSet(s setSpec) {
	t.sets++
	t.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE)
	t.Text(unix.NFTA_SET_TABLE, plan.TableName)
	t.Text(unix.NFTA_SET_NAME, s.name)
	t.Uint32BE(unix.NFTA_SET_FLAGS, s.flags)
	t.Uint32BE(unix.NFTA_SET_KEY_TYPE, s.keyType)
	t.Uint32BE(unix.NFTA_SET_KEY_LEN, s.keySize)
	if s.flags&unix.NFT_SET_MAP != 0 {
		t.Uint32BE(unix.NFTA_SET_DATA_TYPE, s.dataType)
		if s.dataType != dataVerdict {
			t.Uint32BE(unix.NFTA_SET_DATA_LEN, s.data)
		}
	}
	t.Uint32BE(unix.NFTA_SET_ID, t.sets)
	if s.size != 0 {
		desc := t.BeginNested(unix.NFTA_SET_DESC)
		t.Uint32BE(unix.NFTA_SET_DESC_SIZE, s.size)
		t.EndNested(desc)
	}
	t.Bytes(unix.NFTA_SET_USERDATA, s.userdata())
	t.End()
}

// userdata has the byte order of keys (type 0) and data (type 1) for the lists of nft, which
// shows wrong numbers without it: four bytes, 1 for host order and 2 for network order.
func (s setSpec) userdata() []byte {
	order := func(t uint32) byte {
		if t == typeMark {
			return 1
		}
		return 2
	}
	b := []byte{0, 4, order(s.keyType), 0, 0, 0}
	if s.dataType == typeMark {
		b = append(b, 1, 4, order(s.dataType), 0, 0, 0)
	}
	return b
}

func (t *transaction) removeSet(name string) {
	t.begin(unix.NFT_MSG_DELSET, 0)
	t.Text(unix.NFTA_SET_TABLE, plan.TableName)
	t.Text(unix.NFTA_SET_NAME, name)
	t.End()
}

func (t *transaction) addElements(set string, list []element) {
	putElements(&t.Messages, unix.NFT_MSG_NEWSETELEM, set, list)
}

func (t *transaction) removeElements(set string, list []element) {
	putElements(&t.Messages, unix.NFT_MSG_DELSETELEM, set, list)
}

// commit sends the transaction, unless it is empty, and waits for the result.
//
// Only the last message asks for an acknowledgement: the kernel reports errors of all, and an
// acknowledgement of each would overrun the socket.
func (f *Conn) commit(t *transaction, generation *uint32) error {
	if len(t.Starts) == 0 {
		return nil
	}
	var m nlmsg.Messages
	embrace := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	m.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, embrace...)
	if generation != nil {
		// The kernel refuses the transaction if the ruleset has another generation.
		m.Uint32BE(batchGeneration, *generation)
	}
	m.End()
	m.Append(&t.Messages)
	last := m.Starts[len(m.Starts)-1]
	m.Data[last+6] |= unix.NLM_F_ACK
	m.Begin(unix.NFNL_MSG_BATCH_END, 0, embrace...)
	m.End()
	if len(m.Data) > f.nft.SendLimit {
		return fmt.Errorf("change %d things in nftables: they take %d bytes at once, and the socket's buffer has %d: give the process CAP_NET_ADMIN, or set net.core.wmem_max to more", len(t.Starts), len(m.Data), f.nft.SendLimit)
	}
	first, err := f.nft.Send(&m)
	if err != nil {
		return fmt.Errorf("change nftables: %w", err)
	}
	f.nft.Sent += len(t.Starts)
	end := first + uint32(len(m.Starts)) - 1
	var refusals []error
	err = f.nft.Receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
		// Older sequence numbers belong to an exchange that failed.
		if h.Type != unix.NLMSG_ERROR || h.Seq-first > end-first {
			return false, nil
		}
		if err := nlmsg.ParseError(h, data); err != nil && len(refusals) < 3 {
			refusals = append(refusals, fmt.Errorf("%s: %w", describe(&m, int(h.Seq-first)), err))
		}
		// An error of the whole transaction has the sequence number of its first message.
		return h.Seq == first || h.Seq >= end-1, nil
	})
	if err = errors.Join(append(refusals, err)...); err != nil {
		return fmt.Errorf("change nftables: %w", err)
	}
	f.committed++
	return nil
}

// Transactions returns the number of committed transactions, each of which incremented the
// generation of the ruleset.
func (f *Conn) Transactions() uint32 { return f.committed }

// batchGeneration is NFNL_BATCH_GENID.
const batchGeneration = 1

// describe returns the operation of one message of a transaction.
func describe(m *nlmsg.Messages, i int) string {
	if i <= 0 || i >= len(m.Starts)-1 {
		return "transaction"
	}
	b := m.Slice(i, i+1).Data
	kind := uint16(b[4])
	what := map[uint16]string{
		unix.NFT_MSG_NEWTABLE: "add table", unix.NFT_MSG_DELTABLE: "delete table", unix.NFT_MSG_NEWCHAIN: "add chain", unix.NFT_MSG_DELCHAIN: "delete chain",
		unix.NFT_MSG_NEWRULE: "add rule to chain", unix.NFT_MSG_DELRULE: "delete rule of chain", unix.NFT_MSG_NEWSET: "add set", unix.NFT_MSG_DELSET: "delete set",
		unix.NFT_MSG_NEWSETELEM: "add elements to set", unix.NFT_MSG_DELSETELEM: "delete elements of set",
	}[kind]
	// Attribute 1 is the table in all of them; the name of the object is attribute 2 in
	// messages of rules, sets and elements, and 3 in those of chains.
	name := uint16(2)
	if kind == unix.NFT_MSG_NEWCHAIN || kind == unix.NFT_MSG_DELCHAIN {
		name = unix.NFTA_CHAIN_NAME
	}
	if kind == unix.NFT_MSG_NEWTABLE || kind == unix.NFT_MSG_DELTABLE {
		return what + " inet " + plan.TableName
	}
	return what + " inet " + plan.TableName + " " + nlmsg.Text(nlmsg.Attribute(b[nlmsg.HeaderLen+nlmsg.NFHeaderLen:], name))
}
