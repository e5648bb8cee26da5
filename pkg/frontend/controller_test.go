package frontend

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The goroutine that receives an update applies it only while the loop runs and is not evaluating.
// The decision is complete when it returns.
func TestUpdateByReceiver(t *testing.T) {
	o, _ := testObserver()
	s := &scriptedSource{changed: make(chan struct{}), update: readiness.Update{
		Position: readiness.Position{InstanceID: "lb", Revision: 1}, Complete: true, Synced: true, Open: true,
		LeaseEnd: time.Now().Add(time.Hour), Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready}},
	}}
	up := bird.State{At: time.Now().Add(time.Hour), Alive: true}
	for _, f := range vip.Families {
		up.Gateways = append(up.Gateways, bird.GatewayState{Family: f, Up: true, Usable: true})
	}
	c := &controller{
		gate: gate.New(gate.Options{NoFlapBackoff: true}), source: s, bird: latest.New(up),
		kernel: latest.New(kernel.Confirmed{VIPs: vip.NewSet(vipA)}), announcer: announce.New(announce.Options{}),
		observer:  o,
		attractor: &attractor{current: latest.New(attraction{}), apply: func(time.Time, [len(vip.Families)]bool) {}},
		commands:  make(chan command), ready: make(chan struct{}),
	}
	c.gate.Configure([]vip.VIP{vipA})
	if c.tryUpdate() || !s.taken.IsZero() {
		t.Fatal("an update was taken before the loop runs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	<-c.ready

	// The loop may be evaluating for other reasons.
	for end := time.Now().Add(10 * time.Second); !c.tryUpdate(); {
		if time.Now().After(end) {
			t.Fatal("no update was taken while the loop waits")
		}
	}
	o.mu.Lock()
	decided := o.queue
	o.mu.Unlock()
	if len(decided) == 0 {
		t.Fatal("no decision")
	}
	last := decided[len(decided)-1]
	if last.Position.Revision != 1 || len(last.Changes) != 1 || last.Changes[0].To.Advertisement != gate.Announced {
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

// The KEEPALIVEs of the loopback session need a heartbeat also without any input of the gate.
func TestControllerBeatsAtWholeSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const offset = 300 * time.Millisecond
		<-time.After(offset)
		o, _ := testObserver()
		c := &controller{
			gate: gate.New(gate.Options{}), bird: latest.New(bird.State{}), kernel: latest.New(kernel.Confirmed{}),
			announcer: announce.New(announce.Options{}), observer: o,
			attractor: &attractor{current: latest.New(attraction{}), apply: func(time.Time, [len(vip.Families)]bool) {}},
			commands:  make(chan command), ready: make(chan struct{}),
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		<-c.ready
		for range 5 {
			<-time.After(time.Second)
			synctest.Wait()
			if got := c.idle(); got != offset {
				t.Errorf("last evaluated %v before %v", got, time.Now())
			}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
