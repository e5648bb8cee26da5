package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/meridio/availability"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/nsptest"
)

// startMeridioLB starts an available load balancer of Meridio on a socket.
func (f *fixture) startMeridioLB(socket string, args ...string) *lab.Process {
	f.t.Helper()
	authority, err := identity.OpenDevAuthority(f.t.Context(), f.pod.Authority())
	f.must(err)
	svid, err := authority.MintFor(spiffeid.RequireFromString(lab.LBID), time.Hour)
	f.must(err)
	dir := f.path("meridio-lb-svid")
	f.must(os.MkdirAll(dir, 0o700))
	f.must(authority.WriteFiles(dir, svid))
	p, err := f.Start(f.Pod, "meridio-lb", append([]string{
		filepath.Join(binaries, "meridio-lb"), "-socket=" + socket, "-svid-dir=" + dir, "-available",
	}, args...)...)
	f.must(err)
	return p
}

// startMeridioFrontend starts an NSP with the usual attractor, and Meridio's frontend.
func (f *fixture) startMeridioFrontend() {
	f.t.Helper()
	authority, err := identity.OpenDevAuthority(f.t.Context(), f.pod.Authority())
	f.must(err)
	svid := f.mint(authority, "spiffe://"+lab.TrustDomain+"/nsp")
	server := nsptest.New(nsptest.Options{
		Credentials: nsptest.ServerCredentials(svid, authority.Bundle(svid.ID.TrustDomain())), Address: nspAddress,
		Listen: f.Pod.Listen,
	})
	server.SetAttractors(nspAttractor())
	f.must(server.Start())
	f.t.Cleanup(func() {
		harness.Check(f.t, server.Stop())
	})
	f.must(f.pod.StartMeridioFrontend(nspAddress, "trench-a", "attractor-a-1"))
}

// waitProtocol waits until the status of the frontend shows a gRPC service.
func (f *fixture) waitProtocol(service string) {
	f.t.Helper()
	f.waitFor(func() error {
		if is := f.frontendStatus().GetLoadBalancer().GetService(); is != service {
			return fmt.Errorf("the frontend reads %q, not %q", is, service)
		}
		return nil
	})
}

// withdrawnAfter waits until the VIPs are withdrawn at the gateway, and logs the times since the
// cause.
func (f *fixture) withdrawnAfter(cause string, mark int, since time.Time, vips ...string) {
	f.t.Helper()
	var took []time.Duration
	for _, v := range vips {
		took = append(took, f.waitUpdate(mark, v, withdrawn).At.Sub(since))
	}
	f.t.Logf("%s: withdrawn after %v", cause, took)
}

// wantFirst waits until a process has printed a text since a length of its output, and fails if it
// printed another text before.
func (f *fixture) wantFirst(p *lab.Process, from int, first, other string) {
	f.t.Helper()
	if !f.isFirst(p, from, first, other) {
		f.t.Fatalf("%s has printed %q before %q:\n%s", p.Name, other, first, p.Output()[from:])
	}
}

// isFirst waits until a process has printed a text since a length of its output, and reports
// whether it had not printed another text before.
func (f *fixture) isFirst(p *lab.Process, from int, first, other string) bool {
	f.t.Helper()
	var before string
	f.waitFor(func() error {
		text, _, found := strings.Cut(p.Output()[from:], first)
		if !found {
			return fmt.Errorf("%s has not printed %q", p.Name, first)
		}
		before = text
		return nil
	})
	return !strings.Contains(before, other)
}

