package identity_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

// whoami is a health service that records its callers.
type whoami struct {
	*health.Server
	caller atomic.Value
}

func (w *whoami) Check(ctx context.Context, r *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if id, ok := identity.PeerID(ctx); ok {
		w.caller.Store(id)
	}
	return w.Server.Check(ctx, r)
}

// serve runs a gRPC server with these credentials and returns its socket.
func serve(t *testing.T, creds credentials.TransportCredentials) (path string, w *whoami) {
	t.Helper()
	path = filepath.Join(identitytest.ShortDir(t), "s.sock")
	l, err := identity.Listen(t.Context(), identity.ListenOptions{Path: path})
	must(t, err)
	server := grpc.NewServer(grpc.Creds(creds))
	w = &whoami{Server: health.NewServer()}
	healthpb.RegisterHealthServer(server, w)
	harness.Serve(t, server, l)
	return path, w
}

func client(t *testing.T, path string, creds credentials.TransportCredentials) healthpb.HealthClient {
	t.Helper()
	cc, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(creds))
	must(t, err)
	t.Cleanup(func() { must(t, cc.Close()) })
	return healthpb.NewHealthClient(cc)
}

func check(t *testing.T, c healthpb.HealthClient) error {
	ctx := harness.Context(t, waitLimit)
	_, err := c.Check(ctx, &healthpb.HealthCheckRequest{})
	return err
}

// bare is a TLS client or server that presents a certificate and verifies nothing.
func bare(svid *x509svid.SVID) *tls.Config {
	c := &tls.Config{InsecureSkipVerify: true, ClientAuth: tls.RequestClientCert, NextProtos: []string{"h2"}}
	if svid != nil {
		cert := tls.Certificate{PrivateKey: svid.PrivateKey}
		for _, x := range svid.Certificates {
			cert.Certificate = append(cert.Certificate, x.Raw)
		}
		c.Certificates = []tls.Certificate{cert}
	}
	return c
}

func TestAuthorizeErrors(t *testing.T) {
	id := spiffeid.RequireFromString
	td := spiffeid.RequireTrustDomainFromString("example.org")
	a, b, guest := id("spiffe://example.org/a"), id("spiffe://example.org/b"), id("spiffe://example.net/a")
	for _, c := range []struct {
		name      string
		authorize func(spiffeid.ID, [][]*x509.Certificate) error
		allowed   []spiffeid.ID
		denied    spiffeid.ID
		says      string
	}{
		{"no ID", identity.Authorize(), nil, a, "no SPIFFE ID is authorized"},
		{
			"one", identity.Authorize(a),
			[]spiffeid.ID{a},
			b,
			"the peer is spiffe://example.org/b, expected spiffe://example.org/a",
		},
		{
			"one, a prefix of the peer", identity.Authorize(a), nil, id("spiffe://example.org/a2"),
			"expected spiffe://example.org/a",
		},
		{
			"two, prefixes of the peer", identity.Authorize(a, b), nil, id("spiffe://example.org/b/x"),
			"expected one of spiffe://example.org/a, spiffe://example.org/b",
		},
		{
			"members, a prefix of the trust domain", identity.AuthorizeMember(td), nil, id("spiffe://example.org.net/a"),
			"expected a member of trust domain example.org",
		},
		{
			"a guest, a prefix of the peer", identity.AuthorizeMember(td, guest), nil, id("spiffe://example.net/a/x"),
			"or spiffe://example.net/a",
		},
		{
			"two", identity.Authorize(a, b),
			[]spiffeid.ID{a, b},
			guest,
			"the peer is spiffe://example.net/a, expected one of spiffe://example.org/a, spiffe://example.org/b",
		},
		{
			"members", identity.AuthorizeMember(td),
			[]spiffeid.ID{a, b},
			guest,
			"the peer is spiffe://example.net/a, expected a member of trust domain example.org",
		},
		{
			"members and a guest", identity.AuthorizeMember(td, guest),
			[]spiffeid.ID{a, b, guest},
			id("spiffe://example.net/b"),
			"the peer is spiffe://example.net/b, expected a member of trust domain example.org or spiffe://example.net/a",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, id := range c.allowed {
				must(t, c.authorize(id, nil))
			}
			if err := c.authorize(c.denied, nil); err == nil || !strings.HasSuffix(err.Error(), c.says) {
				t.Errorf("%s: %v, want %q", c.denied, err, c.says)
			}
		})
	}
}

