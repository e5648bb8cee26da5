package healthcheck

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

// loopbacks are an address of each family.
var loopbacks = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")}

// onBoth runs a test over each family.
func onBoth(t *testing.T, f func(*testing.T, netip.Addr)) {
	t.Helper()
	for _, at := range loopbacks {
		t.Run(at.String(), func(t *testing.T) { f(t, at) })
	}
}

// listen opens a port of the address until the test ends.
func listen(t *testing.T, at netip.Addr) (l net.Listener, port uint16) {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(at, 0).String())
	harness.Must(t, err)
	t.Cleanup(func() {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	return l, l.Addr().(*net.TCPAddr).AddrPort().Port()
}

// serveRaw gives each connection to serve, until the test ends.
func serveRaw(t *testing.T, at netip.Addr, serve func(net.Conn)) (port uint16) {
	t.Helper()
	l, port := listen(t, at)
	var serving sync.WaitGroup
	t.Cleanup(func() {
		_ = l.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				serve(conn)
			})
		}
	})
	return port
}

// answer reads the head of a request and writes the text.
func answer(text string) func(net.Conn) {
	return func(conn net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
			_, _ = io.WriteString(conn, text)
		}
	}
}

// untilClosed reads until the other side has ended the connection.
func untilClosed(conn net.Conn) error {
	_, err := io.Copy(io.Discard, conn)
	return err
}

// ask makes one check of the kind that the check is of.
func ask(t *testing.T, p *plan, at netip.Addr, patience time.Duration) outcome {
	t.Helper()
	ctx := harness.Context(t, patience)
	return p.probe(ctx, path{}.dial, at, at)
}

// inTime runs a check that ends with its timeout, which grows from impatient while a busy machine
// does not get as far as the expected outcome.
func inTime(check func(limit time.Duration) (expected bool)) {
	for limit := impatient; !check(limit) && limit < patient; limit *= 4 {
	}
}

func wantFailureInTime(t *testing.T, p *plan, at netip.Addr, port uint16, reason string) {
	t.Helper()
	var o outcome
	inTime(func(limit time.Duration) bool {
		o = ask(t, p, at, limit)
		return strings.HasSuffix(o.reason, reason)
	})
	wantFailure(t, o, port, reason)
}

const (
	patient   = 20 * time.Second
	impatient = 100 * time.Millisecond
)

func httpCheck(port uint16, change func(*trench.HTTPCheck)) trench.Check {
	c := trench.Check{
		SingleCheck: trench.SingleCheck{Timeout: impatient, HTTP: trench.HTTPCheck{Port: port, Path: "/", Status: "200-399"}},
	}
	if change != nil {
		change(&c.HTTP)
	}
	return c
}

// wantFailure fails unless the check failed for the reason, which may have PORT for the port.
func wantFailure(t *testing.T, o outcome, port uint16, reason string) {
	t.Helper()
	want := outcome{verdict: failed, reason: "port " +
		netip.AddrPortFrom(netip.IPv4Unspecified(), port).String()[len("0.0.0.0:"):] + ": " + reason, refused: o.refused}
	if o != want {
		t.Errorf("\n got %+v\nwant %+v", o, want)
	}
}

func TestHTTPRequest(t *testing.T) {
	onBoth(t, func(t *testing.T, at netip.Addr) {
		requests := make(chan *http.Request, 1)
		handle := func(_ http.ResponseWriter, r *http.Request) { requests <- r }
		s := httptest.NewUnstartedServer(http.HandlerFunc(handle))
		l, port := listen(t, at)
		_ = s.Listener.Close()
		s.Listener = l
		s.Start()
		defer s.Close()
		for _, tt := range []struct{ host, wantHost string }{
			{"", netip.AddrPortFrom(at, port).String()},
			{"example.org:8443", "example.org:8443"},
		} {
			p := newPlan(httpCheck(port, func(c *trench.HTTPCheck) { c.Host, c.Path = tt.host, "/healthz%20?full=1" }))
			if o := ask(t, p, at, patient); o.verdict != succeeded || o.reason != "" {
				t.Fatalf("got %+v", o)
			}
			r := <-requests
			if r.Method != "GET" || r.RequestURI != "/healthz%20?full=1" || r.Host != tt.wantHost ||
				r.Proto != "HTTP/1.1" || r.UserAgent() != "vipgate-check" {
				t.Errorf("got %s %s %s of %s by %s", r.Method, r.RequestURI, r.Proto, r.Host, r.UserAgent())
			}
		}
	})
}

