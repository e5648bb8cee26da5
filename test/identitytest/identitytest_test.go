package identitytest_test

import (
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSecurityHeader(t *testing.T) {
	api := identitytest.NewWorkloadAPI(t)
	api.Start()
	cc, err := grpc.NewClient(api.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Must(t, err)
	defer cc.Close()
	stream, err := workload.NewSpiffeWorkloadAPIClient(cc).FetchX509SVID(t.Context(), &workload.X509SVIDRequest{})
	harness.Must(t, err)
	if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Fatalf("got %v", err)
	}
}

func TestRotationAcrossRestart(t *testing.T) {
	ca, other := identitytest.NewCA(t, "example.org"), identitytest.NewCA(t, "example.net")
	api := identitytest.NewWorkloadAPI(t)
	api.Start()
	t.Setenv("SPIFFE_ENDPOINT_SOCKET", api.Addr())
	src, err := identity.NewWorkloadAPI(identity.Options{})
	harness.Must(t, err)
	stopSource := identitytest.Run(t, src)
	stopRotation := api.Rotate(ca, ca.ID("/lb"), 20*time.Millisecond, time.Hour)
	rotations := func(n uint64) {
		t.Helper()
		identitytest.WaitStatus(t, src, "rotated", func(s identity.Status) bool { return s.Rotations >= n && s.Err == nil })
	}
	rotations(5)
	api.Stop()
	identitytest.WaitStatus(t, src, "without the API",
		func(s identity.Status) bool { return s.RenewalErr != nil && s.Err == nil })
	api.Start()
	rotations(src.Status().Load().Rotations + 5)
	stopRotation()

	svid := ca.SVID(ca.ID("/lb"), time.Hour)
	api.Offer(ca, []*x509svid.SVID{svid}, other.Bundle())
	identitytest.WaitStatus(t, src, "the last one", func(s identity.Status) bool {
		return s.Serial == svid.Certificates[0].SerialNumber.Text(16)
	})
	b, err := src.GetX509BundleForTrustDomain(other.ID("/x").TrustDomain())
	if err != nil || !b.Equal(other.Bundle()) {
		t.Fatalf("federated bundle: %v", err)
	}
	stopSource()
}
