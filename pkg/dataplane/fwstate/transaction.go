package fwstate

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
)

// transaction collects messages that the kernel applies atomically.
type transaction struct {
	nlmsg.Messages
	// steps holds the operation of each message, for errors.
	steps []step
	// table is the table name in all messages; "" is the data plane's table.
	table string
	// sets is the last set ID. The kernel requires an ID for each new set.
	sets uint32
	// err is the encoding error of a rule.
	err error
}

// step is an operation and the name of its object, "" for the table.
type step struct{ operation, name string }

// begin starts a message for the object called name, or for the table if name is empty.
func (t *transaction) begin(operation string, kind, flags, attribute uint16, name string) {
	t.steps = append(t.steps, step{operation, name})
	t.Messages.Begin(nftMessage(kind), flags, familyInet, unix.NFNETLINK_V0, 0, 0)
	t.Text(tableAttribute, cmp.Or(t.table, plan.TableName))
	if name != "" {
		t.Text(attribute, name)
	}
}

func (t *transaction) append(more *transaction) {
	t.Messages.Append(&more.Messages)
	t.steps = append(t.steps, more.steps...)
	t.err = errors.Join(t.err, more.err)
}

func (t *transaction) addTable() {
	t.begin("add table", unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, "")
	t.Uint32BE(unix.NFTA_TABLE_FLAGS, 0) // reactivates a dormant table
}

func (t *transaction) removeTable() { t.begin("delete table", unix.NFT_MSG_DELTABLE, 0, 0, "") }

func (t *transaction) addChain(c chainSpec) {
	t.begin("add chain", unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, c.name)
	if c.kind == "" {
		return
	}
	t.Nested(unix.NFTA_CHAIN_HOOK, func() {
		t.Uint32BE(unix.NFTA_HOOK_HOOKNUM, c.hook)
		t.Uint32BE(unix.NFTA_HOOK_PRIORITY, uint32(c.priority))
	})
	t.Uint32BE(unix.NFTA_CHAIN_POLICY, c.policy)
	t.Text(unix.NFTA_CHAIN_TYPE, c.kind)
}

func (t *transaction) removeChain(name string) {
	t.begin("delete chain", unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name)
}

func (t *transaction) addRules(chain string, rules ...ruleSpec) {
	for _, r := range rules {
		t.err = errors.Join(t.err, r.err)
		t.begin("add rule to chain", unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFTA_RULE_CHAIN, chain)
		t.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.expressions)
		t.Bytes(unix.NFTA_RULE_USERDATA, userdata.AppendString(nil, commentType, r.comment))
	}
}

// setRules replaces the data plane's rules of a chain if they differ.
func (t *transaction) setRules(chain string, have []rule, want ...ruleSpec) {
	if !sameRules(have, want) {
		t.removeRules(have)
		t.addRules(chain, want...)
	}
}

// removeRules removes the data plane's rules.
func (t *transaction) removeRules(have []rule) {
	for _, r := range have {
		if r.owned() {
			t.begin("delete rule of chain", unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, r.chain)
			t.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, r.handle))
		}
	}
}

func (t *transaction) addSet(s setSpec) {
	t.sets++
	t.begin("add set", unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME, s.name)
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
		t.Nested(unix.NFTA_SET_DESC, func() { t.Uint32BE(unix.NFTA_SET_DESC_SIZE, s.size) })
	}
	// nft needs the byte order of keys and data to list numbers correctly.
	order := userdata.AppendUint32(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, byteOrder(s.keyType))
	if s.dataType == typeMark {
		order = userdata.AppendUint32(order, userdata.NFTNL_UDATA_SET_DATABYTEORDER, byteOrder(s.dataType))
	}
	t.Bytes(unix.NFTA_SET_USERDATA, order)
}

// byteOrder returns the byte order of a type in user data: 1 is host, 2 network byte order.
func byteOrder(typ uint32) uint32 {
	if typ == typeMark {
		return 1
	}
	return 2
}

func (t *transaction) removeSet(name string) {
	t.begin("delete set", unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name)
}

// batchGeneration is NFNL_BATCH_GENID.
const batchGeneration = 1

// commit sends the transaction, unless it is empty, and waits for the result. With a generation
// the kernel rejects the transaction if the ruleset generation differs.
func (f *Conn) commit(t *transaction, generation *uint32) error {
	if t.Len() == 0 || t.err != nil {
		return t.err
	}
	var m nlmsg.Messages
	embrace := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	m.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, embrace...)
	if generation != nil {
		m.Uint32BE(batchGeneration, *generation)
	}
	m.Append(&t.Messages)
	// Only the last message requests an acknowledgement: the kernel reports errors for every
	// message, and an acknowledgement of each would overrun the receive buffer.
	m.SetFlags(unix.NLM_F_ACK)
	m.Begin(unix.NFNL_MSG_BATCH_END, 0, embrace...)
	if len(m.Data) > f.nft.SendLimit {
		return fmt.Errorf("failed to change %d nftables objects: they take %d bytes at once, and the socket's buffer "+
			"has %d; give the process CAP_NET_ADMIN, or set net.core.wmem_max to more", t.Len(), len(m.Data), f.nft.SendLimit)
	}
	var rejections []error
	err := f.nft.Transact(&m, func(i int, err error) {
		if i > 0 && i <= len(t.steps) {
			err = fmt.Errorf("%s inet %s %s: %w", t.steps[i-1].operation, plan.TableName, t.steps[i-1].name, err)
		}
		if len(rejections) < 3 {
			rejections = append(rejections, err)
		}
	}, f.reported.add)
	if err = errors.Join(append(rejections, err)...); err != nil {
		return fmt.Errorf("failed to change nftables: %w", err)
	}
	f.transactions++
	f.messages += uint32(t.Len())
	return nil
}
