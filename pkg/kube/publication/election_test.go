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
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/vipgate/vipgate/pkg/latest"
)

// fakeLease is an API server with one Lease.
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

// take sets another holder of the Lease.
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

// recreate replaces the Lease by a new one of another holder, as after its deletion.
func (l *fakeLease) recreate(holder string) {
	l.mu.Lock()
	l.lease = &coordinationv1.Lease{ObjectMeta: l.lease.ObjectMeta, Spec: coordinationv1.LeaseSpec{
		LeaseDurationSeconds: l.lease.Spec.LeaseDurationSeconds,
	}}
	l.lease.UID = "another"
	l.mu.Unlock()
	l.take(holder)
}

// candidate returns a Publisher for the election.
func candidate(a *api, l *fakeLease) *Publisher {
	return &Publisher{
		options: Options{
			Namespace: "ns", Trench: "a", Pod: "a-0",
			Metrics: &counters{n: map[string]int{}}, Log: slog.New(slog.DiscardHandler),
		},
		input: latest.New(withReports(input(trench(), service(), accepted(vip4)))),
		state: latest.New(State{}), watch: a, write: a, leases: l, timing: defaultTiming(), lease: LeaseName("a"),
	}
}

// campaign starts the election and waits until it is won.
func campaign(t *testing.T, p *Publisher) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.campaign(ctx)
	}()
	time.Sleep(time.Second)
	synctest.Wait()
	if s := p.state.Load(); !s.Leading || s.Leader != "a-0" {
		t.Fatalf("leading %v, the leader is %q", s.Leading, s.Leader)
	}
	return func() {
		cancel()
		<-ended
	}
}

// A leader stops writing when it reads another holder, for example after a long suspension of its
// process or the deletion of the Lease, even before its renew deadline. It no longer reports
// errors.
func TestAnotherHolderEndsTheTerm(t *testing.T) {
	for name, change := range map[string]func(*fakeLease){
		"taken":   func(l *fakeLease) { l.take("a-1") },
		"deleted": func(l *fakeLease) { l.recreate("a-1") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, lease := newAPI(), newFakeLease()
				a.answer = func(_ int, w write) error {
					if w.resource == "services" {
						return errForbidden
					}
					return nil
				}
				p := candidate(a, lease)
				stop := campaign(t, p)
				if len(a.of("services")) == 0 || p.state.Load().WriteError == nil {
					t.Fatalf("%d writes, error %v", len(a.of("services")), p.state.Load().WriteError)
				}
				change(lease)
				time.Sleep(p.timing.retry + p.timing.retry/2) // client-go adds jitter
				synctest.Wait()
				before := len(a.of("services"))
				if s := p.state.Load(); s.Leading || s.Leader != "a-1" || s.WriteError != nil {
					t.Errorf("leading %v, the leader is %q, error %v", s.Leading, s.Leader, s.WriteError)
				}
				p.input.Set(input(trench(), service(), accepted(vip6)))
				time.Sleep(time.Second)
				synctest.Wait()
				if now := len(a.of("services")); now != before {
					t.Errorf("%d writes more", now-before)
				}
				stop()
				if lease.holder() != "a-1" {
					t.Errorf("the Lease has %q", lease.holder())
				}
			})
		})
	}
}

// A leader that stops before it reads the new holder does not release the Lease of that holder.
func TestStopKeepsAnotherHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, lease := newAPI(), newFakeLease()
		stop := campaign(t, candidate(a, lease))
		lease.take("a-1")
		stop()
		if lease.holder() != "a-1" {
			t.Errorf("the Lease has %q", lease.holder())
		}
	})
}

// Without renewal, for example while the process is suspended, the Lease becomes uncertain before
// it expires; it also does after its deletion.
func TestLeaseInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, lost := newFakeLease(), false
		lock := &lease{
			Interface: &resourcelock.LeaseLock{
				LeaseMeta: metav1.ObjectMeta{Namespace: "ns", Name: "vipgate-a"}, Client: l,
				LockConfig: resourcelock.ResourceLockConfig{Identity: "a-0"},
			},
			valid: 10 * time.Second, lost: func() { lost = true },
		}
		record := resourcelock.LeaderElectionRecord{HolderIdentity: "a-0"}
		want := func(holds bool) {
			t.Helper()
			if lock.holds() != holds || lost {
				t.Errorf("holds %v, lost %v, want %v", lock.holds(), lost, holds)
			}
		}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		want(false)
		must(lock.Create(t.Context(), record))
		want(true)
		time.Sleep(10 * time.Second)
		want(false)
		must(lock.Update(t.Context(), record))
		want(true)
		l.lease = nil
		if _, _, err := lock.Get(t.Context()); !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		want(false)
		must(lock.Create(t.Context(), record))
		want(true)
	})
}

// The Lease is held until the last write ends, so that two leaders never write concurrently.
func TestLeaseOutlivesWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, lease, release := newAPI(), newFakeLease(), make(chan struct{})
		a.delay = func(string) { <-release }
		p := candidate(a, lease)
		stopped, stop := make(chan struct{}), campaign(t, p)
		go func() {
			defer close(stopped)
			stop()
		}()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if lease.holder() != "a-0" {
			t.Errorf("during a write the Lease has %q", lease.holder())
		}
		if renewed := lease.lease.Spec.RenewTime.Time; time.Since(renewed) > p.timing.renew {
			t.Errorf("the Lease was renewed %v ago", time.Since(renewed))
		}
		close(release)
		<-stopped
		synctest.Wait()
		if lease.holder() != "" || p.state.Load().Leading {
			t.Errorf("after the stop the Lease has %q, leading %v", lease.holder(), p.state.Load().Leading)
		}
	})
}
