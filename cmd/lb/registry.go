package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
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
	address string // "": the admin socket, without the fields below
	source  *identity.Source
	cancel  context.CancelFunc
	running sync.WaitGroup // of source
}

// connect returns a connection to the registry, or to the admin socket when no registry is named.
// Unless wait, it is an error when the socket does not exist yet, or the own SVID.
func (f registryFlags) connect(ctx context.Context, admin cli.AdminFlags, wait bool) (*registryConn, error) {
	if f.Registry == "" {
		conn, err := cli.DialAdmin("lb", admin.AdminSocket, wait)
		return &registryConn{ClientConn: conn}, err
	}
	address, err := registryAddress(f.Registry)
	if err != nil {
		return nil, err
	}
	if f.LBID.IsZero() {
		return nil, cli.Usage("--registry needs --lb-id, the SPIFFE ID of the lb that serves it")
	}
	source, err := f.Source(defaultTargetID, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, cli.Usage("%w", err)
	}
	creds := identity.NewCredentials(source, identity.CredentialOptions{Authorize: identity.Authorize(f.LBID)})
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: cli.CallTimeout,
		}),
		// A host that disappeared sends nothing.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 2 * time.Second}),
		grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("registry %s: %w", f.Registry, err)
	}
	running, cancel := context.WithCancel(ctx)
	c := &registryConn{ClientConn: conn, address: f.Registry, source: source, cancel: cancel}
	c.running.Go(func() { _ = source.Run(running) }) // until cancel
	if wait {
		return c, nil
	}
	select {
	case <-source.Ready():
		return c, nil
	case <-time.After(cli.CallTimeout):
		err = fmt.Errorf("no SVID within %v: %w", cli.CallTimeout, source.Status().Load().Err)
	case <-ctx.Done():
		err = ctx.Err()
	}
	c.close()
	return nil, err
}

// registryAddress returns the gRPC target of a registry.
func registryAddress(s string) (string, error) {
	if strings.HasPrefix(s, "unix:") || strings.HasPrefix(s, "/") {
		path, err := identity.SocketPath(s)
		if err != nil {
			return "", cli.Usage("--registry: %w", err)
		}
		return "unix:" + path, nil
	}
	if host, port, err := net.SplitHostPort(s); err != nil || host == "" || port == "" {
		return "", cli.Usage("--registry=%s: write unix:///PATH, or HOST:PORT", s)
	}
	return "dns:///" + s, nil
}

func (c *registryConn) String() string {
	if c.address == "" {
		return "the load balancer"
	}
	return "the registry " + c.address
}

// close closes the connection and stops its source.
func (c *registryConn) close() {
	_ = c.Close() // fails only if it is closed already
	if c.source != nil {
		c.cancel()
		c.running.Wait()
	}
}

// closedByServer matches gRPC's errors of a connection that ended before the server had sent
// anything. In TLS 1.3 a client's handshake ends before the server has verified its certificate.
var closedByServer = regexp.MustCompile(`client preface|server preface|EOF|bad certificate|connection reset`)

// explain adds why a registry other than the admin socket is unavailable.
func (c *registryConn) explain(err error) error {
	s := grpcstatus.Convert(err)
	if c.source == nil || s.Code() != codes.Unavailable {
		return err
	}
	reason := health.Reason(err)
	err = fmt.Errorf("%s does not answer: %s", c, reason)
	if closedByServer.MatchString(s.Message()) {
		err = fmt.Errorf("%s closed the connection right after the TLS handshake: it denied the client's SPIFFE ID or "+
			"certificate, and its log says why, or it is stopping (%s)", c, reason)
	}
	if own := c.source.Status().Load().Err; own != nil {
		err = fmt.Errorf("%w\nown SVID: %w", err, own)
	}
	return err
}
