package fwstate

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
)

// Conn is a connection to the kernel in the network namespace of the thread that called Dial.
// It belongs to one goroutine, and keeps no record of the objects that it installs.
type Conn struct {
	config Config
	// nft changes and reads nftables, rt routing, and ct connection tracking.
	nft, rt, ct *nlmsg.Socket
	// ruleEvents receives notifications of policy rules.
	ruleEvents *nlmsg.Socket
	// noIPv6: the kernel has no IPv6.
	noIPv6 bool
	// failedNeighbors are those that were FAILED at the last read: the kernel resets the
	// state when it probes again.
	failedNeighbors map[neighborKey]bool
	// committed counts transactions.
	committed uint32
}

// Dial opens the sockets.
func Dial(o Config) (*Conn, error) {
	f := &Conn{config: o.WithDefaults()}
	for at, protocol := range map[**nlmsg.Socket]int{
		&f.nft: unix.NETLINK_NETFILTER, &f.ct: unix.NETLINK_NETFILTER,
		&f.rt: unix.NETLINK_ROUTE, &f.ruleEvents: unix.NETLINK_ROUTE,
	} {
		s, err := nlmsg.Open(protocol)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		*at = s
	}
	if err := f.ruleEvents.Join(unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	_, err := os.Stat("/proc/sys/net/ipv6")
	f.noIPv6 = errors.Is(err, fs.ErrNotExist)
	return f, nil
}

// HasIPv6 reports whether the kernel has IPv6.
func (f *Conn) HasIPv6() bool { return !f.noIPv6 }

// Close closes the sockets.
func (f *Conn) Close() error {
	return errors.Join(f.nft.Close(), f.ct.Close(), f.rt.Close(), f.ruleEvents.Close())
}
