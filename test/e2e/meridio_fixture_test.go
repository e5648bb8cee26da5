package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/protobuf/proto"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/nsptest"
)

// meridio is a pod of a Meridio 1.2.8 trench whose frontend is replaced: the frontend only has
// Meridio's variables, the load balancer serves StreamAvailabilityService, both have the same
// SPIFFE ID, and the NSP serves the attractor.
type meridio struct {
	*fixture
	ca    *identitytest.CA
	spire *identitytest.WorkloadAPI
	id    spiffeid.ID
	nsp   *nsptest.NSP
	host  string
	// wrapper is a command that executes the frontend, if any.
	wrapper []string
}

// newMeridio creates the lab. The NSP runs and serves the attractor with the usual VIPs and
// gateways; load balancer and frontend do not run yet.
func newMeridio(t *testing.T) *meridio {
	t.Helper()
	m := &meridio{
		fixture: newFixture(t), ca: identitytest.NewCA(t, lab.TrustDomain), spire: identitytest.NewWorkloadAPI(t),
	}
	m.must(os.Remove(m.pod.TrenchFile()))
	host, err := os.Hostname()
	m.must(err)
	m.host, m.id = host, m.ca.ID("/ns/default/sa/meridio-trench-a")
	m.spire.Offer(m.ca, []*x509svid.SVID{m.ca.SVID(m.id, time.Hour)})
	m.spire.Start()
	m.nsp = nsptest.New(nsptest.Options{
		Credentials: nsptest.ServerCredentials(m.ca.SVID(m.ca.ID("/ns/default/sa/nsp"), time.Hour), m.ca.Bundle()),
		Address:     nspAddress, EntryTimeout: entryTimeout,
		Listen: m.Pod.Listen,
	})
	t.Cleanup(func() {
		harness.Check(t, m.nsp.Stop())
	})
	m.nsp.SetAttractors(nspAttractor())
	m.must(m.nsp.Start())
	return m
}

const nspAddress = "127.0.0.1:7778"

// The frontend refreshes its registration often, and the NSP expires it after a fraction of
// Meridio's 60 s.
const refreshTime, entryTimeout = time.Second, 4 * time.Second

// nspAttractor is the attractor of the usual trench file in the NSP's format.
func nspAttractor() *nspv1.Attractor {
	a := &nspv1.Attractor{Name: "attractor-a-1", Trench: &nspv1.Trench{Name: "trench-a"}}
	addVIPs(a, every()...)
	addGateway(a, "gateway-a4", lab.GatewayA4.String())
	addGateway(a, "gateway-a6", lab.GatewayA6.String())
	return a
}

// addVIPs adds VIPs; the name of each contains its address.
func addVIPs(a *nspv1.Attractor, addresses ...string) {
	for _, v := range addresses {
		a.Vips = append(a.Vips, &nspv1.Vip{Name: "vip-" + v, Address: v, Trench: a.GetTrench()})
	}
}

// addGateway adds a gateway with the fields that Meridio's operator sets.
func addGateway(a *nspv1.Attractor, name, address string) *nspv1.Gateway {
	family := "ipv4"
	if strings.Contains(address, ":") {
		family = "ipv6"
	}
	g := &nspv1.Gateway{
		Name: name, Address: address, IpFamily: family, Protocol: "bgp", RemoteAsn: lab.GatewayAS, LocalAsn: lab.PodAS,
		RemotePort: lab.BGPPort, LocalPort: lab.BGPPort, HoldTime: lab.HoldSeconds, Trench: a.GetTrench(),
	}
	a.Gateways = append(a.Gateways, g)
	return g
}

// setAttractor stores a change of the usual attractor in the NSP.
func (m *meridio) setAttractor(change func(*nspv1.Attractor)) {
	a := nspAttractor()
	change(a)
	m.nsp.SetAttractors(a)
}

// in returns the same pod for a subtest, so that failures are attributed to the subtest.
func (m *meridio) in(t *testing.T) *meridio {
	c := *m
	c.fixture = m.fixture.in(t)
	return &c
}

