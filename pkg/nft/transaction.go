package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/google/nftables/expr"
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
func (transaction *Transaction) Len() int { return transaction.messages.Len() }

// Size returns the number of bytes of the messages.
func (transaction *Transaction) Size() int { return len(transaction.messages.Data) }

// begin starts a message for the object called name, or for the table if name is empty.
func (transaction *Transaction) begin(operation string, kind, flags, attribute uint16, name string) {
	transaction.steps = append(transaction.steps, step{operation, transaction.Table.Family, transaction.Table.Name, name})
	transaction.messages.Begin(Message(kind), flags, transaction.Table.Family, unix.NFNETLINK_V0, 0, 0)
	transaction.messages.Text(unix.NFTA_TABLE_NAME, transaction.Table.Name)
	if name != "" {
		transaction.messages.Text(attribute, name)
	}
}

// Append appends a transaction. Its new sets must have different IDs, see [Transaction.Sets].
func (transaction *Transaction) Append(more *Transaction) {
	transaction.messages.Append(&more.messages)
	transaction.steps = append(transaction.steps, more.steps...)
	transaction.Err = errors.Join(transaction.Err, more.Err)
}

// AddTable adds the table, or activates a dormant one.
func (transaction *Transaction) AddTable() {
	transaction.begin("add table", unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, "")
	// Clear the dormant flag.
	transaction.messages.Uint32BE(unix.NFTA_TABLE_FLAGS, 0)
}

// DeleteTable deletes the table with its content.
func (transaction *Transaction) DeleteTable() {
	transaction.begin("delete table", unix.NFT_MSG_DELTABLE, 0, 0, "")
}

// AddChain adds a chain without rules, or sets the policy of an existing one.
func (transaction *Transaction) AddChain(chain Chain) {
	transaction.begin("add chain", unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, chain.Name)
	if chain.Type == "" {
		return
	}
	// Without a hook the chain is the target of a jump or goto.
	transaction.messages.Nested(unix.NFTA_CHAIN_HOOK, func() {
		transaction.messages.Uint32BE(unix.NFTA_HOOK_HOOKNUM, chain.Hook)
		transaction.messages.Uint32BE(unix.NFTA_HOOK_PRIORITY, uint32(chain.Priority))
		if chain.Device != "" {
			transaction.messages.Text(unix.NFTA_HOOK_DEV, chain.Device)
		}
	})
	transaction.messages.Uint32BE(unix.NFTA_CHAIN_POLICY, chain.Policy)
	transaction.messages.Text(unix.NFTA_CHAIN_TYPE, chain.Type)
}

// DeleteChain deletes a chain, which no rule or element may reference.
func (transaction *Transaction) DeleteChain(name string) {
	transaction.begin("delete chain", unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name)
}

// AddRules appends rules to a chain.
func (transaction *Transaction) AddRules(chain string, rules ...Rule) {
	for _, rule := range rules {
		// Without this rule the transaction would install a wrong ruleset, so Commit fails.
		transaction.Err = errors.Join(transaction.Err, rule.err)
		transaction.begin("add rule to chain", unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND,
			unix.NFTA_RULE_CHAIN, chain)
		transaction.messages.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, rule.encoded)
		if rule.Comment != "" {
			transaction.messages.Bytes(unix.NFTA_RULE_USERDATA, userdata.AppendString(nil, commentType, rule.Comment))
		}
	}
}

// FlushChain deletes the rules of a chain.
func (transaction *Transaction) FlushChain(name string) {
	transaction.begin("flush chain", unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, name)
}

// DeleteRule deletes a listed rule.
func (transaction *Transaction) DeleteRule(rule Rule) {
	transaction.begin("delete rule of chain", unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, rule.Chain)
	transaction.messages.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, rule.Handle))
}