// stranger is a certificate that is not an SVID.
func stranger(t *testing.T) *x509svid.SVID {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"example.org"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	return &x509svid.SVID{Certificates: []*x509.Certificate{cert}, PrivateKey: key}
}

// badPeers are rejected by both sides.
func badPeers(t *testing.T, ca *identitytest.CA, id spiffeid.ID) []badPeer {
	other := identitytest.NewCA(t, "example.net")
	impostor := identitytest.NewCA(t, "example.org")
	now := time.Now()
	return []badPeer{
		{
			"wrong ID", bare(ca.SVID(ca.ID("/evil"), time.Hour)), "wrong_id", "spiffe://example.org/evil",
			"expected " + id.String(),
		},
		{
			"longer ID", bare(ca.SVID(ca.ID(id.Path()+"2"), time.Hour)), "wrong_id", id.String() + "2",
			"expected " + id.String(),
		},
		{
			"ID below", bare(ca.SVID(ca.ID(id.Path()+"/x"), time.Hour)), "wrong_id", id.String() + "/x",
			"expected " + id.String(),
		},
		{
			"shorter ID", bare(ca.SVID(ca.ID(id.Path()[:2]), time.Hour)), "wrong_id", "spiffe://example.org" + id.Path()[:2],
			"expected " + id.String(),
		},
		{
			"other trust domain", bare(other.SVID(other.ID(id.Path()), time.Hour)), "other_trust_domain",
			"spiffe://example.net" + id.Path(), "expected " + id.String() + "; no bundle for trust domain example.net",
		},
		{
			"our authority, other trust domain", bare(ca.SVID(other.ID(id.Path()), time.Hour)), "other_trust_domain",
			"spiffe://example.net" + id.Path(), "expected " + id.String() + "; no bundle for trust domain example.net",
		},
		{
			"impostor of the trust domain", bare(impostor.SVID(id, time.Hour)), "untrusted_authority", id.String(),
			"not signed by an authority of trust domain example.org",
		},
		{
			"expired", bare(ca.SVIDBetween(id, now.Add(-time.Hour), now.Add(-time.Minute))), "expired", id.String(),
			"local clock:",
		},
		{
			"not yet valid", bare(ca.SVIDBetween(id, now.Add(time.Hour), now.Add(2*time.Hour))), "not_yet_valid", id.String(),
			"local clock:",
		},
		{"no SVID", bare(stranger(t)), "bad_svid", "", "no URI SAN"},
	}
}

type badPeer struct {
	name   string
	config *tls.Config
	reason identity.Reason
	id     string // the claimed ID
	says   string
}

func TestServerLogsRejections(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	fe := ca.ID("/frontend")
	journal, log := newJournal()
	path, w := serve(t, identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(fe), Log: log}))
	old := bare(ca.SVID(fe, time.Hour))
	old.MaxVersion = tls.VersionTLS12
	for _, c := range append(badPeers(t, ca, fe),
		badPeer{"no certificate", bare(nil), identity.ReasonNoCertificate, "", "certificate"},
		badPeer{"plaintext", nil, identity.ReasonNotTLS, "", "TLS"},
		badPeer{"TLS 1.2", old, identity.ReasonProtocol, "", "version"},
	) {
		t.Run(c.name, func(t *testing.T) {
			creds := insecure.NewCredentials()
			if c.config != nil {
				creds = credentials.NewTLS(c.config)
			}
			if err := check(t, client(t, path, creds)); err == nil {
				t.Fatal("was let in")
			}
			r := journal.wait(t, map[string]any{
				"msg": "client refused", "reason": string(c.reason), "peer_id": c.id,
				"level": "WARN",
			})
			if got := fmt.Sprint(r["error"]); !strings.Contains(got, c.says) {
				t.Errorf("the log does not say %q: %s", c.says, got)
			}
			if r["peer_pid"] == nil {
				t.Errorf("the log does not name the process: %v", r)
			}
		})
	}
	if got := w.caller.Load(); got != nil {
		t.Fatalf("%v came through", got)
	}
}

// socketPair returns the ends of a unix socket. Unlike with net.Pipe, both sides can write
// simultaneously, as in a failing handshake.
func socketPair(t *testing.T) (server, client net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(identitytest.ShortDir(t), "s"))
	must(t, err)
	defer l.Close()
	client, err = net.Dial("unix", l.Addr().String())
	must(t, err)
	server, err = l.Accept()
	must(t, err)
	return server, client
}

