package readiness

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

const (
	// waitLimit bounds every wait for a condition.
	waitLimit = 20 * time.Second
	// streamLimit bounds a stream, which lasts for many waits.
	streamLimit = 5 * time.Minute
)

var (
	frontendID = spiffeid.RequireFromString("spiffe://example.org/frontend")
	readerID   = spiffeid.RequireFromString("spiffe://example.org/operator")
	unknownID  = spiffeid.RequireFromString("spiffe://example.org/stranger")
)

// fakeCredentials use no cryptography: the client sends its ID, and the server accepts it.
type fakeCredentials struct {
	credentials.TransportCredentials // for unused methods

	id  spiffeid.ID
	end time.Time // of the connection
}

type fakeAuthInfo struct {
	credentials.CommonAuthInfo
	id  spiffeid.ID
	end time.Time
}

func (fakeAuthInfo) AuthType() string { return "named" }

func (n fakeCredentials) info(id spiffeid.ID) fakeAuthInfo {
	return fakeAuthInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		id:             id, end: n.end,
	}
}

func (n fakeCredentials) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo,
	error,
) {
	text := n.id.String()
	_, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(text))), text...))
	return conn, n.info(n.id), err
}

func (n fakeCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return nil, nil, err
	}
	text := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(conn, text); err != nil {
		return nil, nil, err
	}
	id, err := spiffeid.FromString(string(text))
	return conn, n.info(id), err
}

func (n fakeCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "named"}
}
func (n fakeCredentials) Clone() credentials.TransportCredentials { return n }

func fakePeer(ctx context.Context) (spiffeid.ID, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return spiffeid.ID{}, false
	}
	info, ok := p.AuthInfo.(fakeAuthInfo)
	return info.id, ok
}

// socketPath returns a path short enough for a unix socket.
func socketPath(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "vg")
	harness.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "lb.sock")
}

// testLB is a Server on a unix socket.
type testLB struct {
	*Server
	table *Table
	path  string
	log   *harness.Log
	// kill closes all connections abruptly, as the end of the process does.
	kill func()
}

// startLB serves the table on path until the test ends or kill is called.
func startLB(t testing.TB, path string, table *Table) *testLB {
	t.Helper()
	b := &testLB{table: table, path: path, log: &harness.Log{}}
	b.Server = NewServer(table, ServerOptions{
		Peer: fakePeer,
		Role: RolesOf([]spiffeid.ID{frontendID}, []spiffeid.ID{readerID}),
		Log:  b.log.Logger(),
	})
	b.kill = serveGRPC(t, path, b.Server, fakeCredentials{})
	return b
}

func serveGRPC(t testing.TB, path string, impl readinessv1.ReadinessServiceServer,
	creds credentials.TransportCredentials,
) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	harness.Must(t, err)
	// Calls are counted, as in the load balancer.
	s := grpc.NewServer(slices.Concat(GRPCOptions(), metrics.NewLB("test").ServerOptions(),
		[]grpc.ServerOption{grpc.Creds(creds)})...)
	readinessv1.RegisterReadinessServiceServer(s, impl)
	return harness.Serve(t, s, listener)
}

// sendHeartbeats sends heartbeats of the table until the returned function is called.
func sendHeartbeats(t testing.TB, table *Table) (stop func()) {
	return harness.Run(t, func(ctx context.Context) error {
		ticker := time.NewTicker(table.lease / 5)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				table.Heartbeat()
			case <-ctx.Done():
				return nil
			}
		}
	})
}

// view is the state of a consumer of updates.
type view struct {
	Update
	vips map[vip.VIP]VIPReadiness
}

// apply applies an update in the way that the documentation of Update requires.
func (v *view) apply(u Update) {
	v.Update = u
	if u.Complete || v.vips == nil {
		v.vips = make(map[vip.VIP]VIPReadiness)
	}
	for _, r := range u.Changed {
		v.vips[r.VIP] = r
	}
	for _, r := range u.Removed {
		delete(v.vips, r)
	}
}

// frontend is a running watcher and its consumer.
type frontend struct {
	*Watcher
	view
	log  *harness.Log
	stop func()
}

func startFrontend(t testing.TB, path string, change func(*WatcherOptions)) *frontend {
	t.Helper()
	f := &frontend{log: &harness.Log{}}
	o := WatcherOptions{
		Target: "unix://" + path, Credentials: fakeCredentials{id: frontendID}, Reader: "test",
		Log: f.log.Logger(),
	}
	if change != nil {
		change(&o)
	}
	f.Watcher = NewWatcher(o)
	f.stop = harness.Run(t, f.Run)
	return f
}

// waitFor takes updates until the condition holds.
func (f *frontend) waitFor(t testing.TB, what string, condition func() bool) {
	t.Helper()
	deadline := time.NewTimer(waitLimit)
	defer deadline.Stop()
	for {
		f.apply(f.Take())
		if condition() {
			return
		}
		select {
		case <-f.Changed():
		case <-deadline.C:
			t.Fatalf("not within %v: %s\nlast update: %+v\nlog:\n%s", waitLimit, what, f.Update, f.log)
		}
	}
}

// at returns a condition that reports whether the frontend has the newest state of the table.
func (f *frontend) at(table *Table) func() bool {
	return func() bool { return f.Synced && f.Position == table.Position() }
}

func ready(v string) VIPReadiness {
	return VIPReadiness{
		VIP: vip.Require(v), State: vip.Ready, Reason: readinessv1.VipReason_VIP_REASON_TARGETS_READY,
		ReadyTargets: 1, TotalTargets: 1,
	}
}

func notReady(v string) VIPReadiness {
	return VIPReadiness{
		VIP: vip.Require(v), Reason: readinessv1.VipReason_VIP_REASON_TOO_FEW_READY,
		Detail: "connect: connection refused", TotalTargets: 1,
	}
}

// numbered returns the i-th of many VIPs.
func numbered(i int) vip.VIP {
	return vip.Require(fmt.Sprintf("20.%d.%d.%d/32", i>>16, i>>8&255, i&255))
}

func numberedReady(n int) []VIPReadiness {
	rs := make([]VIPReadiness, n)
	for i := range rs {
		rs[i] = VIPReadiness{
			VIP: numbered(i), State: vip.Ready, Reason: readinessv1.VipReason_VIP_REASON_TARGETS_READY,
			ReadyTargets: 1, TotalTargets: 1,
		}
	}
	return rs
}

// dialRaw returns a client without a watcher.
func dialRaw(t testing.TB, path string, id spiffeid.ID) readinessv1.ReadinessServiceClient {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(fakeCredentials{id: id}))
	harness.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	return readinessv1.NewReadinessServiceClient(conn)
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	t.Cleanup(cancel)
	return ctx
}
