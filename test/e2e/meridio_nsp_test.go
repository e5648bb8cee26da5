package e2e

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// The NSP's attractor is applied like a trench file: changes of VIPs and gateways affect nothing
// else, identical lists have no effect, only the invalid object of a list is refused, and a
// deleted attractor is withdrawn gracefully.
func TestNSPAttractorChanges(t *testing.T) {
	t.Parallel()
	const added = "20.0.0.3/32"
	m := newMeridio(t)
	b := m.second()
	m.startMeridio()
	m.wantRoutesAt(b)
	mark, bird, sessions := m.mark(), m.birdPID(), m.sessions()
	untouched := func(t *testing.T, vips ...string) {
		t.Helper()
		if now := m.in(t).sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
			t.Errorf("sessions were %v and are %v", sessions, now)
		}
		if now := m.in(t).birdPID(); now != bird {
			t.Errorf("BIRD is %d now, it was %d", now, bird)
		}
		m.in(t).wantNoUpdates(mark, vips...)
	}
	gatewayB := func(a *nspv1.Attractor) {
		addGateway(a, "gateway-b4", lab.GatewayB4.String()).RemoteAsn = lab.GatewayBAS
		addGateway(a, "gateway-b6", lab.GatewayB6.String()).RemoteAsn = lab.GatewayBAS
	}

	t.Run("gateways added", func(t *testing.T) {
		m := m.in(t)
		from := length(m.pod.Frontend)
		m.setAttractor(gatewayB)
		m.wantRoutesAt(b, every()...)
		for _, name := range []string{"gateway-b4", "gateway-b6"} {
			m.waitLine(m.pod.Frontend, from, "gateway session up", "gateway="+name)
		}
		untouched(t, every()...)
	})
	t.Run("identical lists, then a VIP added", func(t *testing.T) {
		m := m.in(t)
		m.wantIdenticalListsIgnored(func() {
			m.setAttractor(func(a *nspv1.Attractor) {
				gatewayB(a)
				addVIPs(a, added)
			})
			m.wantRoutes(append(every(), added)...)
		})
		m.wantRoutesAt(b, append(every(), added)...)
		m.wantUpdates(mark, added, announced)
		untouched(t, every()...)
	})
	t.Run("invalid objects", func(t *testing.T) {
		m := m.in(t)
		from := length(m.pod.Frontend)
		m.setAttractor(func(a *nspv1.Attractor) {
			gatewayB(a)
			addVIPs(a, added, "20.0.0.9", "20.0.1.1/24", "nonsense")
			addGateway(a, "gateway-c4", "169.254.100")
			addGateway(a, "gateway-d4", lab.GatewayB6.String()).IpFamily = "ipv4"
			addGateway(a, "gateway-e4", "169.254.100.77").Protocol = "ospf"
		})
		for _, name := range []string{
			"vip-20.0.0.9", "vip-20.0.1.1/24", "vip-nonsense", "gateway-c4", "gateway-d4", "gateway-e4",
		} {
			m.waitLine(m.pod.Frontend, from, "refused", "name="+name)
			m.waitCommand("status", name)
		}
		m.waitFrontend("Configuration", false, "vip-20.0.0.9", "gateway-c4")
		m.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_SERVING)
		// Valid entries of the same list are in force.
		m.setAttractor(func(a *nspv1.Attractor) {
			gatewayB(a)
			addVIPs(a, "20.0.0.9")
		})
		m.wantRoutes(every()...)
		m.wantRoutesAt(b, every()...)
		m.wantUpdates(mark, added, announced, depreferred, withdrawn)
		m.wantUpdates(mark, "20.0.0.9/32")
		untouched(t, every()...)
	})
	t.Run("gateways removed", func(t *testing.T) {
		m := m.in(t)
		m.nsp.SetAttractors(nspAttractor())
		m.wantRoutesAt(b)
		m.waitFrontend("Configuration", true)
		untouched(t, every()...)
	})
	t.Run("attractor removed", func(t *testing.T) {
		m := m.in(t)
		// The VIPs and their gateway leave together: BIRD announces routes again, unchanged, after a
		// reload of its filters.
		m.nsp.SetAttractors()
		m.wantRoutes()
		want := []string{depreferred, withdrawn}
		for _, vip := range every() {
			if got := slices.Compact(changes(m.updates(mark, vip))); !slices.Equal(got, want) {
				t.Errorf("the gateway received for %s %v, want %v", vip, got, want)
			}
		}
		m.nsp.SetAttractors(nspAttractor())
		// The VIPs may return before BIRD has loaded that the gateway stays.
		for _, vip := range every() {
			m.waitUpdate(mark, vip, announced)
		}
		m.wantRunning(m.pod.Frontend, m.pod.LB)
	})
}

