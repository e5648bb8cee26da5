package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
)

// Transaction collects messages that the kernel applies atomically.
type Transaction struct {
	// Table is the table of the next messages.
	Table Table
	// New makes the kernel reject the next elements to add if they exist.
	New bool
	// Echo makes the kernel report the next elements to [Conn.Echo].
	Echo bool
	// Sets is the ID of the last new set. The kernel requires one for each.
	Sets uint32
	// Err holds the encoding errors of rules.
	Err error

	messages nlmsg.Messages
	// steps holds the operation of each message, for errors.
	steps []step
}

// step is an operation and its object in a table; the table itself if name is empty.
type step struct {
	operation string
	family    byte
	table     string
	name      string
}

// Error is the kernel's rejection of a message of a transaction.
type Error struct {
	// Operation and Object name the message, such as "add chain" and "inet vipgate output".
	Operation, Object string
	Err               error
}

func (e *Error) Error() string {
	return "failed to " + e.Operation + " " + e.Object + ": " + e.Err.Error()
}

// Unwrap returns the kernel's error.
func (e *Error) Unwrap() error { return e.Err }

// Len returns the number of messages.
func (t *Transaction) Len() int { return t.messages.Len() }

// begin starts a message for the object called name, or for the table if name is empty.
func (t *Transaction) begin(operation string, kind, flags, attribute uint16, name string) {
	t.steps = append(t.steps, step{operation, t.Table.Family, t.Table.Name, name})
	t.messages.Begin(Message(kind), flags, t.Table.Family, unix.NFNETLINK_V0, 0, 0)
	t.messages.Text(unix.NFTA_TABLE_NAME, t.Table.Name)
	if name != "" {
		t.messages.Text(attribute, name)
	}
}

// Append appends a transaction. Its new sets must have different IDs, see [Transaction.Sets].
func (t *Transaction) Append(more *Transaction) {
	t.messages.Append(&more.messages)
	t.steps = append(t.steps, more.steps...)
	t.Err = errors.Join(t.Err, more.Err)
}

// AddTable adds the table, or activates a dormant one.
func (t *Transaction) AddTable() {
	t.begin("add table", unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, "")
	t.messages.Uint32BE(unix.NFTA_TABLE_FLAGS, 0)
}

// DeleteTable deletes the table with its content.
func (t *Transaction) DeleteTable() { t.begin("delete table", unix.NFT_MSG_DELTABLE, 0, 0, "") }

// AddChain adds a chain without rules, or sets the policy of an existing one.
func (t *Transaction) AddChain(c Chain) {
	t.begin("add chain", unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, c.Name)
	if c.Type == "" {
		return
	}
	t.messages.Nested(unix.NFTA_CHAIN_HOOK, func() {
		t.messages.Uint32BE(unix.NFTA_HOOK_HOOKNUM, c.Hook)
		t.messages.Uint32BE(unix.NFTA_HOOK_PRIORITY, uint32(c.Priority))
		if c.Device != "" {
			t.messages.Text(unix.NFTA_HOOK_DEV, c.Device)
		}
	})
	t.messages.Uint32BE(unix.NFTA_CHAIN_POLICY, c.Policy)
	t.messages.Text(unix.NFTA_CHAIN_TYPE, c.Type)
}

// DeleteChain deletes a chain, which no rule or element may reference.
func (t *Transaction) DeleteChain(name string) {
	t.begin("delete chain", unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name)
}

// AddRules appends rules to a chain.
func (t *Transaction) AddRules(chain string, rules ...Rule) {
	for _, r := range rules {
		t.Err = errors.Join(t.Err, r.err)
		t.begin("add rule to chain", unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFTA_RULE_CHAIN, chain)
		t.messages.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.encoded)
		if r.Comment != "" {
			t.messages.Bytes(unix.NFTA_RULE_USERDATA, userdata.AppendString(nil, commentType, r.Comment))
		}
	}
}

// DeleteRule deletes a listed rule.
func (t *Transaction) DeleteRule(r Rule) {
	t.begin("delete rule of chain", unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, r.Chain)
	t.messages.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, r.Handle))
}

// AddSet adds a set with its elements.
func (t *Transaction) AddSet(s Set) {
	t.Sets++
	m := &t.messages
	t.begin("add set", unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME, s.Name)
	m.Uint32BE(unix.NFTA_SET_FLAGS, s.Flags)
	m.Uint32BE(unix.NFTA_SET_KEY_TYPE, s.KeyType)
	m.Uint32BE(unix.NFTA_SET_KEY_LEN, s.KeyLen)
	if s.Flags&unix.NFT_SET_MAP != 0 {
		m.Uint32BE(unix.NFTA_SET_DATA_TYPE, s.DataType)
		if s.DataType != TypeVerdict {
			m.Uint32BE(unix.NFTA_SET_DATA_LEN, s.DataLen)
		}
	}
	m.Uint32BE(unix.NFTA_SET_ID, t.Sets)
	if s.Size != 0 {
		m.Nested(unix.NFTA_SET_DESC, func() { m.Uint32BE(unix.NFTA_SET_DESC_SIZE, s.Size) })
	}
	if s.Timeout != 0 {
		m.Uint64BE(unix.NFTA_SET_TIMEOUT, uint64(s.Timeout.Milliseconds()))
	}
	// nft needs the byte order of keys and data to list numbers correctly.
	order := userdata.AppendUint32(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, byteOrder(s.KeyType))
	if s.Flags&unix.NFT_SET_MAP != 0 && s.DataType != TypeVerdict {
		order = userdata.AppendUint32(order, userdata.NFTNL_UDATA_SET_DATABYTEORDER, byteOrder(s.DataType))
	}
	m.Bytes(unix.NFTA_SET_USERDATA, order)
	t.AddElements(s.Name, s.Elements)
}

