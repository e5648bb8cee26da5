package balancer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// The lease is long, so that it does not expire on a busy machine. It is renewed as often as by
// an lb with the default lease of 1 s.
const (
	lease = 10 * time.Second
	beat  = 200 * time.Millisecond
	// endWithin bounds the end of the watches.
	endWithin = 30 * time.Second
)

// Balancer is a scripted load balancer.
type Balancer struct {
	Table  *readiness.Table
	Server *readiness.Server

	grpc   *grpc.Server
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	mu     sync.Mutex
	errs   []error
}

// Start serves on the pod's readiness socket, with an empty table. The caller closes the
// balancer.
func Start(ctx context.Context, pod *lab.Pod) (*Balancer, error) {
	source, err := identity.NewDev(pod.Authority(), spiffeid.RequireFromString(lab.LBID), identity.Options{})
	if err != nil {
		return nil, fmt.Errorf("scripted load balancer: %w", err)
	}
	listener, err := identity.Listen(ctx, identity.ListenOptions{Path: pod.Socket(), Mode: 0o600})
	if err != nil {
		return nil, fmt.Errorf("scripted load balancer: %w", err)
	}
	frontend := spiffeid.RequireFromString(lab.FrontendID)
	b := &Balancer{Table: readiness.NewTable(readiness.TableOptions{Lease: lease})}
	b.Server = readiness.NewServer(b.Table, readiness.ServerOptions{
		Peer: identity.PeerID, Role: readiness.RolesOf([]spiffeid.ID{frontend}, nil),
	})
	b.grpc = grpc.NewServer(append(readiness.GRPCOptions(),
		grpc.Creds(identity.NewCredentials(source,
			identity.CredentialOptions{Authorize: identity.Authorize(frontend)})))...)
	readinessv1.RegisterReadinessServiceServer(b.grpc, b.Server)

	// ctx bounds only Start: the balancer serves until Close.
	ctx, b.cancel = context.WithCancel(context.WithoutCancel(ctx))
	b.tasks.Go(func() {
		if err := source.Run(ctx); err != nil && ctx.Err() == nil {
			b.failed(fmt.Errorf("identity: %w", err))
		}
	})
	b.tasks.Go(func() {
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				b.Table.Heartbeat()
			case <-ctx.Done():
				return
			}
		}
	})
	b.tasks.Go(func() {
		if err := b.grpc.Serve(listener); err != nil {
			b.failed(fmt.Errorf("socket: %w", err))
		}
	})
	return b, nil
}

func (b *Balancer) failed(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.errs = append(b.errs, fmt.Errorf("scripted load balancer: %w", err))
}

// Close ends the watches and the server, and returns the errors that occurred since Start.
func (b *Balancer) Close() error {
	ctx, done := context.WithTimeout(context.Background(), endWithin)
	defer done()
	if err := b.Server.EndWatches(ctx); err != nil {
		b.failed(err)
	}
	b.grpc.Stop()
	b.cancel()
	b.tasks.Wait()
	return errors.Join(b.errs...)
}

// Readiness returns the readiness of VIPs, all ready or all not.
func Readiness(ready bool, vips ...vip.VIP) []readiness.VIPReadiness {
	entries := make([]readiness.VIPReadiness, len(vips))
	for i, v := range vips {
		entries[i] = readiness.VIPReadiness{
			VIP: v, State: vip.NotReady,
			Reason: readinessv1.VipReason_VIP_REASON_TOO_FEW_READY,
		}
		if ready {
			entries[i].State, entries[i].Reason = vip.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY
		}
	}
	return entries
}
