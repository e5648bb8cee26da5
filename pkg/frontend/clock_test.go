package frontend

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// monotonic reports whether a time has a monotonic clock reading. Package time compares two such
// times by it, independently of the wall clock.
func monotonic(t time.Time) bool { return t != t.Round(0) }

// Clock jumps do not affect leases or timers (docs/architecture.md#failure-table). A test cannot
// set the clock of the machine. Instead it checks that every time passed to the gate has a
// monotonic clock reading.
func TestClockJumpsMoveNoLease(t *testing.T) {
	dir, err := os.MkdirTemp("", "vg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "lb.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	frontendID := spiffeid.RequireFromString("spiffe://example.org/frontend")
	table := readiness.NewTable(readiness.TableOptions{Lease: time.Minute, StaleGrace: time.Minute})
	table.Commit(readiness.Decision{Synced: true, Changed: []readiness.VIPReadiness{
		{VIP: vipA, State: vip.Ready},
		{VIP: vipB, State: vip.Draining, DrainEnd: time.Now().Add(time.Minute)},
	}})
	server := grpc.NewServer(readiness.GRPCOptions()...)
	readinessv1.RegisterReadinessServiceServer(server, readiness.NewServer(table, readiness.ServerOptions{
		Peer: func(context.Context) (spiffeid.ID, bool) { return frontendID, true },
		Role: readiness.RolesOf([]spiffeid.ID{frontendID}, nil),
		Log:  slog.New(slog.DiscardHandler),
	}))
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()

	w := readiness.NewWatcher(readiness.WatcherOptions{
		Target: socket, Credentials: insecure.NewCredentials(), Log: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-ran
		server.Stop()
		<-served
	})
	next := func(until func(gate.LBUpdate) bool) gate.LBUpdate {
		t.Helper()
		deadline := time.After(30 * time.Second)
		var states []gate.VIPState
		for {
			select {
			case <-w.Changed():
			case <-deadline:
				t.Fatal("the watcher did not receive it")
			}
			h := lbUpdate(w.Take(), nil)
			states = append(states, h.VIPs...)
			if until(h) {
				h.VIPs = states
				return h
			}
		}
	}

	h := next(func(h gate.LBUpdate) bool { return h.Live })
	if !monotonic(h.LeaseEnd) {
		t.Errorf("the end of the lease follows the wall clock: %v", h.LeaseEnd)
	}
	for _, state := range h.VIPs {
		if state.State == vip.Draining && !monotonic(state.DrainEnd) {
			t.Errorf("the end of a VIP's drain follows the wall clock: %v", state.DrainEnd)
		}
	}
	table.GoAway(time.Minute)
	if h := next(func(h gate.LBUpdate) bool { return h.GoingAway }); !monotonic(h.DrainEnd) {
		t.Errorf("the end of the load balancer's drain follows the wall clock: %v", h.DrainEnd)
	}
	server.Stop()
	if h := next(func(h gate.LBUpdate) bool { return !h.Live }); !monotonic(h.EndedAt) {
		t.Errorf("the end of the stream follows the wall clock: %v", h.EndedAt)
	}
}