// byteOrder returns the byte order of a type in user data: 1 is host, 2 network byte order.
func byteOrder(typ uint32) uint32 {
	if typ == TypeMark {
		return 1
	}
	return 2
}

// DeleteSet deletes a set with its elements.
func (t *Transaction) DeleteSet(name string) {
	t.begin("delete set", unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name)
}

// FlushSet deletes all elements of a set.
func (t *Transaction) FlushSet(name string) {
	t.begin("flush set", unix.NFT_MSG_DELSETELEM, 0, unix.NFTA_SET_ELEM_LIST_SET, name)
}

// AddElements adds elements to a set.
func (t *Transaction) AddElements(set string, list []Element) {
	t.putElements("add elements to set", unix.NFT_MSG_NEWSETELEM, set, list)
}

// DeleteElements deletes elements by their keys.
func (t *Transaction) DeleteElements(set string, list []Element) {
	t.putElements("delete elements of set", unix.NFT_MSG_DELSETELEM, set, list)
}

// listRoom limits the elements of one message: the length of their attribute has 16 bits, and the
// longest element takes less than the difference.
const listRoom = math.MaxUint16 - 768

func (t *Transaction) putElements(operation string, kind uint16, set string, list []Element) {
	for len(list) > 0 {
		flags := uint16(unix.NLM_F_CREATE)
		if t.New {
			flags |= unix.NLM_F_EXCL
		}
		if t.Echo {
			flags |= unix.NLM_F_ECHO
		}
		t.begin(operation, kind, flags, unix.NFTA_SET_ELEM_LIST_SET, set)
		t.messages.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for begin := len(t.messages.Data); len(list) > 0 && len(t.messages.Data)-begin < listRoom; list = list[1:] {
				t.messages.Nested(unix.NFTA_LIST_ELEM, func() { putElement(&t.messages, list[0]) })
			}
		})
	}
}

func putElement(m *nlmsg.Messages, e Element) {
	m.Nested(unix.NFTA_SET_ELEM_KEY, func() { m.Bytes(unix.NFTA_DATA_VALUE, e.Key) })
	if e.End {
		m.Uint32BE(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	switch {
	case e.Chain != "":
		m.Nested(unix.NFTA_SET_ELEM_DATA, func() {
			m.Nested(unix.NFTA_DATA_VERDICT, func() {
				m.Uint32BE(unix.NFTA_VERDICT_CODE, gotoCode)
				m.Text(unix.NFTA_VERDICT_CHAIN, e.Chain)
			})
		})
	case e.Data != nil:
		m.Nested(unix.NFTA_SET_ELEM_DATA, func() { m.Bytes(unix.NFTA_DATA_VALUE, e.Data) })
	}
	if e.Timeout != 0 {
		m.Uint64BE(unix.NFTA_SET_ELEM_TIMEOUT, uint64(e.Timeout.Milliseconds()))
	}
}

// batchGeneration is NFNL_BATCH_GENID.
const batchGeneration = 1

// Commit sends a transaction, unless it is empty, and waits for the result. With a generation, the
// kernel rejects the transaction with ERESTART if the ruleset has another one. A rejection of a
// message is an [*Error], for the first of them.
func (c *Conn) Commit(t *Transaction, generation *uint32) error {
	if t.Len() == 0 || t.Err != nil {
		return t.Err
	}
	var m nlmsg.Messages
	frame := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	m.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, frame...)
	if generation != nil {
		m.Uint32BE(batchGeneration, *generation)
	}
	m.Append(&t.messages)
	// Only the last message requests an acknowledgement: the kernel reports errors for every
	// message, and an acknowledgement of each would overrun the receive buffer.
	m.SetFlags(unix.NLM_F_ACK)
	m.Begin(unix.NFNL_MSG_BATCH_END, 0, frame...)
	if len(m.Data) > c.SendLimit {
		return fmt.Errorf("failed to change %d nftables objects: the transaction has %d bytes, and the socket's buffer "+
			"has %d; give the process CAP_NET_ADMIN, or set net.core.wmem_max to more", t.Len(), len(m.Data), c.SendLimit)
	}
	var rejection error
	err := c.Transact(&m, func(i int, err error) {
		switch {
		case rejection != nil:
		case i > 0 && i <= len(t.steps):
			s := t.steps[i-1]
			object := strings.TrimSpace(Table{Family: s.family, Name: s.table}.String() + " " + s.name)
			rejection = &Error{Operation: s.operation, Object: object, Err: err}
		default:
			rejection = fmt.Errorf("failed to change nftables: %w", err)
		}
	}, c.report)
	if err = errors.Join(rejection, err); err != nil {
		return err
	}
	c.Transactions++
	c.Messages += uint32(t.Len())
	return nil
}

// report passes the elements of an echoed message on.
func (c *Conn) report(kind uint16, data []byte) {
	added, deleted := kind == Message(unix.NFT_MSG_NEWSETELEM), kind == Message(unix.NFT_MSG_DELSETELEM)
	if c.Echo == nil || !added && !deleted {
		return
	}
	b := nlmsg.Netfilter(data)
	set := b.Text(unix.NFTA_SET_ELEM_LIST_SET)
	for _, e := range b.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
		c.Echo(set, parseElement(e), deleted)
	}
}
