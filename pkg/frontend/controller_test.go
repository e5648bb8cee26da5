package frontend

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"reflect"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

// newReadyController returns a controller of vipA and vipB; vipA is ready with the first update.
func newReadyController(o *observer, g *gate.Gate) (*controller, *scriptedSource) {
	s := &scriptedSource{changed: make(chan struct{}), update: readiness.Update{
		Position: readiness.Position{InstanceID: "lb", Revision: 1}, Complete: true, Synced: true, Open: true,
		LeaseEnd: time.Now().Add(time.Hour), Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready}},
	}}
	up := bird.State{At: time.Now().Add(time.Hour), Alive: true}
	for _, f := range vip.Families {
		up.Gateways = append(up.Gateways, bird.GatewayState{Family: f, Up: true, Usable: true})
	}
	g.Configure([]vip.VIP{vipA, vipB})
	return &controller{
		gate: g, source: s, bird: latest.New(up),
		kernel: latest.New(kernel.Confirmed{VIPs: vip.NewSet(vipA)}), announcer: announce.New(announce.Options{}),
		session:   latest.New(gate.Announcer{Up: true}),
		observer:  o,
		attractor: &attractor{current: latest.New(attraction{}), apply: func(time.Time, [len(vip.Families)]bool) {}},
		commands:  make(chan command), ready: make(chan struct{}),
	}, s
}

// The latency of a decision starts with the receipt of its input.
func TestReceiptIsTheCause(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	peer := make(chan error, 1)
	go func() { peer <- answerBGP(l) }()
	causes := make(chan time.Time, 1)
	o, _ := testObserver()
	c, s := newReadyController(o, gate.New(gate.Options{}))
	c.announcer = announce.New(announce.Options{
		Local: netip.MustParseAddr("127.0.0.1"), Peer: netip.MustParseAddrPort(l.Addr().String()), PeerAS: 64512,
		HoldTime: time.Hour, OnWritten: func(cause, _ time.Time, _ uint64) { causes <- cause },
	})
	s.update.ReceivedAt = time.Now().Add(-time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- c.announcer.Run(ctx) }()
	go func() { ended <- c.Run(ctx) }()
	// A session begins with the whole table, which has no cause.
	await.True(t, "the empty table", func() bool { return !c.announcer.State().Load().WrittenAt.IsZero() })
	await.True(t, "an update that is taken", c.tryUpdate)
	select {
	case cause := <-causes:
		if !cause.Equal(s.update.ReceivedAt) {
			t.Errorf("caused at %v, the readiness was received at %v", cause, s.update.ReceivedAt)
		}
	case <-time.After(30 * time.Second):
		t.Error("nothing was written")
	}
	cancel()
	<-ended
	<-ended
	if err := errors.Join(<-peer, l.Close()); err != nil {
		t.Error(err)
	}
}

