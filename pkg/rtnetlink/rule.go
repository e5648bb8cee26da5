package rtnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// headerLength is the size of struct rtmsg and of struct fib_rule_hdr.
const headerLength = 12

// Rule is a rule of policy routing.
type Rule struct {
	Family     vip.Family
	Priority   uint32
	Source     netip.Prefix // zero: any
	Mark, Mask uint32
	Action     uint8  // unix.FR_ACT_*
	Table      uint32 // of FR_ACT_TO_TBL
	Goto       uint32 // the priority that FR_ACT_GOTO continues with
	Protocol   uint8
	// Extra: the rule has selectors or flags that the fields cannot express, such as being
	// inverted, or a Goto to a rule that does not exist.
	Extra bool
}

// Same reports whether two rules do the same; their protocols do not matter.
func (r Rule) Same(s Rule) bool {
	r.Protocol, s.Protocol = 0, 0
	return r == s
}

func (r Rule) String() string {
	s := fmt.Sprintf("%s %d:", r.Family, r.Priority)
	if r.Source.IsValid() {
		s += " from " + r.Source.String()
	}
	if r.Mark != 0 || r.Mask != 0 {
		s += fmt.Sprintf(" fwmark %#x/%#x", r.Mark, r.Mask)
	}
	switch r.Action {
	case unix.FR_ACT_TO_TBL:
		s += fmt.Sprintf(" lookup %d", r.Table)
	case unix.FR_ACT_GOTO:
		s += fmt.Sprintf(" goto %d", r.Goto)
	case unix.FR_ACT_BLACKHOLE:
		s += " blackhole"
	default:
		s += fmt.Sprintf(" action %d", r.Action)
	}
	if r.Extra {
		s += " (and more)"
	}
	return s + fmt.Sprintf(" proto %d", r.Protocol)
}

// Add returns the request that adds the rule, which must not have Extra. It fails with EEXIST for
// one that exists.
func (r Rule) Add() Request { return r.request(unix.RTM_NEWRULE, netlink.Create|netlink.Excl) }

// Delete returns the request that deletes the rule. It fails with ENOENT if there is none.
func (r Rule) Delete() Request { return r.request(unix.RTM_DELRULE, 0) }

func (r Rule) request(kind netlink.HeaderType, flags netlink.HeaderFlags) Request {
	a := make(attributes, headerLength, 96)
	a[0], a[7] = systemFamily(r.Family), r.Action
	a.uint32(unix.FRA_PRIORITY, r.Priority)
	a.bytes(unix.FRA_PROTOCOL, []byte{r.Protocol})
	if r.Table != 0 {
		a.uint32(unix.FRA_TABLE, r.Table)
	}
	if r.Action == unix.FR_ACT_GOTO {
		a.uint32(unix.FRA_GOTO, r.Goto)
	}
	if r.Mark != 0 || r.Mask != 0 {
		a.uint32(unix.FRA_FWMARK, r.Mark)
		a.uint32(unix.FRA_FWMASK, r.Mask)
	}
	if r.Source.IsValid() {
		a[2] = uint8(r.Source.Bits())
		a.bytes(unix.FRA_SRC, r.Source.Addr().AsSlice())
	}
	return Request{Header: netlink.Header{Type: kind, Flags: flags}, Data: a}
}

// AddRule adds a rule unless it exists.
func (c *Conn) AddRule(r Rule) error {
	if err := c.do(r.Add()); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("failed to add rule %s: %w", r, err)
	}
	return nil
}

// DeleteRule deletes a rule if it exists.
func (c *Conn) DeleteRule(r Rule) error {
	if err := c.do(r.Delete()); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("failed to delete rule %s: %w", r, err)
	}
	return nil
}

// Rules lists the policy rules of a family. With ErrInterrupted the list may lack rules.
func (c *Conn) Rules(f vip.Family) ([]Rule, error) {
	// Notifications that are queued from now on are about changes during the dump.
	if _, err := c.rules.discard(); err != nil {
		return nil, err
	}
	body := make([]byte, headerLength)
	body[0] = systemFamily(f)
	rules, err := list(c.requests, unix.RTM_GETRULE, body, c.unchanged, func(b []byte) (Rule, bool, error) {
		r, err := parseRule(b)
		return r, err != nil || b[0] == systemFamily(f), err
	})
	if err != nil {
		return rules, fmt.Errorf("failed to list %s rules: %w", f, err)
	}
	return rules, nil
}

// unchanged fails with ErrInterrupted if rules changed since its last call. In a dump of several
// datagrams, some 400 rules each, the kernel continues by counting: it skips a rule when one before
// it was deleted meanwhile, and does not flag that (Linux 6.18).
func (c *Conn) unchanged() error {
	changed, err := c.rules.discard()
	if err == nil && changed {
		err = ErrInterrupted
	}
	return err
}

func parseRule(b []byte) (r Rule, err error) {
	err = decode(b, headerLength, "rule", func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.FRA_PRIORITY:
			r.Priority = ad.Uint32()
		case unix.FRA_TABLE:
			r.Table = ad.Uint32()
		case unix.FRA_GOTO:
			r.Goto = ad.Uint32()
		case unix.FRA_FWMARK:
			r.Mark = ad.Uint32()
		case unix.FRA_FWMASK:
			r.Mask = ad.Uint32()
		case unix.FRA_PROTOCOL:
			r.Protocol = ad.Uint8()
		case unix.FRA_SRC:
			if a, ok := netip.AddrFromSlice(ad.Bytes()); ok {
				r.Source = netip.PrefixFrom(a, int(b[2]))
			}
		case unix.FRA_SUPPRESS_PREFIXLEN: // always present; -1 is off
			r.Extra = r.Extra || ad.Uint32() != 1<<32-1
		default:
			r.Extra = true
		}
	})
	if err != nil {
		return r, err
	}
	r.Family, _ = familyFrom(b[0])
	r.Action = b[7]
	// Destination, type of service, flags.
	r.Extra = r.Extra || b[1] != 0 || b[3] != 0 || binary.NativeEndian.Uint32(b[8:]) != 0
	return r, nil
}