func TestHTTPAnswers(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	for _, tt := range []struct {
		name, answer string
		change       func(*trench.HTTPCheck)
		want         string // "" for success
	}{
		{"200", ok, nil, ""},
		{
			"a redirect is an answer", "HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n",
			nil, "",
		},
		{
			"a redirect that is not wanted", "HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n",
			func(c *trench.HTTPCheck) { c.Status = "200" }, "status 302, wanted 200",
		},
		{"503", "HTTP/1.1 503 Service Unavailable\r\n\r\n", nil, "status 503, wanted 200-399"},
		{"404 is wanted", "HTTP/1.1 404 Not Found\r\n\r\n", func(c *trench.HTTPCheck) { c.Status = "200-299,404" }, ""},
		{"HTTP/1.0", "HTTP/1.0 204 No Content\r\n\r\n", nil, ""},
		{"informational answers first", "HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" +
			"HTTP/1.1 100 Continue\r\n\r\n" + ok, nil, ""},
		{
			"nothing but informational answers", strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 4000), nil,
			"the head of the answer is larger than 64 KiB",
		},
		{"other protocol", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: a\r\n\r\n", nil, "status 101, wanted 200-399"},
		{"body matches", ok, func(c *trench.HTTPCheck) { c.Body = "^ok$" }, ""},
		{
			"body matches anywhere", "HTTP/1.1 200 OK\r\n\r\nall is ok today",
			func(c *trench.HTTPCheck) { c.Body = "is (ok|OK)" }, "",
		},
		{"body does not match", ok, func(c *trench.HTTPCheck) { c.Body = "^OK" }, "the body does not match"},
		{
			"no body", "HTTP/1.1 204 No Content\r\n\r\n", func(c *trench.HTTPCheck) { c.Body = "." },
			"the body does not match",
		},
		{
			"body in chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n",
			func(c *trench.HTTPCheck) { c.Body = "^ok$" }, "",
		},
		{"body within 64 KiB", "HTTP/1.1 200 OK\r\n\r\n" + strings.Repeat(" ", 64<<10-2) + "ok" +
			strings.Repeat("x", 64<<10), func(c *trench.HTTPCheck) { c.Body = "ok$" }, ""},
		{
			"body beyond 64 KiB", "HTTP/1.1 200 OK\r\n\r\n" + strings.Repeat(" ", 64<<10-1) + "ok",
			func(c *trench.HTTPCheck) { c.Body = "ok" }, "the body does not match",
		},
		{"body within 4 KiB", "HTTP/1.1 200 OK\r\n\r\n" + strings.Repeat(" ", 4<<10-2) + "ok" +
			strings.Repeat("x", 64<<10), func(c *trench.HTTPCheck) { c.Body = largeExpression }, ""},
		{
			"body beyond 4 KiB", "HTTP/1.1 200 OK\r\n\r\n" + strings.Repeat(" ", 4<<10-1) + "ok",
			func(c *trench.HTTPCheck) { c.Body = largeExpression }, "the body does not match",
		},
		{"body of chunks of one byte", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" +
			strings.Repeat("1\r\na\r\n", 64<<10) + "0\r\n\r\n", func(c *trench.HTTPCheck) { c.Body = "^a+$" }, ""},
		{
			"body that is cut short", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
			func(c *trench.HTTPCheck) { c.Body = "^ok" }, "closed the connection: no end of the body",
		},
		{"no answer", "", nil, "closed the connection: no answer"},
		{"half an answer", "HTTP/1.1 200 OK\r\nA: b", nil, "closed the connection: no answer"},
		{
			"a head without an end", "HTTP/1.1 200 OK\r\nA: " + strings.Repeat("b", 64<<10), nil,
			"the head of the answer is larger than 64 KiB",
		},
		{
			"SMTP", "220 mail.example.org ESMTP\r\n", nil,
			`the answer is not HTTP/1.1: malformed HTTP status code "mail.example.org"`,
		},
		{
			"terminal sequences", "\x1b[2J\x1b]0;owned\a\r\n", nil,
			`the answer is not HTTP/1.1: malformed HTTP response "\x1b[2J\x1b]0;owned\a"`,
		},
		{
			"a long line", strings.Repeat("x", 1000) + "\r\n", nil,
			`the answer is not HTTP/1.1: malformed HTTP response "` + strings.Repeat("x", 95) + "…",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, at netip.Addr) {
				port := serveRaw(t, at, answer(tt.answer))
				o := ask(t, newPlan(httpCheck(port, tt.change)), at, patient)
				if tt.want != "" {
					wantFailure(t, o, port, tt.want)
				} else if o != (outcome{verdict: succeeded}) {
					t.Errorf("got %+v", o)
				}
			})
		})
	}
}

