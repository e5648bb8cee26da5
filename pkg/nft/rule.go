package nft

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
)

// Rule is a rule to write, or a listed one.
type Rule struct {
	Comment string
	// normal is the canonical form of the expressions, encoded the form to send.
	normal  []byte
	encoded nlmsg.Attributes
	// err is the encoding error; a transaction with the rule fails.
	err error

	// Chain and Handle identify a listed rule.
	Chain  string
	Handle uint64
	// Packets and Bytes are the first counter's of a listed rule, Modulus and Seed the first hash's.
	Packets, Bytes uint64
	Modulus, Seed  uint32
}

// MaxComment is the maximum length of a comment. nftables stores the length in one byte.
const MaxComment = 250

// NewRule encodes a rule.
func NewRule(family byte, comment string, expressions ...expr.Any) Rule {
	rule := Rule{Comment: comment}
	if len(comment) > MaxComment {
		rule.err = fmt.Errorf("rule %q: a comment has at most %d bytes", comment, MaxComment)
	}
	var messages nlmsg.Messages
	for _, expression := range expressions {
		data, err := expr.Marshal(family, expression)
		if err != nil {
			rule.err = fmt.Errorf("rule %q: failed to encode %T: %w", comment, expression, err)
		}
		messages.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, data)
	}
	rule.encoded = messages.Data
	rule.normal = normal(rule.encoded)
	return rule
}

// Same reports whether two rules have equal comments and expressions. It ignores counter values.
func (rule Rule) Same(other Rule) bool {
	return rule.Comment == other.Comment && bytes.Equal(rule.normal, other.normal)
}

func parseRule(attributes nlmsg.Attributes) Rule {
	expressions := attributes.Get(unix.NFTA_RULE_EXPRESSIONS)
	rule := Rule{
		Chain: attributes.Text(unix.NFTA_RULE_CHAIN), Handle: attributes.Uint64BE(unix.NFTA_RULE_HANDLE),
		Comment: comment(attributes.Get(unix.NFTA_RULE_USERDATA)), normal: normal(expressions),
	}
	for _, attribute := range expressions.All() {
		data := attribute.Get(unix.NFTA_EXPR_DATA)
		switch attribute.Text(unix.NFTA_EXPR_NAME) {
		case "counter":
			rule.Packets, rule.Bytes = data.Uint64BE(unix.NFTA_COUNTER_PACKETS), data.Uint64BE(unix.NFTA_COUNTER_BYTES)
		case "hash":
			rule.Modulus, rule.Seed = data.Uint32BE(unix.NFTA_HASH_MODULUS), data.Uint32BE(unix.NFTA_HASH_SEED)
		}
	}
	return rule
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

// known maps each expression to its highest compared attribute, because newer kernels add
// attributes. The values of counters are not compared.
var known = map[string]uint16{
	"meta": unix.NFTA_META_SREG, "cmp": unix.NFTA_CMP_DATA, "payload": unix.NFTA_PAYLOAD_SREG,
	"lookup": unix.NFTA_LOOKUP_FLAGS, "bitwise": unix.NFTA_BITWISE_XOR, "ct": unix.NFTA_CT_SREG,
	"hash": unix.NFTA_HASH_TYPE, "immediate": unix.NFTA_IMMEDIATE_DATA, "counter": 0, "notrack": 0,
	"dynset": unix.NFTA_DYNSET_TIMEOUT, "numgen": unix.NFTA_NG_OFFSET, "byteorder": unix.NFTA_BYTEORDER_SIZE,
	"dup": unix.NFTA_DUP_SREG_DEV, "objref": unix.NFTA_OBJREF_IMM_NAME,
}

// normal returns a canonical form of a rule's expressions, equal for the sent and the listed rule:
// attributes in order, without zero values, which some kernels omit, and without the set ID of the
// transaction.
func normal(expressions nlmsg.Attributes) []byte {
	out := make([]byte, 0, len(expressions))
	for _, attribute := range expressions.All() {
		name, data := attribute.Text(unix.NFTA_EXPR_NAME), attribute.Get(unix.NFTA_EXPR_DATA)
		out = append(append(out, name...), 0)
		highest, ok := known[name]
		if !ok {
			// Keep the raw data of unknown expressions, so that the rule differs.
			out = append(out, data...)
		}
		// The kernel lists attributes in another order than the library sends.
		var values [16]nlmsg.Attributes
		for kind, value := range data.All() {
			if kind <= highest && int(kind) < len(values) && !isSetID(name, kind) {
				values[kind] = value
			}
		}
		for kind, value := range values {
			if len(value) == 0 || len(value)%4 == 0 && len(bytes.Trim(value, "\x00")) == 0 {
				continue
			}
			out = append(out, byte(kind))
			switch {
			case name == "cmp" && kind == unix.NFTA_CMP_DATA, name == "immediate" && kind == unix.NFTA_IMMEDIATE_DATA,
				name == "bitwise" && (kind == unix.NFTA_BITWISE_MASK || kind == unix.NFTA_BITWISE_XOR):
				out = normalData(out, value)
			default:
				out = append(append(out, byte(len(value)>>8), byte(len(value))), value...)
			}
		}
	}
	return out
}

// isSetID reports whether an attribute is the transaction-local ID of a set.
func isSetID(name string, kind uint16) bool {
	return name == "lookup" && kind == unix.NFTA_LOOKUP_SET_ID || name == "dynset" && kind == unix.NFTA_DYNSET_SET_ID
}

// normalData appends the canonical form of data, which is a value or a verdict.
func normalData(out []byte, data nlmsg.Attributes) []byte {
	for kind, value := range data.All() {
		if kind == unix.NFTA_DATA_VERDICT {
			value = append(slices.Clip(value.Get(unix.NFTA_VERDICT_CODE)), value.Text(unix.NFTA_VERDICT_CHAIN)...)
		}
		out = append(append(out, byte(kind), byte(len(value)>>8), byte(len(value))), value...)
	}
	return out
}
