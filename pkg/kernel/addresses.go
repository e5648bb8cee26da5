package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	rtnl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// announcements is how often an address is announced, announceEvery the time
	// between two (RFC 5227 section 1.1, RFC 4861 section 7.2.6).
	announcements = 3
	announceEvery = time.Second
	// addressPoll is when addresses are read although no change was reported.
	addressPoll = 5 * time.Second
)

// address is an address of an interface in this network namespace.
type address struct {
	link      int
	addr      netip.Addr
	network   netip.Prefix
	tentative bool // duplicate address detection (RFC 4862) is not over
	duplicate bool // another host has it
}

// usable reports whether other hosts reach the address.
func (a address) usable() bool { return !a.tentative && !a.duplicate }

// onLink reports whether the address is no source toward others. IPv4 ones are: external
// networks often use 169.254.0.0/16.
func (a address) onLink() bool { return a.addr.Is6() && a.addr.IsLinkLocalUnicast() }

// Addresses follows the addresses of this network namespace and announces those that
// appear on interfaces in use, by gratuitous ARP and unsolicited neighbor
// advertisements: a neighbor that knows the address from another pod would send to
// that one's link address for 15 to 45 s. It is a task.Task.
type Addresses struct {
	log   *slog.Logger
	ready chan struct{}
	wake  chan struct{} // an interface came into use

	mu   sync.Mutex
	list []address // nil: not known
	err  error     // of the last attempt to read them
	// names and links are the interfaces in use.
	names []string
	links map[int]bool
}

// NewAddresses returns an Addresses that announces on the named interfaces, and on
// those that lead to what [Addresses.Source] was asked for.
func NewAddresses(log *slog.Logger, names ...string) *Addresses {
	a := &Addresses{
		log: log.With("component", "addresses"), ready: make(chan struct{}), wake: make(chan struct{}, 1),
		names: names, links: map[int]bool{},
	}
	a.read()
	return a
}

// Ready is closed once changes are followed.
func (a *Addresses) Ready() <-chan struct{} { return a.ready }

// String implements task.Task.
func (a *Addresses) String() string { return "addresses" }

// Source reports why connections to an address from another one, or from one of the
// kernel's choice, would lack a source address, and whether that passes. An address
// in the network of the target is expected, and any other of the family if there is
// none, as toward targets behind a router.
func (a *Addresses) Source(to, from netip.Addr) (problem string, passing bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.list == nil {
		return "", false // the check itself shows
	}
	var candidates []address
	near := false
	for _, x := range a.list {
		if vip.FamilyOf(x.addr) != vip.FamilyOf(to) || x.addr.IsLoopback() != to.IsLoopback() || x.onLink() && !(address{addr: to}).onLink() {
			continue
		}
		fits := x.network.Contains(to)
		if from.IsValid() {
			fits = x.addr == from
		}
		if fits && !near {
			near, candidates = true, nil
		}
		if fits || !near {
			candidates = append(candidates, x)
		}
	}
	if i := slices.IndexFunc(candidates, address.usable); i >= 0 {
		if link := candidates[i].link; near && !a.links[link] && !to.IsLoopback() {
			a.links[link] = true
			select {
			case a.wake <- struct{}{}:
			default:
			}
		}
		return "", false
	}
	switch i := slices.IndexFunc(candidates, func(x address) bool { return !x.duplicate }); {
	case len(candidates) == 0:
		return fmt.Sprintf("no %s address", vip.FamilyOf(to)), true
	case i < 0:
		return fmt.Sprintf("duplicate address detection failed for own address %s", candidates[0].addr), false
	default:
		return fmt.Sprintf("own address %s is tentative: duplicate address detection runs", candidates[i].addr), true
	}
}

// Run follows the addresses until ctx ends, in the network namespace of the calling
// thread.
func (a *Addresses) Run(ctx context.Context) error {
	w := &watch{changed: make(chan struct{}, 1), failed: make(chan struct{})}
	err := w.listen("addresses", unix.NETLINK_ROUTE, func(netlink.Message) bool { return true }, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		a.log.Warn("address notifications are not available, polling only", "interval", addressPoll, "error", err)
	}
	defer func() {
		if err := w.close(); err != nil {
			a.log.Warn("failed to close address notifications", "error", err)
		}
	}()
	close(a.ready)
	poll := time.NewTicker(addressPoll)
	defer poll.Stop()
	again := time.NewTimer(0)
	defer again.Stop()
	left := map[netip.Addr]int{} // announcements still to be sent, of usable addresses
	allowed := true
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.changed:
			a.read()
		case <-poll.C:
			a.read()
		case <-a.wake:
		case <-again.C:
		}
		due, first := a.due(left)
		if len(due) == 0 || !allowed {
			continue
		}
		err := announce(due)
		if errors.Is(err, unix.EPERM) {
			allowed = false
			a.log.Warn("own addresses are not announced without NET_RAW: neighbors with stale entries do not reach this pod for up to 45 s; "+
				"grant it, or set net.ipv4.conf.all.arp_notify=1 and net.ipv6.conf.all.ndisc_notify=1 before the addresses are added", "error", err)
		} else if err != nil {
			a.log.Warn("failed to announce own addresses", "error", err)
		} else if len(first) > 0 {
			a.log.Info("own addresses announced", "addresses", first)
		}
		again.Reset(announceEvery)
	}
}

