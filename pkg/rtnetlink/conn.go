// Package rtnetlink reads and changes policy rules, routes, addresses, neighbor entries and network
// interfaces of a network namespace, and receives the kernel's notifications about them.
//
// It is the only encoder of rtnetlink messages in the project; docs/adr says why it is not one of
// the public libraries.
package rtnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// timeout bounds every exchange with the kernel. A dump of 10 000 routes takes 10 ms.
	timeout = 5 * time.Second
	// batchSize is how many requests one sendmsg has. The kernel queues an acknowledgement for each
	// of them: this many fit the smallest receive buffer.
	batchSize = 64
	// receiveBuffer holds the largest datagram of a dump: the kernel fills the buffer that the
	// reader offers, up to 32 KiB, and restarts its search for each datagram.
	receiveBuffer = 64 << 10
	// dumpAttempts bounds how often a dump is repeated since what it lists changed meanwhile.
	dumpAttempts = 5
)

// ErrInterrupted is returned for a dump that is inconsistent at every attempt, since other
// processes changed what it lists.
var ErrInterrupted = errors.New("kernel state changed during the dump")

// Error is a request that the kernel rejected.
type Error struct {
	Errno   unix.Errno
	Message string // of the kernel's extended acknowledgement; may be empty
}

// Error implements error.
func (e *Error) Error() string {
	if e.Message == "" {
		return e.Errno.Error()
	}
	return e.Message + ": " + e.Errno.Error()
}

// Unwrap returns the error number.
func (e *Error) Unwrap() error { return e.Errno }

// FamilyAbsent reports whether an error says that the kernel lacks the address family
// (ipv6.disable=1).
func FamilyAbsent(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// Conn is a pair of rtnetlink sockets in the network namespace of the thread that called Dial. It
// is not safe for concurrent use. After a failed exchange it remains usable: answers to earlier
// requests are discarded by their sequence numbers.
type Conn struct {
	requests *socket
	// rules is subscribed to changes of policy rules; see unchanged.
	rules *socket
}

// Dial opens the sockets.
func Dial() (*Conn, error) {
	requests, err := dial()
	if err != nil {
		return nil, err
	}
	rules, err := dial(unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
	if err != nil {
		return nil, errors.Join(err, requests.Close())
	}
	return &Conn{requests: requests, rules: rules}, nil
}

// Close closes the sockets.
func (c *Conn) Close() error { return errors.Join(c.requests.Close(), c.rules.Close()) }

// Port is the netlink port that notifications about changes by this Conn name as their origin.
func (c *Conn) Port() uint32 { return c.requests.port }

// Request changes one object; its answer is an acknowledgement.
type Request netlink.Message

// Do sends requests in the order given, and returns for each the kernel's *Error, or nil. The
// second result is a failure of the exchange itself: the fate of requests without an error is then
// unknown.
func (c *Conn) Do(requests ...Request) ([]error, error) {
	rejected := make([]error, len(requests))
	for done := 0; done < len(requests); done += batchSize {
		batch := requests[done:min(done+batchSize, len(requests))]
		msgs := make([]netlink.Message, len(batch))
		for i, r := range batch {
			msgs[i] = netlink.Message(r)
			msgs[i].Header.Flags |= netlink.Request | netlink.Acknowledge
		}
		sent, err := c.requests.send(msgs...)
		if err != nil {
			return rejected, err
		}
		left := len(sent)
		if err := c.requests.receive(func(msgs []syscall.NetlinkMessage) (bool, error) {
			for _, m := range msgs {
				// Unsigned, so that answers to earlier requests are out of range.
				if i := m.Header.Seq - sent[0].Header.Sequence; m.Header.Type == unix.NLMSG_ERROR && i < uint32(len(sent)) {
					rejected[done+int(i)] = parseError(m)
					left--
				}
			}
			return left == 0, nil
		}); err != nil {
			return rejected, err
		}
	}
	return rejected, nil
}

// do sends one request.
func (c *Conn) do(r Request) error {
	rejected, err := c.Do(r)
	return errors.Join(err, rejected[0])
}

// list dumps objects of one kind, again if the dump was interrupted. parse reports whether an
// object belongs to the list. consistent, unless nil, fails if a list in several datagrams is not.
func list[T any](
	s *socket, kind uint16, body []byte, consistent func() error, parse func([]byte) (T, bool, error),
) ([]T, error) {
	for attempt := 1; ; attempt++ {
		var objects []T
		datagrams, err := s.dump(kind, body, func(data []byte) error {
			x, ok, err := parse(data)
			if ok && err == nil {
				objects = append(objects, x)
			}
			return err
		})
		if err == nil && datagrams > 1 && consistent != nil {
			err = consistent()
		}
		if !errors.Is(err, ErrInterrupted) || attempt == dumpAttempts {
			return objects, err
		}
	}
}

// socket is a netlink connection with a receiver of its own: the one of the library reads every
// datagram twice, into a page that grows, and hides the flags of the message that ends a dump.
type socket struct {
	*netlink.Conn
	raw    syscall.RawConn
	port   uint32
	buffer []byte
}

func dial(groups ...uint32) (*socket, error) {
	c, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return nil, fmt.Errorf("failed to open rtnetlink socket: %w", err)
	}
	s := &socket{Conn: c, buffer: make([]byte, receiveBuffer)}
	if s.raw, err = c.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("failed to configure rtnetlink socket: %w", err), c.Close())
	}
	var addr unix.Sockaddr
	rawErr := s.raw.Control(func(fd uintptr) { addr, err = unix.Getsockname(int(fd)) })
	if a, ok := addr.(*unix.SockaddrNetlink); ok {
		s.port = a.Pid
	}
	errs := []error{rawErr, err, c.SetOption(netlink.CapAcknowledge, true), c.SetOption(netlink.ExtendedAcknowledge, true)}
	for _, g := range groups {
		errs = append(errs, c.JoinGroup(g))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(fmt.Errorf("failed to configure rtnetlink socket: %w", err), c.Close())
	}
	// Before Linux 4.20 dumps cannot be filtered by the kernel; their readers filter again.
	_ = c.SetOption(netlink.GetStrictCheck, true)
	return s, nil
}

