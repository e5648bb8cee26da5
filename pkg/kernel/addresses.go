package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/sysctl"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	announcements = 3           // per address (RFC 5227 section 1.1, RFC 4861 section 7.2.6)
	announceEvery = time.Second // the time between two announcements
	// addressPoll is the interval of listings without notifications, addressCheck with notifications.
	addressPoll  = 5 * time.Second
	addressCheck = 30 * time.Second
)

// address is a local address with its MAC address: a change of that needs a new announcement.
type address struct {
	rtnetlink.Address
	mac    [6]byte // zero if the address is not announced
	router bool    // the interface forwards IPv6 packets
}

func (a address) usable() bool { return !a.Tentative() && !a.Duplicate() }

// onLink reports whether a is an IPv6 link-local address. IPv4 link-local addresses do not count,
// because external networks often use 169.254.0.0/16.
func onLink(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }

// Addresses watches the addresses of this network namespace and announces new ones by gratuitous
// ARP and unsolicited neighbor advertisements. Without an announcement, a neighbor entry for the
// pod that had the address before would stay in use for 15 to 45 s. It is a task.Task.
type Addresses struct {
	log   *slog.Logger
	ready chan struct{}
	named func() string // returns the interface to announce on; nil for all interfaces
	mute  bool          // announcements are disabled: CAP_NET_RAW is missing
	// notified reports whether the kernel notifies of changes.
	notified bool

	mu   sync.Mutex
	list []address // nil before the first successful read
	err  error     // error of the last read
}

// NewAddresses returns an Addresses that announces on the interface that named returns, or on all
// interfaces if named is nil.
func NewAddresses(log *slog.Logger, named func() string) *Addresses {
	addresses := &Addresses{log: log.With("component", "addresses"), ready: make(chan struct{}), named: named}
	addresses.read()
	return addresses
}

// Ready is closed after Run has subscribed to address notifications, or failed to subscribe.
func (watched *Addresses) Ready() <-chan struct{} { return watched.ready }

// String implements task.Task.
func (watched *Addresses) String() string { return "addresses" }

// Source returns why connections from the address from, or from an address that the kernel
// selects, to the address to would lack a usable source address, or "". passing reports whether
// the problem is temporary. The expected source is an address in the network of the target or,
// for a target that is reached through a router, any address of the family. If from belongs to
// another interface, the link-local address is required, too, since the kernel sends IPv6
// neighbor solicitations from it.
func (watched *Addresses) Source(to, from netip.Addr) (problem string, passing bool) {
	watched.mu.Lock()
	defer watched.mu.Unlock()
	if watched.list == nil {
		return "", false // unknown: the health check itself will fail
	}
	var candidates, near, chosen, linkLocal []address
	for _, entry := range watched.list {
		switch {
		case vip.FamilyOf(entry.Addr) != vip.FamilyOf(to) || entry.Addr.IsLoopback() != to.IsLoopback():
			continue
		case onLink(entry.Addr) && !onLink(to):
			linkLocal = append(linkLocal, entry)
			continue
		case entry.Addr == from:
			chosen = append(chosen, entry)
		}
		candidates = append(candidates, entry)
		if entry.Network.Contains(to) {
			near = append(near, entry)
		}
	}
	on := func(addrs []address) func(address) bool {
		return func(entry address) bool {
			return slices.ContainsFunc(addrs, func(y address) bool { return entry.Link == y.Link })
		}
	}
	switch {
	case chosen != nil && (near == nil || slices.ContainsFunc(chosen, on(near))):
		return lacking(chosen)
	case chosen != nil:
		// The target resolves the near address for its reply.
		for _, addrs := range [][]address{chosen, near} {
			if problem, passing := lacking(addrs); problem != "" {
				return problem, passing
			}
		}
		linkLocal = slices.DeleteFunc(linkLocal, func(entry address) bool { return entry.Duplicate() || !on(near)(entry) })
		if len(linkLocal) == 0 {
			return "", false
		}
		return lacking(linkLocal)
	case near != nil:
		return lacking(near)
	case len(candidates) == 0:
		return fmt.Sprintf("no %s address", vip.FamilyOf(to)), true
	default:
		return lacking(candidates)
	}
}

// lacking returns why none of addrs is usable, "" if one is, and whether the problem is temporary.
func lacking(addrs []address) (problem string, passing bool) {
	if slices.ContainsFunc(addrs, address.usable) {
		return "", false
	}
	i := slices.IndexFunc(addrs, func(entry address) bool { return !entry.Duplicate() })
	if i < 0 {
		return fmt.Sprintf("duplicate address detection failed for own address %s", addrs[0].Addr), false
	}
	return fmt.Sprintf("own address %s is tentative: duplicate address detection runs", addrs[i].Addr), true
}

// Run watches the addresses until ctx ends, in the network namespace of the calling thread.
func (watched *Addresses) Run(ctx context.Context) error {
	watcher := &watch{Listener: rtnetlink.NewListener(), changed: make(chan struct{}, 1)}
	err := watcher.listen("addresses", unix.NETLINK_ROUTE, func(netlink.Message) bool { return true },
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		watched.log.Warn("address notifications are not available, polling only", "interval", addressPoll, "error", err)
	}
	defer watcher.close(watched.log)
	watched.notified = err == nil
	close(watched.ready)
	timer := time.After(0)
	known, failed := map[address]progress{}, watcher.Failed()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-failed:
			failed, watched.notified = nil, false
			watched.log.Warn("address notifications failed, polling only", "interval", addressPoll, "error", watcher.Err())
		case <-watcher.changed:
		case <-timer:
		}
		watched.read()
		var wait time.Duration
		known, wait = watched.announce(known, time.Now())
		timer = time.After(wait)
	}
}