// The probe detects a hung load balancer of Meridio, whose stream sends nothing between changes,
// within the lease of a second and the probe interval of a second; the next answer restores the
// VIPs.
func TestHungMeridioLBWithdraws(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	old := f.startMeridioLB(f.pod.Socket())
	f.startMeridioFrontend()
	f.wantRoutes(every()...)
	f.waitProtocol(availability.Service)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	for command, want := range map[string]string{
		"status": "of Meridio (loadbalancer.v1.StreamAvailabilityService)",
		"events": "load balancer of Meridio: one state for all VIPs",
	} {
		out, _ := f.run("frontend", command, "--admin-socket=unix://"+f.pod.FrontendAdmin())
		if !strings.Contains(out, want) {
			t.Errorf("frontend %s does not show the protocol:\n%s", command, out)
		}
	}
	for round := range 3 {
		// Longer than a lease: the probes renew it.
		mark := f.mark()
		f.waitPast(time.Now().Add(availability.ProbeInterval + availability.ProbeWithin + 500*time.Millisecond))
		f.wantNoUpdates(mark, every()...)
		stopped := time.Now()
		f.must(old.Signal(syscall.SIGSTOP))
		f.withdrawnAfter("SIGSTOP", mark, stopped, every()...)
		// The lease and the probe's timeout end in the same millisecond: a load balancer that continues
		// in between answers the probe in time.
		f.waitLogs(f.pod.Frontend, "load balancer probe failed", round+1)
		f.must(old.Signal(syscall.SIGCONT))
		f.wantRoutes(every()...)
	}
	page := f.get(lab.FrontendMetrics, "/metrics")
	if n := metric(t, page, "vipgate_frontend_lb_probe_failures_total"); n < 3 {
		t.Errorf("vipgate_frontend_lb_probe_failures_total is %v after 3 hangs", n)
	}
	out := f.pod.Frontend.Output()
	if n := strings.Count(out, "load balancer probe failed"); n != 3 {
		t.Errorf("3 hangs are logged %d times", n)
	}
	if n := strings.Count(out, "readiness stream open"); n != 1 {
		t.Errorf("%d streams were opened", n)
	}
	f.wantRunning(f.pod.Frontend, old)
}

// replaceSocket atomically links the frontend's socket path to another socket.
func (f *fixture) replaceSocket(socket string) {
	f.t.Helper()
	link := f.pod.Socket() + ".new"
	f.must(os.Symlink(socket, link))
	f.must(os.Rename(link, f.pod.Socket()))
}

// startLBAt starts the lb on another socket and waits until it serves that socket.
func (f *fixture) startLBAt(socket string, extra ...string) {
	f.t.Helper()
	f.must(f.pod.StartLB(append([]string{"--socket=unix://" + socket}, extra...)...))
	f.waitLog(f.pod.LB, "readiness is synced")
}

// A load balancer of Meridio is replaced by lb and back, in place: the frontend follows without a
// restart and withdraws no VIP that is ready.
func TestMeridioLBUpgradeInPlace(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	old := f.startMeridioLB(f.path("old.sock"))
	f.waitLog(old, "serving")
	f.replaceSocket(f.path("old.sock"))
	f.startMeridioFrontend()
	f.wantRoutes(every()...)
	f.waitProtocol(availability.Service)
	mark := f.mark()

	f.startLBAt(f.path("new.sock"), "--drain-time=1m")
	replaced := time.Now()
	f.replaceSocket(f.path("new.sock"))
	f.waitProtocol(readiness.Service)
	t.Logf("upgraded %v after the replacement of the socket", time.Since(replaced))
	f.must(old.Kill())
	f.down(f.target2) // from now on each VIP counts
	f.wantRoutes(vipA4, vipA6)
	f.wantNoUpdates(mark, vipA4, vipA6)
	f.up(f.target2)
	f.wantRoutes(every()...)

	mark = f.mark()
	old = f.startMeridioLB(f.path("old.sock"))
	f.waitLogs(old, "serving", 2)
	f.replaceSocket(f.path("old.sock"))
	f.must(f.pod.LB.Signal(syscall.SIGTERM))
	f.waitProtocol(availability.Service)
	f.wantExit(f.pod.LB, 0) // its frontend uses the other load balancer
	f.down(f.target2)
	f.waitPast(time.Now().Add(availability.ProbeInterval + availability.ProbeWithin + 500*time.Millisecond))
	f.wantRoutes(every()...)
	for _, v := range every() { // the lb stopped before the other one was found
		f.wantUpdates(mark, v, depreferred, announced)
	}
	f.wantRunning(f.pod.Frontend, old)
}