// handshakes runs a client's and a server's handshake against each other.
func handshakes(t *testing.T, sc, cc net.Conn, server,
	client func(net.Conn) (net.Conn, credentials.AuthInfo, error),
) (s, c side) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.conn, s.info, s.err = server(sc)
		if s.err != nil {
			sc.Close()
		}
	}()
	c.conn, c.info, c.err = client(cc)
	if c.err != nil {
		cc.Close()
	}
	<-done
	for _, x := range []side{s, c} {
		if x.conn != nil {
			t.Cleanup(func() { x.conn.Close() })
		}
	}
	return s, c
}

type side struct {
	conn net.Conn
	info credentials.AuthInfo
	err  error
}

func serverSide(creds credentials.TransportCredentials) func(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return creds.ServerHandshake
}

func clientSide(t *testing.T, creds credentials.TransportCredentials) func(net.Conn) (net.Conn, credentials.AuthInfo,
	error) {
	return func(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
		ctx := harness.Context(t, waitLimit)
		return creds.ClientHandshake(ctx, "localhost", c)
	}
}

func TestClientRejections(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	lb := ca.ID("/lb")
	creds := identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/frontend"), time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(lb)})
	for _, c := range append(badPeers(t, ca, lb),
		badPeer{"plaintext", nil, identity.ReasonNotTLS, "", "TLS"},
	) {
		t.Run(c.name, func(t *testing.T) {
			server := func(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
				if _, err := c.Read(make([]byte, 4096)); err != nil {
					return nil, nil, err
				}
				_, err := c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
				return nil, nil, err
			}
			if c.config != nil {
				server = serverSide(credentials.NewTLS(c.config))
			}
			sc, cc := socketPair(t)
			_, got := handshakes(t, sc, cc, server, clientSide(t, creds))
			var failure *identity.HandshakeError
			if !errors.As(got.err, &failure) || failure.Reason != c.reason {
				t.Fatalf("got %v", got.err)
			}
			if c.id != "" && failure.PeerID.String() != c.id {
				t.Errorf("the peer claimed to be %s, the error says %s", c.id, failure.PeerID)
			}
			if !strings.Contains(got.err.Error(), c.says) || !strings.Contains(got.err.Error(), c.id) {
				t.Errorf("the error does not say %q and %q: %v", c.says, c.id, got.err)
			}
		})
	}
}

