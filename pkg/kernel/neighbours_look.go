package kernel

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// Of each interface as many are asked at most: next hops and default gateways,
	// those confirmed last, and others by chance.
	maxHops   = 4
	maxLatest = 4
	maxChance = 4
	// userTick is the unit of times in struct nda_cacheinfo: USER_HZ is 100 on
	// every architecture that Go supports.
	userTick = 10 * time.Millisecond
	// ndmsgLength is the size of struct ndmsg.
	ndmsgLength = 12
)

// looker looks at networks while they are asked about. It belongs to one goroutine.
type looker struct {
	epoch   int
	publish func(epoch int, x Network)

	handle   *vnetlink.Handle
	failures int
	ways     map[netip.Addr]int
	links    map[int]*Link
}

// close is for a nil looker as well.
func (l *looker) close() {
	if l != nil && l.handle != nil {
		l.handle.Close()
		l.handle = nil
	}
}

// neighbour is one entry of the kernel's table.
type neighbour struct {
	addr      netip.Addr
	link      int
	state     int
	confirmed time.Time
	// tested: it was solicited for this look.
	tested bool
}

// The states, by what a look wants to know.
const (
	// unsolicited: nothing was sent to it lately, so silence says nothing.
	unsolicited = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY
	// solicited, and has not answered yet or at all.
	solicited = unix.NUD_INCOMPLETE | unix.NUD_PROBE | unix.NUD_FAILED
)

// look has neighbours answer and publishes what it sees. It ends early when ctx
// ends, or when over says that nobody wants to know any more.
func (l *looker) look(ctx context.Context, addrs []netip.Addr, over func() bool) error {
	err := l.tryLook(ctx, addrs, over)
	if err == nil {
		l.failures = 0
		return nil
	}
	l.failures++
	l.close() // the next look begins with a socket of its own
	l.publish(l.epoch, Network{Err: err, Failures: l.failures, At: time.Now()})
	return err
}

