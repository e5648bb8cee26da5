package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/admin"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/vipgate/vipgate/pkg/identity"
)

// stopTimeout is how long calls may run after the endpoint ended. Streams that wait for the next
// change never finish by themselves.
const stopTimeout = 100 * time.Millisecond

// Endpoint is a gRPC server with its listeners. It implements task.Task.
type Endpoint struct {
	name      string
	listeners []net.Listener
	server    *grpc.Server
	pprof     *pprofServer // nil: none
	cleanup   func()
	ready     chan struct{}
}

// Register registers services; generated code and the health server call it.
type Register func(grpc.ServiceRegistrar)

// Calls counts the calls of a server.
type Calls interface {
	ServerOptions() []grpc.ServerOption
	// Serves is called with the server once its services are registered.
	Serves(reflection.ServiceInfoProvider)
}

// NewAdmin listens on a unix socket for the same user and root only, with the services of register,
// reflection and channelz over gRPC, and pprof over HTTP/1. watch is
// [identity.ListenOptions.Watch].
func NewAdmin(ctx context.Context, path string, log *slog.Logger, calls Calls, watch func(error),
	register Register,
) (*Endpoint, error) {
	listener, err := identity.Listen(ctx, identity.ListenOptions{Path: path, Mode: fs.FileMode(0o600), Watch: watch})
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	split := newSplitter(listener, log)
	// The splitter has authenticated the peer.
	e := newEndpoint("admin socket", []net.Listener{split}, calls, register, grpc.Creds(insecure.NewCredentials()))
	e.pprof = newPprofServer(split, log)
	reflection.Register(e.server)
	e.cleanup, err = admin.Register(e.server)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("admin socket: %w", err), listener.Close())
	}
	return e, nil
}

// NewPlain listens on a TCP address, and on loopback, without TLS, for the kubelet's gRPC probe,
// which does not support certificates. Clients are not authenticated, so there is no reflection,
// and streams and memory per connection are limited.
func NewPlain(ctx context.Context, name, addr string, calls Calls, register Register) (*Endpoint, error) {
	listeners, err := ListenTCP(ctx, addr, MaxConnections, true)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return newEndpoint(name, listeners, calls, register,
		grpc.Creds(insecure.NewCredentials()),
		grpc.ConnectionTimeout(3*time.Second),
		grpc.MaxConcurrentStreams(16),
		grpc.MaxRecvMsgSize(4<<10), // a request contains the name of a service
		grpc.MaxHeaderListSize(8<<10),
		grpc.StaticStreamWindowSize(64<<10),
		grpc.StaticConnWindowSize(64<<10),
		grpc.ReadBufferSize(4<<10),
		grpc.WriteBufferSize(4<<10),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: time.Minute, Time: 30 * time.Second,
			Timeout: 5 * time.Second,
		}),
	), nil
}

// NewMutual listens on a TCP address with the given credentials for remote callers. options are
// those of its server.
func NewMutual(ctx context.Context, name, addr string, calls Calls, creds credentials.TransportCredentials,
	options []grpc.ServerOption, register Register,
) (*Endpoint, error) {
	listeners, err := ListenTCP(ctx, addr, MaxRegistryConnections, false)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	e := newEndpoint(name, listeners, calls, register, append(options, grpc.Creds(creds))...)
	reflection.Register(e.server)
	return e, nil
}

func newEndpoint(name string, listeners []net.Listener, calls Calls, register Register,
	options ...grpc.ServerOption,
) *Endpoint {
	e := &Endpoint{
		name: name, listeners: listeners, ready: make(chan struct{}), cleanup: func() {},
		server: grpc.NewServer(slices.Concat(calls.ServerOptions(), options,
			[]grpc.ServerOption{grpc.WaitForHandlers(true)})...),
	}
	register(e.server)
	calls.Serves(e.server)
	return e
}

// String implements task.Task.
func (e *Endpoint) String() string { return e.name + " " + e.Addr().String() }

// Ready is closed when the endpoint accepts calls.
func (e *Endpoint) Ready() <-chan struct{} { return e.ready }

// Addr returns its address, beside loopback.
func (e *Endpoint) Addr() net.Addr { return e.listeners[0].Addr() }

// Close closes an endpoint that was never run.
func (e *Endpoint) Close() {
	e.cleanup()
	if e.pprof != nil {
		e.pprof.close()
	}
	e.server.Stop()
	for _, l := range e.listeners {
		// The only possible error: the listener is closed already.
		_ = l.Close()
	}
}

// Run serves until ctx ends.
func (e *Endpoint) Run(ctx context.Context) error {
	served := make(chan error, len(e.listeners)+1)
	running := len(e.listeners)
	for _, l := range e.listeners {
		go func() { served <- e.server.Serve(l) }()
	}
	if e.pprof != nil {
		running++
		go func() { served <- e.pprof.serve() }()
	}
	close(e.ready)
	var err error
	select {
	case <-ctx.Done():
		err = ctx.Err()
	case err = <-served:
		running--
		if err != nil {
			err = fmt.Errorf("serve: %w", err)
		}
	}
	force := time.AfterFunc(stopTimeout, e.server.Stop)
	e.server.GracefulStop()
	force.Stop()
	e.Close()
	for range running {
		<-served
	}
	return err
}