// AddSet adds a set with its elements.
func (transaction *Transaction) AddSet(set Set) {
	transaction.Sets++
	messages := &transaction.messages
	transaction.begin("add set", unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME, set.Name)
	messages.Uint32BE(unix.NFTA_SET_FLAGS, set.Flags)
	messages.Uint32BE(unix.NFTA_SET_KEY_TYPE, set.KeyType)
	messages.Uint32BE(unix.NFTA_SET_KEY_LEN, set.KeyLen)
	if set.Flags&unix.NFT_SET_MAP != 0 {
		messages.Uint32BE(unix.NFTA_SET_DATA_TYPE, set.DataType)
		if set.DataType != TypeVerdict {
			messages.Uint32BE(unix.NFTA_SET_DATA_LEN, set.DataLen)
		}
	}
	messages.Uint32BE(unix.NFTA_SET_ID, transaction.Sets)
	if set.Size != 0 {
		messages.Nested(unix.NFTA_SET_DESC, func() { messages.Uint32BE(unix.NFTA_SET_DESC_SIZE, set.Size) })
	}
	if set.Timeout != 0 {
		messages.Uint64BE(unix.NFTA_SET_TIMEOUT, uint64(set.Timeout.Milliseconds()))
	}
	// nft needs the byte order of keys and data to list numbers correctly.
	order := userdata.AppendUint32(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, byteOrder(set.KeyType))
	if set.Flags&unix.NFT_SET_MAP != 0 && set.DataType != TypeVerdict {
		order = userdata.AppendUint32(order, userdata.NFTNL_UDATA_SET_DATABYTEORDER, byteOrder(set.DataType))
	}
	messages.Bytes(unix.NFTA_SET_USERDATA, order)
	transaction.AddElements(set.Name, set.Elements)
}

// byteOrder returns the byte order of a type in user data: 1 is host, 2 network byte order.
func byteOrder(typ uint32) uint32 {
	if typ == TypeMark {
		return 1
	}
	return 2
}

// DeleteSet deletes a set with its elements.
func (transaction *Transaction) DeleteSet(name string) {
	transaction.begin("delete set", unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name)
}

// FlushSet deletes all elements of a set.
func (transaction *Transaction) FlushSet(name string) {
	transaction.begin("flush set", unix.NFT_MSG_DELSETELEM, 0, unix.NFTA_SET_ELEM_LIST_SET, name)
}

// AddTimeouts adds timeouts. The kernel keeps existing ones of the same name.
func (transaction *Transaction) AddTimeouts(list ...Timeouts) {
	for _, timeouts := range list {
		transaction.begin("add ct timeout", unix.NFT_MSG_NEWOBJ, unix.NLM_F_CREATE, unix.NFTA_OBJ_NAME, timeouts.Name)
		transaction.messages.Uint32BE(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_CT_TIMEOUT)
		transaction.messages.Nested(unix.NFTA_OBJ_DATA, func() {
			transaction.messages.Bytes(expr.NFTA_CT_TIMEOUT_L4PROTO, []byte{timeouts.Protocol})
			transaction.messages.Nested(expr.NFTA_CT_TIMEOUT_DATA, func() {
				for state, seconds := range timeouts.Seconds {
					transaction.messages.Uint32BE(state, seconds)
				}
			})
		})
	}
}

// DeleteTimeouts deletes timeouts, which no rule may reference.
func (transaction *Transaction) DeleteTimeouts(name string) {
	transaction.begin("delete ct timeout", unix.NFT_MSG_DELOBJ, 0, unix.NFTA_OBJ_NAME, name)
	transaction.messages.Uint32BE(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_CT_TIMEOUT)
}

// AddElements adds elements to a set.
func (transaction *Transaction) AddElements(set string, list []Element) {
	transaction.putElements("add elements to set", unix.NFT_MSG_NEWSETELEM, set, list)
}

// DeleteElements deletes elements by their keys.
func (transaction *Transaction) DeleteElements(set string, list []Element) {
	transaction.putElements("delete elements of set", unix.NFT_MSG_DELSETELEM, set, list)
}

// listRoom limits the elements of one message: the length of their attribute has 16 bits, and the
// longest element takes less than the difference.
const listRoom = math.MaxUint16 - 768

func (transaction *Transaction) putElements(operation string, kind uint16, set string, list []Element) {
	for len(list) > 0 {
		flags := uint16(unix.NLM_F_CREATE)
		if transaction.New {
			flags |= unix.NLM_F_EXCL
		}
		if transaction.Echo {
			flags |= unix.NLM_F_ECHO
		}
		transaction.begin(operation, kind, flags, unix.NFTA_SET_ELEM_LIST_SET, set)
		transaction.messages.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for begin := len(transaction.messages.Data); len(list) > 0 &&
				len(transaction.messages.Data)-begin < listRoom; list = list[1:] {
				transaction.messages.Nested(unix.NFTA_LIST_ELEM, func() { putElement(&transaction.messages, list[0]) })
			}
		})
	}
}

