package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/identity"
)

// defaultTargetID is the SPIFFE ID of a target with the development authority.
const defaultTargetID = "spiffe://vipgate.local/target"

// Back-off of the attempts to reach a registry.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 2 * time.Second
)

// registryConn is a connection to a registry.
type registryConn struct {
	*grpc.ClientConn
	address string // "" is the admin socket
	cancel  context.CancelFunc
	done    chan error // nil without an identity
	source  *identity.Source
}

// connect returns a connection to the registry, or to the admin socket when no
// registry is named. Only if now is true it is an error that the socket is not
// there yet, or our SVID.
func (f registryFlags) connect(ctx context.Context, adminSocket string, now bool) (*registryConn, error) {
	if f.Registry == "" {
		conn, err := dialAdmin(adminSocket, now)
		if err != nil {
			return nil, err
		}
		return &registryConn{ClientConn: conn, cancel: func() {}}, nil
	}
	address, err := registryAddress(f.Registry)
	if err != nil {
		return nil, err
	}
	if f.LBID.IsZero() {
		return nil, usage("--registry needs --lb-id, the SPIFFE ID of the lb that serves it")
	}
	source, err := f.Source(defaultTargetID, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, usage("%w", err)
	}
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(identity.ClientCredentials(source, identity.CredentialOptions{Authorize: identity.Authorize(f.LBID.ID)})),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: minBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: cli.CallTimeout,
		}),
		// A host that vanished does not say so.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 2 * time.Second}),
		grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("registry %s: %w", f.Registry, err)
	}
	running, cancel := context.WithCancel(ctx)
	c := &registryConn{ClientConn: conn, address: f.Registry, cancel: cancel, done: make(chan error, 1), source: source}
	go func() { c.done <- source.Run(running) }()
	if !now {
		return c, nil
	}
	timer := time.NewTimer(cli.CallTimeout)
	defer timer.Stop()
	select {
	case <-source.Ready():
		return c, nil
	case <-timer.C:
		err = fmt.Errorf("no SVID within %v: %w", cli.CallTimeout, source.Status().Load().Err)
	case <-ctx.Done():
		err = ctx.Err()
	}
	c.close()
	return nil, err
}

func dialAdmin(socket string, now bool) (*grpc.ClientConn, error) {
	if now {
		return cli.DialAdmin("lb", socket)
	}
	path, err := identity.SocketPath(socket)
	if err != nil {
		return nil, usage("--admin-socket: %w", err)
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("admin socket %s: %w", path, err)
	}
	return conn, nil
}

// registryAddress is what gRPC calls the address of a registry.
func registryAddress(s string) (string, error) {
	if strings.HasPrefix(s, "unix:") || strings.HasPrefix(s, "/") {
		path, err := identity.SocketPath(s)
		if err != nil {
			return "", usage("--registry: %w", err)
		}
		return "unix:" + path, nil
	}
	if host, port, err := net.SplitHostPort(s); err != nil || host == "" || port == "" {
		return "", usage("--registry=%s: write unix:///PATH, or HOST:PORT", s)
	}
	return "dns:///" + s, nil
}

// String names the registry.
func (c *registryConn) String() string {
	if c.address == "" {
		return "the load balancer"
	}
	return "the registry " + c.address
}

// close ends the connection, and waits for what belongs to it.
func (c *registryConn) close() {
	// What it returns is that it is closed already.
	_ = c.Close()
	c.cancel()
	if c.done != nil {
		<-c.done // the end of our context
	}
}

// closedOnUs matches how gRPC says that the connection ended before the server had
// spoken. In TLS 1.3 a client's handshake is over before the server has judged it.
var closedOnUs = regexp.MustCompile(`client preface|server preface|EOF|bad certificate|connection reset`)

// explain puts it into words that a registry which is not the admin socket does
// not answer.
func (c *registryConn) explain(err error) error {
	if s := grpcstatus.Convert(err); c.address != "" && s.Code() == codes.Unavailable {
		reason := health.Reason(err)
		err = fmt.Errorf("%s does not answer: %s", c, reason)
		if closedOnUs.MatchString(s.Message()) {
			err = fmt.Errorf("%s closed the connection right after the TLS handshake: it denied the client's SPIFFE ID or certificate, and its log says why, or it is stopping (%s)", c, reason)
		}
		if c.source != nil {
			if own := c.source.Status().Load().Err; own != nil {
				err = errors.Join(err, fmt.Errorf("our own SVID: %w", own))
			}
		}
	}
	return err
}
