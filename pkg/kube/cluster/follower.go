package cluster

import (
	"cmp"
	"context"
	"errors"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Delays between attempts to list and watch. With client-go's defaults, which reach a minute, the
// trench file would stay outdated for that time after an outage.
const (
	minDelay = 200 * time.Millisecond
	maxDelay = 5 * time.Second
	// refusedTime is the time after which a refusal does not come from a server that just started.
	refusedTime = 10 * time.Second
)

var errClosed = errors.New("the connection was closed")

// follower keeps a store in sync with the API server.
type follower struct {
	what  string // for messages
	store *store
	// required reports whether nothing takes effect without the objects, even if they are refused.
	required bool
	refused  atomic.Bool // see isRefused
	first    time.Time   // the first of consecutive refusals; only failing uses it
	condition
	cancel context.CancelFunc
	done   chan struct{}
}

// newFollower returns a follower that is not started. It calls changed after changes of the store
// and reported after changes of the condition.
func newFollower(what string, changed, reported func()) *follower {
	return &follower{
		what: what, store: newStore(changed), condition: condition{changed: reported}, done: make(chan struct{}),
	}
}

// start follows a source until stop is called or ctx ends.
func (follower *follower) start(ctx context.Context, source source) {
	ctx, follower.cancel = context.WithCancel(ctx)
	go func() {
		defer close(follower.done)
		follower.run(ctx, source)
	}()
}

func (follower *follower) stop() {
	follower.cancel()
	<-follower.done
}

func (follower *follower) run(ctx context.Context, source source) {
	lister := &cache.ListWatch{
		ListWithContextFunc: func(_ context.Context, options metav1.ListOptions) (runtime.Object, error) {
			call, cancel := context.WithTimeout(ctx, listTimeout)
			defer cancel()
			list, err := source.list(call, options)
			if err != nil {
				follower.failing(ctx, err) // only an established watch clears the failure
			}
			return list, err
		},
		WatchFuncWithContext: func(_ context.Context, options metav1.ListOptions) (watch.Interface, error) {
			w, err := source.watch(ctx, options)
			if _, streams := w.(*watch.StreamWatcher); err == nil && !streams {
				err = errClosed // client-go returns an ended watch instead of the error
			}
			follower.failing(ctx, err)
			return w, err
		},
	}
	runReflector(ctx, follower.what, lister, source.example, follower.store)
}

// isRefused reports whether the API server refuses the objects: other caches take effect without.
func (follower *follower) isRefused() bool {
	failure, _ := follower.failure()
	return follower.refused.Load() && (!failure.Since.IsZero() || !follower.store.isSynced())
}

// failing reports the result of an attempt. It ignores errors after the end of ctx. If a resource
// version expired, or the API server streams no lists, the reflector lists without delay.
func (follower *follower) failing(ctx context.Context, err error) {
	if ctx.Err() == nil && !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) && !apierrors.IsInvalid(err) {
		follower.report(follower.what, err)
		forbidden := apierrors.IsForbidden(err)
		follower.first = cmp.Or(follower.first, time.Now())
		if !forbidden {
			follower.first = time.Time{} // a server that is away may start again
		}
		lasts := forbidden && !follower.required && time.Since(follower.first) >= refusedTime
		// A watch that streams the list is established before the list is complete.
		if (err == nil && follower.store.isSynced() || lasts) && follower.refused.Swap(lasts) != lasts {
			follower.condition.changed() // a refusal is not stale
			follower.store.changed()
		}
	}
}
