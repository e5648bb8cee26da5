package readiness_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The load balancer commits decisions to a table and serves it; the frontend watches. Both programs
// use mutual TLS where this example has no credentials.
func Example() {
	frontend := spiffeid.RequireFromString("spiffe://example.org/frontend")
	table := readiness.NewTable(readiness.TableOptions{InstanceID: "lb-1"})
	server := readiness.NewServer(table, readiness.ServerOptions{
		Peer: func(context.Context) (spiffeid.ID, bool) { return frontend, true },
		Role: readiness.RolesOf([]spiffeid.ID{frontend}, nil),
	})
	dir, err := os.MkdirTemp("", "readiness-")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "lb.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		fmt.Println(err)
		return
	}
	transport := grpc.NewServer(readiness.GRPCOptions()...)
	readinessv1.RegisterReadinessServiceServer(transport, server)
	served := make(chan error, 1)
	go func() { served <- transport.Serve(listener) }()

	watcher := readiness.NewWatcher(readiness.WatcherOptions{
		Target: socket, Credentials: insecure.NewCredentials(), Reader: "example",
	})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- watcher.Run(ctx) }()

	table.Commit(readiness.Decision{Synced: true, Changed: []readiness.VIPReadiness{
		{VIP: vip.Require("20.0.0.1/32"), State: vip.Ready, ReadyTargets: 2, TotalTargets: 2},
	}})
	for update := watcher.Take(); ; update = watcher.Take() {
		for _, r := range update.Changed {
			fmt.Printf("%s revision %d: %s is %s\n", update.Position.InstanceID, update.Position.Revision, r.VIP, r.State)
		}
		if update.Complete {
			break
		}
		<-watcher.Changed()
	}

	stop()
	<-ended
	transport.Stop()
	<-served
	// Output: lb-1 revision 1: 20.0.0.1/32 is ready
}
