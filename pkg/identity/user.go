package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/logs"
)

// userPrefix precedes the UID in the ID of a user of this host.
const userPrefix = "spiffe://localhost/uid/"

// UnmappedUser is the user that the kernel reports for every user that the reader's user namespace
// does not map (kernel.overflowuid, user_namespaces(7)).
const UnmappedUser = 65534

// UserID returns the ID that a process of this host has without an SVID, by its user:
// spiffe://localhost/uid/998. Roles and limits treat it like a SPIFFE ID.
func UserID(uid uint32) spiffeid.ID {
	return spiffeid.RequireFromString(userPrefix + strconv.FormatUint(uint64(uid), 10))
}

// UserOf returns the user of an ID of [UserID], and reports whether it is one.
func UserOf(id spiffeid.ID) (uid uint32, ok bool) {
	text, ok := strings.CutPrefix(id.String(), userPrefix)
	number, err := strconv.ParseUint(text, 10, 32)
	return uint32(number), ok && err == nil && UserID(uint32(number)) == id
}

// peerCredentials is the origin of a source without SVIDs.
type peerCredentials struct{}

func (peerCredentials) String() string { return "peer credentials" }

func (peerCredentials) watch(ctx context.Context, _ *Source) error {
	<-ctx.Done()
	return ctx.Err()
}

// NewPeerCredentials returns a source for processes of one host, which know each other by their users:
// the kernel reports the user of the process at the other end of a unix socket (SO_PEERCRED,
// unix(7)). Its ID is [UserID] of this process, without an end.
func NewPeerCredentials(options Options) (*Source, error) {
	own := uint32(os.Geteuid())
	if own == UnmappedUser {
		return nil, fmt.Errorf("--identity=peer-credentials: this process runs as user %d, as all users that are not "+
			"mapped do; use another user", own)
	}
	source := newSource(peerCredentials{}, options)
	source.next = Status{ID: UserID(own)}
	source.ready()
	source.status.Set(source.next)
	return source, nil
}

// userCredentials authenticate peers on a unix socket by their users. Nothing is encrypted: the kernel
// passes the bytes between two processes.
type userCredentials struct {
	authorize tlsconfig.Authorizer
	log       *slog.Logger
	throttle  logs.Throttle // of rejections
}

// userInfo is the security level for gRPC.
type userInfo struct{ credentials.CommonAuthInfo }

func (userInfo) AuthType() string { return "peercred" }

// handshake returns the peer of a connection, or why it is refused.
func (users *userCredentials) handshake(raw net.Conn) (info AuthInfo, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("peer credentials: %w", err)
		}
	}()
	// Over TCP the kernel knows no user; PeerProcess fails there, too, but with a less clear error.
	if raw.RemoteAddr().Network() != "unix" {
		return info, fmt.Errorf("%s is not on a unix socket: use SVIDs", raw.RemoteAddr())
	}
	process, err := PeerProcess(raw)
	if err != nil {
		return info, err
	}
	info.ID = UserID(process.Uid)
	if process.Uid == UnmappedUser {
		return info, errors.New("the peer is a user that this user namespace does not map")
	}
	info.AuthInfo = userInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}
	return info, users.authorize(info.ID, nil)
}

// ServerHandshake implements [credentials.TransportCredentials].
func (users *userCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	info, err := users.handshake(raw)
	if err == nil {
		err = raw.SetDeadline(time.Now().Add(handshakeTimeout)) // until gRPC has the first bytes of HTTP/2
	}
	if err != nil {
		users.throttle.Log(users.log.Warn, info.ID.String(), "client refused", append(peerAttrs(raw), "error", err)...)
		return nil, nil, errors.Join(err, raw.Close())
	}
	if limited, ok := raw.(interface{ Authenticated(spiffeid.ID) }); ok {
		limited.Authenticated(info.ID)
	}
	return raw, info, nil
}

// ClientHandshake implements [credentials.TransportCredentials]. The user of a server is that of
// the process that called listen(2).
func (users *userCredentials) ClientHandshake(_ context.Context, _ string, raw net.Conn) (net.Conn,
	credentials.AuthInfo, error,
) {
	info, err := users.handshake(raw)
	if err != nil {
		return nil, nil, errors.Join(err, raw.Close())
	}
	return raw, info, nil
}

// Info implements [credentials.TransportCredentials].
func (users *userCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "peercred"}
}

// Clone implements [credentials.TransportCredentials]. The credentials are immutable.
func (users *userCredentials) Clone() credentials.TransportCredentials { return users }

// OverrideServerName implements [credentials.TransportCredentials]. No name is verified.
func (users *userCredentials) OverrideServerName(string) error { return nil }
