package fwstate

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Defaults of [Config].
const (
	DefaultFirst    = 5000
	DefaultMask     = 0x00ffffff
	DefaultPriority = 90
)

// Config states which fwmarks, tables and rule priorities belong to the data plane.
type Config struct {
	// First is the lowest fwmark, and routing table, of a target.
	First uint32
	// Mask has the bits of packet and connection marks that the data plane sets.
	Mask uint32
	// Priority is that of the first of three policy rules in a row.
	Priority int
	// Conntrack is how established flows keep their targets.
	Conntrack Conntrack
}

// Conntrack is how established flows keep their targets.
type Conntrack uint8

const (
	// ConntrackOn: by the mark of their connection, whose packets of both directions it must see.
	ConntrackOn Conntrack = iota
	// ConntrackOff: not at all, and the kernel does not track them.
	ConntrackOff
	// ConntrackLoose: by the packets of their clients. The kernel does not track them.
	ConntrackLoose
)

// conntrackNames are the values of --conntrack.
var conntrackNames = [...]string{"on", "off", "loose"}

func (c Conntrack) String() string { return conntrackNames[c] }

// UnmarshalText reads a name.
func (c *Conntrack) UnmarshalText(name []byte) error {
	i := slices.Index(conntrackNames[:], string(name))
	if i < 0 {
		return fmt.Errorf("%q must be one of %s", name, strings.Join(conntrackNames[:], ", "))
	}
	*c = Conntrack(i)
	return nil
}

// WithDefaults fills in zero fields.
func (c Config) WithDefaults() Config {
	c.First = cmp.Or(c.First, DefaultFirst)
	c.Mask = cmp.Or(c.Mask, DefaultMask)
	c.Priority = cmp.Or(c.Priority, DefaultPriority)
	return c
}

// inRange reports whether a routing table has the number of a fwmark.
func (c Config) inRange(table uint32) bool { return table >= c.First && table <= c.Mask }

// Validate returns an error for values that cannot work together.
func (c Config) Validate() error {
	switch {
	case c.First&^c.Mask != 0:
		return fmt.Errorf("first number %d is outside the mask %#x of packet marks: choose a smaller number or a wider mask",
			c.First, c.Mask)
	case c.Mask != 1<<bits.Len32(c.Mask)-1:
		return fmt.Errorf("mask %#x of packet marks has a gap: numbers count up, so it must be like 0xffff or 0xffffff",
			c.Mask)
	case c.Conntrack == ConntrackLoose && c.Mask&closing != 0:
		return fmt.Errorf("mask %#x of packet marks: loose connection tracking needs the highest bit itself", c.Mask)
	case c.Priority < 1 || c.Priority > 32763:
		return fmt.Errorf("rule priority %d: choose one from 1 to 32763, since three are used and 32766 is the main table's",
			c.Priority)
	}
	return nil
}

// Conn is a connection to the kernel in the network namespace of the thread that called Dial.
// It belongs to one goroutine, and keeps no record of the objects that it installs.
type Conn struct {
	config Config
	nft    *nlmsg.Socket // nftables and connection tracking
	rt     *rtnetlink.Conn
	// families are those of the kernel.
	families []vip.Family
	// failedNeighbors were FAILED at the last read: the kernel resets the state when it probes again.
	failedNeighbors map[neighborKey]bool
	// others are the policy rules of other processes, once they were listed, and othersAt is what
	// rtnetlink.Conn.ForeignRuleChanges returned before that.
	others       []rtnetlink.Rule
	othersAt     uint64
	othersListed bool
	// reported is what the kernel reported of the last Write.
	reported report
	// transactions counts those that were committed, messages what was in them.
	transactions, messages uint32
}

// Dial opens the sockets.
func Dial(c Config) (*Conn, error) {
	nft, err := nlmsg.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	rt, err := rtnetlink.Dial()
	if err != nil {
		return nil, errors.Join(err, nft.Close())
	}
	f := &Conn{config: c.WithDefaults(), nft: nft, rt: rt, families: vip.Families[:]}
	if _, err := os.Stat("/proc/sys/net/ipv6"); errors.Is(err, fs.ErrNotExist) {
		f.families = []vip.Family{vip.IPv4}
	}
	return f, nil
}

// HasIPv6 reports whether the kernel has IPv6.
func (f *Conn) HasIPv6() bool { return slices.Contains(f.families, vip.IPv6) }

// Transactions returns the number of committed transactions: each is a generation of the ruleset.
func (f *Conn) Transactions() uint32 { return f.transactions }

// Close closes the sockets.
func (f *Conn) Close() error { return errors.Join(f.nft.Close(), f.rt.Close()) }
