package main

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

func TestCredentialsOfLoadBalancer(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	dir := identitytest.ShortDir(t)
	ca.WriteFiles(dir, ca.SVID(ca.ID("/frontend"), time.Hour))
	lb, other := ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)), ca.Source(ca.SVID(ca.ID("/other"), time.Hour))
	for name, tt := range map[string]struct {
		flag        string
		lb, otherLB bool // accepted
	}{
		"ID":           {"--lb-id=spiffe://example.org/lb", true, false},
		"trust domain": {"--lb-trust-domain=example.org", true, true},
		"another ID":   {"--lb-id=spiffe://example.org/lb2", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := readinessOptions(t, nil, tt.flag, "--identity=files", "--svid-dir="+dir)
			harness.Must(t, err)
			identitytest.Run(t, o.Identity)
			<-o.Identity.Ready()
			for peer, want := range map[*identity.Source]bool{lb: tt.lb, other: tt.otherLB} {
				if err := identitytest.Handshake(t, o.Credentials, peer); (err == nil) != want {
					t.Errorf("%s as the load balancer: %v", peer.Status().Load().ID, err)
				}
			}
		})
	}
}
