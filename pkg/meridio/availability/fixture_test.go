package availability_test

import (
	"maps"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	lbavailability "github.com/vipgate/vipgate/pkg/availability"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/meridio/availability"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/meridiotest"
)

const (
	// waitLimit bounds every wait for a condition.
	waitLimit = 20 * time.Second
	host      = "lb-frontend-attractor-a1-abcde"
)

// fixture is a pod: a socket and two identities of one trust domain.
type fixture struct {
	t        *testing.T
	ca       *identitytest.CA
	socket   string
	frontend *identity.Source
	lb       *identity.Source
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	ca := identitytest.NewCA(t, "example.org")
	return &fixture{
		t: t, ca: ca, socket: filepath.Join(identitytest.ShortDir(t), "lb.sock"),
		frontend: ca.Source(ca.SVID(ca.ID("/frontend"), time.Hour)),
		lb:       ca.Source(ca.SVID(ca.ID("/lb"), time.Hour)),
	}
}

func (f *fixture) creds(s *identity.Source) credentials.TransportCredentials {
	return identity.NewCredentials(s, identity.CredentialOptions{
		Authorize: identity.AuthorizeMember(spiffeid.RequireTrustDomainFromString("example.org")),
	})
}

// meridio starts a load balancer of Meridio on the socket.
func (f *fixture) meridio() *meridiotest.LB {
	f.t.Helper()
	l := meridiotest.New(meridiotest.Options{Socket: f.socket, Credentials: f.creds(f.lb), Host: host})
	harness.Must(f.t, l.Start())
	f.t.Cleanup(func() { harness.Must(f.t, l.Kill()) })
	return l
}

// serve serves on path until the returned function is called or the test ends.
func (f *fixture) serve(path string, register func(grpc.ServiceRegistrar)) (kill func()) {
	f.t.Helper()
	listener, err := net.Listen("unix", path)
	harness.Must(f.t, err)
	// Close must not unlink the socket, because another server may have replaced it.
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	s := grpc.NewServer(append(readiness.GRPCOptions(), grpc.Creds(f.creds(f.lb)))...)
	register(s)
	return harness.Serve(f.t, s, listener)
}

// lb is a load balancer of vipgate: both services of one table.
type vipgateLB struct {
	table        *readiness.Table
	readiness    *readiness.Server
	availability *lbavailability.Server
	log          *harness.Log
	kill         func()
}

// vipgate starts a load balancer of vipgate on path.
func (f *fixture) vipgate(path string, o readiness.TableOptions) *vipgateLB {
	f.t.Helper()
	b := &vipgateLB{table: readiness.NewTable(o), log: &harness.Log{}}
	role := readiness.RolesOf([]spiffeid.ID{f.ca.ID("/frontend")}, []spiffeid.ID{f.ca.ID("/reader")})
	b.readiness = readiness.NewServer(b.table, readiness.ServerOptions{Peer: identity.PeerID, Role: role})
	b.availability = lbavailability.NewServer(b.table, b.readiness, host, b.log.Logger())
	b.kill = f.serve(path, func(r grpc.ServiceRegistrar) {
		readinessv1.RegisterReadinessServiceServer(r, b.readiness)
		loadbalancerv1.RegisterStreamAvailabilityServiceServer(r, b.availability)
	})
	return b
}

// replace moves the socket of path to the pod's socket.
func (f *fixture) replace(path string) {
	f.t.Helper()
	harness.Must(f.t, os.Rename(path, f.socket))
}

// watcher is a running readiness.Watcher with a Client, and its merged state.
type watcher struct {
	*readiness.Watcher
	t      *testing.T
	client *availability.Client
	vips   *latest.Value[[]vip.VIP]
	log    *harness.Log
	svid   *latest.Value[uint64] // generation
	at     readiness.Update
	ready  map[vip.VIP]vip.State
}

var vipA, vipB = vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")

// watch starts a watcher of VIPs A and B, whose probes ask for the state when they must.
func (f *fixture) watch(interval, within time.Duration) *watcher {
	f.t.Helper()
	return f.watchState(interval, within, 0)
}

// watchState starts a watcher whose probes ask for the state at an interval; 0 for the default.
func (f *fixture) watchState(interval, within, state time.Duration) *watcher {
	f.t.Helper()
	w := &watcher{t: f.t, log: &harness.Log{}, vips: latest.New([]vip.VIP{vipA, vipB}), svid: latest.New(uint64(0))}
	w.client = availability.NewClient(availability.ClientOptions{
		Host: host, VIPs: w.vips.Get, Interval: interval, Within: within, StateInterval: state,
		Log: w.log.Logger(),
	})
	w.Watcher = readiness.NewWatcher(readiness.WatcherOptions{
		Target: f.socket, Credentials: f.creds(f.frontend), ConnectionEnd: identity.ConnectionEnd, Fallback: w.client,
		Rotation: w.svid.Get, Log: w.log.Logger(),
	})
	harness.Run(f.t, w.Run)
	return w
}

// take applies the pending changes.
func (w *watcher) take() readiness.Update {
	u := w.Take()
	if u.Complete {
		w.ready = map[vip.VIP]vip.State{}
	}
	for _, r := range u.Changed {
		w.ready[r.VIP] = r.State
	}
	for _, v := range u.Removed {
		delete(w.ready, v)
	}
	w.at = u
	return u
}

// until takes updates until condition holds; check, which may be nil, sees every one.
func (w *watcher) until(what string, condition func() bool, check func(readiness.Update)) {
	w.t.Helper()
	deadline := time.NewTimer(waitLimit)
	defer deadline.Stop()
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for {
		u := w.take()
		if check != nil {
			check(u)
		}
		if condition() {
			return
		}
		select {
		case <-w.Changed():
		case <-poll.C:
		case <-deadline.C:
			w.t.Fatalf("not within %v: %s\nlast update: %+v\nlog:\n%s", waitLimit, what, w.at, w.log)
		}
	}
}

// is returns a condition: the watcher is synced and has exactly these states.
func (w *watcher) is(want map[vip.VIP]vip.State) func() bool {
	return func() bool { return w.at.Synced && maps.Equal(w.ready, want) }
}

// live fails the test if the state is not valid now.
func (w *watcher) live(u readiness.Update) {
	w.t.Helper()
	if !u.Synced || u.LeaseEnd.Before(time.Now()) {
		w.t.Fatalf("readiness was lost: %+v\nlog:\n%s", u, w.log)
	}
}
