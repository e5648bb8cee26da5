package turn

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// lock is the Lease of one turn. It records when the API server last answered about it.
type lock struct {
	resourcelock.Interface
	acquired chan struct{} // closed when this process holds the Lease
	ended    chan struct{} // closed when this process no longer renews the Lease

	mu   sync.Mutex
	last time.Time
}

// acquire acquires the Lease and renews it until ctx ends.
func (taker *Taker) acquire(ctx context.Context) *lock {
	options := taker.options
	lock := &lock{
		Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: options.Namespace, Name: LeaseName(options.Trench)},
			Client:     options.Leases,
			LockConfig: resourcelock.ResourceLockConfig{Identity: options.Pod},
		},
		acquired: make(chan struct{}), ended: make(chan struct{}), last: time.Now(),
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, Name: LeaseName(options.Trench), ReleaseOnCancel: true,
		LeaseDuration: taker.timing.lease, RenewDeadline: taker.timing.renew, RetryPeriod: taker.timing.retry,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { close(lock.acquired) },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		panic(err) // the durations are constants
	}
	go func() {
		defer close(lock.ended)
		elector.Run(ctx)
	}()
	return lock
}

// Get implements resourcelock.Interface.
func (lock *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := lock.Interface.Get(ctx)
	// A missing Lease is no answer: a server that refuses to create it would never let the pod have it.
	if err == nil {
		lock.mu.Lock()
		lock.last = time.Now()
		lock.mu.Unlock()
	}
	return record, raw, err
}

// answered returns the time of the last answer about the Lease.
func (lock *lock) answered() time.Time {
	lock.mu.Lock()
	defer lock.mu.Unlock()
	return lock.last
}
