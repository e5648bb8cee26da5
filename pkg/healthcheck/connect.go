package healthcheck

import (
	"container/heap"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// maxIdle is the maximum number of idle sockets that are kept: more than one pace opens.
	maxIdle = 2 * burst
	// idleTime is how long an unused socket is kept: checks that are a second apart reuse it, and the
	// many sockets that are opened after a stall are closed again.
	idleTime = 2 * time.Second
)

// connector opens connections and resets them, and exchanges datagrams, without a goroutine per
// check (ADR 11 has the measurements). It belongs to one goroutine. It reuses sockets, as
// connect(2) allows: connecting to AF_UNSPEC resets a connection, and gives up the port of a
// datagram socket. Sockets whose check failed are closed.
type connector struct {
	epoll int
	// watch is an epoll descriptor that contains epoll, armed by answers for one event. The runtime's
	// poller holds it instead of epoll, with which each packet of each connection would wake it.
	watch   int
	file    *os.File // of watch
	sockets map[int32]*socket
	idle    []*socket // sorted by since
	busy    schedule[*socket]
	fetched [128]unix.EpollEvent // by one system call
	packet  [maxDatagram]byte    // the last datagram

	arrived chan struct{} // of size 1: there are answers
	done    chan struct{} // closed when the goroutine that waits for them has ended
}

// origin holds the properties of a probe that its socket must have.
type origin struct {
	family vip.Family
	source netip.Addr // zero: of the kernel's choice
	vip    bool       // see path
	// datagrams is false for TCP.
	datagrams bool
}

// socket is idle, or waits for an answer until it is due.
type socket struct {
	origin
	slot
	fd     int
	fwmark uint32
	probe  probe
	query  *query    // of datagrams
	late   outcome   // of the last datagram that did not belong to the query
	since  time.Time // it is idle
}

// newConnector returns a connector that must be stopped.
func newConnector() (_ *connector, err error) {
	k := &connector{
		epoll: -1, watch: -1, sockets: map[int32]*socket{}, arrived: make(chan struct{}, 1), done: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			_, _ = unix.Close(k.epoll), unix.Close(k.watch)
		}
	}()
	for _, fd := range []*int{&k.epoll, &k.watch} {
		if *fd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
			return nil, os.NewSyscallError("epoll_create", err)
		}
	}
	disarmed := unix.EpollEvent{Events: unix.EPOLLONESHOT}
	if err := unix.EpollCtl(k.watch, unix.EPOLL_CTL_ADD, k.epoll, &disarmed); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	// The runtime polls non-blocking files, also an epoll descriptor: this costs no thread.
	if err := unix.SetNonblock(k.watch, true); err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	k.file = os.NewFile(uintptr(k.watch), "epoll")
	go k.wait()
	return k, nil
}

