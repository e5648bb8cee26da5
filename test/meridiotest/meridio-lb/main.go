// Command meridio-lb is the load balancer of a Meridio pod as a process. SIGUSR1 makes it
// available, SIGUSR2 unavailable; SIGTERM stops it gracefully.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/meridiotest"
	"github.com/vipgate/vipgate/test/nsptest"
)

// retryDelay is the time after which Meridio's load balancer opens a failed watch again.
const retryDelay = 500 * time.Millisecond

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// sources are an SVID and the bundle that verifies peers.
type sources interface {
	x509svid.Source
	x509bundle.Source
}

// files are an SVID and a bundle that were read once.
type files struct {
	*x509svid.SVID
	*x509bundle.Bundle
}

func open(ctx context.Context, dir string) (sources, error) {
	if dir == "" {
		return workloadapi.NewX509Source(ctx)
	}
	svid, err := x509svid.Load(dir+"/"+identity.CertFile, dir+"/"+identity.KeyFile)
	if err != nil {
		return nil, err
	}
	bundle, err := x509bundle.Load(svid.ID.TrustDomain(), dir+"/"+identity.BundleFile)
	return files{svid, bundle}, err
}

func run() error {
	socket := flag.String("socket", "/var/lib/meridio/lb.sock", "path of the unix socket")
	host := flag.String("host", "", "host name of the pod; that of the system by default")
	dir := flag.String("svid-dir", "", "directory of the SVID; without it the Workload API issues it")
	nsp := flag.String("nsp", "", "address of the NSP at which the frontend must be registered")
	available := flag.Bool("available", false, "start available")
	flag.Parse()
	if *host == "" {
		name, err := os.Hostname()
		if err != nil {
			return err
		}
		*host = name
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// Buffered, because signal.Notify drops signals that the channel cannot take.
	toggles := make(chan os.Signal, 8)
	signal.Notify(toggles, syscall.SIGUSR1, syscall.SIGUSR2)

	source, err := open(ctx, *dir)
	if err != nil {
		return fmt.Errorf("SVID: %w", err)
	}
	lb := meridiotest.New(meridiotest.Options{
		Socket: *socket, Credentials: nsptest.ServerCredentials(source, source), Host: *host,
	})
	if err := lb.Start(); err != nil {
		return err
	}
	fmt.Println("serving", *socket)
	found := make(chan bool)
	var watching sync.WaitGroup
	if *nsp != "" {
		conn, err := grpc.NewClient(*nsp, grpc.WithTransportCredentials(nsptest.ClientCredentials(source, source)))
		if err != nil {
			return err
		}
		defer conn.Close()
		watching.Go(func() { watch(ctx, conn, *host, found) })
	}
	serve(ctx, lb, *available, *nsp == "", toggles, found)
	watching.Wait()
	return lb.Stop()
}

// serve sets the state of lb until ctx ends: available when it is switched on and the frontend is
// registered.
func serve(ctx context.Context, lb *meridiotest.LB, on, registered bool, toggles <-chan os.Signal, found <-chan bool) {
	for {
		lb.SetAvailable(on && registered)
		fmt.Printf("available %t: switched on %t, frontend registered %t\n", on && registered, on, registered)
		select {
		case s := <-toggles:
			on = s == syscall.SIGUSR1
		case registered = <-found:
		case <-ctx.Done():
			return
		}
	}
}

// watch watches the frontend's registration until ctx ends.
func watch(ctx context.Context, conn *grpc.ClientConn, host string, found chan<- bool) {
	for ctx.Err() == nil {
		err := meridiotest.WatchFrontend(ctx, conn, host, func(here bool) {
			select {
			case found <- here:
			case <-ctx.Done():
			}
		})
		if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
			fmt.Println(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryDelay):
		}
	}
}