// The goroutine that receives an update applies it only while the loop runs and is not evaluating.
// The decision is complete when it returns.
func TestUpdateByReceiver(t *testing.T) {
	o, _ := testObserver()
	c, s := newReadyController(o, gate.New(gate.Options{NoFlapBackoff: true}))
	if c.tryUpdate() || !s.taken.IsZero() {
		t.Fatal("an update was taken before the loop runs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	<-c.ready

	// The loop may be evaluating for other reasons.
	await.True(t, "an update that is taken while the loop waits", c.tryUpdate)
	var decided []decisions
	o.queue.Drain(func(queue []input, _ int) {
		for _, in := range queue {
			if len(in.Changes) > 0 {
				decided = append(decided, in.decisions)
			}
		}
	})
	if len(decided) == 0 {
		t.Fatal("no decision")
	}
	last := decided[len(decided)-1]
	if last.Position.Revision != 1 || len(last.Changes) != 2 || last.Changes[0].To.Advertisement != gate.Announced {
		t.Fatalf("decided %+v", decided)
	}

	taken := s.taken
	if err := c.Do(ctx, func(*gate.Gate, time.Time) {
		if c.tryUpdate() {
			t.Error("an update was taken while the loop evaluates")
		}
	}); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-ended
	if c.tryUpdate() || s.taken != taken {
		t.Fatal("an update was taken after the end of the loop")
	}
}

// A decision that changes a reason only has a revision that the announcer confirms: merged decisions
// have the last one's.
func TestRevisionIsPosted(t *testing.T) {
	o, _ := testObserver()
	c, _ := newReadyController(o, gate.New(gate.Options{}))
	var from gate.Decision
	for i, to := range []gate.Decision{
		{Advertisement: gate.Announced, Reason: gate.Ready}, {Reason: gate.LBNotReady}, {Reason: gate.LBLost},
	} {
		c.post(time.Now(), []gate.Change{{VIP: vipA, From: from, To: to}})
		if want := uint64(min(i+1, 2)); c.revision != want {
			t.Errorf("revision %d after %+v, want %d", c.revision, to, want)
		}
		from = to
	}
}

// A new weight alone is announced, and is no decision for logs, events and reports.
func TestWeightAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, _ := testObserver()
		c, s := newReadyController(o, gate.New(gate.Options{}))
		policies, err := policy.New([]trench.Policy{{Ready: trench.Attributes{TargetBandwidth: 10}}}, policy.Carried)
		if err != nil {
			t.Fatal(err)
		}
		c.setPolicies(policies, []vip.VIP{vipA, vipB}, time.Now())
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		<-c.ready
		s.update.Changed[0].ReadyTargets = 1
		await.True(t, "an update that is taken", c.tryUpdate)
		o.queue.Drain(func([]input, int) {})
		s.update.Changed = []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready, ReadyTargets: 2}}
		await.True(t, "an update that is taken", c.tryUpdate)
		<-time.After(11 * time.Second)
		cancel()
		<-ended
		if got := c.gate.Decision(vipA).Weight; got != 20 {
			t.Errorf("weight %d", got)
		}
		if len(c.batch) != 1 || c.batch[0].VIP != vipA {
			t.Errorf("announced last: %v", c.batch)
		}
		o.queue.Drain(func(queue []input, _ int) {
			for _, in := range queue {
				if len(in.Changes) > 0 {
					t.Errorf("decided %+v", in.Changes)
				}
			}
		})
	})
}

// The state of BIRD's sessions is valid for 3 s, in which a stall of this process does not count.
func TestStallKeepsGateways(t *testing.T) {
	for _, update := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			o, _ := testObserver()
			c, _ := newReadyController(o, gate.New(gate.Options{}))
			c.bird.Update(func(s bird.State) bird.State { s.At = time.Now(); return s })
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- c.Run(ctx) }()
			<-c.ready
			await.True(t, "an update that is taken", c.tryUpdate)
			decision := func() (d gate.Decision) {
				_ = c.Do(ctx, func(g *gate.Gate, _ time.Time) { d = g.Decision(vipA) })
				return d
			}
			// The stall ends with the next step of the loop, or with an update of the load balancer.
			_ = c.Do(ctx, func(g *gate.Gate, _ time.Time) {
				if <-time.After(10 * time.Second); update {
					c.update()
				}
			})
			<-time.After(time.Second) // longer than a lease is extended
			if d := decision(); d.Advertisement != gate.Announced {
				t.Errorf("after a stall: %+v", d)
			}
			<-time.After(4 * time.Second)
			if d := decision(); d.Advertisement != gate.Withdrawn || d.Reason != gate.NoGateway {
				t.Errorf("without a survey: %+v", d)
			}
			cancel()
			<-ended
		})
	}
}

// runController runs a controller without inputs until stop; apply is called in each evaluation.
func runController(t *testing.T, apply func(now time.Time)) (c *controller, stop func()) {
	t.Helper()
	o, _ := testObserver()
	c = &controller{
		gate: gate.New(gate.Options{}), bird: latest.New(bird.State{}), kernel: latest.New(kernel.Confirmed{}),
		announcer: announce.New(announce.Options{}), session: latest.New(gate.Announcer{}), observer: o,
		attractor: &attractor{
			current: latest.New(attraction{}),
			apply:   func(now time.Time, _ [len(vip.Families)]bool) { apply(now) },
		},
		commands: make(chan command), ready: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	<-c.ready
	return c, func() {
		t.Helper()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

// The KEEPALIVEs of the loopback session need a heartbeat also without any input of the gate.
func TestControllerBeatsAtWholeSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const offset = 300 * time.Millisecond
		<-time.After(offset)
		var evaluated atomic.Pointer[time.Time]
		_, stop := runController(t, func(now time.Time) { evaluated.Store(&now) })
		for range 5 {
			<-time.After(time.Second)
			synctest.Wait()
			if got := time.Since(*evaluated.Load()); got != offset {
				t.Errorf("last evaluated %v before %v", got, time.Now())
			}
		}
		stop()
	})
}