func TestClientErrorAfterServerRejection(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	lb := ca.ID("/lb")
	path, _ := serve(t, identity.NewCredentials(ca.Source(ca.SVID(lb, time.Hour)), identity.CredentialOptions{}))
	c := client(t, path, identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/frontend"), time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(lb)}))
	raw, err := net.Dial("unix", path)
	must(t, err)
	conn, _, err := identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/frontend"), time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(lb)}).ClientHandshake(t.Context(), "localhost", raw)
	must(t, err)
	defer conn.Close()
	if _, err := conn.Read(make([]byte, 1)); err == nil ||
		!strings.Contains(err.Error(), "rejected the SVID spiffe://example.org/frontend") {
		t.Fatalf("got %v", err)
	}
	if err := check(t, c); err == nil {
		t.Fatal("a peer was accepted without an authorizer")
	}
}

func TestHandshakeNeedsSVID(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	lb, fe := ca.ID("/lb"), ca.ID("/frontend")
	good := ca.Source(ca.SVID(lb, time.Hour))
	none := identity.NewManualSource(identity.Options{})
	none.Fail(errors.New("origin failed"))

	server := func(src *identity.Source, log *slog.Logger) func(net.Conn) (net.Conn, credentials.AuthInfo, error) {
		return serverSide(identity.NewCredentials(src,
			identity.CredentialOptions{Authorize: identity.Authorize(fe), Log: log}))
	}
	client := func(src *identity.Source) func(net.Conn) (net.Conn, credentials.AuthInfo, error) {
		return clientSide(t, identity.NewCredentials(src, identity.CredentialOptions{Authorize: identity.Authorize(lb)}))
	}
	reason := func(err error) identity.Reason {
		var failure *identity.HandshakeError
		if !errors.As(err, &failure) {
			t.Fatalf("got %v", err)
		}
		return failure.Reason
	}
	journal, log := newJournal()
	sc, cc := socketPair(t)
	s, c := handshakes(t, sc, cc, server(none, log), client(good))
	if got := reason(s.err); got != identity.ReasonNoOwnSVID || !strings.Contains(s.err.Error(), "origin failed") {
		t.Errorf("server: %v", s.err)
	}
	if got := reason(c.err); got != identity.ReasonGone {
		t.Errorf("client: %v", c.err)
	}
	journal.wait(t, map[string]any{"msg": "client refused", "reason": "no_own_svid"})

	sc, cc = socketPair(t)
	_, c = handshakes(t, sc, cc, server(good, nil), client(none))
	if got := reason(c.err); got != identity.ReasonNoOwnSVID || !strings.Contains(c.err.Error(), "origin failed") {
		t.Errorf("client: %v", c.err)
	}
}

// countingCache counts the sessions that a client could resume.
type countingCache struct {
	tls.ClientSessionCache
	puts atomic.Int32
}

func (c *countingCache) Put(key string, s *tls.ClientSessionState) {
	if s != nil {
		c.puts.Add(1)
	}
	c.ClientSessionCache.Put(key, s)
}

func TestSessionsAreNotResumed(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	fe := ca.ID("/frontend")
	var denied atomic.Bool
	journal, log := newJournal()
	path, w := serve(t, identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)), identity.CredentialOptions{
		Log: log,
		Authorize: func(id spiffeid.ID, _ [][]*x509.Certificate) error {
			if denied.Load() {
				return fmt.Errorf("the peer is %s, denied since", id)
			}
			return nil
		},
	}))
	config := bare(ca.SVID(fe, time.Hour))
	cache := &countingCache{ClientSessionCache: tls.NewLRUClientSessionCache(8)}
	config.ClientSessionCache = cache
	// The call makes the client read the session tickets that follow the handshake.
	must(t, check(t, client(t, path, credentials.NewTLS(config))))
	if got := w.caller.Load(); got != fe {
		t.Fatalf("the server saw %v", got)
	}
	if n := cache.puts.Load(); n != 0 {
		t.Errorf("the server gave out %d session tickets", n)
	}
	denied.Store(true)
	if err := check(t, client(t, path, credentials.NewTLS(config))); err == nil {
		t.Fatal("the second connection was let in after the denial")
	}
	journal.wait(t, map[string]any{"msg": "client refused", "reason": "wrong_id", "peer_id": fe.String()})
}

func TestConnectionEndsAtNotAfter(t *testing.T) {
	for _, c := range []struct {
		name           string
		server, client time.Duration
	}{
		{"the server's", time.Minute, time.Hour},
		{"the client's", time.Hour, time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ca := identitytest.NewCA(t, "example.org")
				source := func(id spiffeid.ID, ttl time.Duration) *identity.Source {
					s := identity.NewManualSource(identity.Options{})
					s.Offer(ca.Bundle(), ca.SVID(id, ttl))
					return s
				}
				start := time.Now()
				lb, fe := ca.ID("/lb"), ca.ID("/frontend")
				lbSource := source(lb, c.server)
				journal, log := newJournal()
				sc, cc := net.Pipe() // synctest does not support sockets
				s, cl := handshakes(t, sc, cc,
					serverSide(identity.NewCredentials(lbSource,
						identity.CredentialOptions{Authorize: identity.Authorize(fe), Log: log})),
					clientSide(t, identity.NewCredentials(source(fe, c.client),
						identity.CredentialOptions{Authorize: identity.Authorize(lb)})))
				if s.err != nil || cl.err != nil {
					t.Fatal(s.err, cl.err)
				}
				for _, info := range []credentials.AuthInfo{s.info, cl.info} {
					if end, ok := identity.ConnectionEnd(info); !ok || !end.Equal(start.Add(time.Minute)) {
						t.Fatalf("the connection ends %v, %v", end, ok)
					}
				}
				// gRPC does the same once its transport is ready.
				must(t, s.conn.SetDeadline(time.Time{}))
				// A rotation does not extend an old connection.
				lbSource.Offer(ca.Bundle(), ca.SVID(lb, 24*time.Hour))

				<-time.After(59 * time.Second)
				got := make(chan byte, 1)
				go func() {
					b := make([]byte, 1)
					if _, err := s.conn.Read(b); err != nil {
						t.Errorf("read: %v", err)
					}
					got <- b[0]
				}()
				if _, err := cl.conn.Write([]byte("x")); err != nil {
					t.Fatalf("ended too early: %v", err)
				}
				<-got
				if _, err := s.conn.Read(make([]byte, 1)); err == nil {
					t.Fatal("read something")
				}
				if d := time.Since(start); d != time.Minute {
					t.Fatalf("ended after %v", d)
				}
				synctest.Wait()
				if n := journal.count(t, map[string]any{"msg": "connection closed: SVID expired", "peer_id": fe.String()}); n != 1 {
					t.Fatalf("%d lines about the end", n)
				}
			})
		})
	}
}

