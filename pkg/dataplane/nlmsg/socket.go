package nlmsg

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

// netlinkTimeout bounds every wait for the kernel. Its longest answer, to a
// transaction of 200 000 elements, takes a tenth of it on a slow machine.
const netlinkTimeout = 10 * time.Second

// Sizes of struct nlmsghdr, and of struct nfgenmsg that follows it in messages of
// netfilter. The latter's res_id is the subsystem in messages that embrace a batch.
const (
	HeaderLen   = 16
	NFHeaderLen = 4
)

// receiveBuffer holds the longest datagram of a dump: the kernel fills what the
// reader offers, up to 32 KiB.
const receiveBuffer = 64 << 10

// sendBuffer is what one transaction may take. A stream of 65 537 entries in both
// families takes 3.7 MiB. It costs nothing until it is used.
const sendBuffer = 64 << 20

// ErrInterrupted: what was listed changed meanwhile.
var ErrInterrupted = errors.New("the kernel's state changed while it was read")

// KernelError is a refusal of the kernel with its own words, if it had some.
type KernelError struct {
	Errno   unix.Errno
	message string
	// sequence is the number of the message that was refused.
	sequence uint32
}

func (e *KernelError) Error() string {
	if e.message != "" {
		return e.message + ": " + e.Errno.Error()
	}
	return e.Errno.Error()
}

func (e *KernelError) Unwrap() error { return e.Errno }

// Socket is a netlink socket. Each exchange has numbers of its own, so that what
// is left of one that failed is not taken for the answer to the next one.
type Socket struct {
	fd       int
	sequence uint32
	buffer   []byte
	// SendLimit is what one sendmsg may take.
	SendLimit int
	// Port is its address, which the kernel's notifications name.
	Port uint32
	// Sent counts messages that were sent to change something, for tests.
	Sent int
	// Datagrams counts what was received.
	Datagrams int
}

// Open opens a socket in the network namespace of the calling thread.
func Open(protocol int) (*Socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	s := &Socket{fd: fd, buffer: make([]byte, receiveBuffer)}
	timeout := unix.NsecToTimeval(int64(netlinkTimeout))
	if err := errors.Join(
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
	); err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink: %w", err), s.Close())
	}
	if protocol == unix.NETLINK_ROUTE {
		// Without it (before Linux 4.20) lists are longer than asked for; their
		// readers filter again.
		_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	}
	// Without the privilege that this needs, large changes are refused.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer)
	_ = s.SetReceiveBuffer(4 << 20)
	if s.SendLimit, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF); err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink: %w", err), s.Close())
	}
	address, err := unix.Getsockname(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink: %w", err), s.Close())
	}
	if a, ok := address.(*unix.SockaddrNetlink); ok {
		s.Port = a.Pid
	}
	return s, nil
}

func (s *Socket) Close() error {
	if s == nil || s.fd < 0 {
		return nil
	}
	err := unix.Close(s.fd)
	s.fd = -1
	if err != nil {
		return fmt.Errorf("close netlink: %w", err)
	}
	return nil
}

// SetReceiveBuffer sets the size of the receive buffer, which needs a privilege.
func (s *Socket) SetReceiveBuffer(size int) error {
	return unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size)
}

// Send sends messages that begin at the offsets, and numbers them. It returns the
// number of the first.
func (s *Socket) Send(m *Messages) (first uint32, err error) {
	first = s.sequence + 1
	for _, at := range m.Starts {
		s.sequence++
		binary.NativeEndian.PutUint32(m.Data[at+8:], s.sequence)
	}
	for {
		err = unix.Sendto(s.fd, m.Data, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return first, fmt.Errorf("send %d messages of %d bytes to the kernel: %w", len(m.Starts), len(m.Data), err)
	}
	return first, nil
}

// Join has the kernel report changes, such as RTNLGRP_IPV4_RULE.
func (s *Socket) Join(groups ...int) error {
	for _, g := range groups {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			return fmt.Errorf("join netlink group %d: %w", g, err)
		}
	}
	return nil
}

// Drain reads what was reported, without waiting, and reports whether anything was.
func (s *Socket) Drain() (anything bool, err error) {
	for {
		_, _, err := unix.Recvfrom(s.fd, s.buffer, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return anything, nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil && !errors.Is(err, unix.ENOBUFS): // that is: there was too much
			return anything, fmt.Errorf("receive from the kernel: %w", err)
		}
		anything = true
	}
}

