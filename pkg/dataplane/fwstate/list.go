package fwstate

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
)

func nftMessage(kind uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | kind }

// tableAttribute holds the name of the table in all nftables messages.
const tableAttribute = unix.NFTA_TABLE_NAME

// request returns a request for the object called name, or for the table if name is empty.
func request(kind, flags, attribute uint16, name string) *nlmsg.Messages {
	var t transaction
	t.begin("", kind, flags, attribute, name)
	return &t.Messages
}

// dump lists the objects of one kind in the table, filtered by name unless it is empty. Each
// object is valid during the call only. The kernel may return ENOENT for a missing table or name.
func (f *Conn) dump(what string, kind, attribute uint16, name string, each func(nlmsg.Attributes)) error {
	_, err := f.nft.Dump(request(kind, unix.NLM_F_DUMP, attribute, name), func(data []byte) {
		// Kernels that ignore the filter list the objects of all tables.
		if b := nlmsg.Netfilter(data); data[0] == familyInet && b.Text(tableAttribute) == plan.TableName {
			each(b)
		}
	})
	if err != nil {
		return fmt.Errorf("failed to list %s of inet %s %s: %w", what, plan.TableName, name, err)
	}
	return nil
}

// list is like dump, but ignores ENOENT.
func (f *Conn) list(what string, kind, attribute uint16, name string, each func(nlmsg.Attributes)) error {
	if err := f.dump(what, kind, attribute, name, each); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// get reads one object by name; nil if it does not exist.
func get[T any](f *Conn, kind, attribute uint16, name string, parse func(nlmsg.Attributes) T) (*T, error) {
	data, err := f.nft.Get(request(kind, 0, attribute, name))
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("failed to read inet %s %s: %w", plan.TableName, name, err)
	}
	x := parse(nlmsg.Netfilter(data))
	return &x, nil
}

// rule is a rule read from the kernel.
type rule struct {
	chain   string
	handle  uint64
	comment string
	normal  []byte
	// packets and bytes come from the first counter, size and seed from the first hash.
	packets, bytes uint64
	size, seed     uint32
}

// owned reports whether the comment of a rule identifies it as the data plane's.
func (r rule) owned() bool {
	if strings.HasPrefix(r.chain, plan.TargetPrefix) {
		return strings.Contains(r.comment, "/")
	}
	return strings.HasPrefix(r.comment, ruleComment)
}

// sameRules reports whether the data plane's rules among have equal want.
func sameRules(have []rule, want []ruleSpec) bool {
	owned := slices.DeleteFunc(slices.Clone(have), func(r rule) bool { return !r.owned() })
	return slices.EqualFunc(owned, want, func(h rule, w ruleSpec) bool {
		return h.comment == w.comment && bytes.Equal(h.normal, w.normal)
	})
}

func (f *Conn) readRules(chain string) (map[string][]rule, error) {
	rules := map[string][]rule{}
	err := f.list("rules", unix.NFT_MSG_GETRULE, unix.NFTA_RULE_CHAIN, chain, func(b nlmsg.Attributes) {
		if r := parseRule(b); chain == "" || r.chain == chain {
			rules[r.chain] = append(rules[r.chain], r)
		}
	})
	return rules, err
}

func parseRule(b nlmsg.Attributes) rule {
	expressions := b.Get(unix.NFTA_RULE_EXPRESSIONS)
	r := rule{
		chain: b.Text(unix.NFTA_RULE_CHAIN), handle: b.Uint64BE(unix.NFTA_RULE_HANDLE),
		comment: comment(b.Get(unix.NFTA_RULE_USERDATA)), normal: normal(expressions),
	}
	for _, e := range expressions.All() {
		data := e.Get(unix.NFTA_EXPR_DATA)
		switch e.Text(unix.NFTA_EXPR_NAME) {
		case "counter":
			r.packets, r.bytes = data.Uint64BE(unix.NFTA_COUNTER_PACKETS), data.Uint64BE(unix.NFTA_COUNTER_BYTES)
		case "hash":
			r.size, r.seed = data.Uint32BE(unix.NFTA_HASH_MODULUS), data.Uint32BE(unix.NFTA_HASH_SEED)
		}
	}
	return r
}

// commentType is the type of a comment in nft user data: type 0, length, NUL-terminated text.
const commentType = 0

// comment parses the comment from user data, which may be malformed if another process wrote it:
// userdata.Get panics for a length beyond the end.
func comment(userdata []byte) string {
	for len(userdata) >= 2 && len(userdata) >= 2+int(userdata[1]) {
		value := userdata[2 : 2+int(userdata[1])]
		if userdata[0] == commentType {
			return nlmsg.Attributes(value).Text()
		}
		userdata = userdata[2+len(value):]
	}
	return ""
}

func parseSet(b nlmsg.Attributes) setSpec {
	return setSpec{
		name: b.Text(unix.NFTA_SET_NAME), flags: b.Uint32BE(unix.NFTA_SET_FLAGS),
		keyType: b.Uint32BE(unix.NFTA_SET_KEY_TYPE), keySize: b.Uint32BE(unix.NFTA_SET_KEY_LEN),
		dataType: b.Uint32BE(unix.NFTA_SET_DATA_TYPE), data: b.Uint32BE(unix.NFTA_SET_DATA_LEN),
		size: b.Uint32BE(unix.NFTA_SET_DESC, unix.NFTA_SET_DESC_SIZE),
	}
}

func (f *Conn) readSet(name string) (*setSpec, error) {
	return get(f, unix.NFT_MSG_GETSET, unix.NFTA_SET_NAME, name, parseSet)
}

func parseChain(b nlmsg.Attributes) chainSpec {
	return chainSpec{
		name: b.Text(unix.NFTA_CHAIN_NAME), kind: b.Text(unix.NFTA_CHAIN_TYPE), policy: b.Uint32BE(unix.NFTA_CHAIN_POLICY),
		hook:     b.Uint32BE(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_HOOKNUM),
		priority: int32(b.Uint32BE(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_PRIORITY)),
	}
}

func (f *Conn) readChain(name string) (*chainSpec, error) {
	return get(f, unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_NAME, name, parseChain)
}