func TestStreamEndsWithSVID(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	lb, fe := ca.ID("/lb"), ca.ID("/frontend")
	path, _ := serve(t, identity.NewCredentials(ca.Source(ca.SVID(lb, time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(fe)}))
	svid := ca.SVID(fe, 2*time.Second)
	src := ca.Source(svid)
	c := client(t, path, identity.NewCredentials(src, identity.CredentialOptions{Authorize: identity.Authorize(lb)}))
	ctx := harness.Context(t, waitLimit)
	stream, err := c.Watch(ctx, &healthpb.HealthCheckRequest{})
	must(t, err)
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err == nil || ctx.Err() != nil {
		t.Fatalf("got %v", err)
	}
	if early := time.Until(svid.Certificates[0].NotAfter); early > 0 {
		t.Fatalf("the stream ended %v before the SVID", early)
	}
	if err := check(t, c); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Fatalf("got %v", err)
	}
}

func TestSilentClientIsDropped(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	lb, fe := ca.ID("/lb"), ca.ID("/frontend")
	journal, log := newJournal()
	creds := identity.NewCredentials(ca.Source(ca.SVID(lb, time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(fe), Log: log})
	identity.SetHandshakeTimeout(creds, time.Second)
	path, _ := serve(t, creds)
	c := client(t, path, identity.NewCredentials(ca.Source(ca.SVID(fe, time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(lb)}))
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	stream, err := c.Watch(ctx, &healthpb.HealthCheckRequest{})
	must(t, err)
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	// Both connections have outlasted the timeout once the handshake of this later one times out.
	silent, err := net.Dial("unix", path)
	must(t, err)
	defer silent.Close()
	journal.wait(t, map[string]any{"msg": "client refused", "reason": "timeout"})
	if err := check(t, c); err != nil {
		t.Fatalf("a served connection did not outlive the handshake timeout: %v", err)
	}
	ended := make(chan error, 1)
	go func() { _, err := stream.Recv(); ended <- err }()
	select {
	case err := <-ended:
		t.Fatalf("the stream ended: %v", err)
	default:
	}
	cancel()
	<-ended
}

func TestClientHandshakeTimeout(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	creds := identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/frontend"), time.Hour)), identity.CredentialOptions{})
	for name, c := range map[string]struct {
		ctx  func() (context.Context, context.CancelFunc)
		want identity.Reason
	}{
		"deadline": {func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(t.Context(), 20*time.Millisecond)
		}, identity.ReasonTimeout},
		"cancelled": {func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return ctx, cancel
		}, identity.ReasonGone},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := c.ctx()
			defer cancel()
			sc, cc := socketPair(t)
			defer sc.Close()
			_, _, err := creds.ClientHandshake(ctx, "localhost", cc)
			var failure *identity.HandshakeError
			if !errors.As(err, &failure) || failure.Reason != c.want {
				t.Fatalf("got %v", err)
			}
			if _, err := cc.Write([]byte("x")); err == nil {
				t.Error("the connection stayed open")
			}
		})
	}
}

func TestCaller(t *testing.T) {
	id := spiffeid.RequireFromString("spiffe://example.org/operator")
	for want, info := range map[string]credentials.AuthInfo{
		"spiffe://example.org/operator": identity.AuthInfo{ID: id},
		"uid 1000":                      identity.SocketInfo{UID: 1000},
		"unknown":                       nil,
	} {
		ctx := peer.NewContext(t.Context(), &peer.Peer{AuthInfo: info})
		if got := identity.Caller(ctx); got != want {
			t.Errorf("the caller with %T is %q, want %q", info, got, want)
		}
	}
}