// An lb that starts where a load balancer of Meridio was killed is used immediately.
func TestMeridioLBUpgradeAfterDeath(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	old := f.startMeridioLB(f.pod.Socket())
	f.startMeridioFrontend()
	f.wantRoutes(every()...)
	f.must(old.Kill())
	f.wantRoutes()
	f.must(f.pod.StartLB())
	f.waitLog(f.pod.LB, "readiness is synced")
	f.waitProtocol(readiness.Service)
	f.wantRoutes(vipA4, vipA6)
}

// oldFrontend watches the lb with Meridio's protocol.
func (f *fixture) oldFrontend() grpc.ServerStreamingClient[loadbalancerv1.Response] {
	f.t.Helper()
	ctx := harness.Context(f.t, 2*waitTimeout)
	stream, err := loadbalancerv1.NewStreamAvailabilityServiceClient(f.dialAsFrontend()).Watch(ctx, &emptypb.Empty{},
		grpc.WaitForReady(true))
	f.must(err)
	return stream
}

// wantAvailable receives the next state.
func (f *fixture) wantAvailable(s grpc.ServerStreamingClient[loadbalancerv1.Response], want bool) {
	f.t.Helper()
	m, err := s.Recv()
	f.must(err)
	host, err := os.Hostname()
	f.must(err)
	if len(m.GetTargets()) != 1 {
		f.t.Fatalf("%d targets: %v", len(m.GetTargets()), m)
	}
	if id, is := m.GetTargets()[0].GetContext()["identifier"]; is != want || (is && id != host) {
		f.t.Fatalf("available %v with identifier %q, want %v with %q", is, id, want, host)
	}
}

// lb serves Meridio's protocol to a frontend that only supports that protocol.
func TestLBServesOldFrontend(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const drain = 2500 * time.Millisecond
	f.must(f.pod.StartLB("--drain-time=" + drain.String()))
	o := f.oldFrontend()
	f.wantAvailable(o, false)
	f.waitFor(func() error {
		for _, c := range f.lbStatus().GetConditions() {
			if c.GetName() == "Egress" && strings.Contains(c.GetDetail(), "a frontend of Meridio is connected") {
				return nil
			}
		}
		return fmt.Errorf("Egress does not name the frontend: %v", f.lbStatus().GetConditions())
	})
	f.up(f.target1)
	f.wantAvailable(o, true)
	f.up(f.target2)
	f.down(f.target1)
	f.waitFor(func() error {
		for _, v := range f.lbStatus().GetVips() {
			if r := v.GetReadiness(); v.GetVip() == vipA4 && r.GetReadyTargets() > 0 {
				return fmt.Errorf("%v", r)
			}
		}
		return nil
	})
	f.down(f.target2)
	f.wantAvailable(o, false) // and no message while one of the streams was ready
	f.up(f.target2)
	f.wantAvailable(o, true)

	terminated := time.Now()
	f.must(f.pod.LB.Signal(syscall.SIGTERM))
	f.wantAvailable(o, false)
	t.Logf("unavailable %v after SIGTERM", time.Since(terminated))
	_, err := o.Recv()
	if status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ended with %v", err)
	}
	if after := time.Since(terminated); after < drain-clockSlack {
		t.Errorf("the stream ended %v after SIGTERM, before the drain time of %v", after, drain)
	}
	f.wantExit(f.pod.LB, 0)
	f.waitLog(f.pod.LB, "a frontend of Meridio had the time to withdraw; stopping")
	t.Logf("the lb ended %v after SIGTERM, its drain time is %v", f.pod.LB.Ended().Sub(terminated), drain)
}

// A stop does not wait for a frontend of Meridio that has disconnected.
func TestLBStopWithoutOldFrontend(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB("--drain-time=10m"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := loadbalancerv1.NewStreamAvailabilityServiceClient(f.dialAsFrontend()).Watch(ctx, &emptypb.Empty{},
		grpc.WaitForReady(true))
	f.must(err)
	for available := false; !available; {
		m, err := stream.Recv()
		f.must(err)
		_, available = m.GetTargets()[0].GetContext()["identifier"]
	}
	f.must(f.pod.LB.Signal(syscall.SIGTERM))
	f.wantAvailable(stream, false)
	cancel()
	f.wantExit(f.pod.LB, 0)
	f.waitLog(f.pod.LB, "no frontend is connected; stopping")
}
