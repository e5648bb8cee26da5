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
	// CallTimeout is the timeout of a unary call, and of a connection with its handshake.
	CallTimeout = 5 * time.Second
	// firstListTimeout is the timeout of the first list of a watch, which the NSP sends without delay.
	firstListTimeout = 2 * CallTimeout
	// minBackoff is the minimum time between two attempts.
	minBackoff = 50 * time.Millisecond
	// maxMessage is the maximum size of a list in bytes. [trench.MaxVIPs] take 5 MB.
	maxMessage = 32 << 20
)

// Options configure the client. Every field is required unless stated otherwise.
type Options struct {
	// Target is the address of the NSP, host:port.
	Target string
	// Credentials present the frontend's SVID and authorize the NSP.
	Credentials credentials.TransportCredentials
	// Trench and Attractor name the attractor; [ValidName] must accept both.
	Trench, Attractor string
	// Defaults holds the values of fields that are 0 in a gateway.
	Defaults trench.Defaults
	// MaxRemoval is the percentage of the VIPs in force that a list may remove without a confirmation;
	// 100 never asks for one.
	MaxRemoval int
	// Cache is the path of the file that stores the last accepted list.
	Cache string
	// Host is the host name of the pod, by which its load balancer finds the frontend.
	Host string
	// EntryTimeout is the time between two calls that refresh the registration. The NSP removes an
	// entry after 60 s.
	EntryTimeout time.Duration
	// MaxBackoff is the maximum time between two attempts.
	MaxBackoff time.Duration
	// KeepaliveTime is the idle time after which a connection is probed; the minimum of gRPC is 10 s.
	// A server without an enforcement policy, such as Meridio's NSP, closes a connection after the
	// third probe, until gRPC has increased the interval. The watch is then reopened immediately.
	KeepaliveTime time.Duration
	// Keys holds the passwords of gateways. If nil, gateways with a password are refused.
	Keys Keys
	Log  *slog.Logger
}

// Keys provides the passwords in keys of Secrets as files.
type Keys interface {
	// File returns the path of the file that holds a key of a Secret. The file may not exist yet.
	File(source, key string) string
	// Want replaces the set of keys, by Secret. It does not block.
	Want(sources map[string][]string)
}

var validName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,60}$`)

// ValidName reports whether name is valid for a trench or an attractor, as in the trench file.
func ValidName(name string) bool { return validName.MatchString(name) }

// String names the NSP in messages.
func (o *Options) String() string { return "NSP " + o.Target }

// dial returns a connection that is established on demand.
func (o *Options) dial() (*grpc.ClientConn, error) {
	// passthrough uses the system resolver at each attempt. The resolver of gRPC waits up to two
	// minutes after a failed lookup.
	conn, err := grpc.NewClient("passthrough:///"+o.Target, grpc.WithTransportCredentials(o.Credentials),
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
	return conn, nil
}
