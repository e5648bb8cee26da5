package identity_test

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/identitytest"
)

// limitedConn is a connection of a limited listener.
type limitedConn struct {
	net.Conn
	authenticated atomic.Bool
}

func (c *limitedConn) Authenticated(spiffeid.ID) { c.authenticated.Store(true) }

// A connection counts as authenticated only after the peer is authorized; otherwise a flood of
// handshakes would protect itself.
func TestAuthenticatedAfterAuthorization(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	allowed := ca.ID("/frontend")
	creds := identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)),
		identity.CredentialOptions{Authorize: identity.Authorize(allowed)})
	for name, tt := range map[string]struct {
		config *tls.Config
		want   bool
	}{
		"authorized":     {bare(ca.SVID(allowed, time.Hour)), true},
		"another ID":     {bare(ca.SVID(ca.ID("/other"), time.Hour)), false},
		"no certificate": {bare(nil), false},
	} {
		t.Run(name, func(t *testing.T) {
			server, client := socketPair(t)
			defer client.Close()
			go func() { _ = tls.Client(client, tt.config).Handshake() }()
			raw := &limitedConn{Conn: server}
			conn, _, err := creds.ServerHandshake(raw)
			if err == nil {
				defer conn.Close()
			}
			if got := raw.authenticated.Load(); got != tt.want || (err == nil) != tt.want {
				t.Errorf("authenticated %v, error %v", got, err)
			}
		})
	}
	t.Run("no message", func(t *testing.T) {
		server, client := socketPair(t)
		raw := &limitedConn{Conn: server}
		done := make(chan struct{})
		go func() { defer close(done); _, _, _ = creds.ServerHandshake(raw) }()
		if _, err := client.Write([]byte{22, 3, 1}); err != nil { // the start of a TLS record
			t.Fatal(err)
		}
		if raw.authenticated.Load() {
			t.Error("authenticated during the handshake")
		}
		_ = client.Close()
		<-done
		if raw.authenticated.Load() {
			t.Error("authenticated without a handshake")
		}
	})
}

// deafConn sends and never reads, like a peer with a closed window.
type deafConn struct {
	net.Conn
	closed chan struct{}
}

func (c *deafConn) Read([]byte) (int, error) { <-c.closed; return 0, net.ErrClosed }

// The timeout of a handshake also limits writes.
func TestHandshakeWithPeerThatReadsNothing(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	creds := identity.NewCredentials(ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)), identity.CredentialOptions{})
	identity.SetHandshakeTimeout(creds, 100*time.Millisecond)
	server, client := net.Pipe() // without a buffer: a write waits for its reader
	deaf := &deafConn{client, make(chan struct{})}
	sent := make(chan struct{})
	go func() { defer close(sent); _ = tls.Client(deaf, bare(nil)).Handshake() }()
	ended := make(chan error, 1)
	go func() { _, _, err := creds.ServerHandshake(server); ended <- err }()
	select {
	case err := <-ended:
		var failure *identity.HandshakeError
		if !errors.As(err, &failure) || failure.Reason != identity.ReasonTimeout ||
			!errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("error %v", err)
		}
	case <-time.After(waitLimit):
		t.Error("the handshake does not end")
		_ = server.Close()
		<-ended
	}
	close(deaf.closed)
	_ = client.Close()
	<-sent
}
