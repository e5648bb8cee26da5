// Package fwstate reads, writes and watches the forwarding state in the kernel: nftables objects,
// policy rules, routes, links and neighbors. It knows no policy: what to write when is decided by
// its callers.
package fwstate

import (
	"errors"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Conn is a connection to the kernel in the network namespace of the thread that called Dial.
// It belongs to one goroutine, and keeps no record of the objects that it installs.
type Conn struct {
	config Config
	nft    *nlmsg.Socket // nftables and connection tracking
	rt     *rtnetlink.Conn
	// families are those of the kernel.
	families []vip.Family
	// failedNeighbors are those that were FAILED at the last read: the kernel resets the
	// state when it probes again.
	failedNeighbors map[neighborKey]bool
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

// Transactions returns the number of committed transactions, each of which incremented the
// generation of the ruleset.
func (f *Conn) Transactions() uint32 { return f.transactions }

// Close closes the sockets.
func (f *Conn) Close() error { return errors.Join(f.nft.Close(), f.rt.Close()) }
