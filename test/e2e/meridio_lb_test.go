package e2e

import (
	"syscall"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// The load balancer of Meridio gates all VIPs: by the first message of its stream, by each change,
// by the end of the stream, and by a missing probe answer.
func TestOldLBGatesVIPs(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startFrontend()
	m.waitFrontend("Egress/ipv6", true)
	m.waitFrontend("Egress/ipv4", true)

	// The first message has available=false.
	m.startOldLB("-available=false")
	m.waitFrontend("Stream", true)
	m.wantSilence(0)
	m.switchOldLB(true)
	m.wantRoutes(every()...)
	mark := m.mark()
	m.switchOldLB(false)
	m.wantRoutes()
	m.switchOldLB(true)
	m.wantRoutes(every()...)
	for _, vip := range every() {
		m.wantUpdates(mark, vip, withdrawn, announced)
	}

	// Its crash withdraws immediately; the first message of its successor has available=true. A probe
	// that is under way at a crash may fail before the end of the stream is read, but not each time.
	byStream := false
	for range 3 {
		mark = m.mark()
		killed, from := time.Now(), length(m.pod.Frontend)
		m.must(m.pod.LB.Kill())
		m.withdrawnAfter("killed", mark, killed, every()...)
		byStream = m.isFirst(m.pod.Frontend, from, "to=withdrawn", "load balancer probe failed") || byStream
		m.startOldLB()
		m.wantRoutes(every()...)
		for _, vip := range every() {
			m.wantUpdates(mark, vip, withdrawn, announced)
		}
	}
	if !byStream {
		t.Error("each crash was noticed by a probe: none by the end of the stream")
	}

	// The load balancer freezes.
	mark = m.mark()
	frozen := time.Now()
	m.must(m.pod.LB.Signal(syscall.SIGSTOP))
	m.withdrawnAfter("frozen", mark, frozen, every()...)
	m.waitFrontend("Stream", false)
	m.wantHealth(lab.FrontendHealth, "Egress", healthv1.HealthCheckResponse_SERVING)
	m.must(m.pod.LB.Signal(syscall.SIGCONT))
	m.wantRoutes(every()...)
	for _, vip := range every() {
		m.wantUpdates(mark, vip, withdrawn, announced)
	}

	// A graceful stop first sends available=false.
	from := length(m.pod.Frontend)
	m.stop(m.pod.LB)
	m.wantRoutes()
	m.waitLine(m.pod.Frontend, from, "load balancer availability", "available=false")
	m.wantRunning(m.pod.Frontend)
}

// The load balancer is upgraded to lb, and downgraded: the frontend follows without a restart. lb
// gates each VIP separately.
func TestOldLBIsUpgraded(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startMeridio()
	m.must(m.pod.WriteTrench(usualTrench())) // for lb only: the frontend keeps its NSP
	m.up(m.target1)
	m.up(m.target2)
	frontend := m.pod.Frontend.PID()

	m.stop(m.pod.LB)
	m.startLBAs([]string{"SPIFFE_ENDPOINT_SOCKET=" + m.spire.Addr()},
		as(m.pod.LBArgs(noDrain, "--frontend-id="+m.id.String()), "--identity=spiffe"))
	m.wantRoutes(every()...)
	mark := m.mark()
	m.down(m.target2)
	m.wantRoutes(vipA4, vipA6)
	m.wantNoUpdates(mark, vipA4, vipA6)
	m.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)

	m.must(m.pod.LB.Kill())
	m.startOldLB()
	m.wantRoutes(every()...)
	m.must(m.pod.LB.Kill())
	m.wantRoutes()
	if now := m.pod.Frontend.PID(); now != frontend {
		t.Errorf("the frontend was restarted: %d, now %d", frontend, now)
	}
	m.wantRunning(m.pod.Frontend)
}

// A dead static gateway is evicted once, although the load balancer is only available while the
// frontend is registered, and becomes available again once BFD can come up.
func TestStaticGatewayDiesWithOldLB(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.must(m.gateway.Process.Kill())
	c := lab.GatewayA()
	c.Name = "router-a"
	router := m.startStatic(lab.KindBIRD, m.Gateway, c)
	m.setAttractor(func(a *nspv1.Attractor) {
		for _, g := range a.GetGateways() {
			g.Protocol, g.Bfd = "static", true
			g.BfdSpec = &nspv1.Gateway_BfdSpec{MinTx: 100, MinRx: 100, Multiplier: 3}
		}
	})
	m.startOldLB()
	m.startFrontend()
	m.wantBFD(router, pod46...)
	m.waitVIPs(every()...)

	for _, p := range router.Processes() {
		m.must(p.Kill())
	}
	m.waitRegistered(false)
	m.waitFrontend("Egress", false)
	m.waitGateway("gateway-a4", isHeld) // the load balancer is unavailable
	calls := len(m.nsp.Requests("Register"))
	m.waitPast(time.Now().Add(5 * time.Second)) // longer than one registration would take to fail
	if more := len(m.nsp.Requests("Register")) - calls; more != 0 {
		t.Errorf("it registered %d more times with dead gateways", more)
	}
	m.wantHealth(lab.FrontendHealth, "Egress", healthNotServing)
	m.waitCommand("status", "its BFD session was down before")

	m.must(router.Start())
	m.wantBFD(router, pod46...)
	m.waitVIPs(every()...)
	m.waitRegistered(true)
}
