package nlmsg

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// timeout bounds every wait for the kernel. Its longest answer, to a transaction of 200 000
	// elements, takes a tenth of it on a slow machine; a dump of 10 000 routes takes 10 ms.
	timeout = 10 * time.Second
	// datagramLength holds the longest datagram of a dump: the kernel fills the buffer that the
	// reader offers, up to 32 KiB, and restarts its search for each datagram.
	datagramLength = 64 << 10
	// sendBuffer is what one transaction may take. A stream of 65 537 entries in both families
	// takes 3.7 MiB. It costs nothing until it is used, like receiveBuffer.
	sendBuffer    = 64 << 20
	receiveBuffer = 4 << 20
	// batchSize is how many requests one sendmsg has. The kernel queues an acknowledgement for
	// each of them: this many fit the smallest receive buffer.
	batchSize = 64
)

// ErrInterrupted is returned for a dump during which other processes changed what it lists.
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

// Socket is a netlink socket. It is not safe for concurrent use. After a failed exchange it
// remains usable: answers to earlier requests are discarded by their sequence numbers.
type Socket struct {
	// Port is the address of the socket, which notifications about its changes name.
	Port uint32
	// SendLimit bounds the bytes of one sendmsg.
	SendLimit int

	fd       int
	sequence uint32
	buffer   []byte
	received int // datagrams
}

// Open opens a socket in the network namespace of the calling thread, subscribed to groups.
func Open(protocol int, groups ...int) (*Socket, error) {
	s := &Socket{buffer: make([]byte, datagramLength)}
	var err error
	if s.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
		return nil, fmt.Errorf("failed to open netlink socket: %w", err)
	}
	if err := s.configure(protocol, groups); err != nil {
		return nil, errors.Join(fmt.Errorf("failed to configure netlink socket: %w", err), s.Close())
	}
	return s, nil
}

func (s *Socket) configure(protocol int, groups []int) error {
	limit := unix.NsecToTimeval(int64(timeout))
	errs := []error{
		unix.Bind(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit),
		unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
	}
	for _, g := range groups {
		errs = append(errs, unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g))
	}
	if protocol == unix.NETLINK_ROUTE {
		// Before Linux 4.20 dumps cannot be filtered by the kernel; their readers filter again.
		_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	}
	// Large buffers are a privilege; without it large transactions are refused.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	var err error
	s.SendLimit, err = unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	errs = append(errs, err)
	addr, err := unix.Getsockname(s.fd)
	if a, ok := addr.(*unix.SockaddrNetlink); ok {
		s.Port = a.Pid
	}
	return errors.Join(append(errs, err)...)
}

// Close closes the socket, if it is open.
func (s *Socket) Close() error {
	if s == nil || s.fd < 0 {
		return nil
	}
	err := unix.Close(s.fd)
	s.fd = -1
	return err
}

// Do sends requests in batches, and returns for each the kernel's *Error, or nil. The second result
// is a failure of the exchange itself: the fate of requests without an error is then unknown.
func (s *Socket) Do(m *Messages) ([]error, error) {
	rejected := make([]error, m.Len())
	for done := 0; done < m.Len(); done += batchSize {
		batch := m.slice(done, min(done+batchSize, m.Len()))
		left := batch.Len()
		if err := s.exchange(batch, func(i int, kind, flags uint16, data []byte) (bool, error) {
			if kind == unix.NLMSG_ERROR {
				rejected[done+i] = parseError(flags, data)
				left--
			}
			return left == 0, nil
		}, nil); err != nil {
			return rejected, err
		}
	}
	return rejected, nil
}

// Transact sends messages that the kernel applies together: the first and the last embrace the
// others, and only the last but one asks for an acknowledgement. It passes the rejections on, by
// the index of their message; an error of the whole has that of the first. It also passes on what
// the kernel reports of messages with NLM_F_ECHO, which is valid during the call only.
func (s *Socket) Transact(m *Messages, reject func(i int, err error), report func(kind uint16, data []byte)) error {
	return s.exchange(m, func(i int, kind, flags uint16, data []byte) (bool, error) {
		if kind != unix.NLMSG_ERROR {
			report(kind, data)
			return false, nil
		}
		if err := parseError(flags, data); err != nil {
			reject(i, err)
		}
		return i == 0 || i >= m.Len()-2, nil
	}, report)
}