// wait fills arrived when there are answers, until the file is closed.
func (connector *connector) wait() {
	defer close(connector.done)
	raw, err := connector.file.SyscallConn()
	for err == nil {
		err = raw.Read(func(fd uintptr) bool {
			var e [1]unix.EpollEvent
			n, err := unix.EpollWait(int(fd), e[:], 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
		latest.Wake(connector.arrived)
	}
}

// answers returns a channel that is filled once when there may be answers to collect.
func (connector *connector) answers() (<-chan struct{}, error) {
	// Without busy sockets only resets of idle sockets would wake the loop.
	if len(connector.busy) == 0 {
		return nil, nil
	}
	armed := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT}
	err := unix.EpollCtl(connector.watch, unix.EPOLL_CTL_MOD, connector.epoll, &armed)
	return connector.arrived, os.NewSyscallError("epoll_ctl", err)
}

// start begins the connection of a probe. If it ended, collect will not report the outcome o.
func (connector *connector) start(probe probe) (o outcome, ended bool) {
	socket, err := connector.socket(probe)
	if err != nil {
		return probe.plan.failure(err), true
	}
	if socket.fwmark != probe.fwmark {
		if err := setFWMark(socket.fd, probe.fwmark); err != nil {
			connector.close(socket)
			return probe.plan.failure(err), true
		}
		socket.fwmark = probe.fwmark
	}
	switch err := socket.connect(probe.to.Unmap(), probe.plan.port); err {
	case 0:
		if socket.datagrams {
			return connector.send(socket, probe)
		}
		connector.release(socket)
		return outcome{verdict: succeeded}, true
	case unix.EINPROGRESS, unix.EINTR:
		connector.await(socket, probe)
		return outcome{}, false
	default:
		connector.close(socket)
		return probe.plan.failure(os.NewSyscallError("connect", err)), true
	}
}

func (connector *connector) await(socket *socket, probe probe) {
	socket.probe, socket.due = probe, probe.began.Add(probe.plan.Timeout)
	heap.Push(&connector.busy, socket)
}

// collect reports the outcomes that are known at now, and returns their number.
func (connector *connector) collect(now time.Time, report func(probe, outcome)) (reported int) {
	end := func(socket *socket, result outcome) {
		p := socket.probe
		socket.probe, socket.query, socket.late = probe{}, nil, outcome{}
		heap.Remove(&connector.busy, socket.index)
		if result.verdict == succeeded {
			connector.release(socket)
		} else {
			connector.close(socket)
		}
		reported++
		report(p, result)
	}
	for {
		n, err := unix.EpollWait(connector.epoll, connector.fetched[:], 0)
		if err != nil || n == 0 {
			break // after EINTR pending events remain for the next time
		}
		for _, e := range connector.fetched[:n] {
			// Idle sockets report their resets.
			if socket := connector.sockets[e.Fd]; socket != nil && socket.index >= 0 {
				judge := socket.judge
				if socket.datagrams {
					judge = connector.receive(socket)
				}
				if o, ended := judge(e.Events); ended {
					end(socket, o)
				}
			}
		}
	}
	for len(connector.busy) > 0 && !connector.busy[0].due.After(now) {
		socket := connector.busy[0].item
		result := socket.probe.plan.failure(context.DeadlineExceeded)
		if socket.late.verdict == failed {
			result = socket.late
		}
		end(socket, result)
	}
	for len(connector.idle) > 0 && now.Sub(connector.idle[0].since) > idleTime {
		connector.evict()
	}
	return reported
}

// judge returns the outcome of a connection for its epoll events.
func (socket *socket) judge(events uint32) (o outcome, ended bool) {
	if events&(unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		return outcome{verdict: succeeded}, events&unix.EPOLLOUT != 0
	}
	value, err := unix.GetsockoptInt(socket.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return socket.probe.plan.failure(os.NewSyscallError("getsockopt", err)), true
	}
	switch errno := unix.Errno(value); errno {
	case unix.ECONNRESET, unix.EPIPE:
		// Before the handshake was complete a reset is ECONNREFUSED. This target accepted the
		// connection and reset it before its event was read.
		return outcome{verdict: succeeded}, true
	case 0:
		_, err := unix.Getpeername(socket.fd)
		return outcome{verdict: succeeded}, err == nil
	default:
		return socket.probe.plan.failure(os.NewSyscallError("connect", errno)), true
	}
}

// socket returns an idle socket that fits, or a new one.
func (connector *connector) socket(p probe) (*socket, error) {
	o := origin{vip.FamilyOf(p.to), p.source, p.vip, p.plan.network != "tcp"}
	for i, socket := range slices.Backward(connector.idle) {
		if socket.origin == o {
			connector.idle = slices.Delete(connector.idle, i, i+1)
			return socket, nil
		}
	}
	socket, err := connector.open(o)
	// A check needs a descriptor more than an idle socket.
	if len(connector.idle) > 0 && (errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)) {
		connector.evict()
		return connector.open(o)
	}
	return socket, err
}

func (connector *connector) open(o origin) (_ *socket, err error) {
	domain := unix.AF_INET
	if o.family != vip.IPv4 {
		domain = unix.AF_INET6
	}
	kind, protocol, events := unix.SOCK_STREAM, unix.IPPROTO_TCP, uint32(unix.EPOLLOUT)
	if o.datagrams {
		kind, protocol, events = unix.SOCK_DGRAM, unix.IPPROTO_UDP, unix.EPOLLIN
	}
	fd, err := unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY, trench.CheckPriority)
	if o.datagrams {
		if err := ReportICMP(fd, o.family); err != nil {
			return nil, err
		}
	} else if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		// With a linger time of 0 close resets as well.
		return nil, os.NewSyscallError("setsockopt SO_LINGER", err)
	}
	if o.vip {
		if err := limitHops(fd, o.family); err != nil {
			return nil, err
		}
	}
	if o.source.IsValid() {
		// connect chooses the port, so that one serves for many targets.
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
			return nil, os.NewSyscallError("setsockopt IP_BIND_ADDRESS_NO_PORT", err)
		}
		if err := unix.Bind(fd, sockaddr(o.family, o.source)); err != nil {
			return nil, os.NewSyscallError("bind", err)
		}
	}
	// Edge-triggered: an idle socket stays in the set and would otherwise be reported at each wait.
	e := unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd)}
	if err := unix.EpollCtl(connector.epoll, unix.EPOLL_CTL_ADD, fd, &e); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	s := &socket{origin: o, slot: slot{index: -1}, fd: fd}
	connector.sockets[int32(fd)] = s
	return s, nil
}

