package fwstate

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
)

// Conn is the kernel's side of the data plane, in the network namespace of the
// calling thread when it was made. It belongs to one goroutine. It remembers
// nothing of what it did: who calls it does.
type Conn struct {
	config Config
	// nft changes and reads nftables, rt routing, and ct connection tracking.
	nft, rt, ct *nlmsg.Socket
	// ruleEvents has what is reported of policy rules, whoever changes them.
	ruleEvents *nlmsg.Socket
	// noIPv6: the kernel has none.
	noIPv6 bool
	// failedNeighbors are the neighbours that had failed at the last look: the kernel forgets
	// it when it asks again.
	failedNeighbors map[neighborKey]bool
	// committed counts transactions.
	committed uint32
}

// Dial opens the sockets.
func Dial(o Config) (*Conn, error) {
	f := &Conn{config: o.WithDefaults()}
	for at, protocol := range map[**nlmsg.Socket]int{&f.nft: unix.NETLINK_NETFILTER, &f.ct: unix.NETLINK_NETFILTER, &f.rt: unix.NETLINK_ROUTE, &f.ruleEvents: unix.NETLINK_ROUTE} {
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