// A target that was reached and does not answer is not silent: the network is there.
func TestHTTPSilence(t *testing.T) {
	onBoth(t, func(t *testing.T, at netip.Addr) {
		silentUntilClosed := serveRaw(t, at, func(conn net.Conn) { _ = untilClosed(conn) })
		wantFailureInTime(t, newPlan(httpCheck(silentUntilClosed, nil)), at, silentUntilClosed,
			"connected, but no answer in 100ms")
		secured := newPlan(httpCheck(silentUntilClosed, func(c *trench.HTTPCheck) { c.TLS.On = true }))
		wantFailureInTime(t, secured, at, silentUntilClosed, "connected, but no TLS handshake in 100ms")

		endless := serveRaw(t, at, func(conn net.Conn) {
			answer("HTTP/1.1 200 OK\r\n\r\nok")(conn)
			_ = untilClosed(conn)
		})
		withBody := newPlan(httpCheck(endless, func(c *trench.HTTPCheck) { c.Body = "ok" }))
		wantFailureInTime(t, withBody, at, endless, "connected, but no end of the body in 100ms")
		if o := ask(t, newPlan(httpCheck(endless, nil)), at, patient); o.verdict != succeeded {
			t.Errorf("a body that is not checked is waited for: %+v", o)
		}

		l, refused := listen(t, at)
		harness.Must(t, l.Close())
		wantFailure(t, ask(t, newPlan(httpCheck(refused, nil)), at, patient), refused, "connection refused")

		wantDialFailures(t, newPlan(httpCheck(1, nil)), at)
	})
}

// wantDialFailures has a prober of port 1 fail to get a connection in every way.
func wantDialFailures(t *testing.T, p *plan, at netip.Addr) {
	t.Helper()
	ctx := harness.Context(t, impatient)
	o := p.probe(ctx, func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}, at, at)
	if want := (outcome{verdict: failed, silent: true, reason: "port 1: no answer in 100ms"}); o != want {
		t.Errorf("got %+v, want %+v", o, want)
	}
	for errno, want := range map[syscall.Errno]outcome{
		syscall.EHOSTUNREACH: {verdict: failed, silent: true, reason: "port 1: no route to host"},
		syscall.EMFILE:       {verdict: notRun, reason: "check not run: dial tcp: socket: too many open files"},
	} {
		o := p.probe(t.Context(), func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", errno)}
		}, at, at)
		if o != want {
			t.Errorf("got %+v, want %+v", o, want)
		}
	}
}

// A stop of the checker does not wait for the timeout.
func TestHTTPCheckEndsWithItsContext(t *testing.T) {
	onBoth(t, func(t *testing.T, at netip.Addr) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		port := serveRaw(t, at, func(conn net.Conn) {
			answer("")(conn)
			cancel()
			_ = untilClosed(conn)
		})
		o := newPlan(httpCheck(port, nil)).probe(ctx, path{}.dial, at, at)
		if o.verdict == succeeded {
			t.Errorf("got %+v", o)
		}
	})
}

