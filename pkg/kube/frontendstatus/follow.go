package frontendstatus

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/identity"
)

// callTimeout is the timeout of a call to the frontend.
const callTimeout = 5 * time.Second

// maxStatusBytes is the largest accepted status: 200 000 VIPs.
const maxStatusBytes = 256 << 20

// Follow follows the status of the frontend at an admin socket until ctx ends, and returns ctx's
// error. It calls changed with each status, and with an error when a connection fails or ends,
// which makes the last status invalid. The calls do not overlap.
//
// The stream is silent while the status does not change, so probes detect a frontend that hangs.
// The timeout of a probe is half of the interval.
func Follow(ctx context.Context, socket string, probe time.Duration, changed func(*frontendv1.Status, error)) error {
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.1}
	for {
		err := watch(ctx, socket, probe, func(s *frontendv1.Status) {
			retry.Reset()
			changed(s, nil)
		})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		changed(nil, err)
		if err := retry.Wait(ctx); err != nil {
			return err
		}
	}
}

// watch follows one connection until it ends.
func watch(ctx context.Context, socket string, probe time.Duration, received func(*frontendv1.Status)) error {
	conn, err := dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := frontendv1.NewFrontendServiceClient(conn)
	// The first goroutine that fails ends the other one: ctx cancels the stream and the probe.
	g, ctx := errgroup.WithContext(ctx)
	stream, err := client.WatchStatus(ctx, &adminv1.WatchStatusRequest{})
	if err != nil {
		return err
	}
	g.Go(func() error {
		for {
			status, err := stream.Recv()
			if err != nil {
				return err
			}
			received(status)
		}
	})
	g.Go(func() error {
		for {
			if err := backoff.Sleep(ctx, probe); err != nil {
				return err
			}
			call, cancel := context.WithTimeout(ctx, probe/2)
			// A frontend that hangs keeps the stream open, and only a call with a deadline shows it.
			_, err := client.GetStatus(call, &adminv1.GetStatusRequest{})
			cancel()
			if err != nil {
				return err
			}
		}
	})
	return g.Wait()
}

// Call makes calls of the frontend at an admin socket, which end after [callTimeout].
func Call(ctx context.Context, socket string,
	call func(context.Context, frontendv1.FrontendServiceClient) error,
) error {
	conn, err := dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return call(ctx, frontendv1.NewFrontendServiceClient(conn))
}

func dial(socket string) (*grpc.ClientConn, error) {
	path, err := identity.SocketPath(socket)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxStatusBytes)))
	if err != nil {
		return nil, fmt.Errorf("failed to connect to the frontend at %s: %w", path, err)
	}
	return conn, nil
}
