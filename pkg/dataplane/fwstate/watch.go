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
	// Neighbors: an entry entered or left the state FAILED, or got another link-layer address.
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
	failed map[neighborKey]bool
	// links holds the link-layer addresses last reported.
	links    map[neighborKey]string
	failedMu sync.Mutex
}

// IgnoreOwn excludes changes of rules and routes by conn.
func (watch *Watch) IgnoreOwn(conn *Conn) { watch.ownPort.Store(conn.rt.Port()) }

// watchBuffer holds a backlog of about ten thousand messages.
const watchBuffer = 4 << 20

// Subscribe starts a watch in the network namespace of the calling thread.
func Subscribe(config Config) (*Watch, error) {
	watch := &Watch{
		Listener: rtnetlink.NewListener(), Changed: make(chan struct{}, 1), config: config.WithDefaults(),
		failed: map[neighborKey]bool{}, links: map[neighborKey]string{},
	}
	if err := watch.subscribe(); err != nil {
		return nil, errors.Join(err, watch.Close())
	}
	return watch, nil
}

func (watch *Watch) subscribe() error {
	// Handlers of the subscription wait until the initial state is known.
	watch.failedMu.Lock()
	defer watch.failedMu.Unlock()
	ruleset := func() { watch.publish(Events{Ruleset: true}) }
	if err := errors.Join(
		watch.Listen("nftables", rtnetlink.Subscription{
			Protocol: unix.NETLINK_NETFILTER, Groups: []uint32{unix.NFNLGRP_NFTABLES}, Buffer: watchBuffer,
			Prepare: onlyGenerations, Handle: func(netlink.Message) { ruleset() }, Overrun: ruleset,
		}),
		watch.Listen("rtnetlink", rtnetlink.Subscription{
			Protocol: unix.NETLINK_ROUTE, Buffer: watchBuffer, Handle: watch.handle, Overrun: watch.handleOverrun,
			Groups: []uint32{
				unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
				unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
				unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
			},
		}),
	); err != nil {
		return err
	}
	// Read after subscribing: a neighbor that fails in between is reported in any case.
	conn, err := Dial(watch.config)
	if err != nil {
		return err
	}
	if _, err = conn.ReadNetwork(); err == nil {
		watch.failed = conn.failedNeighbors
	}
	return errors.Join(err, conn.Close())
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
func (watch *Watch) publish(events Events) {
	watch.mu.Lock()
	pending := &watch.pending
	pending.Ruleset, pending.Routes, pending.Links = pending.Ruleset || events.Ruleset, pending.Routes || events.Routes,
		pending.Links || events.Links
	pending.Neighbors, pending.Sysctls = pending.Neighbors || events.Neighbors, pending.Sysctls || events.Sysctls
	for _, index := range events.LinksDown {
		if !slices.Contains(pending.LinksDown, index) {
			pending.LinksDown = append(pending.LinksDown, index)
		}
	}
	watch.mu.Unlock()
	// A token in the channel is sufficient: Take returns all pending events.
	select {
	case watch.Changed <- struct{}{}:
	default:
	}
}

// Take returns the events since the last call.
func (watch *Watch) Take() Events {
	watch.mu.Lock()
	defer watch.mu.Unlock()
	events := watch.pending
	watch.pending = Events{}
	return events
}

// handleOverrun marks all parts as changed after the kernel dropped messages.
func (watch *Watch) handleOverrun() {
	watch.failedMu.Lock()
	// The lost messages may be transitions, so the next message of a failed neighbor is published.
	clear(watch.failed)
	watch.failedMu.Unlock()
	watch.publish(Events{Routes: true, Links: true, Neighbors: true, Sysctls: true})
}

func (watch *Watch) handle(message netlink.Message) {
	own := watch.ownPort.Load()
	foreign := own == 0 || message.Header.PID != own
	switch message.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		events := Events{Links: true}
		if link, err := rtnetlink.ParseLink(message.Data); err == nil && (message.Header.Type == unix.RTM_DELLINK ||
			!link.Up()) {
			events.LinksDown = []int{link.Index}
		}
		watch.publish(events)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		watch.publish(Events{Links: true})
		// The kernel reports forwarding and rp_filter here.
	case unix.RTM_NEWNETCONF:
		watch.publish(Events{Sysctls: true})
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		if foreign {
			watch.publish(Events{Routes: true})
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		// The process knows its own changes and reads them back itself.
		if foreign && watch.config.concerns(message.Data) {
			watch.publish(Events{Routes: true})
		}
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		watch.handleNeighbor(message)
	}
}

// handleNeighbor publishes transitions of neighbors to and from FAILED. A failed neighbor remains
// failed during a new probe until it responds.
func (watch *Watch) handleNeighbor(message netlink.Message) {
	neighbor, err := rtnetlink.ParseNeighbor(message.Data)
	exists := message.Header.Type == unix.RTM_NEWNEIGH
	if err != nil || !neighbor.Addr.IsValid() || neighbor.State&unix.NUD_INCOMPLETE != 0 && exists {
		return
	}
	watch.failedMu.Lock()
	defer watch.failedMu.Unlock()
	key, failed := neighborKey{neighbor.Link, neighbor.Addr}, neighbor.State&unix.NUD_FAILED != 0 && exists
	moved := exists && !failed && watch.links[key] != string(neighbor.MAC)
	if moved {
		watch.links[key] = string(neighbor.MAC)
	} else if !exists {
		delete(watch.links, key)
	}
	if failed == watch.failed[key] {
		if moved {
			watch.publish(Events{Neighbors: true})
		}
		return
	}
	if failed {
		watch.failed[key] = true
	} else {
		delete(watch.failed, key)
	}
	watch.publish(Events{Neighbors: true})
}

// concerns reports whether a route belongs to the data plane, is in a table of its range, or may
// deliver packets of VIPs locally. It excludes the many routes that BIRD may write.
func (config Config) concerns(message []byte) bool {
	route, err := rtnetlink.ParseRoute(message)
	return err != nil || route.Protocol == plan.RouteProtocol || config.inRange(route.Table) || isLocalRoute(route)
}
