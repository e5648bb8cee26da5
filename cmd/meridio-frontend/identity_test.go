package main

import (
	"log/slog"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

// The connections to the load balancer and to the NSP have separate credentials.
func TestCredentialsOfConnections(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	dir := identitytest.ShortDir(t)
	ca.WriteFiles(dir, ca.SVID(ca.ID("/frontend"), time.Hour))
	lb, other := ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)), ca.Source(ca.SVID(ca.ID("/other"), time.Hour))
	for name, tt := range map[string]struct {
		flags       []string
		lb, otherLB bool // accepted as the load balancer
	}{
		"ID":                   {flags: []string{"--lb-id=spiffe://example.org/lb"}, lb: true},
		"no flag":              {lb: true, otherLB: true},
		"another trust domain": {flags: []string{"--lb-trust-domain=example.com"}},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := runOptions(t, nspVariables(t), append(tt.flags, "--identity=files", "--svid-dir="+dir)...)
			harness.Must(t, err)
			identitytest.Run(t, o.Identity)
			<-o.Identity.Ready()
			client := (&runCommand{}).nspOptions(o.Identity, "pod-1", slog.New(slog.DiscardHandler))
			for peer, want := range map[*identity.Source]bool{lb: tt.lb, other: tt.otherLB} {
				if err := identitytest.Handshake(t, o.Credentials, peer); (err == nil) != want {
					t.Errorf("%s as the load balancer: %v", peer.Status().Load().ID, err)
				}
				if err := identitytest.Handshake(t, client.Credentials, peer); err != nil {
					t.Errorf("%s as the NSP: %v", peer.Status().Load().ID, err)
				}
			}
		})
	}
}