// A close would leave a socket in TIME_WAIT at each check, here or at the target.
func TestHTTPCheckResetsItsConnection(t *testing.T) {
	onBoth(t, func(t *testing.T, at netip.Addr) {
		ends := make(chan error, 1)
		port := serveRaw(t, at, func(conn net.Conn) {
			answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")(conn)
			ends <- untilClosed(conn)
		})
		if o := ask(t, newPlan(httpCheck(port, func(c *trench.HTTPCheck) { c.Body = "ok" })), at,
			patient); o.verdict != succeeded {
			t.Fatalf("got %+v", o)
		}
		if err := <-ends; !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the connection ended with %v", err)
		}
	})
}

// authority signs certificates of servers.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	a := authority{key: newKey(t)}
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, a.key.Public(), a.key)
	harness.Must(t, err)
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(t, err)
	return key
}

// sign makes a certificate for loopback addresses and names.
func (a authority) sign(t *testing.T, notAfter time.Time, names ...string) tls.Certificate {
	t.Helper()
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "server"},
		NotBefore: notAfter.Add(-2 * time.Hour), NotAfter: notAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, n)
		}
	}
	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	harness.Must(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// write writes the authority to a file, which is as large for any.
func (a authority) write(t *testing.T, path string) {
	t.Helper()
	data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
	harness.Must(t, os.WriteFile(path, append(data, make([]byte, 4096-len(data))...), 0o600))
}

// dated gives the file a time.
func dated(t *testing.T, path string, at time.Time) {
	t.Helper()
	harness.Must(t, os.Chtimes(path, at, at))
}

// serveTLS answers "ok" over TLS.
func serveTLS(t *testing.T, at netip.Addr, config *tls.Config) (port uint16) {
	t.Helper()
	return serveRaw(t, at, func(conn net.Conn) {
		secure := tls.Server(conn, config)
		if secure.Handshake() == nil {
			answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")(secure)
		}
		_ = untilClosed(conn)
	})
}

func TestHTTPCheckOverTLS(t *testing.T) {
	trusted, untrusted := newAuthority(t), newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.pem")
	trusted.write(t, file)
	soon, past := time.Now().Add(time.Hour), time.Now().Add(-time.Minute)
	byAddress := &tls.Config{Certificates: []tls.Certificate{trusted.sign(t, soon, "127.0.0.1", "::1")}}
	byName := &tls.Config{Certificates: []tls.Certificate{trusted.sign(t, soon, "example.org", "a.example")}}
	for _, tt := range []struct {
		name   string
		server *tls.Config
		check  trench.TLSCheck
		want   string // ADDRESS stands for the target's
	}{
		{"by address", byAddress, trench.TLSCheck{CAFile: file}, ""},
		{"by name", byName, trench.TLSCheck{CAFile: file, ServerName: "example.org"}, ""},
		{"server name requested", &tls.Config{GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if h.ServerName != "example.org" {
				return nil, errors.New("who?")
			}
			return &byName.Certificates[0], nil
		}}, trench.TLSCheck{CAFile: file, ServerName: "example.org"}, ""},
		{
			"another name", byName,
			trench.TLSCheck{CAFile: file, ServerName: "b.example"},
			"the certificate is not for b.example",
		},
		{"a name, not the address", byName, trench.TLSCheck{CAFile: file}, "the certificate is not for ADDRESS"},
		{
			"another authority",
			&tls.Config{Certificates: []tls.Certificate{untrusted.sign(t, soon, "127.0.0.1", "::1")}},
			trench.TLSCheck{CAFile: file},
			"the certificate is signed by an authority that is not trusted",
		},
		{
			"the system's authorities", byAddress,
			trench.TLSCheck{},
			"the certificate is signed by an authority that is not trusted",
		},
		{
			"expired", &tls.Config{Certificates: []tls.Certificate{trusted.sign(t, past, "127.0.0.1", "::1")}},
			trench.TLSCheck{CAFile: file},
			"the certificate is valid from " + date(past.Add(-2*time.Hour)) + " to " +
				date(past) + " only",
		},
		{
			"insecure", &tls.Config{Certificates: []tls.Certificate{untrusted.sign(t, past, "c.example")}},
			trench.TLSCheck{Insecure: true},
			"",
		},
		{
			"TLS 1.1", &tls.Config{
				MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10,
				Certificates: byAddress.Certificates,
			},
			trench.TLSCheck{CAFile: file},
			"TLS handshake: remote error: tls: protocol version not supported",
		},
		{
			"TLS 1.2", &tls.Config{MaxVersion: tls.VersionTLS12, Certificates: byAddress.Certificates},
			trench.TLSCheck{CAFile: file},
			"",
		},
		{
			"client certificate requested",
			&tls.Config{ClientAuth: tls.RequireAnyClientCert, Certificates: byAddress.Certificates},
			trench.TLSCheck{CAFile: file},
			"remote error: tls: certificate required",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, at netip.Addr) {
				port := serveTLS(t, at, tt.server)
				o := ask(t, newPlan(httpCheck(port, func(c *trench.HTTPCheck) {
					c.TLS, c.Body = tt.check, "^ok$"
					c.TLS.On = true
				})), at, patient)
				if tt.want != "" {
					wantFailure(t, o, port, strings.ReplaceAll(tt.want, "ADDRESS", at.String()))
				} else if o.verdict != succeeded {
					t.Errorf("got %+v", o)
				}
			})
		})
	}
	t.Run("no TLS", func(t *testing.T) {
		onBoth(t, func(t *testing.T, at netip.Addr) {
			port := serveRaw(t, at, func(conn net.Conn) {
				_, _ = io.WriteString(conn, "220 mail.example.org ESMTP\r\n")
				_ = untilClosed(conn)
			})
			o := ask(t, newPlan(httpCheck(port, func(c *trench.HTTPCheck) { c.TLS.On = true })), at, patient)
			wantFailure(t, o, port, "no TLS here")
		})
	})
	t.Run("closed", func(t *testing.T) {
		onBoth(t, func(t *testing.T, at netip.Addr) {
			port := serveRaw(t, at, func(conn net.Conn) { _, _ = io.ReadFull(conn, make([]byte, 5)) })
			o := ask(t, newPlan(httpCheck(port, func(c *trench.HTTPCheck) { c.TLS.On = true })), at, patient)
			if o.verdict != failed || o.silent {
				t.Errorf("got %+v", o)
			}
		})
	})
}

