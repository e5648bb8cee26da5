package nft

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
)

// Conn is a netfilter socket in the network namespace of the thread that called Dial. It is not
// safe for concurrent use.
type Conn struct {
	*nlmsg.Socket
	// Echo receives the elements that a transaction with [Echo] changed, in order.
	Echo func(set string, e Element, deleted bool)
	// Transactions counts committed transactions, Messages their messages.
	Transactions, Messages uint32
}

// Dial opens a socket.
func Dial() (*Conn, error) {
	socket, err := nlmsg.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	return &Conn{Socket: socket}, nil
}

// Message returns the netlink message type of an nftables message.
func Message(kind uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | kind }

// Generation returns the generation ID of the ruleset, which every transaction increments.
func (conn *Conn) Generation() (uint32, error) {
	var request nlmsg.Messages
	request.Begin(Message(unix.NFT_MSG_GETGEN), 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	data, err := conn.Get(&request)
	if err != nil {
		return 0, fmt.Errorf("failed to read the generation of the nftables ruleset: %w", err)
	}
	return nlmsg.Netfilter(data).Uint32BE(unix.NFTA_GEN_ID), nil
}

// readAttempts limits the repetitions of a list that another process interrupts.
const readAttempts = 10

// List calls each for every object of a kind in a table, filtered by name unless it is empty. The
// kernel may return ENOENT for a missing table or name.
func (conn *Conn) List(table Table, kind, attribute uint16, name string, each func(nlmsg.Attributes)) error {
	var objects [][]byte
	err := nlmsg.ErrInterrupted
	// Parse after the dump: transactions of other processes interrupt a faster reader less often.
	for attempt := 0; attempt < readAttempts && errors.Is(err, nlmsg.ErrInterrupted); attempt++ {
		objects = nil
		_, err = conn.Socket.Dump(request(table, kind, unix.NLM_F_DUMP, attribute, name), func(data []byte) {
			objects = append(objects, slices.Clone(data))
		})
	}
	// The kernel counts only the rules of the table to resume a dump, so transactions of other tables,
	// which may be more frequent, do not change the list. One of this table has a notification.
	if err != nil && (kind != unix.NFT_MSG_GETRULE || !errors.Is(err, nlmsg.ErrInterrupted)) {
		return fmt.Errorf("failed to list nftables objects of %s %s: %w", table, name, err)
	}
	for _, data := range objects {
		// Kernels that ignore the filter list the objects of all tables.
		if attributes := nlmsg.Netfilter(data); data[0] == table.Family &&
			attributes.Text(unix.NFTA_TABLE_NAME) == table.Name {
			each(attributes)
		}
	}
	return nil
}

func request(table Table, kind, flags, attribute uint16, name string) *nlmsg.Messages {
	transaction := Transaction{Table: table}
	transaction.begin("", kind, flags, attribute, name)
	return &transaction.messages
}

// absent reports whether an error means that an object, or its whole family, does not exist.
func absent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// get reads one object by name; nil if it does not exist.
func get[T any](
	conn *Conn, table Table, kind, attribute uint16, name string, parse func(nlmsg.Attributes) T,
) (*T, error) {
	data, err := conn.Get(request(table, kind, 0, attribute, name))
	switch {
	case absent(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("failed to read nftables object %s %s: %w", table, name, err)
	}
	object := parse(nlmsg.Netfilter(data))
	return &object, nil
}

// Flags returns the flags of a table; nil if it does not exist.
func (conn *Conn) Flags(table Table) (*uint32, error) {
	return get(conn, table, unix.NFT_MSG_GETTABLE, 0, "", func(attributes nlmsg.Attributes) uint32 {
		return attributes.Uint32BE(unix.NFTA_TABLE_FLAGS)
	})
}

// Chain reads a chain without its rules; nil if it does not exist.
func (conn *Conn) Chain(table Table, name string) (*Chain, error) {
	return get(conn, table, unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_NAME, name, parseChain)
}

// Set reads a set without its elements; nil if it does not exist.
func (conn *Conn) Set(table Table, name string) (*Set, error) {
	return get(conn, table, unix.NFT_MSG_GETSET, unix.NFTA_SET_NAME, name, parseSet)
}

// Rules reads the rules of a chain, or of all chains for "".
func (conn *Conn) Rules(table Table, chain string) (map[string][]Rule, error) {
	rules := map[string][]Rule{}
	err := conn.List(table, unix.NFT_MSG_GETRULE, unix.NFTA_RULE_CHAIN, chain, func(attributes nlmsg.Attributes) {
		// Kernels that ignore the filter list the rules of all chains.
		if rule := parseRule(attributes); chain == "" || rule.Chain == chain {
			rules[rule.Chain] = append(rules[rule.Chain], rule)
		}
	})
	if absent(err) {
		err = nil
	}
	return rules, err
}

// Elements calls each for every element of a set. The error is ENOENT for a missing set.
//
// The kernel resumes a dump of several messages by the number of elements. Elements that the
// packet path adds or removes in between can make it skip elements; messages is then above 1.
func (conn *Conn) Elements(table Table, set string, each func(Element)) (messages int, err error) {
	err = conn.List(table, unix.NFT_MSG_GETSETELEM, unix.NFTA_SET_ELEM_LIST_SET, set, func(attributes nlmsg.Attributes) {
		messages++
		for _, attributes := range attributes.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
			each(parseElement(attributes))
		}
	})
	return messages, err
}

// Element reads one element by its key; nil if it does not exist.
func (conn *Conn) Element(table Table, set string, key []byte) (*Element, error) {
	transaction := Transaction{Table: table}
	transaction.putElements("get element of set", unix.NFT_MSG_GETSETELEM, set, []Element{{Key: key}})
	data, err := conn.Get(&transaction.messages)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("failed to read an element of set %s %s: %w", table, set, err)
	}
	for _, attributes := range nlmsg.Netfilter(data).Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
		element := parseElement(attributes)
		return &element, nil
	}
	return nil, nil
}

// Ruleset is the content of a table without set elements.
type Ruleset struct {
	Exists bool
	Flags  uint32
	Chains map[string]Chain // without rules
	Sets   map[string]Set
	Rules  map[string][]Rule // by chain
}

// NewRuleset returns the content of an absent table.
func NewRuleset() *Ruleset {
	return &Ruleset{Chains: map[string]Chain{}, Sets: map[string]Set{}, Rules: map[string][]Rule{}}
}

// Dump reads the content of a table without set elements.
func (conn *Conn) Dump(table Table) (*Ruleset, error) {
	content := NewRuleset()
	flags, err := conn.Flags(table)
	if err != nil || flags == nil {
		return content, err
	}
	content.Exists, content.Flags = true, *flags
	// Another process may delete the table between the requests.
	if err := errors.Join(
		conn.List(table, unix.NFT_MSG_GETCHAIN, 0, "", func(attributes nlmsg.Attributes) {
			chain := parseChain(attributes)
			content.Chains[chain.Name] = chain
		}),
		conn.List(table, unix.NFT_MSG_GETSET, 0, "", func(attributes nlmsg.Attributes) {
			set := parseSet(attributes)
			content.Sets[set.Name] = set
		}),
	); err != nil && !absent(err) {
		return nil, err
	}
	content.Rules, err = conn.Rules(table, "")
	return content, err
}
