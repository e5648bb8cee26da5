package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/admin"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
)

// stopTimeout bounds running calls after the endpoint's context ended. Streams that wait for the
// next change would never finish.
const stopTimeout = 100 * time.Millisecond

// Endpoint is a gRPC server with its listeners. It implements task.Task.
type Endpoint struct {
	name      string
	listeners []net.Listener
	server    *grpc.Server
	pprof     *splitter // passes HTTP/1 connections to http; nil without pprof
	http      *http.Server
	cleanup   func()

	// Begin, unless nil, is called before the endpoint serves, and End before running calls are ended.
	// An error of Begin is the result of Run.
	Begin func(context.Context) error
	End   func()
}

// Register registers services; generated code and the health server call it.
type Register func(grpc.ServiceRegistrar)

// Calls counts the calls of a server.
type Calls interface {
	ServerOptions() []grpc.ServerOption
	// Serves is called with the server once its services are registered.
	Serves(reflection.ServiceInfoProvider)
}

// NewAdmin listens on a unix socket that only the same user and root can use. It serves the
// services of register, reflection and channelz over gRPC, and pprof over HTTP/1. watch is
// identity.ListenOptions.Watch.
func NewAdmin(ctx context.Context, path string, log *slog.Logger, calls Calls, watch func(error),
	register Register,
) (*Endpoint, error) {
	listener, err := identity.Listen(ctx, identity.ListenOptions{Path: path, Mode: fs.FileMode(0o600), Watch: watch})
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	split := newSplitter(listener, log)
	// The splitter has authenticated the peer.
	e := newEndpoint("admin socket", []net.Listener{share{split, split.grpc}}, calls, register,
		grpc.Creds(socketCredentials{insecure.NewCredentials()}))
	e.pprof, e.http = split, newPprofServer(log)
	reflection.Register(e.server)
	e.cleanup, err = admin.Register(e.server)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("admin socket: %w", err), listener.Close())
	}
	return e, nil
}

// NewPlain listens on a TCP address and on loopback without TLS, because the kubelet's gRPC probe
// does not support certificates. Clients are not authenticated, so reflection is disabled, and
// streams and memory per connection are limited. refused is passed to [Except].
func NewPlain(ctx context.Context, name, addr string, refused func(local netip.Addr) bool, calls Calls,
	register Register,
) (*Endpoint, error) {
	listeners, err := ListenTCP(ctx, addr, MaxConnections, true)
	if err != nil {
		return nil, fmt.Errorf("--%s-address: %w", name, err)
	}
	for i, l := range listeners {
		listeners[i] = Except(l, refused)
	}
	return newPlain(name, listeners, calls, register), nil
}

// NewPlainSocket is [NewPlain] on a unix socket that only the same user and root can use, for
// probes that run in the container. watch is identity.ListenOptions.Watch.
func NewPlainSocket(ctx context.Context, name, path string, calls Calls, watch func(error),
	register Register,
) (*Endpoint, error) {
	l, err := identity.Listen(ctx, identity.ListenOptions{Path: path, Mode: fs.FileMode(0o600), Watch: watch})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return newPlain(name, []net.Listener{Limit(l, MaxConnections, nil)}, calls, register), nil
}

func newPlain(name string, listeners []net.Listener, calls Calls, register Register) *Endpoint {
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
			MaxConnectionIdle: time.Minute, Time: 30 * time.Second, Timeout: 5 * time.Second,
		}),
	)
}

// NewMutual returns an endpoint for remote callers, with credentials and options for the server.
func NewMutual(name string, listeners []net.Listener, calls Calls, creds credentials.TransportCredentials,
	options []grpc.ServerOption, register Register,
) *Endpoint {
	e := newEndpoint(name, listeners, calls, register, append(options, grpc.Creds(creds))...)
	reflection.Register(e.server)
	return e
}

func newEndpoint(name string, listeners []net.Listener, calls Calls, register Register,
	options ...grpc.ServerOption,
) *Endpoint {
	options = slices.Concat(calls.ServerOptions(), options, []grpc.ServerOption{grpc.WaitForHandlers(true)})
	e := &Endpoint{name: name, listeners: listeners, cleanup: func() {}, server: grpc.NewServer(options...)}
	register(e.server)
	calls.Serves(e.server)
	return e
}

