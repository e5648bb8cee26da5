package rtnetlink

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// headerLength is the size of struct rtmsg and of struct fib_rule_hdr.
const headerLength = unix.SizeofRtMsg

// Rule is a policy routing rule.
type Rule struct {
	Family     vip.Family
	Priority   uint32
	Source     netip.Prefix // zero: any
	Input      string       // the interface on which packets arrive; "": any
	Mark, Mask uint32
	// LocalICMP selects locally generated ICMP messages by type<<8|code; 0: any packet.
	LocalICMP uint16
	Action    uint8  // unix.FR_ACT_*
	Table     uint32 // of FR_ACT_TO_TBL
	Goto      uint32 // target priority of FR_ACT_GOTO
	Protocol  uint8
	// Extra: the rule has selectors or flags without a field, such as inversion, or its Goto has
	// no target rule.
	Extra bool
}

// Drops reports whether the kernel drops packets that the rule matches.
func (r Rule) Drops() bool {
	return r.Action == unix.FR_ACT_BLACKHOLE || r.Action == unix.FR_ACT_UNREACHABLE || r.Action == unix.FR_ACT_PROHIBIT
}

// Same reports whether two rules are equal, ignoring the protocol.
func (r Rule) Same(s Rule) bool {
	r.Protocol, s.Protocol = 0, 0
	return r == s
}

func (r Rule) String() string {
	s := fmt.Sprintf("%s %d:", r.Family, r.Priority)
	if r.Source.IsValid() {
		s += " from " + r.Source.String()
	}
	if r.Input != "" {
		s += " iif " + r.Input
	}
	if r.Mark != 0 || r.Mask != 0 {
		s += fmt.Sprintf(" fwmark %#x/%#x", r.Mark, r.Mask)
	}
	if r.LocalICMP != 0 {
		s += fmt.Sprintf(" iif lo ipproto %s dport %d", icmpNames[r.Family], r.LocalICMP)
	}
	switch r.Action {
	case unix.FR_ACT_TO_TBL:
		s += fmt.Sprintf(" lookup %d", r.Table)
	case unix.FR_ACT_GOTO:
		s += fmt.Sprintf(" goto %d", r.Goto)
	case unix.FR_ACT_BLACKHOLE:
		s += " blackhole"
	case unix.FR_ACT_UNREACHABLE:
		s += " unreachable"
	default:
		s += fmt.Sprintf(" action %d", r.Action)
	}
	if r.Extra {
		s += " (and more)"
	}
	return s + fmt.Sprintf(" proto %d", r.Protocol)
}

// fraDportMask is FRA_DPORT_MASK from <linux/fib_rules.h>.
const fraDportMask = 29

// icmpProtocols and icmpNames map each family to its ICMP protocol number and iproute2 name.
var (
	icmpProtocols = [...]byte{unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6}
	icmpNames     = [...]string{"icmp", "ipv6-icmp"}
)

