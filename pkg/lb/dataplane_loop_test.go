package lb

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// running is a loop that runs, with one target that listens or not.
type running struct {
	*loop
	t        *testing.T
	plane    *scriptedPlane
	frontend *scriptedFrontend
	listener net.Listener
}

func run(t *testing.T) *running {
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
	r := &running{newLoop(t, TargetOptions{}), t, &scriptedPlane{ready: make(chan struct{})}, &scriptedFrontend{}, listener}
	r.config, r.lease, r.away, r.ready = latest.New(trench.Loaded{Config: c, Generation: 1}), time.Second, latest.New(false), make(chan struct{})
	r.forwarding = newForwarding(r.plane, r.frontend, r.table.Position, time.Hour, quiet)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.checker.Run(ctx) }) // the end of ctx
	wg.Go(func() { _ = r.loop.Run(ctx) })    // likewise
	t.Cleanup(func() { cancel(); wg.Wait() })
	return r
}

// until waits for a condition.
func (r *running) until(what string, condition func() bool) {
	r.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-limit.C:
			r.t.Fatalf("not within 20s: %s", what)
		}
	}
}

func (r *running) vip() readiness.VIPReadiness {
	got, _ := r.table.Get(vipA)
	return got
}

func (r *running) told() dataplane.Role {
	if w := r.plane.last(); w != nil {
		return w.Streams["s"].Targets[0].Roles[vip.IPv4]
	}
	return dataplane.Unknown
}

func TestRestartSaysNothingBeforeTheKernelWasLookedAt(t *testing.T) {
	r := run(t)
	r.until("the target is checked", func() bool {
		checked := r.checker.List()
		return len(checked) == 1 && checked[0].State == healthcheck.Ready
	})
	if r.table.State().Synced || r.plane.last() != nil {
		t.Fatal("the loop speaks before it knows what is in the kernel")
	}
	r.plane.state.Set(dataplane.State{
		Streams: map[string]*dataplane.StreamState{"s": {Serving: [2]map[string]struct{}{{"a": {}}, {}}}}, VIPs: map[vip.VIP]string{vipA: "s"},
	})
	close(r.plane.ready)
	r.until("the loop is synced", func() bool { return r.table.State().Synced })
	if got := r.vip(); got.State != readiness.Ready {
		t.Errorf("what is forwarded all the time was said to be %v: %s", got.State, got.Detail)
	}
	r.until("the data plane is configured", func() bool { return r.told() == dataplane.Serving })
}

func TestDataPlaneThatCannotStartIsNotWaitedFor(t *testing.T) {
	r := run(t)
	r.plane.state.Set(dataplane.State{Err: errors.New("no space left on device")})
	r.until("the loop is synced", func() bool { return r.table.State().Synced })
	r.until("the VIP says why", func() bool { return r.vip().Detail == "no space left on device" })
	if got := r.vip(); got.State != readiness.NotReady || got.Reason != reasonDataPlane {
		t.Errorf("%v (%v)", got.State, got.Reason)
	}
}

func TestLoopHearsTheKernelAndTheFrontend(t *testing.T) {
	r := run(t)
	close(r.plane.ready)
	r.until("the target is to serve", func() bool { return r.told() == dataplane.Serving })
	if got := r.vip(); got.State != readiness.NotReady {
		t.Fatalf("%v before the kernel confirmed it", got.State)
	}
	r.plane.state.Set(forward(dataplane.State{}, r.plane.last()))
	r.until("the VIP is ready", func() bool { return r.vip().State == readiness.Ready })
	r.frontend.say(time.Now(), "", 0, vipA)

	if err := r.listener.Close(); err != nil {
		t.Fatal(err)
	}
	r.until("the VIP is not ready", func() bool { return r.vip().State == readiness.NotReady })
	r.until("the removal is held back", func() bool { s := r.forwarding.shown.Load(); return s != nil && len(s.held) == 1 })
	if r.told() != dataplane.Serving {
		t.Fatal("the last target is removed before the VIP is withdrawn")
	}
	p := r.table.Position()
	r.frontend.say(time.Now(), p.InstanceID, p.Revision)
	r.until("the target is removed", func() bool { return r.told() == dataplane.Down })
}
