package registration

import (
	"crypto/x509"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

// Only the named SPIFFE ID is a load balancer, not another member of its trust domain.
func TestLoadBalancerIsAuthorized(t *testing.T) {
	t.Parallel()
	ca := identitytest.NewCA(t, "example.org")
	target := ca.Source(ca.SVID(ca.ID("/target"), time.Hour))
	for path, want := range map[string]codes.Code{"/lb": codes.Unimplemented, "/app": codes.Unavailable} {
		socket := filepath.Join(identitytest.ShortDir(t), "lb.sock")
		l, err := net.Listen("unix", socket)
		harness.Must(t, err)
		creds := identity.NewCredentials(ca.Source(ca.SVID(ca.ID(path), time.Hour)), identity.CredentialOptions{
			Authorize: func(spiffeid.ID, [][]*x509.Certificate) error { return nil },
		})
		stop := harness.Serve(t, grpc.NewServer(grpc.Creds(creds)), l)
		address, err := ParseAddress("unix://" + socket)
		harness.Must(t, err)
		conn, err := Dial(address, target, ca.ID("/lb"))
		harness.Must(t, err)
		_, err = targetv1.NewTargetServiceClient(conn).Deregister(t.Context(), &targetv1.DeregisterRequest{})
		if got := grpcstatus.Code(err); got != want {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
		_ = conn.Close()
		stop()
	}
}
