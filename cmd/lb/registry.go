package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/registration"
)

type registryConn struct {
	*registration.Conn
	cancel  context.CancelFunc // nil without a source
	running sync.WaitGroup     // of the source of the own SVID
}

// connect returns a connection to the registry, or to the admin socket if --registry is not set.
// Unless wait is set, it fails if the socket, or the caller's SVID, does not exist yet.
func (f registryFlags) connect(ctx context.Context, admin cli.AdminFlags, wait bool) (*registryConn, error) {
	// The admin socket admits only the same user and root, and needs no SVID.
	if f.Registry == "" {
		conn, err := cli.DialAdmin("lb", admin.AdminSocket, wait)
		if err != nil {
			return nil, err
		}
		return &registryConn{Conn: registration.NewConn(conn, "the load balancer", cli.Explain)}, nil
	}
	address, err := registration.ParseAddress(f.Registry)
	if err != nil {
		return nil, cli.Usage("--registry=%w", err)
	}
	// Only its SPIFFE ID identifies a remote registry.
	if f.LBID.IsZero() {
		return nil, cli.Usage("--registry needs --lb-id, the SPIFFE ID of the lb that serves it")
	}
	source, err := f.Source(cli.DefaultTargetID, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, cli.Usage("%w", err)
	}
	conn, err := registration.Dial(address, source, f.LBID)
	if err != nil {
		return nil, err
	}
	running, cancel := context.WithCancel(ctx)
	c := &registryConn{Conn: conn, cancel: cancel}
	// The source renews the SVID for as long as the connection is open.
	c.running.Go(func() { _ = source.Run(running) }) // until cancel
	if wait {
		return c, nil
	}
	// A command that makes one call fails early and explains the missing SVID; gRPC would time out.
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

// close closes the connection and stops its source.
func (c *registryConn) close() {
	_ = c.Close() // fails only if it is closed already
	if c.cancel != nil {
		// No goroutine outlives the command.
		c.cancel()
		c.running.Wait()
	}
}
