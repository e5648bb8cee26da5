package replypath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
)

// tableName is the name of the nftables table in each of tableFamilies.
const tableName = "vipgate-target"

// tableFamilies are the nftables families in the order of installation.
var tableFamilies = [...]uint8{unix.NFPROTO_ARP, unix.NFPROTO_NETDEV, unix.NFPROTO_INET}

// familyName returns nft's name of a family.
func familyName(f uint8) string {
	return map[uint8]string{unix.NFPROTO_ARP: "arp", unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_INET: "inet"}[f]
}

// policyAccept is NF_ACCEPT.
const policyAccept = 1

// nameAttribute holds the name of a table in table messages, and the table of any other object.
const nameAttribute = unix.NFTA_TABLE_NAME

// Constants of linux/netfilter/nf_tables.h.
const (
	tableHandle = 4
	setHandle   = 16
)

// transaction collects messages that the kernel applies atomically.
type transaction struct {
	nlmsg.Messages
	family uint8 // of the next messages
	steps  []string
	sets   uint32 // the last set ID
	err    error
}

// begin starts a message for the object called name, or for the table if name is empty.
func (t *transaction) begin(operation string, kind, flags, attribute uint16, name string) {
	t.steps = append(t.steps, strings.TrimSpace(operation+" "+familyName(t.family)+" "+tableName+" "+name))
	t.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, t.family, unix.NFNETLINK_V0, 0, 0)
	t.Text(nameAttribute, tableName)
	if name != "" {
		t.Text(attribute, name)
	}
}

func (t *transaction) addTable() {
	t.begin("add table", unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, "")
	t.Uint32BE(unix.NFTA_TABLE_FLAGS, 0) // reactivates a dormant table
}

func (t *transaction) deleteTable() { t.begin("delete table", unix.NFT_MSG_DELTABLE, 0, 0, "") }

// hook is the netfilter hook of a base chain.
type hook struct {
	number   uint32
	priority int32
	device   string
}

func (t *transaction) addChain(name string, h hook, rules ...rule) {
	t.begin("add chain", unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, name)
	t.Nested(unix.NFTA_CHAIN_HOOK, func() {
		t.Uint32BE(unix.NFTA_HOOK_HOOKNUM, h.number)
		t.Uint32BE(unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
		if h.device != "" {
			t.Text(unix.NFTA_HOOK_DEV, h.device)
		}
	})
	t.Uint32BE(unix.NFTA_CHAIN_POLICY, policyAccept)
	t.Text(unix.NFTA_CHAIN_TYPE, "filter")
	for _, r := range rules {
		expressions, err := r.marshal(t.family)
		t.err = errors.Join(t.err, err)
		t.begin("add rule to chain", unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFTA_RULE_CHAIN, name)
		t.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, expressions)
	}
}

// set is a set or a map.
type set struct {
	name                        string
	flags                       uint32
	keyType, keyLen             uint32
	dataType, dataLen, capacity uint32
	timeout                     time.Duration
}

func (t *transaction) addSet(s set) {
	t.sets++
	t.begin("add set", unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME, s.name)
	t.Uint32BE(unix.NFTA_SET_FLAGS, s.flags)
	t.Uint32BE(unix.NFTA_SET_KEY_TYPE, s.keyType)
	t.Uint32BE(unix.NFTA_SET_KEY_LEN, s.keyLen)
	if s.flags&unix.NFT_SET_MAP != 0 {
		t.Uint32BE(unix.NFTA_SET_DATA_TYPE, s.dataType)
		t.Uint32BE(unix.NFTA_SET_DATA_LEN, s.dataLen)
	}
	t.Uint32BE(unix.NFTA_SET_ID, t.sets)
	if s.capacity != 0 {
		t.Nested(unix.NFTA_SET_DESC, func() { t.Uint32BE(unix.NFTA_SET_DESC_SIZE, s.capacity) })
	}
	if s.timeout != 0 {
		t.Bytes(unix.NFTA_SET_TIMEOUT, milliseconds(s.timeout))
	}
	t.Bytes(unix.NFTA_SET_USERDATA, byteOrders(s))
}

func milliseconds(d time.Duration) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(d.Milliseconds()))
}

// element is a set element or an interval boundary.
type element struct {
	key, data []byte
	end       bool
	timeout   time.Duration
}

func (t *transaction) addElements(name string, list []element) {
	t.putElements("add elements to", unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, name, list)
}

func (t *transaction) putElements(operation string, kind, flags uint16, name string, list []element) {
	// The length of an attribute has 16 bits; 500 elements fit.
	for part := range slices.Chunk(list, 500) {
		t.begin(operation, kind, flags, unix.NFTA_SET_ELEM_LIST_SET, name)
		t.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for _, e := range part {
				t.Nested(unix.NFTA_LIST_ELEM, func() { t.putElement(e) })
			}
		})
	}
}

