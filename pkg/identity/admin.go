package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"

	"google.golang.org/grpc/credentials"
)

// AdminInfo identifies the peer of an admin socket.
type AdminInfo struct {
	credentials.CommonAuthInfo
	// PID, UID and GID are those of the peer when it connected.
	PID      int32
	UID, GID uint32
}

// AuthType returns "admin".
func (AdminInfo) AuthType() string { return "admin" }

// AdminCredentials are the credentials of a plaintext server on a unix socket for processes of the
// same user and of root (SO_PEERCRED). Rejections are logged, rate-limited. Clients use them
// without a check: the permissions of directory and socket protect the path.
func AdminCredentials(log *slog.Logger) credentials.TransportCredentials {
	return &adminCredentials{uid: uint32(os.Geteuid()), denials: newDenialLog(log)}
}

type adminCredentials struct {
	uid     uint32
	denials *denialLog
}

func (a *adminCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cred, err := peerProcess(c)
	if err != nil {
		a.denials.log("admin", "admin connection refused", "error", err)
		return nil, nil, errors.Join(err, c.Close())
	}
	if cred.Uid != 0 && cred.Uid != a.uid {
		err := fmt.Errorf("user %d may not use this socket, only user %d and root", cred.Uid, a.uid)
		a.denials.log(fmt.Sprint(cred.Uid), "admin connection refused", append(peerAttrs(c), "error", err)...)
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, AdminInfo{CommonAuthInfo: localSecurity(), PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
}

func (a *adminCredentials) ClientHandshake(_ context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo,
	error,
) {
	info := AdminInfo{CommonAuthInfo: localSecurity()}
	if cred, err := peerProcess(c); err == nil {
		info.PID, info.UID, info.GID = cred.Pid, cred.Uid, cred.Gid
	}
	return c, info, nil
}

// localSecurity: data on a unix socket do not leave the kernel.
func localSecurity() credentials.CommonAuthInfo {
	return credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
}

func (a *adminCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "admin"}
}

func (a *adminCredentials) Clone() credentials.TransportCredentials { return a }

func (a *adminCredentials) OverrideServerName(string) error {
	return errors.New("an admin socket has no server name")
}
