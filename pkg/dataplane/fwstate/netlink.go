package fwstate

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
	nlmsgLength    = 16
	nfgenmsgLength = 4
)

// receiveBuffer holds the longest datagram of a dump: the kernel fills what the
// reader offers, up to 32 KiB.
const receiveBuffer = 64 << 10

// sendBuffer is what one transaction may take. A stream of 65 537 entries in both
// families takes 3.7 MiB. It costs nothing until it is used.
const sendBuffer = 64 << 20

// errInterrupted: what was listed changed meanwhile.
var errInterrupted = errors.New("the kernel's state changed while it was read")

// kernelError is a refusal of the kernel with its own words, if it had some.
type kernelError struct {
	errno   unix.Errno
	message string
	// sequence is the number of the message that was refused.
	sequence uint32
}

func (e *kernelError) Error() string {
	if e.message != "" {
		return e.message + ": " + e.errno.Error()
	}
	return e.errno.Error()
}

func (e *kernelError) Unwrap() error { return e.errno }

// socket is a netlink socket. Each exchange has numbers of its own, so that what
// is left of one that failed is not taken for the answer to the next one.
type socket struct {
	fd       int
	sequence uint32
	buffer   []byte
	// sendLimit is what one sendmsg may take.
	sendLimit int
	// port is its address, which the kernel's notifications name.
	port uint32
	// sent counts messages that were sent to change something, for tests.
	sent int
	// datagrams counts what was received.
	datagrams int
}

// dial opens a socket in the network namespace of the calling thread.
func dial(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	s := &socket{fd: fd, buffer: make([]byte, receiveBuffer)}
	timeout := unix.NsecToTimeval(int64(netlinkTimeout))
	if err := errors.Join(
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
	); err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink: %w", err), s.close())
	}
	if protocol == unix.NETLINK_ROUTE {
		// Without it (before Linux 4.20) lists are longer than asked for; their
		// readers filter again.
		_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	}
	// Without the privilege that this needs, large changes are refused.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	if s.sendLimit, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF); err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink: %w", err), s.close())
	}
	address, err := unix.Getsockname(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink: %w", err), s.close())
	}
	if a, ok := address.(*unix.SockaddrNetlink); ok {
		s.port = a.Pid
	}
	return s, nil
}

func (s *socket) close() error {
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

// send sends messages that begin at the offsets, and numbers them. It returns the
// number of the first.
func (s *socket) send(m *messages) (first uint32, err error) {
	first = s.sequence + 1
	for _, at := range m.starts {
		s.sequence++
		binary.NativeEndian.PutUint32(m.b[at+8:], s.sequence)
	}
	for {
		err = unix.Sendto(s.fd, m.b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return first, fmt.Errorf("send %d messages of %d bytes to the kernel: %w", len(m.starts), len(m.b), err)
	}
	return first, nil
}

// join has the kernel report changes, such as RTNLGRP_IPV4_RULE.
func (s *socket) join(groups ...int) error {
	for _, g := range groups {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			return fmt.Errorf("join netlink group %d: %w", g, err)
		}
	}
	return nil
}

// drain reads what was reported, without waiting, and tells whether anything was.
func (s *socket) drain() (anything bool, err error) {
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

// receive hands over messages until one of them says that it is enough.
func (s *socket) receive(each func(header unix.NlMsghdr, data []byte) (enough bool, err error)) error {
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
		s.datagrams++
		for b := s.buffer[:n]; len(b) >= nlmsgLength; {
			h := unix.NlMsghdr{
				Len: binary.NativeEndian.Uint32(b), Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
				Seq: binary.NativeEndian.Uint32(b[8:]), Pid: binary.NativeEndian.Uint32(b[12:]),
			}
			if int(h.Len) < nlmsgLength || int(h.Len) > len(b) {
				return fmt.Errorf("receive from the kernel: a message of %d bytes in %d: %w", h.Len, len(b), io.ErrUnexpectedEOF)
			}
			enough, err := each(h, b[nlmsgLength:h.Len])
			if enough || err != nil {
				return err
			}
			b = b[min(align(int(h.Len)), len(b)):]
		}
	}
}

// dump sends one request for a list. It hands over the payloads of the answer, which
// are valid during the call only.
func (s *socket) dump(m *messages, each func(data []byte) error) error {
	first, err := s.send(m)
	if err != nil {
		return err
	}
	var interrupted bool
	var failed error
	err = s.receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
		if h.Seq != first {
			return false, nil
		}
		interrupted = interrupted || h.Flags&unix.NLM_F_DUMP_INTR != 0
		switch h.Type {
		case unix.NLMSG_DONE:
			// The list may end with an error.
			if len(data) >= 4 {
				if errno := int32(binary.NativeEndian.Uint32(data)); errno < 0 {
					return true, &kernelError{errno: unix.Errno(-errno)}
				}
			}
			return true, nil
		case unix.NLMSG_ERROR:
			return true, parseError(h, data)
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
		err = errInterrupted
	}
	return err
}

// get sends one request for one thing, which is valid until the next exchange; nil
// when the kernel's answer is empty.
func (s *socket) get(m *messages) ([]byte, error) {
	first, err := s.send(m)
	if err != nil {
		return nil, err
	}
	var got []byte
	err = s.receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
		if h.Seq != first {
			return false, nil
		}
		if h.Type == unix.NLMSG_ERROR {
			return true, parseError(h, data)
		}
		got = data
		return true, nil
	})
	return got, err
}