func (l *looker) tryLook(ctx context.Context, addrs []netip.Addr, over func() bool) error {
	if l.handle == nil {
		h, err := newHandle()
		if err != nil {
			return err
		}
		l.handle = h
	}
	began := time.Now()
	hops, err := l.resolve(addrs)
	if err != nil {
		return err
	}
	table, err := l.read()
	if err != nil {
		return err
	}
	l.tell()
	asked := map[int][]neighbour{} // by interface
	var knocks []*knock
	defer func() {
		for _, k := range knocks {
			k.close()
		}
	}()
	for index, link := range l.links {
		if !link.Carrier || link.Mute {
			continue
		}
		chosen := choosePeers(table[index], hops[index], index)
		link.Asked, link.Unprivileged = len(chosen), false
		for _, p := range chosen {
			// A neighbour that cannot be asked has no answer: that is all that an
			// error says.
			if k, err := newKnock(p, link.Name); err == nil {
				knocks = append(knocks, k)
			}
			p.tested = true // by the knock, if the kernel does not know where it is
			if p.state&unsolicited != 0 {
				err := solicit(p)
				p.tested = err == nil
				link.Unprivileged = link.Unprivileged || errors.Is(err, unix.EPERM)
			}
			asked[index] = append(asked[index], p)
		}
	}
	if len(asked) == 0 { // all is known, and who asks about more is not to wait
		for _, link := range l.links {
			link.Silent = time.Time{}
		}
		return nil
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for _, after := range pollsAfter {
		timer.Reset(time.Until(began.Add(after)))
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if over() {
			return nil
		}
		before := l.confirmations()
		for _, k := range knocks {
			if k.answered() {
				l.links[k.link].reached(k.addr, time.Now())
			}
		}
		if table, err = l.read(); err != nil {
			return err
		}
		for index, link := range l.links {
			link.credit(asked[index], table[index])
		}
		if !maps.Equal(before, l.confirmations()) {
			l.tell()
		}
	}
	for index, link := range l.links {
		link.Silent = time.Time{}
		if link.Confirmed.Before(began) && silent(asked[index], table[index]) {
			link.Silent = began
		}
	}
	l.tell()
	return nil
}

// silent tells whether all that were asked on an interface were solicited and none
// has answered.
func silent(asked []neighbour, table map[netip.Addr]neighbour) bool {
	var n int
	for _, p := range asked {
		switch now := table[p.addr]; {
		case now.state&unsolicited != 0:
			return false
		case now.state&solicited != 0:
			n++
		}
	}
	return n > 0
}

// confirmations are the interfaces with their last sign of life.
func (l *looker) confirmations() map[int]Link {
	m := make(map[int]Link, len(l.links))
	for i, link := range l.links {
		m[i] = Link{Carrier: link.Carrier, Confirmed: link.Confirmed}
	}
	return m
}

// tell publishes a copy of what is known.
func (l *looker) tell() {
	n := Network{Links: make(map[int]Link, len(l.links)), Ways: l.ways, At: time.Now()}
	for i, link := range l.links {
		n.Links[i] = *link
	}
	l.publish(l.epoch, n)
}

// reached notes that somebody on the interface gave a sign of life.
func (k *Link) reached(who netip.Addr, at time.Time) {
	if at.After(k.Confirmed) {
		k.Confirmed, k.Witness = at, who
	}
}

// credit notes who of those asked was reached.
//
// A confirmation alone is no proof. TCP keeps in mind that something was
// acknowledged, and confirms the neighbour when it next sends: into the dark, if the
// network broke between. But nothing except an answer leads from a solicitation
// (PROBE, INCOMPLETE) to REACHABLE. Where we cannot solicit there is nothing better
// than the age of confirmations, of whomever.
func (k *Link) credit(asked []neighbour, table map[netip.Addr]neighbour) {
	if k.Unprivileged {
		for _, p := range table {
			if p.state&unsolicited != 0 {
				k.reached(p.addr, p.confirmed)
			}
		}
		return
	}
	for _, p := range asked {
		if now := table[p.addr]; p.tested && now.state&unix.NUD_REACHABLE != 0 {
			k.reached(now.addr, now.confirmed)
		}
	}
}

// resolve finds the interfaces that lead to the addresses, and on each the next
// hops and the default gateways.
func (l *looker) resolve(addrs []netip.Addr) (hops map[int][]netip.Addr, err error) {
	l.ways, hops = make(map[netip.Addr]int, len(addrs)), map[int][]netip.Addr{}
	add := func(link int, a netip.Addr) {
		if a.IsValid() && len(hops[link]) < maxHops && !slices.Contains(hops[link], a) {
			hops[link] = append(hops[link], a)
		}
	}
	gateways := map[int]bool{}
	for _, a := range addrs {
		link, hop, err := l.way(a, 0)
		if err != nil {
			return nil, err
		}
		l.ways[a] = link
		if link == 0 {
			continue
		}
		if l.links[link] == nil {
			l.links[link] = &Link{}
		}
		if !gateways[link] {
			gateways[link] = true
			for _, far := range []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")} {
				// Documentation addresses (RFC 5737, RFC 3849) are nobody's: what
				// leads there is the default route. Without one there is no gateway.
				if out, gateway, err := l.way(far, link); err == nil && out == link && gateway != far {
					add(link, gateway)
				}
			}
		}
		add(link, hop)
	}
	for link := range l.links {
		if !slices.Contains(slices.Collect(maps.Values(l.ways)), link) {
			delete(l.links, link)
		}
	}
	return hops, nil
}

// way returns the interface and the next hop to an address, 0 if there is none.
func (l *looker) way(a netip.Addr, through int) (link int, hop netip.Addr, err error) {
	o := &vnetlink.RouteGetOptions{OifIndex: through}
	routes, err := l.handle.RouteGetWithOptions(a.AsSlice(), o)
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return 0, netip.Addr{}, nil
	case err != nil:
		return 0, netip.Addr{}, fmt.Errorf("find the way to %s: %w", a, err)
	case len(routes) == 0:
		return 0, netip.Addr{}, nil
	}
	r := routes[0]
	next := r.Gw
	if via, ok := r.Via.(*vnetlink.Via); ok {
		next = via.Addr
	}
	hop = a
	if g, ok := netip.AddrFromSlice(next); ok {
		hop = g.Unmap()
	}
	return r.LinkIndex, hop, nil
}

