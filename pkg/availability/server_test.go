package availability_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	"github.com/vipgate/vipgate/pkg/availability"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

const (
	// waitLimit bounds every wait for a condition.
	waitLimit = 20 * time.Second
	host      = "lb-frontend-attractor-a1-abcde"
)

var vipA, vipB = vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")

// fixture is the server of a table on a socket.
type fixture struct {
	t            *testing.T
	ca           *identitytest.CA
	socket       string
	table        *readiness.Table
	readers      *readiness.Server
	availability *availability.Server
	log          harness.Log
	kill         func()
}

func (f *fixture) creds(id string) credentials.TransportCredentials {
	return identity.NewCredentials(f.ca.Source(f.ca.SVID(f.ca.ID(id), time.Hour)), identity.CredentialOptions{
		Authorize: identity.AuthorizeMember(spiffeid.RequireTrustDomainFromString("example.org")),
	})
}

// newFixture serves a table with the lease until kill or the end of the test.
func newFixture(t *testing.T, lease time.Duration) *fixture {
	t.Helper()
	f := &fixture{
		t: t, ca: identitytest.NewCA(t, "example.org"), socket: filepath.Join(identitytest.ShortDir(t), "lb.sock"),
		table: readiness.NewTable(readiness.TableOptions{Lease: lease}),
	}
	log := f.log.Logger()
	f.readers = readiness.NewServer(f.table, readiness.ServerOptions{
		Peer: identity.PeerID, Log: log,
		Role: readiness.RolesOf([]spiffeid.ID{f.ca.ID("/frontend")}, []spiffeid.ID{f.ca.ID("/reader")}),
	})
	f.availability = availability.NewServer(f.table, f.readers, host, log)
	listener, err := net.Listen("unix", f.socket)
	harness.Must(t, err)
	server := grpc.NewServer(append(readiness.GRPCOptions(), grpc.Creds(f.creds("/lb")))...)
	loadbalancerv1.RegisterStreamAvailabilityServiceServer(server, f.availability)
	f.kill = harness.Serve(t, server, listener)
	return f
}

// oldFrontend is a Watch of a frontend of Meridio.
type oldFrontend struct {
	t      *testing.T
	stream grpc.ServerStreamingClient[loadbalancerv1.Response]
	cancel context.CancelFunc
}

// dial opens a connection with an identity.
func (f *fixture) dial(id string) loadbalancerv1.StreamAvailabilityServiceClient {
	f.t.Helper()
	conn, err := grpc.NewClient("unix://"+f.socket, grpc.WithTransportCredentials(f.creds(id)),
		grpc.WithAuthority("localhost"))
	harness.Must(f.t, err)
	f.t.Cleanup(func() { conn.Close() })
	return loadbalancerv1.NewStreamAvailabilityServiceClient(conn)
}

func open(t *testing.T, c loadbalancerv1.StreamAvailabilityServiceClient) *oldFrontend {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	t.Cleanup(cancel)
	stream, err := c.Watch(ctx, &emptypb.Empty{})
	harness.Must(t, err)
	return &oldFrontend{t, stream, cancel}
}

// next returns the next state.
func (o *oldFrontend) next() (available bool, err error) {
	o.t.Helper()
	m, err := o.stream.Recv()
	if err != nil {
		return false, err
	}
	if len(m.GetTargets()) != 1 {
		o.t.Fatalf("%d targets: %v", len(m.GetTargets()), m)
	}
	id, available := m.GetTargets()[0].GetContext()["identifier"]
	if available && id != host {
		o.t.Errorf("identifier %q", id)
	}
	return available, nil
}

func (o *oldFrontend) want(available bool) {
	o.t.Helper()
	if is, err := o.next(); err != nil || is != available {
		o.t.Fatalf("available %v, %v, want %v", is, err, available)
	}
}

var (
	aReady    = readiness.VIPReadiness{VIP: vipA, State: vip.Ready}
	bReady    = readiness.VIPReadiness{VIP: vipB, State: vip.Ready}
	aNotReady = readiness.VIPReadiness{VIP: vipA}
	bDraining = readiness.VIPReadiness{VIP: vipB, State: vip.Draining, DrainEnd: time.Now().Add(time.Hour)}
)

func commit(f *fixture, changed ...readiness.VIPReadiness) {
	f.table.Commit(readiness.Decision{Changed: changed, Synced: true})
}

