package fwstate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Events reports which parts of the kernel state changed and must be read.
type Events struct {
	// Ruleset: a process, perhaps this one, changed nftables.
	Ruleset bool
	// Routes: a policy rule, or a route of the data plane or in a table of its range.
	Routes bool
	// Links: an interface or an address.
	Links bool
	// Neighbors: an entry entered or left the state FAILED.
	Neighbors bool
	// Sysctls: forwarding or rp_filter.
	Sysctls bool
	// LinksDown are the indexes of interfaces that were down at least briefly.
	LinksDown []int
}

// Watch receives notifications of changes by all processes.
type Watch struct {
	// Changed has a token while events are pending.
	Changed chan struct{}
	// Failed is closed when a subscription failed, with Err.
	Failed   chan struct{}
	failOnce sync.Once
	Err      error

	config Config
	conns  []*netlink.Conn
	done   sync.WaitGroup

	mu      sync.Mutex
	pending Events

	// ownPort is the port of the socket whose changes of rules and routes are ignored; 0
	// for none.
	ownPort atomic.Uint32
}

// IgnoreOwn ignores changes of rules and routes by a connection.
func (w *Watch) IgnoreOwn(f *Conn) { w.ownPort.Store(f.rt.Port) }

// watchBuffer lets a listener fall behind by some ten thousand messages.
const watchBuffer = 4 << 20

// Subscribe starts a watch in the network namespace of the calling thread.
func Subscribe(o Config) (*Watch, error) {
	w := &Watch{Changed: make(chan struct{}, 1), Failed: make(chan struct{}), config: o.WithDefaults()}
	routing, err := w.open("rtnetlink", unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	nft, err := w.open("nftables", unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	// The filter precedes the subscription, so that no other message is ever queued.
	if err := onlyGenerations(nft); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on nftables: %w", err), w.Close())
	}
	groups := map[*netlink.Conn][]uint32{
		routing: {
			unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
			unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
			unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
		},
		nft: {unix.NFNLGRP_NFTABLES},
	}
	for c, list := range groups {
		for _, g := range list {
			if err := c.JoinGroup(g); err != nil {
				return nil, errors.Join(fmt.Errorf("listen for changes in the kernel: join group %d: %w", g, err), w.Close())
			}
		}
	}
	l := &routeListener{Watch: w, failed: map[neighborKey]bool{}}
	if err := l.seed(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	w.done.Go(func() { w.listen("rtnetlink", routing, l.handle, l.missed) })
	everything := func() { w.publish(Events{Ruleset: true}) }
	w.done.Go(func() { w.listen("nftables", nft, func(netlink.Message) { everything() }, everything) })
	return w, nil
}

func (w *Watch) open(name string, bus int) (*netlink.Conn, error) {
	c, err := netlink.Dial(bus, nil)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", name, err)
	}
	w.conns = append(w.conns, c)
	// A larger buffer needs a privilege; with a smaller one more messages are lost and read again.
	_ = c.SetReadBuffer(watchBuffer)
	return c, nil
}

// onlyGenerations makes the kernel queue only the message that ends each transaction: those
// about elements would fill any buffer.
func onlyGenerations(c *netlink.Conn) error {
	kind := uint32(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN)
	// BPF loads numbers in network order; the type is in host order.
	kind = uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, uint16(kind))))
	const typeAt = 4 // of struct nlmsghdr
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: typeAt},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: kind, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1<<32 - 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: unsafe.SliceData(program)})
	}); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	return failed
}

// listen calls hear for each message until the connection is closed.
func (w *Watch) listen(name string, c *netlink.Conn, hear func(netlink.Message), missed func()) {
	for {
		msgs, err := c.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS):
			missed()
			continue
		case err != nil:
			w.failOnce.Do(func() {
				w.Err = fmt.Errorf("listen on %s: %w", name, err)
				close(w.Failed)
			})
			return
		}
		for _, m := range msgs {
			hear(m)
		}
	}
}

// publish adds events and leaves a token.
func (w *Watch) publish(n Events) {
	w.mu.Lock()
	w.pending.Ruleset = w.pending.Ruleset || n.Ruleset
	w.pending.Routes = w.pending.Routes || n.Routes
	w.pending.Links = w.pending.Links || n.Links
	w.pending.Sysctls = w.pending.Sysctls || n.Sysctls
	w.pending.Neighbors = w.pending.Neighbors || n.Neighbors
	for _, index := range n.LinksDown {
		if !slices.Contains(w.pending.LinksDown, index) {
			w.pending.LinksDown = append(w.pending.LinksDown, index)
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
	n := w.pending
	w.pending = Events{}
	return n
}

// Close ends the subscriptions and waits for their goroutines.
func (w *Watch) Close() error {
	var errs []error
	for _, c := range w.conns {
		errs = append(errs, c.Close())
	}
	w.done.Wait()
	return errors.Join(errs...)
}

// neighborKey identifies a neighbor entry.
type neighborKey struct {
	link int
	addr netip.Addr
}

// routeListener turns rtnetlink messages into events. It belongs to one goroutine.
type routeListener struct {
	*Watch
	// failed are the neighbors that were last notified as FAILED.
	failed map[neighborKey]bool
}

// seed reads the neighbors that failed before the subscription.
func (l *routeListener) seed() error {
	f, err := Dial(l.config)
	if err != nil {
		return err
	}
	_, err = f.ReadNetwork()
	l.failed = f.failedNeighbors
	return errors.Join(err, f.Close())
}

// missed marks everything as changed after the kernel dropped messages.
func (l *routeListener) missed() {
	clear(l.failed)
	l.publish(Events{Routes: true, Links: true, Neighbors: true, Sysctls: true})
}

func (l *routeListener) handle(m netlink.Message) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		n := Events{Links: true}
		if k, ok := parseLink(m.Data); ok && (m.Header.Type == unix.RTM_DELLINK || !k.Up) {
			n.LinksDown = []int{k.Index}
		}
		l.publish(n)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		l.publish(Events{Links: true})
	case unix.RTM_NEWNETCONF:
		l.publish(Events{Sysctls: true})
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		if own := l.ownPort.Load(); own == 0 || m.Header.PID != own {
			l.publish(Events{Routes: true})
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if own := l.ownPort.Load(); (own == 0 || m.Header.PID != own) && l.config.concerns(m.Data) {
			l.publish(Events{Routes: true})
		}
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		l.handleNeighbor(m)
	}
}

// handleNeighbor publishes neighbors that enter or leave FAILED. A failed neighbor that is
// probed again stays failed until it answers.
func (l *routeListener) handleNeighbor(m netlink.Message) {
	key, state, ok := parseNeighbor(m.Data)
	if !ok || state&unix.NUD_INCOMPLETE != 0 && m.Header.Type == unix.RTM_NEWNEIGH {
		return
	}
	failed := state&unix.NUD_FAILED != 0 && m.Header.Type == unix.RTM_NEWNEIGH
	if failed == l.failed[key] {
		return
	}
	if failed {
		l.failed[key] = true
	} else {
		delete(l.failed, key)
	}
	l.publish(Events{Neighbors: true})
}

// concerns reports whether a route belongs to the data plane, or is in a table of its range.
// BIRD may write a great many other routes.
func (c Config) concerns(b []byte) bool {
	if len(b) < rtmLength {
		return true
	}
	family := vip.IPv4
	if b[0] == unix.AF_INET6 {
		family = vip.IPv6
	}
	r := parseRoute(family, b)
	return r.protocol == plan.RouteProtocol || r.table >= c.First && r.table <= c.Mask
}
