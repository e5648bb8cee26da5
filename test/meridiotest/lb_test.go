package meridiotest_test

import (
	"context"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/meridiotest"
	"github.com/vipgate/vipgate/test/nsptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const host = "pod-1"

type fixture struct {
	*testing.T
	*meridiotest.LB
	ca     *identitytest.CA
	socket string
}

func start(t *testing.T) fixture {
	t.Helper()
	ca := identitytest.NewCA(t, "example.org")
	f := fixture{T: t, ca: ca, socket: filepath.Join(identitytest.ShortDir(t), "lb.sock")}
	svid := ca.SVID(ca.ID("/ns/default/sa/meridio"), time.Hour)
	f.LB = meridiotest.New(meridiotest.Options{
		Socket: f.socket, Host: host, Credentials: nsptest.ServerCredentials(svid, ca.Bundle()),
	})
	harness.Must(t, f.Start())
	t.Cleanup(func() { harness.Must(t, f.Kill()) })
	return f
}

func (f fixture) watch() grpc.ServerStreamingClient[loadbalancerv1.Response] {
	f.Helper()
	svid := f.ca.SVID(f.ca.ID("/ns/default/sa/meridio"), time.Hour)
	c, err := grpc.NewClient("unix:"+f.socket,
		grpc.WithTransportCredentials(nsptest.ClientCredentials(svid, f.ca.Bundle())))
	harness.Must(f, err)
	f.Cleanup(func() { c.Close() })
	ctx := harness.Context(f, await.Timeout)
	s, err := loadbalancerv1.NewStreamAvailabilityServiceClient(c).Watch(ctx, &emptypb.Empty{}, grpc.WaitForReady(true))
	harness.Must(f, err)
	return s
}

func (f fixture) want(s grpc.ServerStreamingClient[loadbalancerv1.Response], available bool) {
	f.Helper()
	r, err := s.Recv()
	harness.Must(f, err)
	if len(r.GetTargets()) != 1 || (r.GetTargets()[0].GetContext()["identifier"] == host) != available {
		f.Fatalf("got %v, want available %t", r, available)
	}
}

func TestStates(t *testing.T) {
	t.Parallel()
	f := start(t)
	info, err := os.Stat(f.socket)
	if err != nil || info.Mode().Perm() != fs.ModePerm {
		t.Fatalf("mode of the socket: %v, %v", info, err)
	}
	s := f.watch()
	f.want(s, false)
	f.SetAvailable(true)
	f.want(s, true)
	f.SetAvailable(true) // not sent
	f.want(f.watch(), true)
	harness.Must(t, f.Stop())
	f.want(s, false)
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
	harness.Must(t, f.Start())
	f.want(f.watch(), false)
}

func TestKill(t *testing.T) {
	t.Parallel()
	f := start(t)
	f.SetAvailable(true)
	s := f.watch()
	f.want(s, true)
	harness.Must(t, f.Kill())
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
}

func TestFreeze(t *testing.T) {
	t.Parallel()
	f := start(t)
	f.SetAvailable(true)
	s := f.watch()
	f.want(s, true)
	f.Freeze(true)
	f.SetAvailable(false)
	second, err := net.Dial("unix", f.socket) // the kernel accepts
	harness.Must(t, err)
	defer second.Close()
	first := make(chan error, 1)
	go func() {
		_, err := s.Recv()
		first <- err
	}()
	select {
	case err := <-first:
		t.Fatalf("a frozen load balancer answered: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	f.Freeze(false)
	harness.Must(t, <-first)
}

func TestWaitsForFrontend(t *testing.T) {
	t.Parallel()
	ca := identitytest.NewCA(t, "example.org")
	svid := ca.SVID(ca.ID("/ns/default/sa/nsp"), time.Hour)
	n := nsptest.New(nsptest.Options{Credentials: nsptest.ServerCredentials(svid, ca.Bundle())})
	harness.Must(t, n.Start())
	defer func() {
		harness.Check(t, n.Stop())
	}()
	c, err := grpc.NewClient(n.Addr(), grpc.WithTransportCredentials(nsptest.ClientCredentials(svid, ca.Bundle())))
	harness.Must(t, err)
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	found, ended := make(chan bool, 8), make(chan error, 1)
	go func() {
		ended <- meridiotest.WatchFrontend(ctx, c, host, func(here bool) { found <- here })
	}()
	if <-found {
		t.Fatal("no frontend is registered")
	}
	for _, name := range []string{"pod-2", host} {
		harness.Must(t, register(t.Context(), c, name))
		if got := <-found; got != (name == host) {
			t.Fatalf("%s registered, found %t", name, got)
		}
	}
	cancel()
	<-ended
}

func register(ctx context.Context, c grpc.ClientConnInterface, name string) error {
	_, err := nspv1.NewTargetRegistryClient(c).Register(ctx, &nspv1.Target{
		Ips: []string{name}, Type: nspv1.Target_FRONTEND, Context: map[string]string{meridiotest.Identifier: name},
	})
	return err
}
