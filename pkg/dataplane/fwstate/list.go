package fwstate

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// nftMessage returns the netlink type of an nftables message.
func nftMessage(kind uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | kind }

// rule is a rule as the kernel has it.
type rule struct {
	chain   string
	handle  uint64
	comment string
	normal  []byte
	// packets and bytes are those of the first counter, size and seed of the first hash.
	packets, bytes uint64
	size, seed     uint32
}

// owned reports whether a rule belongs to the data plane, by its comment.
func (r *rule) owned() bool {
	if strings.HasPrefix(r.chain, plan.TargetPrefix) {
		return strings.Contains(r.comment, "/")
	}
	return strings.HasPrefix(r.comment, ruleComment)
}

// sameRules reports whether the data plane's rules of a chain are the given ones. Rules of
// other processes are ignored.
func sameRules(have []rule, want []ruleSpec) bool {
	mine := slices.DeleteFunc(slices.Clone(have), func(r rule) bool { return !r.owned() })
	return slices.EqualFunc(mine, want, func(h rule, w ruleSpec) bool {
		return h.comment == w.comment && bytes.Equal(h.normal, w.normal)
	})
}

// list lists objects of the data plane's table. Kernels that ignore the filter return those
// of all tables, so it filters again.
func (f *Conn) list(kind, tableAttribute uint16, more func(*nlmsg.Messages), each func(b []byte)) error {
	var m nlmsg.Messages
	m.Begin(nftMessage(kind), unix.NLM_F_DUMP, familyInet, unix.NFNETLINK_V0, 0, 0)
	m.Text(tableAttribute, plan.TableName)
	if more != nil {
		more(&m)
	}
	return f.nft.Dump(m.End(), func(data []byte) error {
		if len(data) >= nlmsg.NFHeaderLen && data[0] == familyInet && nlmsg.Text(nlmsg.Attribute(data[nlmsg.NFHeaderLen:], tableAttribute)) == plan.TableName {
			each(data[nlmsg.NFHeaderLen:])
		}
		return nil
	})
}

// readNamed reads one object by its name; nil if it does not exist.
func (f *Conn) readNamed(kind, tableAttribute, nameAttribute uint16, name string) ([]byte, error) {
	var m nlmsg.Messages
	m.Begin(nftMessage(kind), 0, familyInet, unix.NFNETLINK_V0, 0, 0)
	m.Text(tableAttribute, plan.TableName)
	m.Text(nameAttribute, name)
	data, err := f.nft.Get(m.End())
	if errors.Is(err, unix.ENOENT) || err == nil && len(data) < nlmsg.NFHeaderLen {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read inet %s %s: %w", plan.TableName, name, err)
	}
	return data[nlmsg.NFHeaderLen:], nil
}

// readRules lists the rules of all chains, or those of one chain.
func (f *Conn) readRules(chain string) (map[string][]rule, error) {
	rules := map[string][]rule{}
	err := f.list(unix.NFT_MSG_GETRULE, unix.NFTA_RULE_TABLE, func(m *nlmsg.Messages) {
		if chain != "" {
			m.Text(unix.NFTA_RULE_CHAIN, chain)
		}
	}, func(b []byte) {
		r := parseRule(b)
		if chain == "" || r.chain == chain {
			rules[r.chain] = append(rules[r.chain], r)
		}
	})
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("list rules of inet %s %s: %w", plan.TableName, chain, err)
	}
	return rules, nil
}

func parseRule(b []byte) rule {
	var r rule
	for kind, value := range nlmsg.Attributes(b) {
		switch kind {
		case unix.NFTA_RULE_CHAIN:
			r.chain = nlmsg.Text(value)
		case unix.NFTA_RULE_HANDLE:
			r.handle = nlmsg.Uint64BE(value)
		case unix.NFTA_RULE_EXPRESSIONS:
			r.normal = normal(value)
			for _, e := range nlmsg.Attributes(value) {
				data := nlmsg.Attribute(e, unix.NFTA_EXPR_DATA)
				switch nlmsg.Text(nlmsg.Attribute(e, unix.NFTA_EXPR_NAME)) {
				case "counter":
					r.packets, r.bytes = nlmsg.Uint64BE(nlmsg.Attribute(data, unix.NFTA_COUNTER_PACKETS)), nlmsg.Uint64BE(nlmsg.Attribute(data, unix.NFTA_COUNTER_BYTES))
				case "hash":
					r.size, r.seed = nlmsg.Uint32BE(nlmsg.Attribute(data, unix.NFTA_HASH_MODULUS)), nlmsg.Uint32BE(nlmsg.Attribute(data, unix.NFTA_HASH_SEED))
				}
			}
		case unix.NFTA_RULE_USERDATA:
			r.comment = comment(value)
		}
	}
	return r
}