// read takes over the state of the interfaces and returns their neighbours.
func (l *looker) read() (map[int]map[netip.Addr]neighbour, error) {
	for index, link := range l.links {
		found, err := l.handle.LinkByIndex(index)
		if errors.As(err, &vnetlink.LinkNotFoundError{}) || errors.Is(err, unix.ENODEV) {
			link.Carrier = false // its routes go with it
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read interface %d: %w", index, err)
		}
		a := found.Attrs()
		link.Name = a.Name
		link.Carrier = a.RawFlags&unix.IFF_UP != 0 && a.RawFlags&unix.IFF_LOWER_UP != 0
		link.Mute = a.RawFlags&(unix.IFF_LOOPBACK|unix.IFF_NOARP) != 0
		link.Neighbours, link.Failed = 0, 0
	}
	list, err := l.handle.NeighList(0, vnetlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, vnetlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	// Later than the kernel looked: in doubt somebody was reached.
	now := time.Now()
	table := make(map[int]map[netip.Addr]neighbour, len(l.links))
	for _, n := range list {
		link := l.links[n.LinkIndex]
		addr, ok := netip.AddrFromSlice(n.IP)
		if link == nil || !ok || n.State&(unsolicited|solicited) == 0 || addr.IsMulticast() {
			continue
		}
		if table[n.LinkIndex] == nil {
			table[n.LinkIndex] = map[netip.Addr]neighbour{}
		}
		p := neighbour{addr: addr, link: n.LinkIndex, state: n.State, confirmed: now.Add(-time.Duration(n.Confirmed) * userTick)}
		table[n.LinkIndex][addr] = p
		link.Neighbours++
		if n.State&(unix.NUD_INCOMPLETE|unix.NUD_FAILED) != 0 {
			link.Failed++
		}
	}
	return table, nil
}

// choosePeers chooses whom to ask on one interface: the hops, also those that the
// kernel does not know yet, those confirmed last, and others by chance.
func choosePeers(table map[netip.Addr]neighbour, hops []netip.Addr, link int) []neighbour {
	var chosen []neighbour
	for _, a := range hops {
		p, known := table[a]
		if !known {
			p = neighbour{addr: a, link: link}
		}
		chosen = append(chosen, p)
	}
	rest := slices.DeleteFunc(slices.Collect(maps.Values(table)), func(p neighbour) bool { return slices.Contains(hops, p.addr) })
	slices.SortFunc(rest, func(p, q neighbour) int {
		return cmp.Or(q.confirmed.Compare(p.confirmed), p.addr.Compare(q.addr))
	})
	n := min(len(rest), maxLatest)
	chosen = append(chosen, rest[:n]...)
	rest = rest[n:]
	rand.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	return append(chosen, rest[:min(len(rest), maxChance)]...)
}

// solicit has the kernel ask a neighbour now whether it is there. It needs
// CAP_NET_ADMIN. It changes an entry only, it makes none.
func solicit(p neighbour) error {
	header := make([]byte, ndmsgLength)
	header[0] = unix.AF_INET6
	if p.addr.Is4() {
		header[0] = unix.AF_INET
	}
	ae := netlink.NewAttributeEncoder()
	ae.Bytes(unix.NDA_DST, p.addr.AsSlice())
	attrs, err := ae.Encode()
	if err != nil {
		return err
	}
	binary.NativeEndian.PutUint32(header[4:], uint32(p.link))
	binary.NativeEndian.PutUint16(header[8:], unix.NUD_PROBE)
	_, err = rtnetlink(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_NEWNEIGH, Flags: netlink.Request | netlink.Acknowledge | netlink.Replace},
		Data:   append(header, attrs...),
	})
	return err
}

// knock is an empty datagram to the discard port (RFC 863) of a neighbour.
type knock struct {
	fd   int
	addr netip.Addr
	link int
}

func newKnock(p neighbour, device string) (*knock, error) {
	family := unix.AF_INET6
	if p.addr.Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	k := &knock{fd: fd, addr: p.addr, link: p.link}
	if err := k.send(device); err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

func (k *knock) send(device string) error {
	const discard = 9
	if err := unix.BindToDevice(k.fd, device); err != nil {
		return fmt.Errorf("bind to %s: %w", device, err)
	}
	var to unix.Sockaddr = &unix.SockaddrInet6{Port: discard, Addr: k.addr.As16(), ZoneId: uint32(k.link)}
	if k.addr.Is4() {
		to = &unix.SockaddrInet4{Port: discard, Addr: k.addr.As4()}
	}
	if err := unix.Connect(k.fd, to); err != nil {
		return fmt.Errorf("connect to %s: %w", k.addr, err)
	}
	if err := unix.Send(k.fd, nil, 0); err != nil {
		return fmt.Errorf("send to %s: %w", k.addr, err)
	}
	return nil
}

// answered tells whether the neighbour refused the datagram or answered it. Other
// errors are this kernel's own.
func (k *knock) answered() bool {
	errno, err := unix.GetsockoptInt(k.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && errno == int(unix.ECONNREFUSED) {
		return true
	}
	n, err := unix.Read(k.fd, make([]byte, 1))
	return err == nil && n >= 0
}

func (k *knock) close() { _ = unix.Close(k.fd) }