// send sends requests in one datagram, and starts the time limit of their exchange.
func (s *socket) send(msgs ...netlink.Message) ([]netlink.Message, error) {
	if err := s.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, fmt.Errorf("failed to set rtnetlink deadline: %w", err)
	}
	sent, err := s.SendMessages(msgs)
	if err != nil {
		return nil, fmt.Errorf("failed to send %d rtnetlink requests: %w", len(msgs), err)
	}
	return sent, nil
}

// receive passes datagrams on, whose data is valid during the call only, until each is done.
func (s *socket) receive(each func([]syscall.NetlinkMessage) (done bool, err error)) error {
	for {
		n, err := s.read(false)
		if err != nil {
			return fmt.Errorf("failed to receive from rtnetlink: %w", err)
		}
		msgs, err := syscall.ParseNetlinkMessage(s.buffer[:n])
		if err != nil {
			return fmt.Errorf("malformed rtnetlink datagram: %w", err)
		}
		if done, err := each(msgs); done || err != nil {
			return err
		}
	}
}

// read receives a datagram. With now it fails with EAGAIN rather than wait for one.
func (s *socket) read(now bool) (n int, err error) {
	rawErr := s.raw.Read(func(fd uintptr) bool {
		for n, err = -1, unix.EINTR; errors.Is(err, unix.EINTR); {
			n, _, err = unix.Recvfrom(int(fd), s.buffer, unix.MSG_DONTWAIT)
		}
		return now || !errors.Is(err, unix.EAGAIN)
	})
	if rawErr != nil { // the time limit
		return n, rawErr
	}
	return n, err
}

// discard empties the receive queue and reports whether it had anything.
func (s *socket) discard() (anything bool, err error) {
	if err := s.SetDeadline(time.Now().Add(timeout)); err != nil {
		return false, fmt.Errorf("failed to set rtnetlink deadline: %w", err)
	}
	for {
		// ENOBUFS says that the queue overflowed.
		switch _, err := s.read(true); {
		case errors.Is(err, unix.EAGAIN):
			return anything, nil
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			return anything, fmt.Errorf("failed to receive from rtnetlink: %w", err)
		}
		anything = true
	}
}

