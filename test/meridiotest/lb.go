package meridiotest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/stall"
)

// Identifier is the key of a target's context whose value is a host name.
const Identifier = "identifier"

// Numbers of Meridio's load balancer.
const (
	// keepaliveTime is the least time between two pings of a client (NSM_GRPC_KEEPALIVE_TIME).
	keepaliveTime = 30 * time.Second
	// stopTime bounds the wait for watchers to be sent "unavailable".
	stopTime = 2 * time.Second
	// gracefulTime bounds the graceful stop of the server after that.
	gracefulTime = time.Second
)

// Options configure an LB.
type Options struct {
	// Socket is the path of the unix socket. An existing file is replaced.
	Socket string
	// Credentials are the server's.
	Credentials credentials.TransportCredentials
	// Host is the pod's host name.
	Host string
}

// LB is the load balancer of a Meridio pod. It is unavailable until SetAvailable, and safe for
// concurrent use.
type LB struct {
	loadbalancerv1.UnimplementedStreamAvailabilityServiceServer
	o         Options
	available latest.Value[bool]

	mu       sync.Mutex
	server   *grpc.Server
	listener *stall.Listener
	served   chan error
	watchers map[*latest.Value[bool]]bool // the last state sent to each watcher
	opened   int                          // streams since New
}

// New returns an LB that is not started.
func New(o Options) *LB { return &LB{o: o, watchers: map[*latest.Value[bool]]bool{}} }

// Start serves until Stop or Kill.
func (l *LB) Start() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server != nil {
		return errors.New("the load balancer is already started")
	}
	if err := os.RemoveAll(l.o.Socket); err != nil {
		return fmt.Errorf("remove the socket: %w", err)
	}
	listener, err := net.Listen("unix", l.o.Socket)
	if err != nil {
		return fmt.Errorf("listen on the socket: %w", err)
	}
	if err := os.Chmod(l.o.Socket, 0o777); err != nil {
		return errors.Join(fmt.Errorf("mode of the socket: %w", err), listener.Close())
	}
	stalled, served := stall.Listen(listener), make(chan error, 1)
	server := grpc.NewServer(grpc.Creds(l.o.Credentials),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveTime}))
	loadbalancerv1.RegisterStreamAvailabilityServiceServer(server, l)
	go func() { served <- server.Serve(stalled) }()
	l.server, l.listener, l.served = server, stalled, served
	return nil
}

// SetAvailable sets whether the load balancer can forward. A value that is the same is not sent.
func (l *LB) SetAvailable(available bool) { l.available.Set(available) }

// Freeze stalls the load balancer as SIGSTOP does, or continues it.
func (l *LB) Freeze(frozen bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listener != nil {
		l.listener.Set(frozen)
	}
}

// Stop sends "unavailable" to all watchers, waits for that at most 2 s, and ends the streams.
func (l *LB) Stop() error {
	l.available.Set(false)
	l.mu.Lock()
	watchers := make([]*latest.Value[bool], 0, len(l.watchers))
	for w := range l.watchers {
		watchers = append(watchers, w)
	}
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	for _, w := range watchers {
		if w.Wait(ctx, func(sent bool) bool { return !sent }) != nil {
			break // watchers that do not read end with the connection
		}
	}
	return l.end(func(s *grpc.Server) {
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			s.GracefulStop()
		}()
		select {
		case <-stopped:
		case <-time.After(gracefulTime):
			s.Stop()
			<-stopped
		}
	})
}

// Kill closes all connections immediately, as SIGKILL does. After the next start the LB is
// unavailable.
func (l *LB) Kill() error {
	defer l.available.Set(false)
	return l.end((*grpc.Server).Stop)
}

func (l *LB) end(stop func(*grpc.Server)) error {
	l.mu.Lock()
	server, served := l.server, l.served
	l.server = nil
	l.mu.Unlock()
	if server == nil {
		return nil
	}
	stop(server)
	if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) { // stopped before Serve
		return fmt.Errorf("serve the load balancer: %w", err)
	}
	return nil
}

// Watchers returns the number of open streams.
func (l *LB) Watchers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.watchers)
}

// Opened returns the number of streams that were opened. Meridio's load balancer logs two lines for
// each at level DEBUG.
func (l *LB) Opened() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.opened
}

// Watch implements loadbalancer.v1: it sends the current state, then each change.
func (l *LB) Watch(_ *emptypb.Empty, stream grpc.ServerStreamingServer[loadbalancerv1.Response]) error {
	var sent latest.Value[bool]
	l.mu.Lock()
	l.watchers[&sent] = true
	l.opened++
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.watchers, &sent)
	}()
	for first := true; ; first = false {
		available, changed := l.available.Get()
		if first || available != sent.Load() {
			target := &loadbalancerv1.Target{}
			if available {
				target.Context = map[string]string{Identifier: l.o.Host}
			}
			if err := stream.Send(&loadbalancerv1.Response{Targets: []*loadbalancerv1.Target{target}}); err != nil {
				return err
			}
			sent.Set(available)
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}
