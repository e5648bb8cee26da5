package identity

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/logs"
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

// AdminGuard authorizes connections to an admin socket by the process that opened them.
type AdminGuard struct {
	uid      uint32
	log      *slog.Logger
	throttle logs.Throttle
}

// NewAdminGuard returns a guard that accepts processes of the same user and of root (SO_PEERCRED).
// It logs rejections, rate-limited.
func NewAdminGuard(log *slog.Logger) *AdminGuard {
	return &AdminGuard{uid: uint32(os.Geteuid()), log: log}
}

// Authorize returns an error, and closes the connection, unless its peer is authorized.
func (a *AdminGuard) Authorize(c net.Conn) error {
	key := "admin"
	cred, err := PeerProcess(c)
	if err == nil && cred.Uid != 0 && cred.Uid != a.uid {
		key = fmt.Sprint(cred.Uid)
		err = fmt.Errorf("user %d may not use this socket, only user %d and root", cred.Uid, a.uid)
	}
	if err == nil {
		return nil
	}
	a.throttle.Log(a.log.Warn, key, "admin connection refused", append(peerAttrs(c), "error", err)...)
	return errors.Join(err, c.Close())
}