// dump lists objects once. It returns how many datagrams had some.
func (s *socket) dump(kind uint16, body []byte, each func([]byte) error) (datagrams int, err error) {
	sent, err := s.send(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request | netlink.Dump}, Data: body,
	})
	if err != nil {
		return 0, err
	}
	interrupted := false
	var failed error
	err = s.receive(func(msgs []syscall.NetlinkMessage) (bool, error) {
		entries := 0
		for _, m := range msgs {
			if m.Header.Seq != sent[0].Header.Sequence {
				continue // of an earlier exchange that failed
			}
			interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
			switch m.Header.Type {
			case unix.NLMSG_ERROR:
				return true, parseError(m)
			case unix.NLMSG_DONE:
				return true, parseDone(m.Data)
			}
			if entries++; failed == nil {
				failed = each(m.Data)
			}
		}
		datagrams += min(entries, 1)
		return false, nil
	})
	switch {
	case err != nil:
		return datagrams, err
	case interrupted:
		return datagrams, ErrInterrupted
	}
	return datagrams, failed
}

// get sends a request whose answer is one message.
func (s *socket) get(m netlink.Message, parse func([]byte) error) error {
	sent, err := s.send(m)
	if err != nil {
		return err
	}
	return s.receive(func(msgs []syscall.NetlinkMessage) (bool, error) {
		for _, m := range msgs {
			switch {
			case m.Header.Seq != sent[0].Header.Sequence:
			case m.Header.Type == unix.NLMSG_ERROR:
				return true, parseError(m)
			default:
				return true, parse(m.Data)
			}
		}
		return false, nil
	})
}

// parseError reads struct nlmsgerr; nil is an acknowledgement.
func parseError(m syscall.NetlinkMessage) error {
	const header = 4 + unix.SizeofNlMsghdr
	if len(m.Data) < header {
		return fmt.Errorf("rtnetlink error of %d bytes: %w", len(m.Data), io.ErrUnexpectedEOF)
	}
	errno := int32(binary.NativeEndian.Uint32(m.Data))
	if errno == 0 {
		return nil
	}
	e := &Error{Errno: unix.Errno(-errno)}
	// CapAcknowledge: the attributes follow the header of the request.
	if ad, err := netlink.NewAttributeDecoder(m.Data[header:]); m.Header.Flags&unix.NLM_F_ACK_TLVS != 0 && err == nil {
		for ad.Next() {
			if ad.Type() == unix.NLMSGERR_ATTR_MSG {
				e.Message = ad.String()
			}
		}
	}
	return e
}

// parseDone reads the end of a dump, which may say that it failed.
func parseDone(data []byte) error {
	if len(data) < 4 {
		return nil
	}
	if errno := int32(binary.NativeEndian.Uint32(data)); errno < 0 {
		return &Error{Errno: unix.Errno(-errno)}
	}
	return nil
}

// attributes encodes a message: its header, then attributes.
type attributes []byte

func (a *attributes) bytes(kind uint16, value []byte) {
	b := binary.NativeEndian.AppendUint16(*a, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%unix.NLA_ALIGNTO != 0 {
		b = append(b, 0)
	}
	*a = b
}

func (a *attributes) uint32(kind uint16, value uint32) {
	a.bytes(kind, binary.NativeEndian.AppendUint32(nil, value))
}

// decode passes the attributes that follow a header to each.
func decode(data []byte, header int, object string, each func(*netlink.AttributeDecoder)) error {
	if len(data) < header {
		return fmt.Errorf("%s of %d bytes: %w", object, len(data), io.ErrUnexpectedEOF)
	}
	ad, err := netlink.NewAttributeDecoder(data[header:])
	if err != nil {
		return fmt.Errorf("malformed %s: %w", object, err)
	}
	for ad.Next() {
		each(ad)
	}
	if err := ad.Err(); err != nil {
		return fmt.Errorf("malformed %s: %w", object, err)
	}
	return nil
}

func systemFamily(f vip.Family) uint8 {
	if f == vip.IPv4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func familyFrom(system uint8) (f vip.Family, ok bool) {
	switch system {
	case unix.AF_INET:
		return vip.IPv4, true
	case unix.AF_INET6:
		return vip.IPv6, true
	}
	return 0, false
}
