package publication

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// probeInterval and probeTimeout find a frontend that hangs: its stream is silent without changes.
	probeInterval = 10 * time.Second
	probeTimeout  = 5 * time.Second
	// maxStatusBytes is the largest accepted status: 200 000 VIPs.
	maxStatusBytes = 256 << 20
)

// frontend follows the status of the frontend in the same pod.
type frontend struct {
	socket string
	log    *slog.Logger
	report *latest.Value[Report]
}

func newFrontend(socket string, log *slog.Logger) *frontend {
	return &frontend{socket, log, latest.New(Report{Time: time.Now(), Problem: "frontend has not answered yet"})}
}

// run follows until ctx ends.
func (f *frontend) run(ctx context.Context) error {
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.1}
	for {
		err := f.watch(ctx, retry.Reset)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if f.set(Report{Problem: "frontend does not answer: " + health.Reason(err)}) {
			f.log.Warn("frontend status lost, retrying", "error", err)
		}
		if err := retry.Wait(ctx); err != nil {
			return err
		}
	}
}

// watch follows one connection until it ends, and calls alive after each message.
func (f *frontend) watch(ctx context.Context, alive func()) error {
	conn, err := grpc.NewClient("unix:"+f.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxStatusBytes)))
	if err != nil {
		return fmt.Errorf("failed to connect to the frontend at %s: %w", f.socket, err)
	}
	defer conn.Close()
	client := frontendv1.NewFrontendServiceClient(conn)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	stream, err := client.WatchStatus(ctx, &frontendv1.WatchStatusRequest{})
	if err != nil {
		return err
	}
	g.Go(func() error {
		for {
			r, err := stream.Recv()
			if err != nil {
				return err
			}
			alive()
			if f.set(reportOf(r.GetStatus())) {
				f.log.Debug("frontend status changed")
			}
		}
	})
	g.Go(func() error {
		for {
			if err := backoff.Sleep(ctx, probeInterval); err != nil {
				return err
			}
			probe, cancel := context.WithTimeout(ctx, probeTimeout)
			_, err := client.GetStatus(probe, &frontendv1.GetStatusRequest{})
			cancel()
			if err != nil {
				return err
			}
		}
	})
	return g.Wait()
}

// set replaces the report unless it is equal, and reports whether it differs.
func (f *frontend) set(r Report) (differs bool) {
	if f.report.Load().equal(r) {
		return false
	}
	r.Time = time.Now().UTC().Truncate(time.Second)
	f.report.Set(r)
	return true
}
