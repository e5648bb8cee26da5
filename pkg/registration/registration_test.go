package registration

import (
	"context"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

// silent responds only to the second Register call and never ends a call.
type silent struct {
	targetv1.UnimplementedTargetServiceServer
	calls atomic.Int64
}

func (s *silent) Register(_ *targetv1.RegisterRequest,
	stream grpc.ServerStreamingServer[targetv1.RegisterResponse],
) error {
	if s.calls.Add(1) > 1 {
		if err := stream.Send(&targetv1.RegisterResponse{}); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (*silent) Deregister(context.Context, *targetv1.DeregisterRequest) (*targetv1.DeregisterResponse, error) {
	return &targetv1.DeregisterResponse{}, nil
}

// The connection is up but the load balancer does not respond.
func TestSilentLoadBalancer(t *testing.T) {
	t.Parallel()
	path := filepath.Join(identitytest.ShortDir(t), "lb.sock")
	l, err := net.Listen("unix", path)
	harness.Must(t, err)
	server, s := grpc.NewServer(grpc.WaitForHandlers(true)), &silent{}
	targetv1.RegisterTargetServiceServer(server, s)
	harness.Serve(t, server, l)
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Must(t, err)
	defer conn.Close()
	r := Registration{
		Conn:    NewConn(conn, "the load balancer", func(err error) error { return err }),
		Request: &targetv1.RegisterRequest{Stream: "s", Targets: []*targetv1.Target{{Name: "a"}}},
		Report:  func(line string) { t.Log(line) },
	}
	leave, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- r.Run(t.Context(), leave) }()
	await.True(t, "the registration", func() bool { return r.State().Phase == Registered })
	if state := r.State(); state.Failures != 1 || s.calls.Load() != 2 {
		t.Errorf("registered after %d calls: %+v", s.calls.Load(), state)
	}
	close(leave)
	err = await.Receive(t, "the end of the wait for the removal", ended)
	harness.WantError(t, err, "did not report the removal of the target within 2s")
	if state := r.State(); state.Phase != Interrupted || state.Err == nil {
		t.Errorf("%+v", state)
	}
}
