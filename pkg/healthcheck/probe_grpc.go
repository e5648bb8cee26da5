package healthcheck

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/trench"
)

// What one check of gRPC may take: an answer has two bytes.
const (
	maxAnswer     = 4 << 10
	maxHeaders    = 64 << 10
	checkBuffered = 4 << 10
)

// grpcProber asks the gRPC health service.
type grpcProber struct {
	check   trench.Check
	secured *secured // nil: plaintext
}

var _ prober = (*grpcProber)(nil)

// newGRPCProber returns a prober for a check whose GRPC has a port.
func newGRPCProber(check trench.Check) *grpcProber {
	p := &grpcProber{check: check}
	if check.GRPC.TLS.On {
		p.secured = &secured{TLSCheck: check.GRPC.TLS}
	}
	return p
}

// probe implements prober.
func (p *grpcProber) probe(ctx context.Context, dial dialFunc, at netip.Addr) (o outcome) {
	c := p.check.GRPC
	a := &attempt{dial: dial}
	var transport credentials.TransportCredentials = insecure.NewCredentials()
	if p.secured != nil {
		config, err := p.secured.config(ctx, at)
		if err != nil {
			return outcome{verdict: unmade, reason: fmt.Sprintf("check not run: %v", err)}
		}
		a.serverName = config.ServerName
		config.NextProtos = []string{"h2"}
		transport = observed{credentials.NewTLS(nil), config, a}
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithContextDialer(a.connect),
		grpc.WithNoProxy(),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableHealthCheck(),
		grpc.WithUserAgent(checkAgent),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithReadBufferSize(checkBuffered),
		grpc.WithWriteBufferSize(checkBuffered),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
	}
	if c.TLS.ServerName != "" {
		options = append(options, grpc.WithAuthority(c.TLS.ServerName))
	}
	conn, err := grpc.NewClient("passthrough:///"+netip.AddrPortFrom(at, c.Port).String(), options...)
	if err != nil {
		return outcome{verdict: unmade, reason: fmt.Sprintf("check not run: %v", err)}
	}
	defer func() {
		// It was not closed before, which would be the only error.
		_ = conn.Close()
		a.end()
	}()
	r, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: c.Service})
	if err != nil {
		return p.failure(a, err)
	}
	if s := r.GetStatus(); s != healthv1.HealthCheckResponse_SERVING {
		return wrong(c.Port, "%s is %s", p.asked(), s)
	}
	return outcome{verdict: succeeded}
}

// asked names what was asked for.
func (p *grpcProber) asked() string {
	if p.check.GRPC.Service == "" {
		return "the server"
	}
	return "service " + p.check.GRPC.Service
}

// failure is the outcome of a call that ended with an error. What it says of a
// connection that failed is phrased for operators; the errors themselves are in a.
func (p *grpcProber) failure(a *attempt, err error) outcome {
	port := p.check.GRPC.Port
	connected, dialing, handshake := a.result()
	s := status.Convert(err)
	switch {
	case handshake != nil:
		return handshakeFailure(&p.check, port, a.serverName, handshake)
	case dialing != nil:
		return failure(&p.check, port, dialing)
	case !connected:
		return failure(&p.check, port, context.DeadlineExceeded)
	}
	switch s.Code() {
	case codes.DeadlineExceeded, codes.Canceled:
		return wrong(port, "connected, but no answer in %s", p.check.Timeout)
	case codes.NotFound:
		return wrong(port, "%s is not known there", p.asked())
	case codes.Unimplemented:
		return wrong(port, "no grpc.health.v1 here")
	case codes.Unavailable:
		if !a.answered.Load() {
			return wrong(port, "closed the connection: no answer")
		}
		// How the library says that the connection was opened, and that the other side
		// began with nothing that HTTP/2 begins with.
		if why, is := strings.CutPrefix(s.Message(), "connection error: desc = "); is {
			why = strings.TrimPrefix(strings.Trim(why, `"`), "error reading server preface: ")
			return wrong(port, "no gRPC here: %s", remark(why))
		}
	}
	return wrong(port, "%s: %s", s.Code(), remark(s.Message()))
}

// attempt is the one connection of a check.
type attempt struct {
	dial       dialFunc
	serverName string // that the certificate must have

	answered atomic.Bool // something came

	mu        sync.Mutex
	ended     bool
	dialing   sync.WaitGroup
	connected bool
	dialed    error // why it could not be opened
	shaken    error // why the TLS handshake failed
}

var errOnce = errors.New("a check opens one connection")

// connect opens the connection, and refuses to do so again: a client that has lost
// one opens another in the background.
func (a *attempt) connect(ctx context.Context, address string) (net.Conn, error) {
	a.mu.Lock()
	if a.ended || a.connected || a.dialed != nil {
		a.mu.Unlock()
		return nil, errOnce
	}
	a.dialing.Add(1)
	a.mu.Unlock()
	defer a.dialing.Done()
	conn, err := a.dial(ctx, "tcp", address)
	a.mu.Lock()
	a.connected, a.dialed = err == nil, err
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	reset(conn)
	return listened{conn, a}, nil
}

// listened is a connection that reports whether something came.
type listened struct {
	net.Conn
	attempt *attempt
}

// Read implements net.Conn.
func (l listened) Read(p []byte) (int, error) {
	n, err := l.Conn.Read(p)
	if n > 0 {
		l.attempt.answered.Store(true)
	}
	return n, err
}

func (a *attempt) result() (connected bool, dialing, handshake error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.connected, a.dialed, a.shaken
}

// end waits for the dialer.
func (a *attempt) end() {
	a.mu.Lock()
	a.ended = true
	a.mu.Unlock()
	a.dialing.Wait()
}

var errNoHTTP2 = errors.New("the TLS server does not speak HTTP/2, which gRPC needs (ALPN h2)")

// observed are credentials that tell why a handshake failed, and that verify an
// address of IPv6 as well, which as the name of an HTTP/2 server has brackets.
type observed struct {
	credentials.TransportCredentials // for what is not about the handshake
	config                           *tls.Config
	attempt                          *attempt
}

// ClientHandshake implements credentials.TransportCredentials.
func (o observed) ClientHandshake(ctx context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secure := tls.Client(conn, o.config)
	err := secure.HandshakeContext(ctx)
	if err == nil && secure.ConnectionState().NegotiatedProtocol != "h2" {
		err = errNoHTTP2
	}
	if err != nil {
		o.attempt.mu.Lock()
		defer o.attempt.mu.Unlock()
		o.attempt.shaken = err
		return nil, nil, err
	}
	return secure, credentials.TLSInfo{
		State:          secure.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// Clone implements credentials.TransportCredentials.
func (o observed) Clone() credentials.TransportCredentials {
	return observed{o.TransportCredentials.Clone(), o.config.Clone(), o.attempt}
}
