package feed

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	probev1 "github.com/vipgate/vipgate/pkg/api/probe/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/probe"
	"github.com/vipgate/vipgate/pkg/registration"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server is a load balancer that answers reports with answer.
type server struct {
	probev1.UnimplementedProbeServiceServer

	mu        sync.Mutex
	instances map[string]int
	answer    func(context.Context) error
}

func (s *server) Report(ctx context.Context, request *probev1.ReportRequest) (*probev1.ReportResponse, error) {
	s.mu.Lock()
	s.instances[request.GetInstance()]++
	answer := s.answer
	s.mu.Unlock()
	return &probev1.ReportResponse{Lease: durationpb.New(time.Second)}, answer(ctx)
}

func (s *server) set(answer func(context.Context) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

// reports returns the number of reports, all of one instance.
func (s *server) reports(t *testing.T) (total int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.instances) > 1 {
		t.Errorf("instances %v", s.instances)
	}
	for _, n := range s.instances {
		total += n
	}
	return total
}

// A load balancer gets reports until its end, those that it refuses or does not answer are retried,
// and another one that hangs does not delay them.
func TestReports(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	accept := func(context.Context) error { return nil }
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	var addresses []registration.Address
	var servers []*server
	for _, answer := range []func(context.Context) error{accept, hang} {
		creds := identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)),
			identity.CredentialOptions{Authorize: identity.Authorize(ca.ID("/probe")), Log: slog.New(slog.DiscardHandler)})
		s := &server{instances: map[string]int{}, answer: answer}
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		harness.Must(t, err)
		g := grpc.NewServer(grpc.Creds(creds))
		probev1.RegisterProbeServiceServer(g, s)
		go func() { _ = g.Serve(listener) }()
		t.Cleanup(g.Stop)
		address, err := registration.ParseAddress(listener.Addr().String())
		harness.Must(t, err)
		addresses, servers = append(addresses, address), append(servers, s)
	}
	prober := probe.New(probe.Options{
		Log: slog.New(slog.DiscardHandler), Interval: time.Second, Timeout: time.Second, Fall: 1, Rate: 1, Ports: 1, First: 1,
	})
	feed := New(Options{
		Prober: prober, LBs: addresses, Source: ca.Source(ca.SVID(ca.ID("/probe"), time.Hour)), LB: ca.ID("/lb"),
		Log: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- feed.Run(ctx) }()
	status := func(lb int) Status {
		for _, status := range feed.Status() {
			if status.LB == addresses[lb].String() {
				return status
			}
		}
		return Status{}
	}
	await.True(t, "reports", func() bool { return status(0).Reporting && servers[0].reports(t) >= 3 })
	await.True(t, "a report without an answer", func() bool { return status(1).Failures > 0 })
	if s := status(0); s.Failures > 0 {
		t.Errorf("%+v", s)
	}

	servers[0].set(func(context.Context) error { return grpcstatus.Error(codes.PermissionDenied, "no") })
	await.True(t, "refusals", func() bool { return status(0).Failures > 1 && !status(0).Reporting })
	servers[0].set(accept)
	servers[1].set(accept)
	await.True(t, "reports again", func() bool { return status(0).Reporting && status(1).Reporting })

	// A load balancer that left the name gets no more reports.
	feed.update(ctx, addresses[1].String(), nil)
	if len(feed.Status()) != 1 {
		t.Errorf("status %+v", feed.Status())
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
