package registration

import (
	"fmt"
	"regexp"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/identity"
)

// CallTimeout bounds a handshake with a registry, a unary call, and a DNS lookup.
const CallTimeout = 5 * time.Second

// Back-off of the attempts to reach a registry.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 2 * time.Second
)

// Conn is a connection to the registry of one load balancer.
type Conn struct {
	*grpc.ClientConn
	name    string // names the load balancer in messages
	explain func(error) error
}

// NewConn returns a connection that does not authenticate with an SVID, such as one to the admin
// socket. name names the load balancer in messages; explain converts the error of a call into a
// message for the user.
func NewConn(client *grpc.ClientConn, name string, explain func(error) error) *Conn {
	return &Conn{ClientConn: client, name: name, explain: explain}
}

// Dial returns an mTLS connection, which is established on demand. The caller runs source, which
// supplies the client's SVID. lb is the SPIFFE ID of the load balancer.
func Dial(address Address, source *identity.Source, lb spiffeid.ID) (*Conn, error) {
	creds := identity.NewCredentials(source, identity.CredentialOptions{Authorize: identity.Authorize(lb)})
	client, err := grpc.NewClient(address.target(), grpc.WithTransportCredentials(creds),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: CallTimeout,
		}),
		// A vanished host sends no FIN or RST, so only keepalive detects it.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 2 * time.Second}),
		grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("registry %s: %w", address, err)
	}
	conn := NewConn(client, "the registry "+address.String(), nil)
	conn.explain = func(err error) error { return explain(conn, source, err) }
	return conn, nil
}

// String names the load balancer in messages.
func (conn *Conn) String() string { return conn.name }

// Explain adds the reason why the registry is unavailable to the error of a call.
func (conn *Conn) Explain(err error) error { return conn.explain(err) }

// closedByServer matches gRPC's errors of a connection that ended before the server sent data. In
// TLS 1.3 the client's handshake finishes before the server has verified the client's certificate.
var closedByServer = regexp.MustCompile(`client preface|server preface|EOF|bad certificate|connection reset`)

func explain(conn *Conn, source *identity.Source, err error) error {
	status := grpcstatus.Convert(err)
	if status.Code() != codes.Unavailable {
		return err
	}
	reason := health.Reason(err)
	err = fmt.Errorf("%s does not answer: %s", conn, reason)
	if closedByServer.MatchString(status.Message()) {
		err = fmt.Errorf("%s closed the connection right after the TLS handshake: it denied the client's SPIFFE ID or "+
			"certificate, and its log says why, or it is stopping (%s)", conn, reason)
	}
	if own := source.Status().Load().Err; own != nil {
		err = fmt.Errorf("%w\nown SVID: %w", err, own)
	}
	return err
}