// An attractor that loses the VIPs of a family, and then all, keeps its sessions: the frontend
// stays ready and registered, and the session is already up for the first VIP.
func TestNSPWithoutVIPs(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startMeridio()
	m.waitRegistered(true)
	sessions, unregistered := m.sessions(), len(m.nsp.Requests("Unregister"))
	ready := m.recordHealth("Readiness")
	ready.wait(healthServing)
	for _, vips := range [][]string{{vipA4, vipB4}, nil, {vipA6}, every()} {
		m.setAttractor(func(a *nspv1.Attractor) {
			a.Vips = nil
			addVIPs(a, vips...)
		})
		m.wantRoutes(vips...)
	}
	if now := m.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
	ready.wantOnly(healthServing)
	if n := len(m.nsp.Requests("Unregister")); n != unregistered {
		t.Errorf("it unregistered %d times", n-unregistered)
	}
}

// wantIdenticalListsIgnored fails unless identical lists have no effect until change applies
// another VIP: no log line, hence no configuration of BIRD. They do not delay the NSP.
func (m *meridio) wantIdenticalListsIgnored(change func()) {
	m.t.Helper()
	const events = 200
	from, distributed := length(m.pod.Frontend), m.nsp.Distributed()
	for range events {
		m.nsp.Event()
	}
	change()
	if n := m.nsp.Distributed() - distributed; n < events {
		m.t.Errorf("the NSP has distributed %d events", n)
	}
	log := m.pod.Frontend.Output()[from:]
	before, _, _ := strings.Cut(log, "new configuration in force")
	if n := strings.Count(log, "new configuration in force"); n != 1 || strings.Contains(before, "\n") {
		m.t.Errorf("%d lists are in force, want 1:\n%s", n, log)
	}
}

// The NSP is unavailable, restarts, and is unavailable at the frontend's start, which then uses
// the last accepted list and reports it.
func TestNSPAbsence(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.must(m.nsp.Stop())
	m.startOldLB()

	// Without NSP, cache and SPIRE there is no VIP to announce, and SIGTERM works.
	m.spire.Stop()
	m.startFrontend()
	m.wantHealth(lab.FrontendHealth, "Liveness", healthv1.HealthCheckResponse_SERVING)
	m.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_NOT_SERVING)
	m.waitFrontend("Identity", false)
	m.stopFrontend()
	m.spire.Start()
	m.startFrontend()
	m.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_NOT_SERVING)
	m.waitFrontend("Configuration", false, "NSP "+nspAddress)
	m.must(m.nsp.Start())
	m.wantRoutes(every()...)

	// The NSP restarts, and is then stopped for a while.
	mark, sessions := m.mark(), m.sessions()
	watches := len(m.nsp.Requests("WatchAttractor"))
	m.must(m.nsp.Stop())
	m.must(m.nsp.Start())
	m.waitRequests("WatchAttractor", watches+1)
	m.must(m.nsp.Stop())
	m.waitFrontend("NSPCli", false, "NSP "+nspAddress)
	m.waitCommand("status", "NSP "+nspAddress)
	m.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_SERVING)
	m.must(m.nsp.Start())
	m.waitFrontend("NSPCli", true)
	m.wantSilence(mark)
	if now := m.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}

	// The NSP is stopped at the frontend's start.
	cache := m.pod.BirdDir() + "/nsp.json"
	if mode := modeOf(t, cache); mode != 0o600 {
		t.Errorf("%s has mode %#o, want 0600", cache, mode)
	}
	m.must(m.nsp.Stop())
	m.must(m.pod.Frontend.Kill())
	m.startFrontend()
	m.wantRoutes(every()...)
	m.waitFrontend("NSPCli", false, "NSP "+nspAddress, cache)
	m.waitCommand("status", cache)
	m.waitLine(m.pod.Frontend, 0, "level=WARN", "configuration taken from the cache", cache)

	mark = m.mark()
	m.setAttractor(func(a *nspv1.Attractor) { a.Vips = a.GetVips()[:2] })
	m.must(m.nsp.Start())
	m.wantRoutes(every()[:2]...)
	m.waitFrontend("NSPCli", true)
	m.wantNoUpdates(mark, every()[:2]...)
	m.wantUpdates(mark, vipB4, depreferred, withdrawn)
}

