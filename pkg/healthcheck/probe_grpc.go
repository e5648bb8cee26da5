package healthcheck

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// Limits of one gRPC check, whose answer has two bytes.
const (
	maxAnswer  = 4 << 10
	maxHeaders = 64 << 10
	bufferSize = 4 << 10
)

func (plan *plan) exchangeGRPC(ctx context.Context, conn net.Conn, address netip.Addr) outcome {
	if secure, ok := conn.(*tls.Conn); ok && secure.ConnectionState().NegotiatedProtocol != "h2" {
		return plan.wrong("the TLS server does not speak HTTP/2, which gRPC needs (ALPN h2)")
	}
	answer, s, answered := askHealth(ctx, conn, netip.AddrPortFrom(address, plan.port), plan.GRPC.Service,
		plan.GRPC.TLS.ServerName)
	service := "the server"
	if plan.GRPC.Service != "" {
		service = "service " + plan.GRPC.Service
	}
	switch s.Code() {
	case codes.OK:
		if answer != healthv1.HealthCheckResponse_SERVING {
			return plan.wrong("%s is %s", service, answer)
		}
		return outcome{verdict: succeeded}
	case codes.DeadlineExceeded, codes.Canceled:
		return plan.wrong("connected, but no answer in %s", plan.Timeout)
	case codes.NotFound:
		return plan.wrong("%s is not known there", service)
	case codes.Unimplemented:
		return plan.wrong("no grpc.health.v1 here")
	case codes.Unavailable:
		if !answered {
			return plan.wrong("closed the connection: no answer")
		}
		// grpc-go returns this message if the peer does not begin with an HTTP/2 preface.
		if why, found := strings.CutPrefix(s.Message(), "connection error: desc = "); found {
			why = strings.TrimPrefix(strings.Trim(why, `"`), "error reading server preface: ")
			return plan.wrong("no gRPC here: %s", remark(why))
		}
	}
	return plan.wrong("%s: %s", s.Code(), remark(s.Message()))
}

// askHealth queries the health of a service, "" for the server, over a connection. answered reports
// whether the peer sent any byte. authority is the name of the server, "" for its address.
func askHealth(ctx context.Context, conn net.Conn, server netip.AddrPort, service, authority string) (
	answer healthv1.HealthCheckResponse_ServingStatus, s *status.Status, answered bool,
) {
	var transport credentials.TransportCredentials = insecure.NewCredentials()
	if _, ok := conn.(*tls.Conn); ok {
		transport = handshaken{credentials.NewTLS(nil)}
	}
	only := &onlyConn{Conn: conn}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithContextDialer(only.open),
		grpc.WithNoProxy(),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableHealthCheck(),
		grpc.WithUserAgent(userAgent),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithReadBufferSize(bufferSize),
		grpc.WithWriteBufferSize(bufferSize),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
	}
	if authority != "" {
		options = append(options, grpc.WithAuthority(authority))
	}
	client, err := grpc.NewClient("passthrough:///"+server.String(), options...)
	if err != nil {
		return 0, status.New(codes.Internal, err.Error()), false
	}
	defer client.Close()
	r, err := healthv1.NewHealthClient(client).Check(ctx, &healthv1.HealthCheckRequest{Service: service})
	return r.GetStatus(), status.Convert(err), only.answered.Load()
}

// onlyConn is the one connection of a check. answered reports whether the peer sent any byte.
type onlyConn struct {
	net.Conn
	opened, answered atomic.Bool
}

// open passes the connection to the client once. A client that lost its connection would open a
// second one in the background.
func (c *onlyConn) open(context.Context, string) (net.Conn, error) {
	if c.opened.Swap(true) {
		return nil, errors.New("a check opens one connection")
	}
	return c, nil
}

// Read implements net.Conn.
func (c *onlyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.answered.Store(true)
	}
	return n, err
}

// handshaken holds the credentials of a connection whose TLS handshake is complete. The handshake
// of grpc-go hides the errors that probes report, and cannot verify an IPv6 address, which has
// brackets as the name of an HTTP/2 server.
type handshaken struct {
	credentials.TransportCredentials
}

// ClientHandshake implements credentials.TransportCredentials.
func (handshaken) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	common := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return conn, credentials.TLSInfo{CommonAuthInfo: common}, nil
}

// Clone implements credentials.TransportCredentials.
func (h handshaken) Clone() credentials.TransportCredentials { return h }
