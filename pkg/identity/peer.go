package identity

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// peerProcess asks the kernel for the process at the other end of a unix socket
// (SO_PEERCRED, unix(7)): its credentials at the time of connect(2).
func peerProcess(c net.Conn) (*unix.Ucred, error) {
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

// peerAttrs describes the process at the other end for the log, as far as it is
// known.
func peerAttrs(c net.Conn) []any {
	cred, err := peerProcess(c)
	if err != nil {
		return []any{"peer_address", c.RemoteAddr().String()}
	}
	return []any{slog.Int("peer_pid", int(cred.Pid)), slog.Uint64("peer_uid", uint64(cred.Uid))}
}
