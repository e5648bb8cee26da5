package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/identity"
)

type statusCommand struct {
	cli.StatusFlags
}

// addSockets is the pattern of the sockets of `target add`, in the directory of the admin socket.
const addSockets = "add*.sock"

// Run exits with 1 while the kernel state is not complete, or a registration is not in force.
func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	path, err := identity.SocketPath(c.AdminSocket)
	if err != nil {
		return cli.Usage("--admin-socket: %w", err)
	}
	adds, err := filepath.Glob(filepath.Join(filepath.Dir(path), addSockets))
	if err != nil {
		return cli.Usage("--admin-socket=%s: %w", c.AdminSocket, err)
	}
	sources := slices.Concat([]string{c.AdminSocket}, adds)
	conn, err := cli.DialAdmin("target", sources[0], false)
	// The host may only register targets, without a reply path.
	if _, isUsage := errors.AsType[*cli.UsageError](err); err != nil && len(adds) > 0 && !isUsage {
		sources = adds // a host that only registers
		conn, err = cli.DialAdmin("target", sources[0], false)
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := c.Context(ctx)
	defer cancel()
	stream, err := client(conn).WatchStatus(ctx, &adminv1.WatchStatusRequest{})
	if err != nil {
		return err
	}
	return cli.ShowStatus(ctx, out, c.StatusFlags,
		func() (*targetadminv1.Status, error) {
			s, err := stream.Recv()
			if err != nil {
				return nil, err
			}
			// The status of the first source already contains its registrations.
			for _, socket := range sources[1:] {
				s.Registrations = append(s.Registrations, registrations(ctx, socket)...)
			}
			return s, nil
		},
		func(s *targetadminv1.Status) (string, bool) { return c.View().Target(s, time.Now()) },
	)
}

func client(conn grpc.ClientConnInterface) targetadminv1.TargetAdminServiceClient {
	return targetadminv1.NewTargetAdminServiceClient(conn)
}

// registrations returns the registrations of one target add; without an answer one with no state.
func registrations(ctx context.Context, socket string) []*targetadminv1.Registration {
	r, err := cli.Call(ctx, "target", cli.AdminFlags{AdminSocket: socket}, client,
		targetadminv1.TargetAdminServiceClient.GetStatus, &adminv1.GetStatusRequest{})
	if err != nil {
		return []*targetadminv1.Registration{{Registry: socket, Error: cli.Explain(err).Error()}}
	}
	return r.GetRegistrations()
}