// parseError reads struct nlmsgerr: nil is success.
func parseError(h unix.NlMsghdr, data []byte) error {
	if len(data) < 4+nlmsgLength {
		return fmt.Errorf("a refusal of %d bytes: %w", len(data), io.ErrUnexpectedEOF)
	}
	errno := int32(binary.NativeEndian.Uint32(data))
	if errno == 0 {
		return nil
	}
	e := &kernelError{errno: unix.Errno(-errno), sequence: h.Seq}
	if h.Flags&unix.NLM_F_ACK_TLVS != 0 {
		rest := data[4+nlmsgLength:]
		if h.Flags&unix.NLM_F_CAPPED == 0 {
			// The request comes back before the words.
			length := align(int(binary.NativeEndian.Uint32(data[4:]))) - nlmsgLength
			rest = rest[min(max(length, 0), len(rest)):]
		}
		for kind, value := range attributes(rest) {
			if kind == unix.NLMSGERR_ATTR_MSG {
				e.message = text(value)
			}
		}
	}
	return e
}

// acked sends messages that each ask to be confirmed, in parts that fit the
// buffers, and returns the refusals by index.
func (s *socket) acked(m *messages) (map[int]error, error) {
	refused := map[int]error{}
	// The kernel queues one confirmation for each: 64 fit the smallest buffer.
	const atOnce = 64
	for done := 0; done < len(m.starts); done += atOnce {
		part := m.slice(done, min(done+atOnce, len(m.starts)))
		first, err := s.send(part)
		if err != nil {
			return refused, err
		}
		s.sent += len(part.starts)
		left := len(part.starts)
		if err := s.receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
			i := int(h.Seq - first)
			if h.Type != unix.NLMSG_ERROR || i < 0 || i >= len(part.starts) {
				return false, nil
			}
			if err := parseError(h, data); err != nil {
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

// messages are netlink messages one after the other.
type messages struct {
	b      []byte
	starts []int
}

// append adds messages of another.
func (m *messages) append(more *messages) {
	shift := len(m.b)
	m.b = append(m.b, more.b...)
	for _, at := range more.starts {
		m.starts = append(m.starts, at+shift)
	}
}

func (m *messages) slice(from, to int) *messages {
	end := len(m.b)
	if to < len(m.starts) {
		end = m.starts[to]
	}
	part := &messages{b: m.b[m.starts[from]:end]}
	for _, at := range m.starts[from:to] {
		part.starts = append(part.starts, at-m.starts[from])
	}
	return part
}

// begin begins a message with its fixed header.
func (m *messages) begin(kind, flags uint16, header ...byte) {
	m.starts = append(m.starts, len(m.b))
	m.b = binary.NativeEndian.AppendUint32(m.b, 0)
	m.b = binary.NativeEndian.AppendUint16(m.b, kind)
	m.b = binary.NativeEndian.AppendUint16(m.b, flags|unix.NLM_F_REQUEST)
	m.b = append(m.b, 0, 0, 0, 0, 0, 0, 0, 0)
	m.b = append(m.b, header...)
}

// end notes the length of the message that was begun last.
func (m *messages) end() *messages {
	at := m.starts[len(m.starts)-1]
	binary.NativeEndian.PutUint32(m.b[at:], uint32(len(m.b)-at))
	return m
}

func (m *messages) bytes(kind uint16, value []byte) {
	m.b = binary.NativeEndian.AppendUint16(m.b, uint16(4+len(value)))
	m.b = binary.NativeEndian.AppendUint16(m.b, kind)
	m.b = append(m.b, value...)
	for len(m.b)%4 != 0 {
		m.b = append(m.b, 0)
	}
}

func (m *messages) text(kind uint16, value string) {
	m.b = binary.NativeEndian.AppendUint16(m.b, uint16(4+len(value)+1))
	m.b = binary.NativeEndian.AppendUint16(m.b, kind)
	m.b = append(m.b, value...)
	m.b = append(m.b, 0)
	for len(m.b)%4 != 0 {
		m.b = append(m.b, 0)
	}
}

// uint32BE writes a number as netfilter wants it, native as routing does.
func (m *messages) uint32BE(kind uint16, value uint32) {
	m.bytes(kind, binary.BigEndian.AppendUint32(nil, value))
}

func (m *messages) uint32Native(kind uint16, value uint32) {
	m.bytes(kind, binary.NativeEndian.AppendUint32(nil, value))
}

// beginNested begins an attribute of attributes; shut ends it.
func (m *messages) beginNested(kind uint16) int {
	at := len(m.b)
	m.b = binary.NativeEndian.AppendUint16(m.b, 0)
	m.b = binary.NativeEndian.AppendUint16(m.b, kind|unix.NLA_F_NESTED)
	return at
}

func (m *messages) endNested(at int) {
	binary.NativeEndian.PutUint16(m.b[at:], uint16(len(m.b)-at))
}

// attributes walks attributes without their flags; it ends at a malformed one.
func attributes(b []byte) func(yield func(kind uint16, value []byte) bool) {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			length := int(binary.NativeEndian.Uint16(b))
			if length < 4 || length > len(b) {
				return
			}
			kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if !yield(kind, b[4:length]) {
				return
			}
			b = b[min(align(length), len(b)):]
		}
	}
}

// attribute returns the value of the first attribute of a kind, or nil.
func attribute(b []byte, kind uint16) []byte {
	for k, v := range attributes(b) {
		if k == kind {
			return v
		}
	}
	return nil
}

// text reads a string that ends with a zero byte.
func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// bigUint32 and nativeUint32 read a number; 0 if it is too short.
func bigUint32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

func nativeUint32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

func align(n int) int { return (n + 3) &^ 3 }
