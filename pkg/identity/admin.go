package identity

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
)

// AdminGuard authorizes connections to an admin socket by the process that opened them.
type AdminGuard struct {
	uid     uint32
	denials *denialLog
}

// NewAdminGuard returns a guard that accepts processes of the same user and of root (SO_PEERCRED).
// It logs rejections, rate-limited.
func NewAdminGuard(log *slog.Logger) *AdminGuard {
	return &AdminGuard{uid: uint32(os.Geteuid()), denials: newDenialLog(log)}
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
	a.denials.log(key, "admin connection refused", append(peerAttrs(c), "error", err)...)
	return errors.Join(err, c.Close())
}
