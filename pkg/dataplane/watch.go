package dataplane

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

	"github.com/vipgate/vipgate/pkg/vip"
)

// news is what happened in the kernel; details are there to be read.
type news struct {
	// ruleset: somebody, perhaps we, changed nftables.
	ruleset bool
	// ways: a policy rule, or a route of ours or in a table that may be ours.
	ways bool
	// links: an interface or an address.
	links bool
	// neighbours: one went into or out of the state FAILED.
	neighbours bool
	// settings: forwarding or rp_filter.
	settings bool
	// downed are the indexes of interfaces that were down for a moment at least.
	downed []int
}

// watch listens for changes in the kernel, whoever makes them.
type watch struct {
	// changed has a token when there are news.
	changed chan struct{}
	// failed is closed when a listener ended by itself; err says why.
	failed   chan struct{}
	failOnce sync.Once
	err      error

	o     Options
	conns []*netlink.Conn
	done  sync.WaitGroup

	mu   sync.Mutex
	news news

	// own is the port of the socket whose changes of rules and routes are no news; 0
	// is the kernel's.
	own atomic.Uint32
}

// ignore has changes of rules and routes that this fabric makes be no news.
func (w *watch) ignore(f *fabric) { w.own.Store(f.rt.port) }

// watchBuffer lets a listener fall behind by some ten thousand messages.
const watchBuffer = 4 << 20

// newWatch starts to listen, in the network namespace of the calling thread.
func newWatch(o Options) (*watch, error) {
	w := &watch{changed: make(chan struct{}, 1), failed: make(chan struct{}), o: o.withDefaults()}
	routing, err := w.open("rtnetlink", unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	nft, err := w.open("nftables", unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	// Before it joins, so that nothing else is ever queued.
	if err := onlyGenerations(nft); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on nftables: %w", err), w.close())
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
				return nil, errors.Join(fmt.Errorf("listen for changes in the kernel: join group %d: %w", g, err), w.close())
			}
		}
	}
	l := &routeListener{watch: w, failing: map[neighbourKey]bool{}}
	if err := l.seed(); err != nil {
		return nil, errors.Join(err, w.close())
	}
	w.done.Go(func() { w.listen("rtnetlink", routing, l.hear, l.missed) })
	everything := func() { w.tell(news{ruleset: true}) }
	w.done.Go(func() { w.listen("nftables", nft, func(netlink.Message) { everything() }, everything) })
	return w, nil
}

func (w *watch) open(name string, bus int) (*netlink.Conn, error) {
	c, err := netlink.Dial(bus, nil)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", name, err)
	}
	w.conns = append(w.conns, c)
	// Raising the buffer is a privilege; without it more is read again.
	_ = c.SetReadBuffer(watchBuffer)
	return c, nil
}

// onlyGenerations has the kernel queue nothing but the messages that end a
// transaction: those about elements would fill any buffer.
func onlyGenerations(c *netlink.Conn) error {
	kind := uint32(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN)
	// The filter loads numbers in network order; the type is in that of the host.
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

// listen hands messages over until the connection is closed.
func (w *watch) listen(name string, c *netlink.Conn, hear func(netlink.Message), missed func()) {
	for {
		msgs, err := c.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS):
			missed()
			continue
		case err != nil:
			w.failOnce.Do(func() {
				w.err = fmt.Errorf("listen on %s: %w", name, err)
				close(w.failed)
			})
			return
		}
		for _, m := range msgs {
			hear(m)
		}
	}
}

// tell adds news and leaves a token.
func (w *watch) tell(n news) {
	w.mu.Lock()
	w.news.ruleset = w.news.ruleset || n.ruleset
	w.news.ways = w.news.ways || n.ways
	w.news.links = w.news.links || n.links
	w.news.settings = w.news.settings || n.settings
	w.news.neighbours = w.news.neighbours || n.neighbours
	for _, index := range n.downed {
		if !slices.Contains(w.news.downed, index) {
			w.news.downed = append(w.news.downed, index)
		}
	}
	w.mu.Unlock()
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// take returns what happened since the last call.
func (w *watch) take() news {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.news
	w.news = news{}
	return n
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

// neighbourKey is an entry of the kernel's table of neighbours.
type neighbourKey struct {
	link int
	addr netip.Addr
}

// routeListener sorts messages of rtnetlink. It belongs to one goroutine.
type routeListener struct {
	*watch
	// failing are those last heard to be FAILED.
	failing map[neighbourKey]bool
}

// seed takes over neighbours that failed before anybody listened.
func (l *routeListener) seed() error {
	f, err := newFabric(l.o)
	if err != nil {
		return err
	}
	_, err = f.surroundings()
	l.failing = f.failing
	return errors.Join(err, f.close())
}

// missed: the kernel dropped messages, so that anything may have happened.
func (l *routeListener) missed() {
	clear(l.failing)
	l.tell(news{ways: true, links: true, neighbours: true, settings: true})
}

func (l *routeListener) hear(m netlink.Message) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		n := news{links: true}
		if k, ok := parseLink(m.Data); ok && (m.Header.Type == unix.RTM_DELLINK || !k.up) {
			n.downed = []int{k.index}
		}
		l.tell(n)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		l.tell(news{links: true})
	case unix.RTM_NEWNETCONF:
		l.tell(news{settings: true})
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		if own := l.own.Load(); own == 0 || m.Header.PID != own {
			l.tell(news{ways: true})
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if own := l.own.Load(); (own == 0 || m.Header.PID != own) && l.o.concerns(m.Data) {
			l.tell(news{ways: true})
		}
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		l.neighbour(m)
	}
}

// neighbour tells of those that fail or come back; a failed one that is asked again
// is still failed.
func (l *routeListener) neighbour(m netlink.Message) {
	key, state, ok := parseNeighbour(m.Data)
	if !ok || state&unix.NUD_INCOMPLETE != 0 && m.Header.Type == unix.RTM_NEWNEIGH {
		return
	}
	failed := state&unix.NUD_FAILED != 0 && m.Header.Type == unix.RTM_NEWNEIGH
	if failed == l.failing[key] {
		return
	}
	if failed {
		l.failing[key] = true
	} else {
		delete(l.failing, key)
	}
	l.tell(news{neighbours: true})
}

// concerns tells whether a route is of ours, or in a table whose number a target may
// have. BIRD may write a great many others.
func (o Options) concerns(b []byte) bool {
	if len(b) < rtmLength {
		return true
	}
	family := vip.IPv4
	if b[0] == unix.AF_INET6 {
		family = vip.IPv6
	}
	r := parseRoute(family, b)
	return r.protocol == RouteProtocol || r.table >= o.First && r.table <= o.Mask
}