// due counts down what is left to be announced and returns what is to be announced now.
// first are those that were not usable before.
func (a *Addresses) due(left map[netip.Addr]int) (due []address, first []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	seen := map[netip.Addr]bool{}
	for _, x := range a.list {
		if !a.links[x.link] || !x.usable() || x.onLink() {
			continue
		}
		n, known := left[x.addr]
		if !known {
			n, first = announcements, append(first, x.addr)
		}
		seen[x.addr], left[x.addr] = true, max(0, n-1)
		if n > 0 {
			due = append(due, x)
		}
	}
	for addr := range left {
		if !seen[addr] {
			delete(left, addr)
		}
	}
	return due, first
}

// read lists the addresses.
func (a *Addresses) read() {
	listed, err := rtnl.AddrList(nil, rtnl.FAMILY_ALL)
	list := make([]address, 0, len(listed))
	for _, x := range listed {
		ip, ok := netip.AddrFromSlice(x.IP)
		network := x.IPNet
		if x.Peer != nil {
			network = x.Peer // the other end of a point-to-point address
		}
		base, okBase := netip.AddrFromSlice(network.IP)
		if !ok || !okBase {
			continue
		}
		bits, _ := network.Mask.Size()
		list = append(list, address{
			link: x.LinkIndex, addr: ip.Unmap(), network: netip.PrefixFrom(base.Unmap(), bits).Masked(),
			tentative: x.Flags&unix.IFA_F_TENTATIVE != 0 && x.Flags&unix.IFA_F_OPTIMISTIC == 0,
			duplicate: x.Flags&unix.IFA_F_DADFAILED != 0,
		})
	}
	links := map[int]bool{}
	for _, name := range a.names {
		if i, err := net.InterfaceByName(name); err == nil {
			links[i.Index] = true
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil && a.err == nil {
		a.log.Warn("failed to list own addresses", "error", err)
	}
	if a.err = err; err == nil {
		a.list = list
	}
	for link := range links {
		a.links[link] = true
	}
}

// announce sends one announcement of each address on its link. Links without link
// addresses, such as tunnels, have no neighbors to correct.
func announce(addrs []address) (err error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open packet socket: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var errs []error
	for _, x := range addrs {
		link, err := net.InterfaceByIndex(x.link)
		if err != nil || len(link.HardwareAddr) != 6 {
			continue // gone meanwhile, or no Ethernet
		}
		protocol, to, packet := uint16(unix.ETH_P_ARP), [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, arpAnnouncement(x.addr, link.HardwareAddr)
		if x.addr.Is6() {
			router := readSysctl("/proc/sys/net/ipv6/conf/"+link.Name+"/forwarding") == "1"
			protocol, to, packet = unix.ETH_P_IPV6, [8]byte{0x33, 0x33, 0, 0, 0, 1}, neighborAdvertisement(x.addr, link.HardwareAddr, router)
		}
		protocol = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, protocol))
		if err := unix.Sendto(fd, packet, 0, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: x.link, Halen: 6, Addr: to}); err != nil {
			errs = append(errs, fmt.Errorf("announce %s on %s: %w", x.addr, link.Name, err))
		}
	}
	return errors.Join(errs...)
}

// arpAnnouncement is a request for the sender's own address (RFC 5227 section 3).
func arpAnnouncement(a netip.Addr, mac net.HardwareAddr) []byte {
	sender := slices.Concat(mac, a.AsSlice())
	return slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, sender, make([]byte, 6), a.AsSlice())
}

// neighborAdvertisement is an unsolicited one to all nodes that overrides what they
// know (RFC 4861 section 4.4), in IPv6. Hosts remove the routes over a router that says
// it is none.
func neighborAdvertisement(a netip.Addr, mac net.HardwareAddr, router bool) []byte {
	flags := byte(0x20)
	if router {
		flags |= 0x80
	}
	all := netip.IPv6LinkLocalAllNodes()
	body := slices.Concat([]byte{136, 0, 0, 0, flags, 0, 0, 0}, a.AsSlice(), []byte{2, 1}, mac)
	addrs := slices.Concat(a.AsSlice(), all.AsSlice())
	sum := uint32(len(body)) + unix.IPPROTO_ICMPV6
	for b := slices.Concat(addrs, body); len(b) > 0; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(body[2:], ^uint16(sum))
	return slices.Concat([]byte{0x60, 0, 0, 0, 0, byte(len(body)), unix.IPPROTO_ICMPV6, 255}, addrs, body)
}