// commentType is the type of a comment in the user data of nft: type 0, length, text, zero
// byte.
const commentType = 0

func comment(userdata []byte) string {
	for len(userdata) >= 2 && len(userdata) >= 2+int(userdata[1]) {
		if userdata[0] == commentType {
			return nlmsg.Text(userdata[2 : 2+int(userdata[1])])
		}
		userdata = userdata[2+int(userdata[1]):]
	}
	return ""
}

// readSets lists the sets of the table.
func (f *Conn) readSets() (map[string]setSpec, error) {
	sets := map[string]setSpec{}
	err := f.list(unix.NFT_MSG_GETSET, unix.NFTA_SET_TABLE, nil, func(b []byte) {
		s := parseSet(b)
		sets[s.name] = s
	})
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("list sets of inet %s: %w", plan.TableName, err)
	}
	return sets, nil
}

func parseSet(b []byte) setSpec {
	var s setSpec
	for kind, value := range nlmsg.Attributes(b) {
		switch kind {
		case unix.NFTA_SET_NAME:
			s.name = nlmsg.Text(value)
		case unix.NFTA_SET_FLAGS:
			s.flags = nlmsg.Uint32BE(value)
		case unix.NFTA_SET_KEY_TYPE:
			s.keyType = nlmsg.Uint32BE(value)
		case unix.NFTA_SET_KEY_LEN:
			s.keySize = nlmsg.Uint32BE(value)
		case unix.NFTA_SET_DATA_TYPE:
			s.dataType = nlmsg.Uint32BE(value)
		case unix.NFTA_SET_DATA_LEN:
			s.data = nlmsg.Uint32BE(value)
		case unix.NFTA_SET_DESC:
			s.size = nlmsg.Uint32BE(nlmsg.Attribute(value, unix.NFTA_SET_DESC_SIZE))
		}
	}
	return s
}

// readSet reads one set; nil if it does not exist.
func (f *Conn) readSet(name string) (*setSpec, error) {
	b, err := f.readNamed(unix.NFT_MSG_GETSET, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME, name)
	if b == nil || err != nil {
		return nil, err
	}
	s := parseSet(b)
	return &s, nil
}

// readChains lists the chains of the table.
func (f *Conn) readChains() (map[string]chainSpec, error) {
	chains := map[string]chainSpec{}
	err := f.list(unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_TABLE, nil, func(b []byte) {
		c := parseChain(b)
		chains[c.name] = c
	})
	if err != nil {
		return nil, fmt.Errorf("list chains of inet %s: %w", plan.TableName, err)
	}
	return chains, nil
}

func parseChain(b []byte) chainSpec {
	var c chainSpec
	for kind, value := range nlmsg.Attributes(b) {
		switch kind {
		case unix.NFTA_CHAIN_NAME:
			c.name = nlmsg.Text(value)
		case unix.NFTA_CHAIN_TYPE:
			c.kind = nlmsg.Text(value)
		case unix.NFTA_CHAIN_POLICY:
			c.policy = nlmsg.Uint32BE(value)
		case unix.NFTA_CHAIN_HOOK:
			c.hook = nlmsg.Uint32BE(nlmsg.Attribute(value, unix.NFTA_HOOK_HOOKNUM))
			c.priority = int32(nlmsg.Uint32BE(nlmsg.Attribute(value, unix.NFTA_HOOK_PRIORITY)))
		}
	}
	return c
}

// readChain reads one chain; nil if it does not exist.
func (f *Conn) readChain(name string) (*chainSpec, error) {
	b, err := f.readNamed(unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, name)
	if b == nil || err != nil {
		return nil, err
	}
	c := parseChain(b)
	return &c, nil
}