// Authorities are replaced while checks run. While their file is missing or
// no such file, nothing is known of the target.
func TestAuthoritiesAreReloaded(t *testing.T) {
	at := loopbacks[0]
	old, next := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "ca.pem")
	port := serveTLS(t, at, &tls.Config{Certificates: []tls.Certificate{next.sign(t, time.Now().Add(time.Hour),
		"127.0.0.1")}})
	p := newPlan(httpCheck(port, func(c *trench.HTTPCheck) { c.TLS = trench.TLSCheck{On: true, CAFile: file} }))
	verdictIs := func(want verdict, reason string) {
		t.Helper()
		if o := ask(t, p, at, patient); o.verdict != want || !strings.Contains(o.reason, reason) {
			t.Errorf("got %+v, want %d %q", o, want, reason)
		}
	}
	verdictIs(notRun, "check not run: caFile: open "+file+": no such file or directory")
	now := time.Now()
	old.write(t, file)
	dated(t, file, now)
	verdictIs(failed, "not trusted")
	next.write(t, file) // over the old one, within a tick of its clock
	dated(t, file, now)
	verdictIs(succeeded, "")
	harness.Must(t, os.WriteFile(file, []byte("no certificate\n"), 0o600))
	verdictIs(notRun, "has no certificate in PEM")

	// An old file is read once, until it is replaced.
	next.write(t, file)
	long := time.Now().Add(-time.Hour)
	dated(t, file, long)
	verdictIs(succeeded, "")
	first, err := p.tls.of(t.Context(), at)
	harness.Must(t, err)
	if again, err := p.tls.of(t.Context(), at); err != nil || again.RootCAs != first.RootCAs {
		t.Errorf("read twice: %v", err)
	}
	other := filepath.Join(dir, "next.pem")
	old.write(t, other)
	dated(t, other, long)
	harness.Must(t, os.Rename(other, file))
	verdictIs(failed, "not trusted")
	harness.Must(t, os.Remove(file))
	harness.Must(t, syscall.Mkfifo(file, 0o600))
	verdictIs(notRun, "is not a regular file")
}

