package fwstate

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

// Events reports the changed parts of the kernel state, which must be read.
type Events struct {
	// Ruleset: nftables changed, possibly by this process.
	Ruleset bool
	// Routes: a policy rule changed, or a route of the data plane or in a table of its range.
	Routes bool
	// Links: an interface or an address changed.
	Links bool
	// Neighbors: an entry entered or left the state FAILED.
	Neighbors bool
	// Sysctls: forwarding or rp_filter changed.
	Sysctls bool
	// LinksDown lists the indexes of interfaces that were down at least briefly.
	LinksDown []int
}

// Watch receives kernel notifications of changes by all processes.
type Watch struct {
	*rtnetlink.Listener
	// Changed contains a token while events are pending.
	Changed chan struct{}

	config Config
	// ownPort is the port ID of the socket whose rule and route changes are ignored; 0 for none.
	ownPort atomic.Uint32

	mu      sync.Mutex
	pending Events

	// failed holds the neighbors last reported as FAILED. subscribe holds failedMu until the
	// initial read, which follows the subscription, so handlers wait for it.
	failed   map[neighborKey]bool
	failedMu sync.Mutex
}

// IgnoreOwn excludes changes of rules and routes by f.
func (w *Watch) IgnoreOwn(f *Conn) { w.ownPort.Store(f.rt.Port()) }

// watchBuffer holds a backlog of about ten thousand messages.
const watchBuffer = 4 << 20

// Subscribe starts a watch in the network namespace of the calling thread.
func Subscribe(c Config) (*Watch, error) {
	w := &Watch{
		Listener: rtnetlink.NewListener(), Changed: make(chan struct{}, 1), config: c.WithDefaults(),
		failed: map[neighborKey]bool{},
	}
	if err := w.subscribe(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

func (w *Watch) subscribe() error {
	w.failedMu.Lock()
	defer w.failedMu.Unlock()
	ruleset := func() { w.publish(Events{Ruleset: true}) }
	if err := errors.Join(
		w.Listen("nftables", rtnetlink.Subscription{
			Protocol: unix.NETLINK_NETFILTER, Groups: []uint32{unix.NFNLGRP_NFTABLES}, Buffer: watchBuffer,
			Prepare: onlyGenerations, Handle: func(netlink.Message) { ruleset() }, Overrun: ruleset,
		}),
		w.Listen("rtnetlink", rtnetlink.Subscription{
			Protocol: unix.NETLINK_ROUTE, Buffer: watchBuffer, Handle: w.handle, Overrun: w.handleOverrun,
			Groups: []uint32{
				unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
				unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
				unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
			},
		}),
	); err != nil {
		return err
	}
	f, err := Dial(w.config)
	if err != nil {
		return err
	}
	if _, err = f.ReadNetwork(); err == nil {
		w.failed = f.failedNeighbors
	}
	return errors.Join(err, f.Close())
}

// onlyGenerations installs a filter that passes only the final message of each transaction,
// because element messages would fill any buffer. It is installed before the subscription, so
// that no other message is queued.
func onlyGenerations(c *netlink.Conn) error {
	// BPF loads numbers in network byte order; the type is in host byte order.
	kind := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, nft.Message(unix.NFT_MSG_NEWGEN)))
	const typeAt = 4 // of struct nlmsghdr
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: typeAt, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(kind), SkipFalse: 1},
		bpf.RetConstant{Val: 1<<32 - 1},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return err
	}
	return c.SetBPF(program)
}

// publish merges events into the pending ones and signals Changed.
func (w *Watch) publish(e Events) {
	w.mu.Lock()
	p := &w.pending
	p.Ruleset, p.Routes, p.Links = p.Ruleset || e.Ruleset, p.Routes || e.Routes, p.Links || e.Links
	p.Neighbors, p.Sysctls = p.Neighbors || e.Neighbors, p.Sysctls || e.Sysctls
	for _, index := range e.LinksDown {
		if !slices.Contains(p.LinksDown, index) {
			p.LinksDown = append(p.LinksDown, index)
		}
	}
	w.mu.Unlock()
	select {
	case w.Changed <- struct{}{}:
	default:
	}
}

// Take returns the events since the last call.
func (w *Watch) Take() Events {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.pending
	w.pending = Events{}
	return e
}

// handleOverrun marks all parts as changed after the kernel dropped messages.
func (w *Watch) handleOverrun() {
	w.failedMu.Lock()
	clear(w.failed)
	w.failedMu.Unlock()
	w.publish(Events{Routes: true, Links: true, Neighbors: true, Sysctls: true})
}

func (w *Watch) handle(m netlink.Message) {
	own := w.ownPort.Load()
	foreign := own == 0 || m.Header.PID != own
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		e := Events{Links: true}
		if l, err := rtnetlink.ParseLink(m.Data); err == nil && (m.Header.Type == unix.RTM_DELLINK || !l.Up()) {
			e.LinksDown = []int{l.Index}
		}
		w.publish(e)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		w.publish(Events{Links: true})
	case unix.RTM_NEWNETCONF:
		w.publish(Events{Sysctls: true})
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		if foreign {
			w.publish(Events{Routes: true})
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if foreign && w.config.concerns(m.Data) {
			w.publish(Events{Routes: true})
		}
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		w.handleNeighbor(m)
	}
}

// handleNeighbor publishes transitions of neighbors to and from FAILED. A failed neighbor remains
// failed during a new probe until it responds.
func (w *Watch) handleNeighbor(m netlink.Message) {
	n, err := rtnetlink.ParseNeighbor(m.Data)
	exists := m.Header.Type == unix.RTM_NEWNEIGH
	if err != nil || !n.Addr.IsValid() || n.State&unix.NUD_INCOMPLETE != 0 && exists {
		return
	}
	w.failedMu.Lock()
	defer w.failedMu.Unlock()
	key, failed := neighborKey{n.Link, n.Addr}, n.State&unix.NUD_FAILED != 0 && exists
	if failed == w.failed[key] {
		return
	}
	if failed {
		w.failed[key] = true
	} else {
		delete(w.failed, key)
	}
	w.publish(Events{Neighbors: true})
}

// concerns reports whether a route belongs to the data plane, is in a table of its range, or may
// deliver packets of VIPs locally. It excludes the many routes that BIRD may write.
func (c Config) concerns(b []byte) bool {
	r, err := rtnetlink.ParseRoute(b)
	return err != nil || r.Protocol == plan.RouteProtocol || c.inRange(r.Table) || isLocalRoute(r)
}
