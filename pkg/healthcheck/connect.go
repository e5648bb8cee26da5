package healthcheck

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// maxIdle is how many sockets are kept for further connections: more than are
	// opened in one pace.
	maxIdle = 2 * burst
	// idleTime is how long an unused socket is kept: what a stall opened in
	// one instant is not held forever.
	idleTime = time.Second
	// events is how many answers one system call fetches.
	events = 128
)

// connector opens connections and resets them, without a goroutine for any. It
// exists because checks by package net cost more: of 10 000 a second over loopback
// each takes 53 µs of processor time, against 33. Most of what is left is the
// kernel's own for the packets of both sides, 22 in connect and 8 for the reset.
//
// Sockets are used again, as connect(2) allows: to connect to AF_UNSPEC resets a
// connection, and saves making and closing a socket. Of those that failed nothing
// is assumed; they are closed.
//
// The last ACK of the handshake is not held back by TCP_QUICKACK, as some checkers
// do so that the reset overtakes it and the application never sees the check. It
// would save another 7 µs, but then the checks alone never fill the queue of an
// application that no longer accepts, and it is not found out by them.
//
// It belongs to one goroutine.
type connector struct {
	epoll int
	// watch is an epoll descriptor that has the other one in it, for one event after
	// each answers. It is in the poller of the runtime, which otherwise would be
	// woken by each packet of each connection.
	watch   int
	file    *os.File // of watch
	sockets map[int32]*socket
	idle    []*socket
	busy    deadlines
	fetched [events]unix.EpollEvent

	arrived chan struct{} // of size 1: there are answers
	done    chan struct{} // closed when the goroutine that looks has ended
}

// origin is what sockets can be used for.
type origin struct {
	family vip.Family
	source netip.Addr // zero: of the kernel's choice
}

// socket is idle, or waits for an answer until a deadline.
type socket struct {
	origin
	fd       int
	v4       unix.SockaddrInet4
	v6       unix.SockaddrInet6
	probe    probe
	deadline time.Time
	index    int       // in connector.busy, or -1
	since    time.Time // it is idle
}

// newConnector returns a connector that must be stopped.
func newConnector() (_ *connector, err error) {
	k := &connector{epoll: -1, watch: -1, sockets: make(map[int32]*socket), arrived: make(chan struct{}, 1), done: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.closeAll())
		}
	}()
	for _, fd := range []*int{&k.epoll, &k.watch} {
		if *fd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
			*fd = -1
			return nil, os.NewSyscallError("epoll_create", err)
		}
	}
	if err := unix.EpollCtl(k.watch, unix.EPOLL_CTL_ADD, k.epoll, &unix.EpollEvent{Events: unix.EPOLLONESHOT}); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	// The runtime polls what is non-blocking, and an epoll descriptor can be polled
	// like any other: this costs no thread.
	if err := unix.SetNonblock(k.watch, true); err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	k.file = os.NewFile(uintptr(k.watch), "epoll")
	raw, err := k.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	go k.look(raw)
	return k, nil
}

// look fills arrived when there are answers, until watch is closed.
func (k *connector) look(raw syscall.RawConn) {
	defer close(k.done)
	for {
		err := raw.Read(func(fd uintptr) bool {
			var e [1]unix.EpollEvent
			n, err := unix.EpollWait(int(fd), e[:], 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
		if err != nil {
			return
		}
		latest.Wake(k.arrived)
	}
}

// answers is filled once when there are answers to collect. It may be filled for
// nothing.
func (k *connector) answers() (<-chan struct{}, error) {
	if len(k.busy) == 0 {
		return nil, nil
	}
	err := unix.EpollCtl(k.watch, unix.EPOLL_CTL_MOD, k.epoll, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT})
	return k.arrived, os.NewSyscallError("epoll_ctl", err)
}

// deadline is when the first connection that waits has waited long enough.
func (k *connector) deadline() (at time.Time, any bool) {
	if len(k.busy) == 0 {
		return time.Time{}, false
	}
	return k.busy[0].deadline, true
}

// start begins the connection of a probe. If that has an outcome at once, ended is
// true and collect will not tell it.
func (k *connector) start(p probe) (o outcome, ended bool) {
	s, err := k.socket(p)
	if err != nil {
		return failure(&p.plan.Check, p.plan.port(), err), true
	}
	switch err := s.connect(p.entry.Addr.Unmap(), p.plan.port()); err {
	case nil:
		k.release(s)
		return outcome{verdict: succeeded}, true
	case unix.EINPROGRESS, unix.EINTR:
		s.probe, s.deadline = p, p.began.Add(p.plan.Timeout)
		heap.Push(&k.busy, s)
		return outcome{}, false
	default:
		k.close(s)
		return failure(&p.plan.Check, p.plan.port(), os.NewSyscallError("connect", err)), true
	}
}

// collect tells the outcomes that there are at now, and how many.
func (k *connector) collect(now time.Time, tell func(probe, outcome)) (told int) {
	end := func(s *socket, o outcome) {
		p := s.probe
		s.probe = probe{}
		heap.Remove(&k.busy, s.index)
		if o.verdict == succeeded {
			k.release(s)
		} else {
			k.close(s)
		}
		told++
		tell(p, o)
	}
	for {
		n, err := unix.EpollWait(k.epoll, k.fetched[:], 0)
		if err != nil || n == 0 {
			break // EINTR: pending events stay for the next time
		}
		for _, e := range k.fetched[:n] {
			// Idle sockets report their resets.
			if s := k.sockets[e.Fd]; s != nil && s.index >= 0 {
				if o, ended := s.judge(e.Events); ended {
					end(s, o)
				}
			}
		}
	}
	for len(k.busy) > 0 && !k.busy[0].deadline.After(now) {
		s := k.busy[0]
		end(s, failure(&s.probe.plan.Check, s.probe.plan.port(), context.DeadlineExceeded))
	}
	for len(k.idle) > 0 && now.Sub(k.idle[0].since) > idleTime {
		k.evict()
	}
	return told
}

// judge says what events of a connection that was begun mean.
func (s *socket) judge(events uint32) (o outcome, ended bool) {
	if events&(unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		return outcome{verdict: succeeded}, events&unix.EPOLLOUT != 0
	}
	p := s.probe
	value, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return failure(&p.plan.Check, p.plan.port(), os.NewSyscallError("getsockopt", err)), true
	}
	switch errno := unix.Errno(value); errno {
	case unix.ECONNRESET, unix.EPIPE:
		// Before the handshake was complete a reset is ECONNREFUSED. This target took
		// the connection, and ended it before anybody looked.
		return outcome{verdict: succeeded}, true
	case 0:
		_, err := unix.Getpeername(s.fd)
		return outcome{verdict: succeeded}, err == nil
	default:
		return failure(&p.plan.Check, p.plan.port(), os.NewSyscallError("connect", errno)), true
	}
}

// socket returns an idle socket that fits, or a new one.
func (k *connector) socket(p probe) (*socket, error) {
	f := vip.FamilyOf(p.entry.Addr)
	o := origin{f, p.plan.source(f)}
	for i := len(k.idle) - 1; i >= 0; i-- {
		if s := k.idle[i]; s.origin == o {
			k.idle = slices.Delete(k.idle, i, i+1)
			return s, nil
		}
	}
	s, err := k.open(o)
	if err != nil && len(k.idle) > 0 && (errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)) {
		k.evict()
		return k.open(o)
	}
	return s, err
}

