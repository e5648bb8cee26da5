package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// watch listens for changes that somebody makes to what is ours.
type watch struct {
	// changed has a token when something happened since it was last taken.
	changed chan struct{}
	// failed is closed when a listener ended by itself; err says why.
	failed   chan struct{}
	failOnce sync.Once
	err      error

	conns []*netlink.Conn
	done  sync.WaitGroup

	// birdPort is the netlink port that last added a route of BIRD to the gateways'
	// table; only the listener of rtnetlink uses it. removed counts the routes that
	// other ports deleted from that table.
	birdPort uint32
	removed  atomic.Uint64
}

// newWatch starts to listen, in the network namespace of the calling thread.
func newWatch(o Options) (*watch, error) {
	w := &watch{changed: make(chan struct{}, 1), failed: make(chan struct{})}
	if err := w.listen("rtnetlink", unix.NETLINK_ROUTE, func(m netlink.Message) bool { return w.concernsPolicy(o, m) },
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
		unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF); err != nil {
		return nil, errors.Join(err, w.close())
	}
	if err := w.listen("nftables", unix.NETLINK_NETFILTER, concernsTable, unix.NFNLGRP_NFTABLES); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (w *watch) listen(name string, bus int, concerns func(netlink.Message) bool, groups ...uint32) error {
	c, err := netlink.Dial(bus, nil)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", name, err)
	}
	w.conns = append(w.conns, c)
	for _, g := range groups {
		if err := c.JoinGroup(g); err != nil {
			return fmt.Errorf("listen on %s: join group %d: %w", name, g, err)
		}
	}
	w.done.Go(func() {
		for {
			msgs, err := c.Receive()
			switch {
			case errors.Is(err, unix.ENOBUFS):
				// The kernel dropped some: anything may have changed.
				w.wake()
				continue
			case err != nil:
				w.failOnce.Do(func() {
					w.err = fmt.Errorf("listen on %s: %w", name, err)
					close(w.failed)
				})
				return
			}
			for _, m := range msgs {
				if concerns(m) {
					w.wake()
					break
				}
			}
		}
	})
	return nil
}

func (w *watch) wake() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// close ends the listeners and waits for them.
func (w *watch) close() error {
	var errs []error
	for _, c := range w.conns {
		errs = append(errs, c.Close())
	}
	w.done.Wait()
	return errors.Join(errs...)
}

// concernsPolicy reports whether a message is about what source routing depends on:
// every rule, since one before ours can divert traffic from them; every sysctl that the
// kernel reports (forwarding, rp_filter); of the routes those in the blackhole's table,
// and those that another process than BIRD deletes from the gateways' table. BIRD may
// write a great many others.
func (w *watch) concernsPolicy(o Options, m netlink.Message) bool {
	switch m.Header.Type {
	case unix.RTM_NEWRULE, unix.RTM_DELRULE, unix.RTM_NEWNETCONF, unix.RTM_DELNETCONF:
		return true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, err := parseRoute(m.Data)
		switch {
		case err != nil || r.table != o.TableID || r.protocol != unix.RTPROT_BIRD:
			return err != nil || r.table == o.blackholeTable()
		case m.Header.Type == unix.RTM_NEWROUTE:
			w.birdPort = m.Header.PID
		// The kernel itself, port 0, removes routes with their interface; BIRD follows.
		case m.Header.PID != 0 && m.Header.PID != w.birdPort:
			w.removed.Add(1)
			return true
		}
	}
	return false
}

// concernsTable tells whether a message of nftables is about our table. In all
// of them attribute 1 is the table's name.
func concernsTable(m netlink.Message) bool {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || m.Header.Type&0xff == unix.NFT_MSG_NEWGEN || len(m.Data) < 4 {
		return false
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[4:])
	if err != nil {
		return true
	}
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		if ad.Type() == unix.NFTA_TABLE_NAME {
			return ad.String() == TableName
		}
	}
	return false
}
