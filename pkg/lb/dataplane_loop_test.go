package lb

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

// scriptedPlane records the desired state; the test sets the confirmed one.
type scriptedPlane struct {
	ready   chan struct{}
	state   latest.Value[plan.State]
	desired latest.Value[*plan.Desired]
}

func (p *scriptedPlane) Configure(w *plan.Desired)        { p.desired.Set(w) }
func (p *scriptedPlane) State() *latest.Value[plan.State] { return &p.state }
func (p *scriptedPlane) Ready() <-chan struct{}           { return p.ready }

// scriptedFrontend returns the report that the test sets.
type scriptedFrontend struct {
	report latest.Value[readiness.Report]
}

func (f *scriptedFrontend) Report() *latest.Value[readiness.Report] { return &f.report }

func (f *scriptedFrontend) Reported(vip.VIP) (readiness.VIPReport, bool) {
	return readiness.VIPReport{Advertisement: readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED}, true
}

// runningLoop is a loop that runs, with a target that listens or not.
type runningLoop struct {
	*loop
	checker  *healthcheck.Checker
	plane    *scriptedPlane
	frontend *scriptedFrontend
	listener net.Listener
}

func run(t *testing.T) *runningLoop {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() }) // some tests close it themselves
	c := oneStream(vipA)
	s := &c.Streams[0]
	s.Maglev = trench.Maglev{Size: 101, Seed: 1}
	s.Check.TCP.Port = uint16(listener.Addr().(*net.TCPAddr).Port)
	s.Check.Interval, s.Check.Timeout = 20*time.Millisecond, 20*time.Millisecond
	s.Targets[0].IPs = []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	r := &runningLoop{
		newLoop(t, TargetOptions{}), healthcheck.New(healthcheck.Options{Log: quiet}),
		&scriptedPlane{ready: make(chan struct{})}, &scriptedFrontend{},
		listener,
	}
	r.loop.checker = r.checker
	r.config, r.lease = latest.New(trench.Loaded{Config: c, Generation: 1}), time.Second
	r.away, r.ready = latest.New(false), make(chan struct{})
	r.evaluator = serving.New(serving.Options{Settle: time.Hour, DataPlane: true, WithdrawTime: time.Hour})
	r.withPlane(r.plane, r.frontend, func(time.Duration) {})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.checker.Run(ctx) }) // the end of ctx
	wg.Go(func() { _ = r.loop.Run(ctx) })    // likewise
	t.Cleanup(func() { cancel(); wg.Wait() })
	return r
}

func (r *runningLoop) vip() readiness.VIPReadiness {
	for _, got := range r.table.State().VIPs {
		if got.VIP == vipA {
			return got
		}
	}
	return readiness.VIPReadiness{}
}

// role returns the desired role of the target.
func (r *runningLoop) role() plan.Role {
	if w := r.plane.desired.Load(); w != nil {
		return w.Streams["s"].Targets[0].Roles[vip.IPv4]
	}
	return plan.Unknown
}

// serves is the state of a kernel that forwards to the target.
var serves = plan.State{
	Streams: map[string]*plan.StreamState{"s": {Serving: [2]map[string]struct{}{
		{"a": {}},
		{},
	}}}, VIPs: map[vip.VIP]string{vipA: "s"},
}

func TestRestartWaitsForTheKernel(t *testing.T) {
	r := run(t)
	await.True(t, "the target is checked", func() bool {
		checked := r.checker.List()
		return len(checked) == 1 && checked[0].State == healthcheck.Ready
	})
	if w := r.plane.desired.Load(); r.table.State().Synced || w != nil && !w.RoutesOnly {
		t.Fatal("the loop decides before it knows what is in the kernel")
	}
	r.plane.state.Set(serves)
	close(r.plane.ready)
	await.True(t, "the loop is synced", func() bool { return r.table.State().Synced })
	if got := r.vip(); got.State != vip.Ready {
		t.Errorf("a VIP that is forwarded all the time is %v: %s", got.State, got.Detail)
	}
	await.True(t, "the data plane is configured", func() bool { return r.role() == plan.Serving })
}

func TestFailedDataPlaneIsNotAwaited(t *testing.T) {
	r := run(t)
	r.plane.state.Set(plan.State{Err: errors.New("no space left on device")})
	await.True(t, "the loop is synced", func() bool { return r.table.State().Synced })
	await.True(t, "the VIP has the reason", func() bool { return r.vip().Detail == "no space left on device" })
	if got := r.vip(); got.State != vip.NotReady || got.Reason != readinessv1.VipReason_VIP_REASON_DATA_PLANE {
		t.Errorf("%v (%v)", got.State, got.Reason)
	}
}

func TestLoopFollowsKernelAndFrontend(t *testing.T) {
	r := run(t)
	close(r.plane.ready)
	await.True(t, "the target is to serve", func() bool { return r.role() == plan.Serving })
	if got := r.vip(); got.State != vip.NotReady {
		t.Fatalf("%v before the kernel confirmed it", got.State)
	}
	confirmed := serves
	confirmed.Revision = r.plane.desired.Load().Revision
	r.plane.state.Set(confirmed)
	await.True(t, "the VIP is ready", func() bool { return r.vip().State == vip.Ready })
	report := readiness.Report{WatchID: "w", Connected: true, Complete: true, Advertised: 1, At: time.Now()}
	r.frontend.report.Set(report)

	if err := r.listener.Close(); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the VIP is not ready", func() bool { return r.vip().State == vip.NotReady })
	await.True(t, "the removal is held back", func() bool { return len(r.forwarding.Load().Held) == 1 })
	if r.role() != plan.Serving {
		t.Fatal("the last target is removed before the VIP is withdrawn")
	}
	report.Applied, report.Advertised = r.table.Position(), 0
	r.frontend.report.Set(report)
	await.True(t, "the target is removed", func() bool { return r.role() == plan.Down })
}
