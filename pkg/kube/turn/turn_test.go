package turn

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

// leases is an API server with one Lease.
type leases struct {
	coordinationclient.LeaseInterface // nil: only the methods below are called
	mu                                sync.Mutex
	lease                             *coordinationv1.Lease
	updates                           int
	away                              bool
}

func (l *leases) Leases(string) coordinationclient.LeaseInterface { return l }

func (l *leases) Get(context.Context, string, metav1.GetOptions) (*coordinationv1.Lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.away:
		return nil, errors.New("connection refused")
	case l.lease == nil:
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "leases"}, "turn")
	}
	return l.lease.DeepCopy(), nil
}

func (l *leases) Create(ctx context.Context, lease *coordinationv1.Lease, _ metav1.CreateOptions) (
	*coordinationv1.Lease, error,
) {
	return l.Update(ctx, lease, metav1.UpdateOptions{})
}

func (l *leases) Update(_ context.Context, lease *coordinationv1.Lease, _ metav1.UpdateOptions) (
	*coordinationv1.Lease, error,
) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.away {
		return nil, errors.New("connection refused")
	}
	l.lease = lease.DeepCopy()
	l.updates++
	return lease, nil
}

func (l *leases) holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lease == nil || l.lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.lease.Spec.HolderIdentity
}

// written returns how often the Lease was written.
func (l *leases) written() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.updates
}

// start runs a taker with short times and without a frontend.
func start(t *testing.T, l *leases, pod string) *Taker {
	t.Helper()
	taker := New(Options{
		Leases: l, Namespace: "a", Trench: "a", Pod: pod, FrontendSocket: filepath.Join(t.TempDir(), "none.sock"),
		Log: slog.New(slog.DiscardHandler),
	})
	taker.timing = timing{
		// A Lease has whole seconds: less is no time at all.
		lease: time.Second, renew: 700 * time.Millisecond, retry: 20 * time.Millisecond,
		silence: 200 * time.Millisecond, slot: time.Millisecond, status: time.Millisecond, write: time.Minute,
		hold: time.Minute, idle: time.Minute, probe: time.Minute,
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = taker.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return taker
}

var change = []trench.Gateway{{Name: "gw-1"}}

func granted(taker *Taker) func() bool {
	return func() bool { granted, _ := taker.Ask(change); return granted }
}

func TestOnePodHasTheTurn(t *testing.T) {
	api := &leases{}
	a, b := start(t, api, "a"), start(t, api, "b")
	await.True(t, "turn of a", granted(a))
	if api.holder() != "a" {
		t.Errorf("the Lease has %q", api.holder())
	}
	b.Ask(change)
	before := api.written()
	await.True(t, "a renews the Lease while b waits", func() bool { return api.written() >= before+5 })
	if api.holder() != "a" {
		t.Errorf("the Lease has %q", api.holder())
	}
	if granted, _ := b.Ask(change); granted {
		t.Error("both pods have the turn")
	}
	a.Ask(nil) // written
	await.True(t, "turn of b", granted(b))
	b.Ask(nil)
	await.True(t, "the Lease is free", func() bool { return api.holder() == "" })
	c := start(t, api, "c")
	c.Ask(change)
	c.Ask(nil) // withdrawn
	await.True(t, "no turn", func() bool { granted, _ := c.Ask(nil); return !granted && api.holder() == "" })
}

func TestHungHolderLosesTheTurn(t *testing.T) {
	hung, now := "hung", metav1.NowMicro()
	seconds := int32(1)
	api := &leases{lease: &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
		HolderIdentity: &hung, LeaseDurationSeconds: &seconds, AcquireTime: &now, RenewTime: &now,
	}}}
	await.True(t, "turn after the Lease expired", granted(start(t, api, "a")))
}

func TestTurnWithoutAPIServer(t *testing.T) {
	api := &leases{away: true}
	begin := time.Now()
	taker := start(t, api, "a")
	await.True(t, "turn without a Lease", granted(taker))
	if waited := time.Since(begin); waited < taker.timing.silence {
		t.Errorf("the turn began after %v without an answer", waited)
	}
}

// The delay of a pod does not change, and pods of one ReplicaSet have different ones.
func TestDelay(t *testing.T) {
	delays := map[time.Duration]bool{}
	for _, pod := range []string{"vipgate-6d4cf56db6-2x8kq", "vipgate-6d4cf56db6-9hc4w", "vipgate-6d4cf56db6-zv7dd"} {
		taker := New(Options{Pod: pod})
		if again := New(Options{Pod: pod}); taker.delay() != again.delay() || taker.delay() >= slots*taker.timing.slot {
			t.Errorf("the delay of %s is %v", pod, taker.delay())
		}
		delays[taker.delay()] = true
	}
	if len(delays) < 2 {
		t.Errorf("delays %v", delays)
	}
}

func TestSessions(t *testing.T) {
	at := func(second int64) *timestamppb.Timestamp { return &timestamppb.Timestamp{Seconds: second} }
	status := func(gateways ...*frontendv1.GatewayStatus) *frontendv1.Status {
		return &frontendv1.Status{Gateways: gateways}
	}
	four := func(since int64, up bool, exported uint32) *frontendv1.GatewayStatus {
		return &frontendv1.GatewayStatus{Address: "192.0.2.1", Up: up, Since: at(since), Exported: exported, Expected: 2}
	}
	six := &frontendv1.GatewayStatus{Address: "2001:db8::1", Up: true, Since: at(1)}
	families := map[vip.Family]bool{vip.IPv4: true}
	before := sessionsOf(status(four(1, true, 2), six), families)
	for name, test := range map[string]struct {
		status          *frontendv1.Status
		restarted, kept bool
	}{
		"unchanged":       {status(four(1, true, 2)), false, true},
		"down":            {status(four(2, false, 0)), false, false},
		"without exports": {status(four(2, true, 1)), false, false},
		"up again":        {status(four(2, true, 2)), true, false},
		"other family":    {status(six), false, false},
		"no frontend":     {nil, false, false},
	} {
		now := sessionsOf(test.status, families)
		if before.restarted(now) != test.restarted || before.kept(now) != test.kept {
			t.Errorf("%s: restarted %t, kept %t", name, before.restarted(now), before.kept(now))
		}
	}
	if !(sessions{}).restarted(sessionsOf(nil, families)) {
		t.Error("without a session before, one is missing")
	}
}