// sockaddr returns an address without a port.
func sockaddr(f vip.Family, address netip.Addr) unix.Sockaddr {
	if f == vip.IPv4 {
		return &unix.SockaddrInet4{Addr: address.As4()}
	}
	return &unix.SockaddrInet6{Addr: address.As16()}
}

// connect begins a connection. It never blocks, but to a nearby target it takes as long as the
// handshake. It is a raw system call: after 20 µs in a normal one the runtime hands the processor
// to a second thread, which doubled the thread switches.
func (socket *socket) connect(a netip.Addr, port uint16) unix.Errno {
	var address [unix.SizeofSockaddrInet6]byte // struct sockaddr_in or sockaddr_in6
	size := unix.SizeofSockaddrInet4
	binary.BigEndian.PutUint16(address[2:], port)
	if socket.family == vip.IPv4 {
		binary.NativeEndian.PutUint16(address[:], unix.AF_INET)
		ip := a.As4()
		copy(address[4:], ip[:])
	} else {
		binary.NativeEndian.PutUint16(address[:], unix.AF_INET6)
		ip := a.As16()
		copy(address[8:], ip[:])
		size = unix.SizeofSockaddrInet6
	}
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(socket.fd), uintptr(unsafe.Pointer(&address)), uintptr(size))
	return errno
}

// release resets a connection and keeps its socket. Like connect it is a raw system call.
func (connector *connector) release(socket *socket) {
	var unspec unix.RawSockaddrAny // of AF_UNSPEC, which is 0; x/sys/unix has no such Sockaddr
	const call, size = unix.SYS_CONNECT, unix.SizeofSockaddrInet4
	if _, _, errno := unix.RawSyscall(call, uintptr(socket.fd), uintptr(unsafe.Pointer(&unspec)), size); errno != 0 {
		connector.close(socket) // which resets as well
		return
	}
	if socket.datagrams && !connector.drain(socket) {
		connector.close(socket)
		return
	}
	if len(connector.idle) == maxIdle {
		connector.evict()
	}
	socket.since = time.Now()
	connector.idle = append(connector.idle, socket)
}

// evict closes the socket that has been idle for longest.
func (connector *connector) evict() {
	connector.close(connector.idle[0])
	connector.idle = slices.Delete(connector.idle, 0, 1)
}

// close closes a socket, even with an error, which removes it from the epoll set.
func (connector *connector) close(socket *socket) {
	delete(connector.sockets, int32(socket.fd))
	_ = unix.Close(socket.fd)
}

// stop closes all descriptors and returns the probes without an outcome.
func (connector *connector) stop() (open []probe, err error) {
	for _, s := range connector.busy {
		open = append(open, s.item.probe)
	}
	for _, s := range connector.sockets {
		connector.close(s)
	}
	connector.busy, connector.idle = nil, nil
	if err = errors.Join(connector.file.Close(), unix.Close(connector.epoll)); err != nil {
		err = fmt.Errorf("failed to close epoll descriptors: %w", err)
	}
	<-connector.done
	return open, err
}
