// Package sockdiag finds the user of a TCP socket of this network namespace (sock_diag(7)).
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
)

// Socket is a TCP socket.
type Socket struct {
	// User created the socket. It is valid while Established or Listens: the kernel may report root
	// for the socket of a process that has closed it.
	User                 uint32
	Established, Listens bool
}

// States of net/tcp_states.h.
const (
	established = 1
	listens     = 10
)

// Sizes and offsets of linux/inet_diag.h.
const (
	requestLength = 56 // struct inet_diag_req_v2
	objectLength  = 72 // struct inet_diag_msg
	userOffset    = 64
)

// TCP returns the socket with a local and a remote address, or the one that listens on the local
// address. Without such a socket, or if the kernel lacks the function, the error wraps
// fs.ErrNotExist. A zero remote address finds listeners only.
func TCP(local, remote netip.AddrPort) (Socket, error) {
	socket, err := nlmsg.Open(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return Socket{}, err
	}
	defer socket.Close()
	address := local.Addr().Unmap()
	request := make([]byte, requestLength)
	request[0], request[1] = unix.AF_INET, unix.IPPROTO_TCP
	if address.Is6() {
		request[0] = unix.AF_INET6
	}
	binary.NativeEndian.PutUint32(request[4:], ^uint32(0)) // all states
	binary.BigEndian.PutUint16(request[8:], local.Port())
	binary.BigEndian.PutUint16(request[10:], remote.Port())
	copy(request[12:28], address.AsSlice())
	copy(request[28:44], remote.Addr().Unmap().AsSlice())
	binary.NativeEndian.PutUint64(request[48:], ^uint64(0)) // any cookie
	var message nlmsg.Messages
	message.Begin(unix.SOCK_DIAG_BY_FAMILY, 0, request...)
	object, err := socket.Get(&message)
	switch {
	case errors.Is(err, unix.ENOENT):
		return Socket{}, fmt.Errorf("no TCP socket of %s: %w", local, fs.ErrNotExist)
	case err != nil:
		return Socket{}, fmt.Errorf("failed to find the TCP socket of %s: %w", local, err)
	case len(object) < objectLength:
		return Socket{}, fmt.Errorf("TCP socket of %s: %w", local, io.ErrUnexpectedEOF)
	}
	return Socket{
		User: binary.NativeEndian.Uint32(object[userOffset:]), Established: object[1] == established,
		Listens: object[1] == listens,
	}, nil
}