func (k *connector) open(o origin) (_ *socket, err error) {
	domain := unix.AF_INET
	if o.family != vip.IPv4 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	// With a linger time of 0 close resets as well.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return nil, os.NewSyscallError("setsockopt SO_LINGER", err)
	}
	s := &socket{origin: o, fd: fd, index: -1}
	if o.source.IsValid() {
		// The port is chosen by connect, so that one serves for many targets.
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
			return nil, os.NewSyscallError("setsockopt IP_BIND_ADDRESS_NO_PORT", err)
		}
		if err := unix.Bind(fd, s.sockaddr(o.source, 0)); err != nil {
			return nil, os.NewSyscallError("bind", err)
		}
	}
	e := unix.EpollEvent{Events: unix.EPOLLOUT | unix.EPOLLET, Fd: int32(fd)}
	if err := unix.EpollCtl(k.epoll, unix.EPOLL_CTL_ADD, fd, &e); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	k.sockets[int32(fd)] = s
	return s, nil
}

// sockaddr holds for one call: a socket has one of a family.
func (s *socket) sockaddr(a netip.Addr, port uint16) unix.Sockaddr {
	if s.family == vip.IPv4 {
		s.v4.Addr, s.v4.Port = a.As4(), int(port)
		return &s.v4
	}
	s.v6.Addr, s.v6.Port = a.As16(), int(port)
	return &s.v6
}

func (s *socket) connect(a netip.Addr, port uint16) error {
	return unix.Connect(s.fd, s.sockaddr(a, port))
}

// disconnect resets the connection and makes the socket one that has none.
func (s *socket) disconnect() error {
	var unspec unix.RawSockaddrAny // of AF_UNSPEC, which is 0; x/sys/unix knows no such Sockaddr
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(s.fd), uintptr(unsafe.Pointer(&unspec)), unix.SizeofSockaddrInet4)
	if errno != 0 {
		return errno
	}
	return nil
}

// release resets a connection and keeps its socket.
func (k *connector) release(s *socket) {
	if s.disconnect() != nil {
		k.close(s) // a kernel that cannot do it: close resets as well
		return
	}
	if len(k.idle) == maxIdle {
		k.evict()
	}
	s.since = time.Now()
	k.idle = append(k.idle, s) // which thus is sorted by since, and used from its end
}

// evict closes the socket that has been idle for longest.
func (k *connector) evict() {
	k.close(k.idle[0])
	k.idle = slices.Delete(k.idle, 0, 1)
}

// close closes a socket, which takes it out of the epoll set.
func (k *connector) close(s *socket) {
	delete(k.sockets, int32(s.fd))
	// What close says of an unused connection does not matter; the
	// descriptor is gone either way.
	_ = unix.Close(s.fd)
}

// stop closes everything and returns the probes that still had no outcome.
func (k *connector) stop() (open []probe, err error) {
	for _, s := range k.busy {
		open = append(open, s.probe)
	}
	for _, s := range k.sockets {
		k.close(s)
	}
	k.busy, k.idle = nil, nil
	err = k.closeAll()
	<-k.done
	return open, err
}

// closeAll closes the epoll descriptors.
func (k *connector) closeAll() error {
	var errs []error
	if k.file != nil {
		errs = append(errs, k.file.Close())
	} else if k.watch >= 0 {
		errs = append(errs, unix.Close(k.watch))
	}
	if k.epoll >= 0 {
		errs = append(errs, unix.Close(k.epoll))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close epoll descriptors: %w", err)
	}
	return nil
}

// deadlines is a heap of the sockets that wait, by deadline.
type deadlines []*socket

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].deadline.Before(d[j].deadline) }
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}

func (d *deadlines) Push(x any) {
	s := x.(*socket)
	s.index = len(*d)
	*d = append(*d, s)
}

func (d *deadlines) Pop() any {
	old := *d
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*d = old[:len(old)-1]
	s.index = -1
	return s
}
