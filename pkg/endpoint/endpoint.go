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
	"google.golang.org/grpc/reflection"

	"github.com/vipgate/vipgate/pkg/identity"
)

// stopTimeout is how long calls get to finish when the endpoint ends. Streams
// that wait for the next change never finish by themselves.
const stopTimeout = 100 * time.Millisecond

// Endpoint is a gRPC server with its listener. It implements task.Task.
type Endpoint struct {
	name     string
	listener net.Listener
	server   *grpc.Server
	pprof    *pprofServer // nil: none
	cleanup  func()
	ready    chan struct{}
}

// Register is how services get into an endpoint; generated code and the health
// server take it.
type Register func(grpc.ServiceRegistrar)

// Calls counts the calls of a server.
type Calls interface {
	ServerOptions() []grpc.ServerOption
	// Serves is told of the server once its services are registered.
	Serves(reflection.ServiceInfoProvider)
}

// NewAdmin listens on a unix socket for the same user and root only (design
// section 10), with the services of register, reflection and channelz over
// gRPC, and pprof over HTTP/1.
func NewAdmin(ctx context.Context, path string, log *slog.Logger, calls Calls, register Register) (*Endpoint, error) {
	listener, err := identity.Listen(ctx, identity.ListenOptions{Path: path, Mode: fs.FileMode(0o600)})
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	split := newSplitter(listener, log)
	e := &Endpoint{
		name: "admin socket", listener: split, pprof: newPprofServer(split, log), ready: make(chan struct{}),
		server: grpc.NewServer(append(calls.ServerOptions(), grpc.Creds(insecure.NewCredentials()), grpc.WaitForHandlers(true))...), // the splitter let the peer in
	}
	register(e.server)
	reflection.Register(e.server)
	calls.Serves(e.server)
	e.cleanup, err = admin.Register(e.server)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("admin socket: %w", err), listener.Close())
	}
	return e, nil
}

// NewPlain listens on a TCP address without TLS, for the kubelet's gRPC probe,
// which knows no certificates (design section 13).
func NewPlain(ctx context.Context, name, addr string, calls Calls, register Register) (*Endpoint, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	e := &Endpoint{
		name: name, listener: listener, ready: make(chan struct{}), cleanup: func() {},
		server: grpc.NewServer(append(calls.ServerOptions(), grpc.Creds(insecure.NewCredentials()), grpc.WaitForHandlers(true), grpc.MaxRecvMsgSize(64<<10))...),
	}
	register(e.server)
	reflection.Register(e.server)
	calls.Serves(e.server)
	return e, nil
}

// NewMutual listens on a TCP address with the given credentials, for callers from
// elsewhere. options are those of its server.
func NewMutual(ctx context.Context, name, addr string, calls Calls, creds credentials.TransportCredentials, options []grpc.ServerOption, register Register) (*Endpoint, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	e := &Endpoint{
		name: name, listener: listener, ready: make(chan struct{}), cleanup: func() {},
		server: grpc.NewServer(slices.Concat(calls.ServerOptions(), options, []grpc.ServerOption{grpc.Creds(creds), grpc.WaitForHandlers(true)})...),
	}
	register(e.server)
	reflection.Register(e.server)
	calls.Serves(e.server)
	return e, nil
}

// String implements task.Task.
func (e *Endpoint) String() string { return e.name + " " + e.listener.Addr().String() }

// Ready is closed when calls are answered.
func (e *Endpoint) Ready() <-chan struct{} { return e.ready }

// Addr is the address it listens on.
func (e *Endpoint) Addr() net.Addr { return e.listener.Addr() }

// Close gives up an endpoint whose task was never run.
func (e *Endpoint) Close() {
	e.cleanup()
	if e.pprof != nil {
		e.pprof.close()
	}
	e.server.Stop()
	// The error would be that the listener is closed already.
	_ = e.listener.Close()
}

// Run serves until ctx ends.
func (e *Endpoint) Run(ctx context.Context) error {
	served := make(chan error, 2)
	running := 1
	go func() { served <- e.server.Serve(e.listener) }()
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
