package publication

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	coordinationfake "k8s.io/client-go/kubernetes/typed/coordination/v1/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/vipgate/vipgate/pkg/latest"
)

// fakeLease keeps one Lease.
type fakeLease struct {
	*coordinationfake.FakeCoordinationV1
	mu    sync.Mutex
	lease *coordinationv1.Lease
}

func newFakeLease() *fakeLease {
	l := &fakeLease{FakeCoordinationV1: &coordinationfake.FakeCoordinationV1{Fake: &clienttesting.Fake{}}}
	keep := func(o runtime.Object) (bool, runtime.Object, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		next := o.(*coordinationv1.Lease).DeepCopy()
		if l.lease != nil && next.ResourceVersion != l.lease.ResourceVersion {
			return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "leases"}, next.Name, errors.New("newer"))
		}
		next.ResourceVersion += "1"
		l.lease = next
		return true, next.DeepCopy(), nil
	}
	l.AddReactor("create", "leases", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return keep(a.(clienttesting.CreateAction).GetObject())
	})
	l.AddReactor("update", "leases", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return keep(a.(clienttesting.UpdateAction).GetObject())
	})
	l.AddReactor("get", "leases", func(a clienttesting.Action) (bool, runtime.Object, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.lease == nil {
			return true, nil, apierrors.NewNotFound(a.GetResource().GroupResource(), "vipgate-a")
		}
		return true, l.lease.DeepCopy(), nil
	})
	return l
}

// take gives the Lease to another holder.
func (l *fakeLease) take(holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := metav1.NewMicroTime(time.Now())
	l.lease.Spec.HolderIdentity, l.lease.Spec.AcquireTime, l.lease.Spec.RenewTime = &holder, &now, &now
	l.lease.ResourceVersion += "1"
}

func (l *fakeLease) holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lease == nil || l.lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.lease.Spec.HolderIdentity
}

// A leader that reads another holder, as after its process was stopped for long, or after the Lease
// was deleted, writes nothing more, although its own deadline has not passed.
func TestAnotherHolderEndsTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, lease := newAPI(), newFakeLease()
		p := &Publisher{
			options: Options{
				Namespace: "ns", Trench: "a", Pod: "a-0", Input: latest.New(input(trench(), service(), accepted(vip4))),
				Metrics: &counters{n: map[string]int{}}, Log: slog.New(slog.DiscardHandler),
			},
			state: latest.New(State{}), watch: a, write: a, leases: lease, timing: defaultTiming(), lease: LeaseName("a"),
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = p.campaign(ctx)
		}()
		time.Sleep(time.Second)
		synctest.Wait()
		before := len(a.of("services"))
		if !p.state.Load().Leading || before == 0 {
			t.Fatalf("leading %v, %d writes", p.state.Load().Leading, before)
		}
		lease.take("a-1")
		time.Sleep(p.timing.retry + p.timing.retry/2) // client-go adds a jitter
		p.options.Input.Set(input(trench(), service(), accepted(vip6)))
		time.Sleep(time.Second)
		synctest.Wait()
		if now := len(a.of("services")); now != before || p.state.Load().Leading {
			t.Errorf("leading %v, %d writes more", p.state.Load().Leading, now-before)
		}
		cancel()
		<-ended
		if lease.holder() != "a-1" {
			t.Errorf("the Lease has %q", lease.holder())
		}
	})
}

// The Lease is held until the last write has ended: the next leader never writes beside this one.
func TestLeaseOutlivesWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, lease, release := newAPI(), newFakeLease(), make(chan struct{})
		a.delay = func() { <-release }
		p := &Publisher{
			options: Options{
				Namespace: "ns", Trench: "a", Pod: "a-0", Input: latest.New(input(trench(), service(), accepted(vip4))),
				Metrics: &counters{n: map[string]int{}}, Log: slog.New(slog.DiscardHandler),
			},
			state: latest.New(State{}), watch: a, write: a, leases: lease, timing: defaultTiming(), lease: LeaseName("a"),
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = p.campaign(ctx)
		}()
		time.Sleep(time.Second)
		synctest.Wait()
		if lease.holder() != "a-0" || !p.state.Load().Leading {
			t.Fatalf("the Lease has %q, leading %v", lease.holder(), p.state.Load().Leading)
		}
		cancel()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if lease.holder() != "a-0" {
			t.Errorf("during a write the Lease has %q", lease.holder())
		}
		if renewed := lease.lease.Spec.RenewTime.Time; time.Since(renewed) > p.timing.renew {
			t.Errorf("the Lease was renewed %v ago", time.Since(renewed))
		}
		close(release)
		<-ended
		synctest.Wait()
		if lease.holder() != "" || p.state.Load().Leading {
			t.Errorf("after the stop the Lease has %q, leading %v", lease.holder(), p.state.Load().Leading)
		}
	})
}