// Dump sends one request for a list. It passes on the data of each object, which is valid during
// the call only, and returns how many datagrams had some.
func (s *Socket) Dump(m *Messages, each func(data []byte)) (datagrams int, err error) {
	interrupted, counted := false, 0
	err = s.exchange(m, func(_ int, kind, flags uint16, data []byte) (bool, error) {
		interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
		switch kind {
		case unix.NLMSG_ERROR:
			return true, parseError(flags, data)
		case unix.NLMSG_DONE:
			return true, parseDone(data)
		}
		if counted != s.received {
			counted = s.received
			datagrams++
		}
		each(data)
		return false, nil
	}, nil)
	if err == nil && interrupted {
		err = ErrInterrupted
	}
	return datagrams, err
}

// Get sends one request whose answer is one object. The data is valid until the next exchange.
func (s *Socket) Get(m *Messages) (object []byte, err error) {
	err = s.exchange(m, func(_ int, kind, flags uint16, data []byte) (bool, error) {
		if kind == unix.NLMSG_ERROR {
			return true, parseError(flags, data)
		}
		object = data
		return true, nil
	}, nil)
	return object, err
}

// Generation returns the generation ID of the nftables ruleset, which every transaction increments.
func (s *Socket) Generation() (uint32, error) {
	var m Messages
	m.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	data, err := s.Get(&m)
	if err != nil {
		return 0, fmt.Errorf("failed to read the generation of the nftables ruleset: %w", err)
	}
	return Netfilter(data).Uint32BE(unix.NFTA_GEN_ID), nil
}

// exchange sends messages in one datagram, and passes on the answers with the index of the message
// that each belongs to, until each is done. report, unless nil, gets those without a message.
func (s *Socket) exchange(
	m *Messages, each func(i int, kind, flags uint16, data []byte) (done bool, err error),
	report func(kind uint16, data []byte),
) error {
	first := s.sequence + 1
	m.number(first)
	s.sequence += uint32(m.Len())
	if err := retry(func() error {
		return unix.Sendto(s.fd, m.Data, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}); err != nil {
		return fmt.Errorf("failed to send %d netlink messages of %d bytes: %w", m.Len(), len(m.Data), err)
	}
	for {
		b, err := s.receive(0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("no answer from the kernel within %v: %w", timeout, err)
		case err != nil:
			return err
		}
		for len(b) >= headerLength {
			length := int(binary.NativeEndian.Uint32(b))
			if length < headerLength || length > len(b) {
				return fmt.Errorf("netlink message of %d bytes in %d: %w", length, len(b), io.ErrUnexpectedEOF)
			}
			kind, flags := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:])
			data, sequence := b[headerLength:length], binary.NativeEndian.Uint32(b[8:])
			// Unsigned, so that answers to earlier requests are out of range.
			if i := sequence - first; i < uint32(m.Len()) {
				if done, err := each(int(i), kind, flags, data); done || err != nil {
					return err
				}
			} else if sequence == 0 && report != nil {
				report(kind, data) // Linux 6.18 does not number what it reports
			}
			b = b[min(Align(length), len(b)):]
		}
	}
}

// Discard empties the receive queue of notifications. It reports whether it had anything, and
// whether some of it was lost, or about changes through another socket than that with the port own.
func (s *Socket) Discard(own uint32) (anything, foreign bool, err error) {
	for {
		b, err := s.receive(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return anything, foreign, nil
		case errors.Is(err, unix.ENOBUFS): // the queue overflowed
			foreign = true
		case err != nil:
			return anything, foreign, err
		}
		anything = true
		for len(b) >= headerLength {
			length := int(binary.NativeEndian.Uint32(b))
			foreign = foreign || length < headerLength || binary.NativeEndian.Uint32(b[12:]) != own
			b = b[min(Align(max(length, headerLength)), len(b)):]
		}
	}
}

// receive receives a datagram, which is valid until the next one.
func (s *Socket) receive(flags int) ([]byte, error) {
	var n int
	err := retry(func() (err error) {
		n, _, err = unix.Recvfrom(s.fd, s.buffer, flags)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("failed to receive from netlink socket: %w", err)
	}
	s.received++
	return s.buffer[:n], nil
}

// retry repeats a system call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// parseError reads struct nlmsgerr; nil is an acknowledgement.
func parseError(flags uint16, data []byte) error {
	const header = 4 + headerLength
	if len(data) < header {
		return fmt.Errorf("netlink error of %d bytes: %w", len(data), io.ErrUnexpectedEOF)
	}
	err := parseDone(data)
	// NETLINK_CAP_ACK: the attributes follow the header of the request.
	if e, ok := errors.AsType[*Error](err); ok && flags&unix.NLM_F_ACK_TLVS != 0 {
		e.Message = Attributes(data[header:]).Text(unix.NLMSGERR_ATTR_MSG)
	}
	return err
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