func (t *transaction) putElement(e element) {
	t.Nested(unix.NFTA_SET_ELEM_KEY, func() { t.Bytes(unix.NFTA_DATA_VALUE, e.key) })
	if e.data != nil {
		t.Nested(unix.NFTA_SET_ELEM_DATA, func() { t.Bytes(unix.NFTA_DATA_VALUE, e.data) })
	}
	if e.end {
		t.Uint32BE(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	if e.timeout != 0 {
		t.Bytes(unix.NFTA_SET_ELEM_TIMEOUT, milliseconds(e.timeout))
	}
}

// stepError is the kernel's rejection of one message of a transaction.
type stepError struct {
	step string
	err  error
}

func (e *stepError) Error() string { return "failed to " + e.step + ": " + e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

// commit sends the transaction and waits for the result. It returns the first rejection as a
// *stepError.
func (t *transaction) commit(s *nlmsg.Socket) error {
	if t.Len() == 0 || t.err != nil {
		return t.err
	}
	var m nlmsg.Messages
	batch := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	m.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, batch...)
	m.Append(&t.Messages)
	m.SetFlags(unix.NLM_F_ACK)
	m.Begin(unix.NFNL_MSG_BATCH_END, 0, batch...)
	var first error
	err := s.Transact(&m, func(i int, err error) {
		switch {
		case first != nil:
		case i > 0 && i <= len(t.steps):
			first = &stepError{t.steps[i-1], err}
		default:
			first = &stepError{"change nftables", err}
		}
	}, func(uint16, []byte) {})
	return errors.Join(first, err)
}

// objects is the content of one table as dumped.
type objects struct {
	present     bool
	chains      []string
	sets        map[string]set
	fingerprint strings.Builder
	rules       int
	// dropped counts the frames without a peer.
	dropped uint64
}

// listTable dumps one table. Handles identify its objects, because the kernel never reuses a
// handle.
func listTable(s *nlmsg.Socket, family uint8) (*objects, error) {
	o := &objects{sets: map[string]set{}}
	note := func(parts ...any) { fmt.Fprintln(&o.fingerprint, parts...) }
	note(familyName(family))
	err := dump(s, family, unix.NFT_MSG_GETTABLE, "", func(b nlmsg.Attributes) {
		o.present = true
		note("table", b.Uint64BE(tableHandle), b.Uint32BE(unix.NFTA_TABLE_FLAGS))
	})
	if err != nil || !o.present {
		return o, err
	}
	err = errors.Join(
		dump(s, family, unix.NFT_MSG_GETCHAIN, "", func(b nlmsg.Attributes) {
			o.chains = append(o.chains, b.Text(unix.NFTA_CHAIN_NAME))
			note("chain", b.Text(unix.NFTA_CHAIN_NAME), b.Uint64BE(unix.NFTA_CHAIN_HANDLE), b.Uint32BE(unix.NFTA_CHAIN_POLICY))
		}),
		dump(s, family, unix.NFT_MSG_GETRULE, "", func(b nlmsg.Attributes) {
			o.rules++
			note("rule", b.Text(unix.NFTA_RULE_CHAIN), b.Uint64BE(unix.NFTA_RULE_HANDLE))
			o.dropped += drops(b.Get(unix.NFTA_RULE_EXPRESSIONS))
		}),
		dump(s, family, unix.NFT_MSG_GETSET, "", func(b nlmsg.Attributes) {
			name := b.Text(unix.NFTA_SET_NAME)
			o.sets[name] = parseSet(b)
			note("set", name, b.Uint64BE(setHandle))
		}),
	)
	for _, name := range slices.Sorted(maps.Keys(o.sets)) {
		if name == peersMap || err != nil {
			continue // the kernel adds and removes its elements
		}
		var lines []string
		err = dump(s, family, unix.NFT_MSG_GETSETELEM, name, func(b nlmsg.Attributes) {
			for _, e := range b.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
				lines = append(lines, fmt.Sprintf("%s %x %x %d", name, keyOf(e), dataOf(e), e.Uint32BE(unix.NFTA_SET_ELEM_FLAGS)))
			}
		})
		slices.Sort(lines)
		for _, line := range lines {
			note(line)
		}
	}
	return o, err
}

// drops returns the packet counter of a drop rule, or 0 for a rule without a verdict.
func drops(expressions nlmsg.Attributes) (packets uint64) {
	verdict := false
	for _, e := range expressions.All() {
		switch e.Text(unix.NFTA_EXPR_NAME) {
		case "counter":
			packets = e.Uint64BE(unix.NFTA_EXPR_DATA, unix.NFTA_COUNTER_PACKETS)
		case "immediate":
			verdict = true
		}
	}
	if !verdict {
		return 0
	}
	return packets
}

func parseSet(b nlmsg.Attributes) set {
	return set{
		name: b.Text(unix.NFTA_SET_NAME), flags: b.Uint32BE(unix.NFTA_SET_FLAGS),
		keyType: b.Uint32BE(unix.NFTA_SET_KEY_TYPE), keyLen: b.Uint32BE(unix.NFTA_SET_KEY_LEN),
		dataType: b.Uint32BE(unix.NFTA_SET_DATA_TYPE), dataLen: b.Uint32BE(unix.NFTA_SET_DATA_LEN),
		capacity: b.Uint32BE(unix.NFTA_SET_DESC, unix.NFTA_SET_DESC_SIZE),
		timeout:  time.Duration(b.Uint64BE(unix.NFTA_SET_TIMEOUT)) * time.Millisecond,
	}
}

func keyOf(e nlmsg.Attributes) nlmsg.Attributes {
	return e.Get(unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)
}

func dataOf(e nlmsg.Attributes) nlmsg.Attributes {
	return e.Get(unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE)
}

// dump lists objects of a kind in the table of a family, or the elements of a set. A missing table
// or set has no objects.
func dump(s *nlmsg.Socket, family uint8, kind uint16, set string, each func(nlmsg.Attributes)) error {
	t := transaction{family: family}
	t.begin("list", kind, unix.NLM_F_DUMP, unix.NFTA_SET_ELEM_LIST_SET, set)
	_, err := s.Dump(&t.Messages, func(data []byte) {
		if b := nlmsg.Netfilter(data); data[0] == family && b.Text(nameAttribute) == tableName {
			each(b)
		}
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EOPNOTSUPP):
		return nil
	case err != nil:
		return fmt.Errorf("failed to list nftables objects of %s %s, kind %s: %w",
			familyName(family), tableName, strconv.Itoa(int(kind)), err)
	}
	return nil
}