// The gate is overdue once an evaluation blocks, and not while it waits.
func TestHungGateIsOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang, hung := make(chan struct{}), atomic.Bool{}
		c, stop := runController(t, func(time.Time) {
			if hung.Load() {
				<-hang
			}
		})
		for range 60 {
			<-time.After(time.Second)
			if got := c.Overdue(); got > beatInterval {
				t.Errorf("overdue by %v while it waits", got)
			}
		}
		hung.Store(true)
		<-time.After(time.Minute)
		if got := c.Overdue(); got < 58*time.Second {
			t.Errorf("overdue by %v after it has been blocked for a minute", got)
		}
		close(hang)
		stop()
		if got := c.Overdue(); got != 0 {
			t.Errorf("overdue by %v after its end", got)
		}
	})
}

// A family has a gateway if BIRD is alive and a gateway is usable and, with requireRoute,
// advertises a route.
func TestGatewaysOfState(t *testing.T) {
	at := time.Unix(1, 0)
	for name, tt := range map[string]struct {
		change       func(*bird.State)
		requireRoute bool
		up, static   bool
	}{
		"up":                   {func(*bird.State) {}, false, true, false},
		"without a route":      {func(*bird.State) {}, true, false, false},
		"with a route":         {func(s *bird.State) { s.Gateways[0].Imported = 1 }, true, true, false},
		"static":               {func(s *bird.State) { s.Gateways[0].Protocol = trench.Static }, false, true, true},
		"BIRD does not answer": {func(s *bird.State) { s.Alive = false }, false, false, false},
		"not usable":           {func(s *bird.State) { s.Gateways[0].Usable = false }, false, false, false},
	} {
		s := bird.State{At: at, Alive: true, Gateways: []bird.GatewayState{{
			Name: "g", Family: vip.IPv6, Protocol: trench.BGP, Up: true, Usable: true,
		}}}
		tt.change(&s)
		want := gate.Gateways{At: at}
		want.Up[vip.IPv6], want.Static[vip.IPv6] = tt.up, tt.static
		if got := gateways(s, tt.requireRoute); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
		for answered, age := range map[time.Time]time.Time{
			{}: at, at.Add(-1): at, at.Add(1): at.Add(1), at.Add(maxRenewal): at.Add(maxRenewal),
			at.Add(maxRenewal + 1): at.Add(maxRenewal),
		} {
			if s.Answered = answered; !gateways(s, tt.requireRoute).At.Equal(age) {
				t.Errorf("%s: an answer at %v renews the state of %v to %v", name, answered, at, age)
			}
		}
		if s.At = (time.Time{}); !gateways(s, tt.requireRoute).At.IsZero() {
			t.Errorf("%s: an answer before the first poll is a state", name)
		}
		if s.Gateways[0].Protocol == trench.Static {
			s.Alive = false
			if got := senders(s); len(got[vip.IPv6]) != 0 {
				t.Errorf("senders of a BIRD that does not answer: %v", got)
			}
		}
	}
}

// The gate receives every field of an update.
func TestLBUpdate(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	got := lbUpdate(readiness.Update{
		Position: readiness.Position{InstanceID: "lb", Revision: 7}, Synced: true, LeaseEnd: at(1), EndedAt: at(2),
		StaleGrace: time.Second, GoingAway: true, DrainEnd: at(3), Complete: true,
		Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Draining, DrainEnd: at(4), ReadyTargets: 9}},
		Removed: []vip.VIP{vipB},
	}, nil)
	want := gate.LBUpdate{
		Instance: "lb", Revision: 7, Live: true, LeaseEnd: at(1), EndedAt: at(2), Grace: time.Second,
		GoingAway: true, DrainEnd: at(3), Complete: true,
		VIPs: []gate.VIPState{{VIP: vipA, State: vip.Draining, DrainEnd: at(4), Weight: 90}}, Removed: []vip.VIP{vipB},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	for service, shared := range map[string]bool{"": false, readiness.Service: false, "loadbalancer.v1.Other": true} {
		if got := lbUpdate(readiness.Update{Service: service}, nil).Shared; got != shared {
			t.Errorf("one state for all VIPs by service %q: %v", service, got)
		}
	}
}