// A hung NSP delays neither the withdrawal after the death of the load balancer, nor the
// withdrawal after the loss of a gateway, nor the stop. Unregistering is attempted.
func TestHungNSPDelaysNoWithdrawal(t *testing.T) {
	t.Parallel()
	for name, hang := range map[string]func(*meridio, bool){
		"unanswered calls": func(m *meridio, hang bool) { m.nsp.Hang(hang) },
		"frozen":           func(m *meridio, hang bool) { m.nsp.Freeze(hang) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMeridio(t)
			m.startMeridio("VIPGATE_DRAIN_TIME=0s")
			m.waitRegistered(true)
			// The registration must not expire before the end of the test.
			hang(m, true)
			requests := len(m.nsp.Requests("Register"))
			if name == "unanswered calls" {
				m.waitRequests("Register", requests+1) // it is waiting for the answer
			}

			// Before a call to the NSP fails at its deadline.
			const late = "at the NSP"
			mark, killed, from := m.mark(), time.Now(), length(m.pod.Frontend)
			m.must(m.pod.LB.Kill())
			m.withdrawnAfter("killed", mark, killed, every()...)
			m.wantFirst(m.pod.Frontend, from, "to=withdrawn", late)
			m.startOldLB("-nsp=")
			m.wantRoutes(every()...)

			from = length(m.pod.Frontend)
			m.control("disable trench0")
			m.waitFrontend("Egress/ipv4", false)
			m.wantFirst(m.pod.Frontend, from, "reason=no_gateway", late)
			m.control("disable trench1")
			m.waitFrontend("Egress", false)
			if name == "unanswered calls" {
				m.waitRequests("Unregister", 1)
			}
			m.control("enable trench0")
			m.control("enable trench1")
			m.wantRoutes(every()...)

			mark, from = m.mark(), length(m.pod.Frontend)
			stopped := time.Now()
			m.must(m.pod.Frontend.Signal(syscall.SIGTERM))
			m.withdrawnAfter("stopped", mark, stopped, every()...)
			m.wantFirst(m.pod.Frontend, from, "to=withdrawn", late)
			m.wantExit(m.pod.Frontend, 0)
			hang(m, false)
		})
	}
}

// The registration at the NSP follows external connectivity: it is created and refreshed while
// there is connectivity, and removed at its loss and at the stop.
func TestNSPRegistration(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startFrontend() // connectivity does not depend on the load balancer
	m.waitRegistered(true)
	first := m.nsp.Requests("Register")[0].Target
	if first.GetStatus() != nspv1.Target_ENABLED {
		t.Errorf("it registers as %v", first)
	}
	// The NSP stores the first registration as DISABLED, and removes it without a refresh.
	begin := time.Now()
	m.waitFor(func() error {
		targets := m.nsp.Targets()
		if len(targets) != 1 || targets[0].GetStatus() != nspv1.Target_ENABLED {
			return fmt.Errorf("targets are %v", targets)
		}
		return nil
	})
	m.waitRequests("Register", 1+int(entryTimeout/refreshTime)+2)
	if took := time.Since(begin); took < entryTimeout {
		t.Errorf("%v for that many refreshes, they come too fast", took)
	}
	if !m.registered(m.nsp.Targets()) {
		t.Errorf("the registration expired: %v", m.nsp.Targets())
	}

	// One family is sufficient for external connectivity.
	m.control("disable trench0")
	m.waitFrontend("Egress/ipv4", false)
	calls := len(m.nsp.Requests("Register"))
	m.waitRequests("Register", calls+2)
	if n := len(m.nsp.Requests("Unregister")); n > 1 {
		t.Errorf("it unregistered %d times while a gateway was up", n)
	}
	m.control("disable trench1")
	m.waitRegistered(false)
	m.waitFrontend("Egress", false)
	calls = len(m.nsp.Requests("Register"))
	m.waitPast(time.Now().Add(3 * refreshTime))
	if more := len(m.nsp.Requests("Register")) - calls; more != 0 {
		t.Errorf("it was refreshed %d times without a gateway", more)
	}
	m.control("enable trench0")
	m.waitRegistered(true)

	// The NSP loses its database, and restarts.
	m.nsp.Forget()
	m.waitRegistered(true)
	m.must(m.nsp.Stop())
	m.nsp.Forget()
	m.must(m.nsp.Start())
	m.waitRegistered(true)

	m.stopFrontend()
	if m.registered(m.nsp.Targets()) {
		t.Errorf("the registration survived the stop: %v", m.nsp.Targets())
	}
	m.waitRequests("Unregister", 1)
}
