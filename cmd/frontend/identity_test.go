package main

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/identitytest"
)

// handshake returns the error with which a client's credentials refuse a server.
func handshake(t *testing.T, client credentials.TransportCredentials, server *identity.Source) error {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(identitytest.ShortDir(t), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	domain := server.Status().Load().ID.TrustDomain()
	creds := identity.NewCredentials(server, identity.CredentialOptions{Authorize: identity.AuthorizeMember(domain)})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, _ = creds.ServerHandshake(accepted) // the client decides
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, _, err = client.ClientHandshake(ctx, "localhost", raw)
	<-done
	return err
}

// The connections to the load balancer and to the NSP have separate credentials.
func TestCredentialsOfConnections(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	dir := identitytest.ShortDir(t)
	ca.WriteFiles(dir, ca.SVID(ca.ID("/frontend"), time.Hour))
	lb, other := ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)), ca.Source(ca.SVID(ca.ID("/other"), time.Hour))
	for name, tt := range map[string]struct {
		variables   map[string]string
		flags       []string
		lb, otherLB bool // accepted as the load balancer
		nsp         bool
	}{
		"trench file, ID":           {flags: []string{"--lb-id=spiffe://example.org/lb"}, lb: true},
		"trench file, trust domain": {flags: []string{"--lb-trust-domain=example.org"}, lb: true, otherLB: true},
		"trench file, another ID":   {flags: []string{"--lb-id=spiffe://example.org/lb2"}},
		"NSP, ID": {
			variables: nspVariables(t), lb: true, nsp: true,
			flags: []string{"--config-source=nsp", "--lb-id=spiffe://example.org/lb"},
		},
		"NSP": {variables: nspVariables(t), flags: []string{"--config-source=nsp"}, lb: true, otherLB: true, nsp: true},
		"NSP, another trust domain": {
			variables: nspVariables(t), nsp: true,
			flags: []string{"--config-source=nsp", "--lb-trust-domain=example.com"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := readinessOptions(t, tt.variables, append(tt.flags, "--identity=files", "--svid-dir="+dir)...)
			if err != nil {
				t.Fatal(err)
			}
			identitytest.Run(t, o.Identity)
			<-o.Identity.Ready()
			for peer, want := range map[*identity.Source]bool{lb: tt.lb, other: tt.otherLB} {
				if err := handshake(t, o.Credentials, peer); (err == nil) != want {
					t.Errorf("%s as the load balancer: %v", peer.Status().Load().ID, err)
				}
			}
			if (o.NSP != nil) != tt.nsp {
				t.Fatalf("NSP: %v", o.NSP)
			}
			if tt.nsp {
				for _, peer := range []*identity.Source{lb, other} {
					if err := handshake(t, o.NSP.Credentials, peer); err != nil {
						t.Errorf("%s as the NSP: %v", peer.Status().Load().ID, err)
					}
				}
			}
		})
	}
}