// String implements task.Task.
func (e *Endpoint) String() string { return e.name + " " + e.Addr().String() }

// Addr returns the address of the first listener, not the additional loopback address.
func (e *Endpoint) Addr() net.Addr { return e.listeners[0].Addr() }

// Close closes an endpoint that was never run.
func (e *Endpoint) Close() {
	e.cleanup()
	if e.http != nil {
		_ = e.http.Close()
	}
	e.server.Stop()
	for _, l := range e.listeners {
		_ = l.Close() // can only fail if the listener is already closed
	}
}

// Run serves until ctx ends.
func (e *Endpoint) Run(ctx context.Context) error {
	if e.Begin != nil {
		if err := e.Begin(ctx); err != nil {
			e.Close()
			return err
		}
	}
	servers, serving := errgroup.WithContext(ctx)
	for _, l := range e.listeners {
		servers.Go(func() error { return e.server.Serve(l) })
	}
	if e.http != nil {
		servers.Go(func() error { return e.http.Serve(share{e.pprof, e.pprof.http}) })
	}
	// Also done if one listener fails: the rest cannot serve alone.
	<-serving.Done()
	if e.End != nil {
		e.End()
	}
	// GracefulStop waits for open streams, which only Stop ends.
	force := time.AfterFunc(stopTimeout, e.server.Stop)
	e.server.GracefulStop()
	force.Stop()
	e.Close()
	err := servers.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("failed to serve: %w", err)
}

// statusInterval is the least time between two messages of WatchStatus.
const statusInterval = 100 * time.Millisecond

// WatchStatus calls send immediately and after every change, until ctx ends.
func WatchStatus[T any](ctx context.Context, changes *latest.Value[T], send func() error) error {
	for {
		// Get the channel before the read: a change after the read closes it.
		_, changed := changes.Get()
		if err := send(); err != nil {
			return err
		}
		// Changes in bursts, such as a reload, are merged into one message.
		if err := backoff.Sleep(ctx, statusInterval); err != nil {
			return status.FromContextError(err).Err()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

// Timestamp converts a time. It returns nil for the zero time.
func Timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// StatusServer implements GetStatus and WatchStatus of a program's admin service.
type StatusServer[S, C any] struct {
	Read    func(context.Context) *S
	Changes *latest.Value[C] // set after each change of the status
}

// GetStatus returns the status.
func (s StatusServer[S, C]) GetStatus(ctx context.Context, _ *adminv1.GetStatusRequest) (*S, error) {
	return s.Read(ctx), nil
}

// WatchStatus sends the status now and after every change.
func (s StatusServer[S, C]) WatchStatus(_ *adminv1.WatchStatusRequest, stream grpc.ServerStreamingServer[S]) error {
	return WatchStatus(stream.Context(), s.Changes, func() error { return stream.Send(s.Read(stream.Context())) })
}

// LogService implements the LogService.
type LogService struct {
	adminv1.UnimplementedLogServiceServer
	Level *logs.Level
	Log   *slog.Logger
	Audit Audit
}

// Audit records the orders of callers as events; nil records none. It must not block.
type Audit func(...*adminv1.Event)

func (audit Audit) record(event *adminv1.Event) {
	if audit != nil {
		audit(event)
	}
}

// SetLogLevel implements the LogService.
func (l LogService) SetLogLevel(ctx context.Context, request *adminv1.SetLogLevelRequest) (*adminv1.SetLogLevelResponse,
	error,
) {
	previous := l.Level.String()
	if err := l.Level.Set(request.GetLevel()); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	caller := identity.Caller(ctx)
	l.Log.Info("log level changed", "from", previous, "to", request.GetLevel(), "by", caller)
	if level := l.Level.String(); level != previous {
		l.Audit.record(&adminv1.Event{Object: "log level", From: previous, To: level, By: caller})
	}
	return &adminv1.SetLogLevelResponse{Previous: previous}, nil
}