// A client certificate is presented, and replaced while checks run. While its files do not
// match, the check does not run.
func TestClientCertificateIsReloaded(t *testing.T) {
	at := loopbacks[0]
	server, clients := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	file := trench.TLSCheck{
		On: true, CAFile: filepath.Join(dir, "ca.pem"),
		CertFile: filepath.Join(dir, "c.pem"), KeyFile: filepath.Join(dir, "c.key"),
	}
	server.write(t, file.CAFile)
	pool := x509.NewCertPool()
	pool.AddCert(clients.cert)
	port := serveTLS(t, at, &tls.Config{
		Certificates: []tls.Certificate{server.sign(t, time.Now().Add(time.Hour), "127.0.0.1")},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: pool,
	})
	plan := newPlan(httpCheck(port, func(c *trench.HTTPCheck) { c.TLS = file }))
	verdictIs := func(want verdict, reason string) {
		t.Helper()
		if o := ask(t, plan, at, patient); o.verdict != want || !strings.Contains(o.reason, reason) {
			t.Errorf("got %+v, want %d %q", o, want, reason)
		}
	}
	// write writes the certificate and the key, or only one of them.
	write := func(pair tls.Certificate, cert, key bool) {
		t.Helper()
		der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
		harness.Must(t, err)
		for path, block := range map[string]*pem.Block{
			file.CertFile: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]}, file.KeyFile: {Type: "PRIVATE KEY", Bytes: der},
		} {
			if path == file.CertFile && cert || path == file.KeyFile && key {
				harness.Must(t, os.WriteFile(path, pem.EncodeToMemory(block), 0o600))
			}
		}
	}
	good, foreign := clients.sign(t, time.Now().Add(time.Hour)), server.sign(t, time.Now().Add(time.Hour))
	verdictIs(notRun, "check not run: certFile: open "+file.CertFile)
	write(foreign, true, true)
	verdictIs(failed, "")
	write(good, true, false)
	verdictIs(notRun, "private key does not match public key")
	write(good, false, true)
	verdictIs(succeeded, "")
	harness.Must(t, os.WriteFile(file.KeyFile, []byte("secret\n"), 0o600))
	verdictIs(notRun, "keyFile "+file.KeyFile)
	if o := ask(t, plan, at, patient); strings.Contains(o.reason, "secret") {
		t.Errorf("the reason has the key: %s", o.reason)
	}
	write(good, false, true)
	verdictIs(succeeded, "")
}

func TestConcurrentHTTPChecks(t *testing.T) {
	a := newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.pem")
	a.write(t, file)
	at := loopbacks[1]
	port := serveTLS(t, at, &tls.Config{Certificates: []tls.Certificate{a.sign(t, time.Now().Add(time.Hour), "::1")}})
	p := newPlan(httpCheck(port, func(c *trench.HTTPCheck) {
		c.TLS, c.Body = trench.TLSCheck{On: true, CAFile: file}, "ok"
	}))
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if o := ask(t, p, at, patient); o.verdict != succeeded {
				t.Errorf("got %+v", o)
			}
		})
	}
	all.Wait()
}

func TestRemarkIsShortAndPlain(t *testing.T) {
	for s, want := range map[string]string{
		"":                       "",
		"plain \"words\"":        "plain \"words\"",
		"two\nlines":             `"two\nlines"`,
		"\xff\xfe":               `"\xff\xfe"`,
		strings.Repeat("ä", 100): strings.Repeat("ä", 60) + "…",
		"\u202egnp.exe":          `"\u202egnp.exe"`,
	} {
		if got := remark(s); got != want {
			t.Errorf("%q: got %s, want %s", s, got, want)
		}
	}
}