// Receive hands over messages until one of them says that it is enough.
func (s *Socket) Receive(each func(header unix.NlMsghdr, data []byte) (enough bool, err error)) error {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.buffer, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("the kernel did not answer within %v", netlinkTimeout)
		case err != nil:
			return fmt.Errorf("receive from the kernel: %w", err)
		}
		s.Datagrams++
		for b := s.buffer[:n]; len(b) >= HeaderLen; {
			h := unix.NlMsghdr{
				Len: binary.NativeEndian.Uint32(b), Type: binary.NativeEndian.Uint16(b[4:]),
				Flags: binary.NativeEndian.Uint16(b[6:]), Seq: binary.NativeEndian.Uint32(b[8:]),
				Pid: binary.NativeEndian.Uint32(b[12:]),
			}
			if int(h.Len) < HeaderLen || int(h.Len) > len(b) {
				return fmt.Errorf("receive from the kernel: a message of %d bytes in %d: %w", h.Len, len(b), io.ErrUnexpectedEOF)
			}
			enough, err := each(h, b[HeaderLen:h.Len])
			if enough || err != nil {
				return err
			}
			b = b[min(Align(int(h.Len)), len(b)):]
		}
	}
}

// Dump sends one request for a list. It hands over the payloads of the answer, which
// are valid during the call only.
func (s *Socket) Dump(m *Messages, each func(data []byte) error) error {
	first, err := s.Send(m)
	if err != nil {
		return err
	}
	var interrupted bool
	var failed error
	err = s.Receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
		if h.Seq != first {
			return false, nil
		}
		interrupted = interrupted || h.Flags&unix.NLM_F_DUMP_INTR != 0
		switch h.Type {
		case unix.NLMSG_DONE:
			// The list may end with an error.
			if len(data) >= 4 {
				if errno := int32(binary.NativeEndian.Uint32(data)); errno < 0 {
					return true, &KernelError{Errno: unix.Errno(-errno)}
				}
			}
			return true, nil
		case unix.NLMSG_ERROR:
			return true, ParseError(h, data)
		case unix.NLMSG_NOOP:
			return false, nil
		}
		if failed == nil {
			failed = each(data)
		}
		return false, nil
	})
	if err == nil {
		err = failed
	}
	if err == nil && interrupted {
		err = ErrInterrupted
	}
	return err
}

// Get sends one request for one thing, which is valid until the next exchange; nil
// when the kernel's answer is empty.
func (s *Socket) Get(m *Messages) ([]byte, error) {
	first, err := s.Send(m)
	if err != nil {
		return nil, err
	}
	var got []byte
	err = s.Receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
		if h.Seq != first {
			return false, nil
		}
		if h.Type == unix.NLMSG_ERROR {
			return true, ParseError(h, data)
		}
		got = data
		return true, nil
	})
	return got, err
}

// ParseError reads struct nlmsgerr: nil is success.
func ParseError(h unix.NlMsghdr, data []byte) error {
	if len(data) < 4+HeaderLen {
		return fmt.Errorf("a refusal of %d bytes: %w", len(data), io.ErrUnexpectedEOF)
	}
	errno := int32(binary.NativeEndian.Uint32(data))
	if errno == 0 {
		return nil
	}
	e := &KernelError{Errno: unix.Errno(-errno), sequence: h.Seq}
	if h.Flags&unix.NLM_F_ACK_TLVS != 0 {
		rest := data[4+HeaderLen:]
		if h.Flags&unix.NLM_F_CAPPED == 0 {
			// The request comes back before the words.
			length := Align(int(binary.NativeEndian.Uint32(data[4:]))) - HeaderLen
			rest = rest[min(max(length, 0), len(rest)):]
		}
		for kind, value := range Attributes(rest) {
			if kind == unix.NLMSGERR_ATTR_MSG {
				e.message = Text(value)
			}
		}
	}
	return e
}

// Exchange sends messages that each ask to be confirmed, in parts that fit the
// buffers, and returns the refusals by index.
func (s *Socket) Exchange(m *Messages) (map[int]error, error) {
	refused := map[int]error{}
	// The kernel queues one confirmation for each: 64 fit the smallest buffer.
	const atOnce = 64
	for done := 0; done < len(m.Starts); done += atOnce {
		part := m.Slice(done, min(done+atOnce, len(m.Starts)))
		first, err := s.Send(part)
		if err != nil {
			return refused, err
		}
		s.Sent += len(part.Starts)
		left := len(part.Starts)
		if err := s.Receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
			i := int(h.Seq - first)
			if h.Type != unix.NLMSG_ERROR || i < 0 || i >= len(part.Starts) {
				return false, nil
			}
			if err := ParseError(h, data); err != nil {
				refused[done+i] = err
			}
			left--
			return left == 0, nil
		}); err != nil {
			return refused, err
		}
	}
	return refused, nil
}
