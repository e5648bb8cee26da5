package nsp

import (
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// CallTimeout bounds a call that the NSP answers at once, and a connection with its handshake.
	CallTimeout = 5 * time.Second
	// firstListTimeout bounds the wait for the first list of a watch, which the NSP sends at once.
	firstListTimeout = 2 * CallTimeout
	// minBackoff is the shortest time between two attempts.
	minBackoff = 50 * time.Millisecond
	// maxMessage bounds a list. [trench.MaxVIPs] take 5 MB.
	maxMessage = 32 << 20
)

// Options configure the client. Every field is needed unless said otherwise.
type Options struct {
	// Target is the NSP, host:port.
	Target string
	// Credentials present the frontend's SVID and authorize the NSP.
	Credentials credentials.TransportCredentials
	// Trench and Attractor name the attractor, as [ValidName] allows.
	Trench, Attractor string
	// Defaults are the values of fields that a gateway leaves 0.
	Defaults trench.Defaults
	// Cache is the path of the file that keeps the last accepted list.
	Cache string
	// Host is the host name of the pod, by which its load balancer finds the frontend.
	Host string
	// EntryTimeout is the time between two calls that refresh the registration. The NSP removes an
	// entry after 60 s.
	EntryTimeout time.Duration
	// MaxBackoff is the longest time between two attempts.
	MaxBackoff time.Duration
	// KeepaliveTime is how long a connection is silent before it is probed; gRPC takes at least 10 s.
	// A server without an enforcement policy, as Meridio's NSP, ends a connection after the third
	// probe, until gRPC probes it less often: the watch is then opened again at once.
	KeepaliveTime time.Duration
	// Keys has the passwords of gateways. Nil refuses gateways with a password.
	Keys Keys
	Log  *slog.Logger
}

// Keys are the keys of Secrets that hold passwords, as files.
type Keys interface {
	// File returns the path of the file that holds a key of a Secret, also before it exists.
	File(source, key string) string
	// Want replaces the set of keys, by Secret. It does not block.
	Want(sources map[string][]string)
}

var validName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,60}$`)

// ValidName reports whether a trench or an attractor can have the name: the trench file could.
func ValidName(name string) bool { return validName.MatchString(name) }

// String names the NSP in messages.
func (o *Options) String() string { return "NSP " + o.Target }

// dial returns a connection that is established on demand.
func (o *Options) dial() (*grpc.ClientConn, error) {
	// The resolver of the system is asked at each attempt: that of gRPC waits up to two minutes
	// between lookups that fail.
	c, err := grpc.NewClient("passthrough:///"+o.Target, grpc.WithTransportCredentials(o.Credentials),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: grpcbackoff.Config{
				BaseDelay: minBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: max(minBackoff, o.MaxBackoff),
			},
			MinConnectTimeout: CallTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: o.KeepaliveTime, Timeout: CallTimeout}),
		grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o, err)
	}
	return c, nil
}
