package identitytest

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
)

// Handshake returns the error with which a client's credentials refuse a server.
func Handshake(t *testing.T, client credentials.TransportCredentials, server *identity.Source) error {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(ShortDir(t), "s"))
	harness.Must(t, err)
	defer l.Close()
	raw, err := net.Dial("unix", l.Addr().String())
	harness.Must(t, err)
	defer raw.Close()
	accepted, err := l.Accept()
	harness.Must(t, err)
	defer accepted.Close()
	domain := server.Status().Load().ID.TrustDomain()
	creds := identity.NewCredentials(server, identity.CredentialOptions{Authorize: identity.AuthorizeMember(domain)})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, _ = creds.ServerHandshake(accepted) // the client decides
	}()
	ctx := harness.Context(t, 20*time.Second)
	_, _, err = client.ClientHandshake(ctx, "localhost", raw)
	<-done
	return err
}
