package fwstate

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Defaults of [Config].
const (
	DefaultFirst    = 5000
	DefaultMask     = 0x00ffffff
	DefaultPriority = 90
)

// Config defines the fwmarks, tables and rule priorities of the data plane.
type Config struct {
	// First is the lowest fwmark and routing table ID of a target.
	First uint32
	// Mask selects the bits of packet and connection marks that the data plane sets: from the lowest
	// on, without a gap, and not the highest bit with ConntrackLoose.
	Mask uint32
	// Priority is the first of three consecutive policy rule priorities, below 32766 (the main table).
	Priority int
	// Conntrack selects how established flows keep their targets.
	Conntrack Conntrack
	timeouts  int // of checkTimeouts that the kernel can assign, see UseTimeouts
}

// Conntrack is the method by which established flows keep their targets.
type Conntrack uint8

const (
	// ConntrackOn uses connection marks. The kernel must see the packets of both directions.
	ConntrackOn Conntrack = iota
	// ConntrackOff disables connection tracking. Flows do not keep their targets.
	ConntrackOff
	// ConntrackLoose remembers flows from the packets of clients, without connection tracking.
	ConntrackLoose
)

// conntrackNames are the values of --conntrack.
var conntrackNames = [...]string{"on", "off", "loose"}

func (c Conntrack) String() string { return conntrackNames[c] }

// UnmarshalText parses a name.
func (c *Conntrack) UnmarshalText(name []byte) error {
	index := slices.Index(conntrackNames[:], string(name))
	if index < 0 {
		return fmt.Errorf("%q must be one of %s", name, strings.Join(conntrackNames[:], ", "))
	}
	*c = Conntrack(index)
	return nil
}

// WithDefaults fills in zero fields.
func (config Config) WithDefaults() Config {
	config.First = cmp.Or(config.First, DefaultFirst)
	config.Mask = cmp.Or(config.Mask, DefaultMask)
	config.Priority = cmp.Or(config.Priority, DefaultPriority)
	return config
}

// FWMarkMask returns the bits of Mask that fwmarks have. Its highest bit in a connection mark says
// that the flow is undecided (package midstream).
func (config Config) FWMarkMask() uint32 {
	if config.Conntrack == ConntrackOn {
		return config.Mask >> 1
	}
	return config.Mask
}

// inRange reports whether the ID of a routing table is in the fwmark range.
func (config Config) inRange(table uint32) bool { return table >= config.First && table <= config.Mask }

// Conn is a connection to the kernel in the network namespace of the thread that called Dial.
// It is not safe for concurrent use, and keeps no record of installed objects.
type Conn struct {
	Routing
	nft reader // nftables and connection tracking
	// reported holds the changes that the kernel echoed during the last Write.
	reported report
}

// reader reads objects of the data plane's table.
type reader struct{ *nft.Conn }

// Routing reads and changes links, neighbors, policy rules and routes.
type Routing struct {
	config Config
	rt     *rtnetlink.Conn
	// families lists the families that the kernel supports.
	families []vip.Family
	// failedNeighbors were FAILED at the last read. The kernel resets the state on each probe.
	failedNeighbors map[neighborKey]bool
	// foreign caches policy rules of other processes; foreignAt is the value of
	// rtnetlink.Conn.ForeignRuleChanges before they were listed.
	foreign       []rtnetlink.Rule
	foreignAt     uint64
	foreignListed bool
}

// Dial opens the sockets.
func Dial(config Config) (*Conn, error) {
	socket, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	rt, err := rtnetlink.Dial()
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	conn := &Conn{Routing: Routing{config: config.WithDefaults(), rt: rt, families: vip.Families[:]}, nft: reader{socket}}
	socket.Echo = func(set string, element nft.Element, deleted bool) { conn.reported.add(set, element, deleted) }
	// With ipv6.disable=1 this directory is missing, and the kernel rejects IPv6 rules and routes.
	if _, err := os.Stat("/proc/sys/net/ipv6"); errors.Is(err, fs.ErrNotExist) {
		conn.families = []vip.Family{vip.IPv4}
	}
	return conn, nil
}

// HasIPv6 reports whether the kernel supports IPv6.
func (routing *Routing) HasIPv6() bool { return slices.Contains(routing.families, vip.IPv6) }

// Transactions counts the committed transactions. Each increments the ruleset generation.
func (conn *Conn) Transactions() uint32 { return conn.nft.Transactions }

// NFTables returns the netfilter socket, whose transactions [Conn.Transactions] counts.
func (conn *Conn) NFTables() *nft.Conn { return conn.nft.Conn }

// Close closes the sockets.
func (conn *Conn) Close() error { return errors.Join(conn.nft.Close(), conn.rt.Close()) }
