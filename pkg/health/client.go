package health

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// CheckTimeout bounds a check whose context has no deadline. The kubelet gives exec probes 1 s.
const CheckTimeout = time.Second

// ErrNotServing is returned if the process responds that the service does not serve.
var ErrNotServing = errors.New("not serving")

// transport matches the text that gRPC adds to a connection error.
var transport = regexp.MustCompile(`(?s)^.*desc = "(?:transport: )?(?:[Ee]rror while dialing: )?(.*)"$`)

// Reason returns the text of a call's error without gRPC's prefixes.
func Reason(err error) string {
	s := status.Convert(err)
	switch s.Code() {
	case codes.DeadlineExceeded:
		return "no response in time"
	case codes.Unavailable:
		if m := transport.FindStringSubmatch(s.Message()); m != nil {
			return m[1]
		}
	}
	return s.Message()
}

// ErrUnreachable is returned by [Probe] if no connection is established in time.
var ErrUnreachable = errors.New("no connection")

// CheckClient checks a service of the process at addr, "host:port" or "unix:///path". It returns
// nil if the service serves, and [ErrNotServing] if the process responds that it does not.
func CheckClient(ctx context.Context, addr, service string) error {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, CheckTimeout)
		defer cancel()
	}
	return withClient(addr, func(conn *grpc.ClientConn) error { return checkService(ctx, conn, addr, service) })
}

// Probe is [CheckClient] with separate limits for the connection and for the call. If the
// connection fails, it returns [ErrUnreachable].
func Probe(ctx context.Context, addr, service string, connect, call time.Duration) error {
	return withClient(addr, func(conn *grpc.ClientConn) error {
		if err := waitReady(ctx, conn, addr, connect); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, call)
		defer cancel()
		return checkService(ctx, conn, addr, service)
	})
}

func withClient(addr string, use func(*grpc.ClientConn) error) (err error) {
	// The target is an address of the pod, for which HTTPS_PROXY of the container must not apply.
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return fmt.Errorf("health check at %s: %w", addr, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	return use(conn)
}

// waitReady waits until the connection is established, or fails once.
func waitReady(ctx context.Context, conn *grpc.ClientConn, addr string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// A new client is idle and connects only with its first call.
	conn.Connect()
	for {
		switch state := conn.GetState(); {
		case state == connectivity.Ready:
			return nil
		case state == connectivity.TransientFailure:
			// The connectivity API hides the reason, which a call without WaitForReady returns immediately.
			_, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
			return fmt.Errorf("health check at %s: %w: %s", addr, ErrUnreachable, Reason(err))
		case !conn.WaitForStateChange(ctx, state):
			return fmt.Errorf("health check at %s: %w within %v", addr, ErrUnreachable, limit)
		}
	}
}

// services returns the remedy for an unknown service: the known services. It returns "" if the
// process cannot list its services.
func services(ctx context.Context, conn *grpc.ClientConn) string {
	list, err := healthv1.NewHealthClient(conn).List(ctx, &healthv1.HealthListRequest{})
	names := slices.Sorted(maps.Keys(list.GetStatuses()))
	// The service "" is the process itself and needs no name.
	names = slices.DeleteFunc(names, func(name string) bool { return name == "" })
	if err != nil || len(names) == 0 {
		return ""
	}
	return "; the services are " + strings.Join(names, ", ")
}

func checkService(ctx context.Context, conn *grpc.ClientConn, addr, service string) error {
	var trailer metadata.MD
	// The reason is in a trailer, because grpc.health.v1 has no field for it.
	r, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: service},
		grpc.Trailer(&trailer))
	switch {
	case status.Code(err) == codes.NotFound:
		return fmt.Errorf("health check at %s: unknown service %q%s", addr, service, services(ctx, conn))
	case err != nil:
		return fmt.Errorf("health check of %q at %s: %s", service, addr, Reason(err))
	case r.GetStatus() != healthv1.HealthCheckResponse_SERVING:
		return fmt.Errorf("service %q at %s is %w: %s", service, addr, ErrNotServing,
			append(trailer[detailKey], r.GetStatus().String())[0])
	}
	return nil
}