// progress is the number of announcements of an address and the time of the next one.
type progress struct {
	sent int
	due  time.Time
}

// announce announces the due addresses. It returns the progress of each address and the wait
// before the next announcement or listing.
func (watched *Addresses) announce(before map[address]progress, now time.Time) (map[address]progress, time.Duration) {
	known := make(map[address]progress, len(watched.list)) // only Run changes the list
	wait := tick.Until(now, addressPoll)
	// Notifications and a successful read make frequent polling unnecessary.
	if watched.notified && watched.err == nil {
		wait = tick.Until(now, addressCheck)
	}
	var due []address
	var first []netip.Addr
	for _, entry := range watched.list {
		if !entry.usable() || entry.mac == [6]byte{} {
			continue
		}
		problem := before[entry]
		if problem.sent < announcements && !problem.due.After(now) {
			if due = append(due, entry); problem.sent == 0 {
				first = append(first, entry.Addr)
			}
			problem.sent, problem.due = problem.sent+1, now.Add(announceEvery)
		}
		// known contains only current addresses, so an address that returns is announced again.
		if known[entry] = problem; problem.sent < announcements {
			wait = min(wait, problem.due.Sub(now))
		}
	}
	if len(due) == 0 || watched.mute {
		return known, wait
	}
	switch err := sendAnnouncements(due); {
	case errors.Is(err, unix.EPERM):
		// A running process gains no capability, so every further attempt would fail.
		watched.mute = true
		watched.log.Info("own addresses are not announced without NET_RAW: neighbors with stale entries do not reach "+
			"this pod for up to 45 s; grant it, or set net.ipv4.conf.all.arp_notify=1 and "+
			"net.ipv6.conf.all.ndisc_notify=1 before the addresses are added", "error", err)
	case err != nil:
		watched.log.Warn("failed to announce own addresses", "error", err)
	case len(first) > 0:
		watched.log.Info("own addresses announced", "addresses", first)
	}
	return known, wait
}

func (watched *Addresses) read() {
	list, err := listAddresses(watched.named)
	watched.mu.Lock()
	defer watched.mu.Unlock()
	// The change that interrupted the dump also sends a notification, which triggers another read.
	if err != nil && watched.err == nil && !errors.Is(err, rtnetlink.ErrInterrupted) {
		watched.log.Warn("failed to list own addresses", "error", err)
	}
	if watched.err = err; err == nil {
		watched.list = list
	}
}

// listAddresses returns the addresses of all interfaces, with a MAC address if they are announced.
func listAddresses(named func() string) ([]address, error) {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	links, err := conn.Links()
	if err != nil {
		return nil, err
	}
	listed, err := conn.Addresses()
	if err != nil {
		return nil, err
	}
	announced := map[int]address{}
	for _, link := range links {
		const required = unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_BROADCAST
		announces := named == nil || named() == link.Name
		if announces && link.Flags&(required|unix.IFF_NOARP) == required && len(link.MAC) == 6 {
			forwarding := sysctl.Key("net/ipv6/conf/" + link.Name + "/forwarding")
			announced[link.Index] = address{mac: [6]byte(link.MAC), router: forwarding.Read() == "1"}
		}
	}
	list := make([]address, 0, len(listed))
	for _, entry := range listed {
		// Ignore flags that have no effect on neighbors, so that their changes cause no announcement.
		entry.Flags &= unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC | unix.IFA_F_DADFAILED
		own := announced[entry.Link]
		own.Address = entry
		list = append(list, own)
	}
	return list, nil
}

func sendAnnouncements(addrs []address) (err error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("failed to open packet socket: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var errs []error
	for _, entry := range addrs {
		protocol, to, packet := uint16(unix.ETH_P_ARP), [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, arpAnnouncement(entry)
		if entry.Addr.Is6() {
			protocol, to, packet = unix.ETH_P_IPV6, [8]byte{0x33, 0x33, 0, 0, 0, 1}, neighborAdvertisement(entry)
		}
		protocol = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, protocol))
		link := &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: entry.Link, Halen: 6, Addr: to}
		if err := unix.Sendto(fd, packet, 0, link); err != nil {
			errs = append(errs, fmt.Errorf("failed to announce %s on interface %d: %w", entry.Addr, entry.Link, err))
		}
	}
	return errors.Join(errs...)
}

// arpAnnouncement returns an ARP request for the sender's own address (RFC 5227 section 3).
func arpAnnouncement(a address) []byte {
	addr := a.Addr.AsSlice()
	return slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, a.mac[:], addr, make([]byte, 6), addr)
}

// neighborAdvertisement returns an unsolicited advertisement to all nodes that overrides their
// entries (RFC 4861 section 4.4). Hosts remove routes through a router whose advertisement lacks
// the router flag.
func neighborAdvertisement(a address) []byte {
	flags := byte(0x20)
	if a.router {
		flags |= 0x80
	}
	all := netip.IPv6LinkLocalAllNodes()
	body := slices.Concat([]byte{136, 0, 0, 0, flags, 0, 0, 0}, a.Addr.AsSlice(), []byte{2, 1}, a.mac[:])
	addrs := slices.Concat(a.Addr.AsSlice(), all.AsSlice())
	// The checksum covers a pseudo-header (RFC 8200 section 8.1).
	sum := uint32(len(body)) + unix.IPPROTO_ICMPV6
	for b := slices.Concat(addrs, body); len(b) > 0; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(body[2:], ^uint16(sum))
	// Receivers discard advertisements whose hop limit is not 255 (RFC 4861 section 7.1.2).
	return slices.Concat([]byte{0x60, 0, 0, 0, 0, byte(len(body)), unix.IPPROTO_ICMPV6, 255}, addrs, body)
}
