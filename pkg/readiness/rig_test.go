package readiness

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// patience bounds every wait for something that must happen.
	patience = 20 * time.Second
	// streamTime bounds a stream, which lasts for many waits.
	streamTime = 5 * time.Minute
)

var (
	frontendID = spiffeid.RequireFromString("spiffe://example.org/frontend")
	readerID   = spiffeid.RequireFromString("spiffe://example.org/operator")
	strangerID = spiffeid.RequireFromString("spiffe://example.org/stranger")
)

// named are credentials without cryptography: the client says who it is, the
// server believes it.
type named struct {
	credentials.TransportCredentials // for what tests do not call

	id  spiffeid.ID
	end time.Time // of the connection
}

type namedInfo struct {
	credentials.CommonAuthInfo
	id  spiffeid.ID
	end time.Time
}

func (namedInfo) AuthType() string { return "named" }

func (n named) info(id spiffeid.ID) namedInfo {
	return namedInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, id: id, end: n.end}
}

func (n named) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	text := n.id.String()
	_, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(text))), text...))
	return conn, n.info(n.id), err
}

func (n named) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
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

func (n named) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "named"}
}
func (n named) Clone() credentials.TransportCredentials { return n }

func namedPeer(ctx context.Context) (spiffeid.ID, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return spiffeid.ID{}, false
	}
	info, ok := p.AuthInfo.(namedInfo)
	return info.id, ok
}

// logBook collects log lines.
type logBook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBook) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBook) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *logBook) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// socketPath returns a path short enough for a unix socket.
func socketPath(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "vg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "lb.sock")
}

// balancer is a load balancer's side on a unix socket.
type balancer struct {
	*Server
	table *Table
	path  string
	log   *logBook
	grpc  *grpc.Server
	done  chan error
}

// startBalancer serves the table on path until the test ends or kill is called.
func startBalancer(t testing.TB, path string, table *Table) *balancer {
	t.Helper()
	b := &balancer{table: table, path: path, log: &logBook{}, done: make(chan error, 1)}
	b.Server = NewServer(table, ServerOptions{
		Peer: namedPeer,
		Role: RolesOf([]spiffeid.ID{frontendID}, []spiffeid.ID{readerID}),
		Log:  b.log.logger(),
	})
	b.grpc = serveGRPC(t, path, b.Server, b.done)
	t.Cleanup(b.kill)
	return b
}

func serveGRPC(t testing.TB, path string, impl readinessv1.ReadinessServiceServer, done chan<- error) *grpc.Server {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	// With calls counted, as the load balancer does.
	s := grpc.NewServer(slices.Concat(GRPCOptions(), metrics.NewLB("test").ServerOptions(), []grpc.ServerOption{grpc.Creds(named{})})...)
	readinessv1.RegisterReadinessServiceServer(s, impl)
	go func() { done <- s.Serve(listener) }()
	return s
}

// kill ends all connections at once, as the end of the process does.
func (b *balancer) kill() {
	if b.grpc == nil {
		return
	}
	b.grpc.Stop()
	<-b.done
	b.grpc = nil
}

// beat makes the table's owner beat until the returned function is called.
func beat(t testing.TB, table *Table) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		ticker := time.NewTicker(table.Lease() / 5)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				table.Heartbeat()
			case <-ctx.Done():
				return
			}
		}
	})
	stop = func() { cancel(); running.Wait() }
	t.Cleanup(stop)
	return stop
}

// view is what a consumer makes of updates.
type view struct {
	Update
	vips map[vip.VIP]VIPReadiness
}

// apply applies an update as a consumer must.
func (v *view) apply(u Update) {
	v.Update = u
	if u.Complete {
		v.vips = u.Changed
		return
	}
	if v.vips == nil {
		v.vips = make(map[vip.VIP]VIPReadiness)
	}
	maps.Copy(v.vips, u.Changed)
	for r := range u.Removed {
		delete(v.vips, r)
	}
}

// frontend is a running watcher and its consumer.
type frontend struct {
	*Watcher
	view
	log  *logBook
	stop func()
}

func startFrontend(t testing.TB, path string, change func(*WatcherOptions)) *frontend {
	t.Helper()
	f := &frontend{log: &logBook{}}
	o := WatcherOptions{Target: "unix://" + path, Credentials: named{id: frontendID}, Reader: "test", Log: f.log.logger()}
	if change != nil {
		change(&o)
	}
	f.Watcher = NewWatcher(o)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	f.stop = func() { cancel(); running.Wait() }
	t.Cleanup(f.stop)
	return f
}

// until takes updates until the condition holds.
func (f *frontend) until(t testing.TB, what string, condition func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		f.apply(f.Take())
		if condition() {
			return
		}
		select {
		case <-f.Changed():
		case <-deadline.C:
			t.Fatalf("not within %v: %s\nlast update: %+v\nlog:\n%s", patience, what, f.Update, f.log)
		}
	}
}

// at tells whether the frontend has the newest state of the table.
func (f *frontend) at(table *Table) func() bool {
	return func() bool { return f.Synced && f.Position == table.Position() }
}

// eventually polls a condition that nothing announces.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		<-tick.C
	}
}

func ready(v string) VIPReadiness {
	return VIPReadiness{VIP: vip.Require(v), State: Ready, Reason: readinessv1.VipReason_VIP_REASON_TARGETS_READY, ReadyTargets: 1, TotalTargets: 1}
}

func notReady(v string) VIPReadiness {
	return VIPReadiness{VIP: vip.Require(v), Reason: readinessv1.VipReason_VIP_REASON_TOO_FEW_READY, Detail: "connect: connection refused", TotalTargets: 1}
}

// numbered returns the i-th of many VIPs.
func numbered(i int) vip.VIP {
	return vip.Require(fmt.Sprintf("20.%d.%d.%d/32", i>>16, i>>8&255, i&255))
}

func many(n int) []VIPReadiness {
	rs := make([]VIPReadiness, n)
	for i := range rs {
		rs[i] = VIPReadiness{VIP: numbered(i), State: Ready, Reason: readinessv1.VipReason_VIP_REASON_TARGETS_READY, ReadyTargets: 1, TotalTargets: 1}
	}
	return rs
}

// dialRaw returns a client without a watcher.
func dialRaw(t testing.TB, path string, id spiffeid.ID) readinessv1.ReadinessServiceClient {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(named{id: id}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return readinessv1.NewReadinessServiceClient(conn)
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}