// startFrontend starts the frontend with Meridio's environment. The only variables of vipgate are
// paths that parallel tests must not share; extra adds further variables.
func (m *meridio) startFrontend(extra ...string) {
	m.t.Helper()
	m.startFrontendAs(append([]string{
		"SPIFFE_ENDPOINT_SOCKET=" + m.spire.Addr(),
		"NFE_NAMESPACE=default", "NFE_NSP_SERVICE=" + nspAddress, "NFE_TRENCH_NAME=trench-a",
		"NFE_ATTRACTOR_NAME=attractor-a-1", "NFE_EXTERNAL_INTERFACE=" + lab.External,
		"NFE_NSP_ENTRY_TIMEOUT=" + refreshTime.String(), "NFE_GRPC_MAX_BACKOFF=1s", "NFE_LB_SOCKET=unix://" + m.pod.Socket(),
		"NFE_BIRD_CONFIG_PATH=" + m.pod.BirdDir(), "NFE_BIRD_COMMUNICATION_SOCK=" + m.pod.BirdSocket(),
		"VIPGATE_ADMIN_SOCKET=unix://" + m.pod.FrontendAdmin(),
		"VIPGATE_HEALTH_SOCKET=unix://" + m.path("health.sock"), "VIPGATE_METRICS_ADDRESS=127.0.0.1",
		"VIPGATE_BIRD_LOG_FILE=" + m.path("bird.log"), "VIPGATE_LOG_FORMAT=text",
		"VIPGATE_IDENTITY_CACHE=" + m.path("svid.json"),
		"VIPGATE_DRAIN_TIME=4s", "VIPGATE_SETTLE=50ms",
	}, extra...), slices.Concat(m.wrapper, []string{filepath.Join(binaries, "meridio-frontend"), "run"}))
}

// startOldLB starts Meridio's load balancer; it is available once the frontend is registered.
func (m *meridio) startOldLB(args ...string) {
	m.t.Helper()
	p, err := m.Start(m.Pod, "meridio-lb", append([]string{
		"/usr/bin/env", "SPIFFE_ENDPOINT_SOCKET=" + m.spire.Addr(), filepath.Join(binaries, "meridio-lb"),
		"-socket=" + m.pod.Socket(), "-nsp=" + nspAddress, "-available",
	}, args...)...)
	m.must(err)
	m.pod.LB = p
}

// switchOldLB makes Meridio's load balancer available or unavailable.
func (m *meridio) switchOldLB(available bool) {
	m.t.Helper()
	s := syscall.SIGUSR2
	if available {
		s = syscall.SIGUSR1
	}
	m.must(m.pod.LB.Signal(s))
}

// startMeridio starts load balancer and frontend and waits until every VIP is announced.
func (m *meridio) startMeridio(extra ...string) {
	m.t.Helper()
	m.startOldLB()
	m.startFrontend(extra...)
	m.wantRoutes(every()...)
}

// waitRegistered waits until the registration of the frontend at the NSP equals want.
func (m *meridio) waitRegistered(want bool) {
	m.t.Helper()
	ctx := harness.Context(m.t, waitTimeout)
	m.must(m.nsp.WaitTargets(ctx, func(targets []*nspv1.Target) bool { return m.registered(targets) == want }))
}

func (m *meridio) registered(targets []*nspv1.Target) bool {
	return slices.ContainsFunc(targets, func(t *nspv1.Target) bool {
		return proto.Equal(&nspv1.Target{
			Ips: []string{m.host}, Type: nspv1.Target_FRONTEND, Context: map[string]string{"identifier": m.host},
			Status: t.GetStatus(),
		}, t)
	})
}

// waitRequests waits until the NSP has received n requests of a method.
func (m *meridio) waitRequests(method string, n int) []nsptest.Request {
	m.t.Helper()
	m.waitFor(func() error {
		if got := len(m.nsp.Requests(method)); got < n {
			return fmt.Errorf("the NSP has %d requests %s, want %d", got, method, n)
		}
		return nil
	})
	return m.nsp.Requests(method)
}

// stopFrontend ends the frontend with SIGTERM.
func (m *meridio) stopFrontend() {
	m.t.Helper()
	m.stop(m.pod.Frontend)
}

// waitCommand waits until the output of a frontend command contains all words.
func (m *meridio) waitCommand(command string, words ...string) string {
	m.t.Helper()
	var out string
	m.waitFor(func() error {
		if out, _ = m.run("frontend", command, "--admin-socket=unix://"+m.pod.FrontendAdmin()); !hasAll(out, words) {
			return fmt.Errorf("frontend %s does not show %q:\n%s", command, words, out)
		}
		return nil
	})
	return out
}