// At least one READY VIP is available; states that are the same are not sent again.
func TestOneReadyVIPIsAvailable(t *testing.T) {
	f := newFixture(t, time.Minute)
	client := f.dial("/frontend")
	o := open(t, client)
	o.want(false) // before the first decision
	f.table.Commit(readiness.Decision{Changed: []readiness.VIPReadiness{aReady}})
	commit(f, aNotReady)
	commit(f, aReady)
	o.want(true) // unsynced data and zero READY VIPs were not available
	open(t, client).want(true)
	commit(f, bReady)
	for range 100 {
		f.table.Heartbeat()
	}
	commit(f, aNotReady)
	commit(f, bDraining)
	o.want(false)
	commit(f, aReady)
	o.want(true)
	f.table.Commit(readiness.Decision{Removed: []vip.VIP{vipA}, Synced: true})
	o.want(false)
}

// The protocol has no lease, so the server sends "unavailable" when the lease of the table expires.
func TestExpiredLeaseIsUnavailable(t *testing.T) {
	const lease = 3 * time.Second
	f := newFixture(t, lease)
	o := open(t, f.dial("/frontend"))
	o.want(false)
	for range 2 {
		commit(f, aReady)
		f.table.Heartbeat()
		renewed := time.Now()
		o.want(true)
		o.want(false) // nothing renews it
		if after := time.Since(renewed); after < lease-50*time.Millisecond {
			t.Errorf("unavailable %v after the renewal", after)
		}
	}
}

func TestGoingAwayIsUnavailable(t *testing.T) {
	f := newFixture(t, time.Minute)
	client := f.dial("/frontend")
	commit(f, aReady)
	streams := []*oldFrontend{open(t, client), open(t, client), open(t, f.dial("/frontend"))}
	for _, o := range streams {
		o.want(true)
	}
	f.table.GoAway(time.Hour)
	for _, o := range streams {
		o.want(false)
	}
	if n := f.availability.Watching().Load(); n != len(streams) {
		t.Errorf("%d streams are open", n)
	}
	open(t, client).want(false)
	harness.Must(t, f.readers.EndWatches(t.Context()))
	for _, o := range streams {
		if _, err := o.next(); status.Code(err) != codes.Unavailable {
			t.Errorf("a stream ended with %v", err)
		}
	}
	if _, err := open(t, client).next(); status.Code(err) != codes.Unavailable {
		t.Errorf("a new stream: %v", err)
	}
}

// A stop without a drain sends "unavailable" before the end of the stream.
func TestEndIsUnavailableFirst(t *testing.T) {
	f := newFixture(t, time.Minute)
	commit(f, aReady)
	o := open(t, f.dial("/frontend"))
	o.want(true)
	harness.Must(t, f.readers.EndWatches(t.Context()))
	o.want(false)
	if _, err := o.next(); status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ended with %v", err)
	}
}

// A client that does not read delays neither other clients nor EndWatches.
func TestStuckReaderDelaysNoOther(t *testing.T) {
	f := newFixture(t, time.Minute)
	stuck, o := open(t, f.dial("/frontend")), open(t, f.dial("/frontend"))
	_ = stuck // never receives
	o.want(false)
	for range 2000 { // more than the flow control window of a stream
		commit(f, aReady)
		o.want(true)
		commit(f, aNotReady)
		o.want(false)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	began := time.Now()
	err := f.readers.EndWatches(ctx)
	t.Logf("ended after %v: %v", time.Since(began), err)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	f.kill()
	await.True(t, "handlers returned", func() bool { return f.availability.Watching().Load() == 0 })
}

func TestWatchAuthorization(t *testing.T) {
	f := newFixture(t, time.Minute)
	if _, err := open(t, f.dial("/stranger")).next(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a stranger: %v", err)
	}
	log := f.log.String()
	if !strings.Contains(log, "call denied") || !strings.Contains(log, "spiffe://example.org/stranger") {
		t.Errorf("log:\n%s", log)
	}
	// The limit applies per peer.
	reader := f.dial("/reader")
	read := open(t, reader)
	read.want(false)
	defer read.cancel()
	client := f.dial("/frontend")
	var streams []*oldFrontend
	for range readiness.DefaultMaxStreamsPerPeer {
		streams = append(streams, open(t, client))
		streams[len(streams)-1].want(false)
	}
	if _, err := open(t, client).next(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond the limit: %v", err)
	}
	for _, o := range slices.Backward(streams) {
		o.cancel()
	}
	read.cancel()
	await.True(t, "streams ended", func() bool { return f.availability.Watching().Load() == 0 })
	open(t, client).want(false)
}