// Add returns the request that adds the rule, which must not have Extra.
func (r Rule) Add() Request {
	q := Request{operation: "add rule", Satisfied: exists}
	return r.request(q, unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
}

// Delete returns the request that deletes the rule.
func (r Rule) Delete() Request {
	return r.request(Request{operation: "delete rule", Satisfied: absent}, unix.RTM_DELRULE, 0)
}

func (r Rule) request(q Request, kind, flags uint16) Request {
	q.object = r
	header := [headerLength]byte{0: systemFamilies[r.Family], 7: r.Action}
	if r.Source.IsValid() {
		header[2] = uint8(r.Source.Bits())
	}
	q.Begin(kind, flags|unix.NLM_F_ACK, header[:]...)
	q.Uint32(unix.FRA_PRIORITY, r.Priority)
	q.Bytes(unix.FRA_PROTOCOL, []byte{r.Protocol})
	if r.Table != 0 {
		// The field of the header has one byte, and table IDs exceed 255.
		q.Uint32(unix.FRA_TABLE, r.Table)
	}
	if r.Action == unix.FR_ACT_GOTO {
		q.Uint32(unix.FRA_GOTO, r.Goto)
	}
	if r.Mark != 0 || r.Mask != 0 {
		q.Uint32(unix.FRA_FWMARK, r.Mark)
		q.Uint32(unix.FRA_FWMASK, r.Mask)
	}
	if r.Source.IsValid() {
		// The prefix length is in the header.
		q.Bytes(unix.FRA_SRC, r.Source.Addr().AsSlice())
	}
	if r.Input != "" {
		q.Bytes(unix.FRA_IIFNAME, append([]byte(r.Input), 0))
	}
	if r.LocalICMP != 0 {
		// The kernel stores type and code of an ICMP message in the bytes of the destination port
		// (union flowi_uli). With iif lo it does not dissect forwarded packets for this rule.
		port := binary.NativeEndian.AppendUint16(nil, r.LocalICMP)
		q.Bytes(unix.FRA_IIFNAME, []byte("lo\x00"))
		q.Bytes(unix.FRA_IP_PROTO, icmpProtocols[r.Family:][:1])
		q.Bytes(unix.FRA_DPORT_RANGE, append(port, port...))
	}
	return q
}

// Rules lists the policy rules of a family. With ErrInterrupted the list may lack rules.
func (c *Conn) Rules(f vip.Family) ([]Rule, error) {
	// Empty the queue first, so that later notifications indicate changes during the dump.
	if _, err := c.discardRuleChanges(); err != nil {
		return nil, err
	}
	header := [headerLength]byte{systemFamilies[f]}
	return list(c, f.String()+" rules", dump(unix.RTM_GETRULE, header[:]), ParseRule, c.unchanged)
}

// unchanged returns ErrInterrupted if rules changed since its last call. In a dump of several
// datagrams of about 400 rules each, the kernel resumes at a rule count. Deleting an earlier rule
// between two datagrams makes it skip a rule without setting NLM_F_DUMP_INTR (Linux 6.18).
func (c *Conn) unchanged() error {
	changed, err := c.discardRuleChanges()
	if err == nil && changed {
		return ErrInterrupted
	}
	return err
}

// discardRuleChanges discards queued rule notifications and reports whether any were queued.
func (c *Conn) discardRuleChanges() (changed bool, err error) {
	changed, foreign, err := c.rules.Discard(c.Port())
	if foreign || err != nil {
		c.foreignRuleChanges++
	}
	return changed, err
}

// ForeignRuleChanges returns a counter that increases after another process changed policy rules.
// While the counter is constant, rules that this Conn did not add are unchanged.
func (c *Conn) ForeignRuleChanges() (uint64, error) {
	_, err := c.discardRuleChanges()
	return c.foreignRuleChanges, err
}

// ParseRule parses the data of RTM_NEWRULE and RTM_DELRULE.
func ParseRule(b []byte) (r Rule, err error) {
	attributes, err := attributes(b, headerLength, "rule")
	if err != nil {
		return r, err
	}
	r.Family, _ = familyFrom(b[0])
	r.Action = b[7]
	// Destination, type of service, flags.
	r.Extra = b[1] != 0 || b[3] != 0 || binary.NativeEndian.Uint32(b[8:]) != 0
	var icmp bool
	for kind, value := range attributes.All() {
		switch kind {
		case unix.FRA_IIFNAME:
			r.Input = attributes.Text(unix.FRA_IIFNAME)
		case unix.FRA_IP_PROTO:
			icmp = value[0] == icmpProtocols[r.Family]
			r.Extra = r.Extra || !icmp
		case unix.FRA_DPORT_RANGE:
			r.LocalICMP = binary.NativeEndian.Uint16(value)
			r.Extra = r.Extra || binary.NativeEndian.Uint16(value[2:]) != r.LocalICMP
		case fraDportMask: // since Linux 6.15; all bits count
			r.Extra = r.Extra || binary.NativeEndian.Uint16(value) != 1<<16-1
		case unix.FRA_PRIORITY:
			r.Priority = value.Uint32()
		case unix.FRA_TABLE:
			r.Table = value.Uint32()
		case unix.FRA_GOTO:
			r.Goto = value.Uint32()
		case unix.FRA_FWMARK:
			r.Mark = value.Uint32()
		case unix.FRA_FWMASK:
			r.Mask = value.Uint32()
		case unix.FRA_PROTOCOL:
			r.Protocol = value[0]
		case unix.FRA_SRC:
			r.Source = netip.PrefixFrom(value.Addr(), int(b[2]))
		case unix.FRA_SUPPRESS_PREFIXLEN: // always present; -1 is off
			r.Extra = r.Extra || value.Uint32() != 1<<32-1
		default:
			r.Extra = true
		}
	}
	// iif lo, the ICMP protocol and the type form one selector.
	selected := r.LocalICMP != 0
	r.Extra = r.Extra || icmp != selected || selected && r.Input != "lo"
	if selected && r.Input == "lo" {
		r.Input = ""
	}
	return r, nil
}
