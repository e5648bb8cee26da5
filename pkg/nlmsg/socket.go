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
	// timeout bounds every wait for the kernel. The slowest reply, to a transaction of 200 000
	// elements, takes a tenth of it on a slow machine; a dump of 10 000 routes takes 10 ms.
	timeout = 10 * time.Second
	// datagramLength holds the longest datagram of a dump. The kernel fills the reader's buffer, up
	// to 32 KiB, and restarts its search for each datagram, so a large buffer makes dumps faster.
	datagramLength = 64 << 10
	// sendBuffer limits the size of one transaction. A stream of 65 537 entries in both families
	// takes 3.7 MiB. The kernel allocates no memory for unused space in either buffer.
	sendBuffer    = 64 << 20
	receiveBuffer = 4 << 20
	// batchSize is the number of requests in one sendmsg. The kernel queues an acknowledgement per
	// request, and the smallest receive buffer holds the acknowledgements of one batch.
	batchSize = 64
)

// ErrInterrupted is returned if another process changed the listed objects during a dump.
var ErrInterrupted = errors.New("kernel state changed during the dump")

// Error is the kernel's rejection of a request.
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

// Socket is a netlink socket. It is not safe for concurrent use. It remains usable after a failed
// exchange: late replies to earlier requests are discarded by sequence number.
type Socket struct {
	// Port is the socket's port ID. Notifications carry the port ID of the one that caused the change.
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
		// Errors contain the header of the request without its payload, and the kernel's message.
		unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
	}
	for _, g := range groups {
		errs = append(errs, unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g))
	}
	if protocol == unix.NETLINK_ROUTE {
		// Linux before 4.20 cannot filter dumps and rejects the option. Readers filter again.
		_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	}
	// Buffers above the sysctl limit require CAP_NET_ADMIN; without it large transactions fail. The
	// first option is limited to net.core.wmem_max.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	var err error
	// Read the size back, because the options above may have failed.
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

// Do sends requests in batches. The first result holds one error per request: the kernel's *Error,
// or nil. The second result is a failure of the exchange; the outcome of requests without an error
// is then unknown.
func (s *Socket) Do(m *Messages) ([]error, error) {
	rejected := make([]error, m.Len())
	for done := 0; done < m.Len(); done += batchSize {
		batch := m.slice(done, min(done+batchSize, m.Len()))
		left := batch.Len()
		if err := s.exchange(batch, func(i int, kind, flags uint16, data []byte) (bool, error) {
			if kind == unix.NLMSG_ERROR {
				// The kernel sends one acknowledgement or error per request.
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

// Transact sends messages that the kernel applies atomically. The first and last message delimit
// the transaction, and only the second to last requests an acknowledgement. Transact calls reject
// with the index of each rejected message; an error of the transaction itself has index 0. It
// calls report for each echo that NLM_F_ECHO requested; data is valid during the call only.
func (s *Socket) Transact(m *Messages, reject func(i int, err error), report func(kind uint16, data []byte)) error {
	return s.exchange(m, func(i int, kind, flags uint16, data []byte) (bool, error) {
		if kind != unix.NLMSG_ERROR {
			report(kind, data)
			return false, nil
		}
		if err := parseError(flags, data); err != nil {
			reject(i, err)
		}
		// The exchange ends with the only acknowledgement or with an error of the transaction.
		return i == 0 || i >= m.Len()-2, nil
	}, report)
}

// Dump sends a dump request and calls each for every object; data is valid during the call only.
// It returns the number of datagrams that contained objects.
func (s *Socket) Dump(m *Messages, each func(data []byte)) (datagrams int, err error) {
	interrupted, counted := false, 0
	err = s.exchange(m, func(_ int, kind, flags uint16, data []byte) (bool, error) {
		// Read an interrupted dump to its end: the kernel rejects a new dump before (EBUSY).
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

// Get sends a request and returns the single object of the reply, valid until the next exchange.
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

// exchange sends the messages in one datagram. It calls each for every reply, with the index of the
// request, until each returns done. report, unless nil, receives messages with sequence number 0.
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
		// SO_RCVTIMEO expired.
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
			// The subtraction is unsigned, so replies to earlier requests are out of range.
			if i := sequence - first; i < uint32(m.Len()) {
				if done, err := each(int(i), kind, flags, data); done || err != nil {
					return err
				}
			} else if sequence == 0 && report != nil {
				report(kind, data) // Linux 6.18 does not set the sequence number of echoes
			}
			b = b[min(Align(length), len(b)):]
		}
	}
}

// Discard empties the receive queue of notifications. anything reports whether the queue contained
// notifications. foreign reports whether notifications were lost, or concern a change by a socket
// other than the one with port ID own.
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
			// In struct nlmsghdr the port ID has offset 12.
			foreign = foreign || length < headerLength || binary.NativeEndian.Uint32(b[12:]) != own
			b = b[min(Align(max(length, headerLength)), len(b)):]
		}
	}
}

// receive returns the next datagram, which is valid until the following call.
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

// parseError parses struct nlmsgerr. It returns nil for an acknowledgement.
func parseError(flags uint16, data []byte) error {
	const header = 4 + headerLength
	// The error number precedes the header of the rejected request.
	if len(data) < header {
		return fmt.Errorf("netlink error of %d bytes: %w", len(data), io.ErrUnexpectedEOF)
	}
	err := parseDone(data)
	// With NETLINK_CAP_ACK the error repeats only the header of the request, and attributes follow.
	if e, ok := errors.AsType[*Error](err); ok && flags&unix.NLM_F_ACK_TLVS != 0 {
		e.Message = Attributes(data[header:]).Text(unix.NLMSGERR_ATTR_MSG)
	}
	return err
}

// parseDone parses NLMSG_DONE, which carries an error number if the dump failed.
func parseDone(data []byte) error {
	if len(data) < 4 {
		return nil
	}
	if errno := int32(binary.NativeEndian.Uint32(data)); errno < 0 {
		return &Error{Errno: unix.Errno(-errno)}
	}
	return nil
}