func putElement(messages *nlmsg.Messages, element Element) {
	messages.Nested(unix.NFTA_SET_ELEM_KEY, func() { messages.Bytes(unix.NFTA_DATA_VALUE, element.Key) })
	if element.End {
		messages.Uint32BE(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	switch {
	case element.Chain != "":
		messages.Nested(unix.NFTA_SET_ELEM_DATA, func() {
			messages.Nested(unix.NFTA_DATA_VERDICT, func() {
				messages.Uint32BE(unix.NFTA_VERDICT_CODE, gotoCode)
				messages.Text(unix.NFTA_VERDICT_CHAIN, element.Chain)
			})
		})
	case element.Data != nil:
		messages.Nested(unix.NFTA_SET_ELEM_DATA, func() { messages.Bytes(unix.NFTA_DATA_VALUE, element.Data) })
	}
	if element.Timeout != 0 {
		messages.Uint64BE(unix.NFTA_SET_ELEM_TIMEOUT, uint64(element.Timeout.Milliseconds()))
	}
}

// batchGeneration is NFNL_BATCH_GENID.
const batchGeneration = 1

// Fits reports whether a transaction fits the send buffer: its batch adds 56 bytes, the kernel 32.
func (conn *Conn) Fits(transaction *Transaction) bool { return transaction.Size()+88 <= conn.SendLimit }

// Commit sends a transaction, unless it is empty, and waits for the result. With a generation, the
// kernel rejects the transaction with ERESTART if the ruleset has another one. A rejection of a
// message is an [*Error], for the first of them.
func (conn *Conn) Commit(transaction *Transaction, generation *uint32) error {
	if transaction.Len() == 0 || transaction.Err != nil {
		return transaction.Err
	}
	var messages nlmsg.Messages
	frame := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	messages.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, frame...)
	if generation != nil {
		messages.Uint32BE(batchGeneration, *generation)
	}
	messages.Append(&transaction.messages)
	// Only the last message requests an acknowledgement: the kernel reports errors for every
	// message, and an acknowledgement of each would overrun the receive buffer.
	messages.SetFlags(unix.NLM_F_ACK)
	messages.Begin(unix.NFNL_MSG_BATCH_END, 0, frame...)
	// The kernel would reject the message with EMSGSIZE, which names no remedy.
	if !conn.Fits(transaction) {
		return fmt.Errorf("failed to change %d nftables objects: the transaction has %d bytes, and the socket's buffer "+
			"has %d; give the process CAP_NET_ADMIN, or set net.core.wmem_max to more", transaction.Len(), len(messages.Data),
			conn.SendLimit)
	}
	var rejection error
	err := conn.Transact(&messages, func(index int, err error) {
		switch {
		case rejection != nil:
		case index > 0 && index <= len(transaction.steps):
			// Message 0 begins the batch.
			step := transaction.steps[index-1]
			object := strings.TrimSpace(Table{Family: step.family, Name: step.table}.String() + " " + step.name)
			rejection = &Error{Operation: step.operation, Object: object, Err: err}
			// Index 0 is the batch itself, such as ERESTART for its generation.
		default:
			rejection = fmt.Errorf("failed to change nftables: %w", err)
		}
	}, conn.report)
	if err = errors.Join(rejection, err); err != nil {
		return err
	}
	conn.Transactions++
	conn.Messages += uint32(transaction.Len())
	return nil
}

// report passes the elements of an echoed message on.
func (conn *Conn) report(kind uint16, data []byte) {
	added, deleted := kind == Message(unix.NFT_MSG_NEWSETELEM), kind == Message(unix.NFT_MSG_DELSETELEM)
	if conn.Echo == nil || !added && !deleted {
		return
	}
	attributes := nlmsg.Netfilter(data)
	set := attributes.Text(unix.NFTA_SET_ELEM_LIST_SET)
	for _, attributes := range attributes.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
		conn.Echo(set, parseElement(attributes), deleted)
	}
}
