package fwstate

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables/expr"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
)

// A stream with a match has a set of protocols and ports for both families, and two rules at the
// start of its chain that drop and count packets outside the set. The rules precede the connection
// mark lookup, so they also apply to established flows. They are rules of the stream's chain, not
// elements per VIP: their cost is independent of the number of VIPs, and streams without a match
// omit them.

// Comments of the rules of a match.
const (
	protocolsComment = ruleComment + "protocols that do not match"
	portsComment     = ruleComment + "ports that do not match"
)

// portKey is the key size of a protocol and a port, each in a register.
const portKey = 8

func matchSpec(stream string) nft.Set {
	// With a size the kernel selects a fixed array of hash buckets. During a transaction the set may
	// contain both the old and the new ports.
	return nft.Set{Name: plan.MatchSet(stream), KeyType: typePort, KeyLen: portKey, Size: 2 * plan.MaxMatch}
}

// matchRules returns the rules that drop packets outside the match. A packet too short for ports
// passes the second rule, but reaches no target: it has no flow key and no hash.
func matchRules(stream string) []nft.Rule {
	protocol := func(r uint32) expr.Any { return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: Register(r)} }
	drop := func(comment string, expressions ...expr.Any) nft.Rule {
		for _, icmp := range icmpOf {
			expressions = append(expressions, protocol(0),
				&expr.Cmp{Op: expr.CmpOpNeq, Register: Register(0), Data: []byte{icmp}})
		}
		return newRule(comment, append(expressions, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop})...)
	}
	return []nft.Rule{
		drop(protocolsComment, ported(true)...),
		drop(portsComment, protocol(0), load(expr.PayloadBaseTransportHeader, 2, 2)(Register(1)),
			&expr.Lookup{SourceRegister: Register(0), SetName: plan.MatchSet(stream), Invert: true}),
	}
}

func portElements(ports []plan.Port) []nft.Element {
	list := make([]nft.Element, len(ports))
	for index, port := range ports {
		// Each part of a concatenation is padded to a full register.
		list[index].Key = binary.BigEndian.AppendUint16([]byte{port.Protocol, 0, 0, 0}, port.Number)
		list[index].Key = append(list[index].Key, 0, 0)
	}
	return list
}

// readMatch reads the ports of a set; nil if content lacks the set. A set of a different type
// is treated as missing; Write reports the conflict.
func (conn *Conn) readMatch(stream string, content *ruleset) ([]plan.Port, error) {
	spec := matchSpec(stream)
	if got, found := content.Sets[spec.Name]; !found || spec.Mismatch(got) != "" {
		return nil, nil
	}
	return conn.nft.readPorts(stream)
}

func (reader reader) readPorts(stream string) ([]plan.Port, error) {
	ports := []plan.Port{}
	err := reader.elements(plan.MatchSet(stream), func(element nft.Element) {
		if key := element.Key; len(key) == portKey {
			ports = append(ports, plan.Port{Protocol: key[0], Number: binary.BigEndian.Uint16(key[4:])})
		}
	})
	slices.SortFunc(ports, plan.ComparePorts)
	return ports, err
}

func changeMatch(transaction *nft.Transaction, stream string, have, want []plan.Port) {
	transaction.DeleteElements(plan.MatchSet(stream), portElements(plan.MissingPorts(want, have)))
	transaction.AddElements(plan.MatchSet(stream), portElements(plan.MissingPorts(have, want)))
}

// createMatch creates the set of a stream with a match, unless content has it.
func createMatch(transaction *nft.Transaction, want *plan.KernelStream, content *ruleset) {
	if spec := matchSpec(want.Name); want.Match != nil && !content.has(spec.Name) {
		spec.Elements = portElements(want.Match)
		transaction.AddSet(spec)
	}
}

// streamMatch creates, changes or removes the set of a stream whose rules are replaced.
func (writer *changeWriter) streamMatch(want *plan.KernelStream, content *ruleset) error {
	spec := matchSpec(want.Name)
	have, err := writer.readMatch(want.Name, content)
	switch {
	case err != nil:
		return err
	// Rules reference the set: they are deleted earlier in last and added at its end.
	case want.Match == nil && have != nil:
		writer.last.DeleteSet(spec.Name)
	case want.Match == nil:
	case have != nil:
		changeMatch(writer.last, want.Name, have, want.Match)
	default:
		if err := content.checkSet("set", spec); err != nil {
			return err
		}
		createMatch(writer.first, want, content)
	}
	return nil
}

// ReadUnmatched returns how many packets each match dropped since its chain was last written.
func (conn *Conn) ReadUnmatched(streams []string) (map[string]uint64, error) {
	dropped := make(map[string]uint64, len(streams))
	for _, stream := range streams {
		rules, err := conn.nft.Rules(inet, plan.StreamChain(stream))
		if err != nil {
			return nil, err
		}
		for _, rule := range rules[plan.StreamChain(stream)] {
			if rule.Comment == protocolsComment || rule.Comment == portsComment {
				dropped[stream] += rule.Packets
			}
		}
	}
	return dropped, nil
}
