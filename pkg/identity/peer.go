package identity

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// PeerProcess returns the credentials of the process that connected to or accepted a unix socket
// (SO_PEERCRED, unix(7)).
func PeerProcess(c net.Conn) (*unix.Ucred, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("a %T has no peer credentials", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("peer credentials: %w", err)
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, failed); err != nil {
		return nil, fmt.Errorf("peer credentials: %w", err)
	}
	return cred, nil
}

// peerAttrs returns log attributes of the peer process as far as they are known.
func peerAttrs(c net.Conn) []any {
	cred, err := PeerProcess(c)
	if err != nil {
		return []any{"peer_address", c.RemoteAddr().String()}
	}
	return []any{slog.Int("peer_pid", int(cred.Pid)), slog.Uint64("peer_uid", uint64(cred.Uid))}
}
