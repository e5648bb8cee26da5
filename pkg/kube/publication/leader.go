package publication

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
)

const (
	// FieldManager is the owner of the applied fields.
	FieldManager = "vipgate"

	// writers is the number of concurrent writes, so that a slow answer does not delay all of them.
	writers = 8
	// evaluateInterval is the minimum time between two evaluations of all objects.
	evaluateInterval = 100 * time.Millisecond
	// holdInterval is the delay of a write while the Lease is uncertain, until the next renewal
	// confirms it or the term ends.
	holdInterval = time.Second
	// endTimeout is the time limit for the Events of the last writes when the leader stops.
	endTimeout = time.Second
)

// leader writes the status of objects. One goroutine evaluates the newest objects. The writers
// take the most urgent object from the queue and write its newest desired status.
type leader struct {
	client   dynamic.Interface
	sources  sources
	log      *slog.Logger
	recorder *recorder
	throttle logs.Throttle
	count    func(resource string, err error)
	restore  time.Duration // timing.restore
	failed   func(error)   // called with one of the current errors after a change; nil without errors
	holds    func() bool   // reports whether this process holds the Lease; called before each write
	limit    flowcontrol.RateLimiter
	queue    workqueue.TypedDelayingInterface[types.UID] // locks before mu

	mu      sync.Mutex // guards the fields below
	objects map[types.UID]*object
	failing map[types.UID]error // errors of objects whose last write failed
	retry   backoff.Backoff
	away    time.Time // time of the next write to an API server that does not answer
}

func newLeader(watch, write dynamic.Interface, o Options, restore time.Duration) *leader {
	count := func(resource string, err error) { o.Metrics.PublicationWrite(resource, resultOf(err)) }
	retry := backoff.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2}
	return &leader{
		client:  write,
		sources: sources{client: watch, log: o.Log, changed: make(chan struct{}, 1), followers: map[source]*follower{}},
		recorder: &recorder{
			client: write, pod: o.Pod, log: o.Log, count: count, sent: map[string]*series{}, retry: retry,
			limit: flowcontrol.NewTokenBucketRateLimiter(eventQPS, eventBurst), added: make(chan struct{}, 1),
		},
		log: o.Log, count: count, restore: restore, retry: retry,
		failed: func(error) {}, holds: func() bool { return true },
		limit:   flowcontrol.NewTokenBucketRateLimiter(qps, burst),
		objects: map[types.UID]*object{}, failing: map[types.UID]error{},
	}
}

// run writes status until ctx ends, and returns after the last write.
func (l *leader) run(ctx context.Context, input *latest.Value[Input]) {
	defer l.sources.stop()
	l.queue = workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[types.UID]{
		Queue: workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[types.UID]{Queue: &order{class: l.class}}),
	})
	// The recorder outlives ctx to send the Events of the last writes.
	recording, stop := context.WithCancel(context.WithoutCancel(ctx))
	var events, writes sync.WaitGroup
	events.Go(func() { l.recorder.run(recording) })
	for range writers {
		writes.Go(func() { l.work(ctx) })
	}
	defer func() {
		l.queue.ShutDown()
		writes.Wait()
		stop()
		events.Wait()
	}()
	for {
		begin := time.Now()
		in, changed := input.Get()
		l.offer(l.evaluate(ctx, in))
		// The watch returns each write as a change. With many objects their evaluation must not starve
		// the writers of CPU time.
		if backoff.Sleep(ctx, max(evaluateInterval, 4*time.Since(begin))) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-l.sources.changed:
		}
	}
}

// evaluate returns the desired status of the objects, with the addresses of spec.publish.
func (l *leader) evaluate(ctx context.Context, in Input) []wanted {
	var p published
	trench, err := decode(in)
	if trench != nil && err == nil {
		l.sources.follow(ctx, trench)
		l.mu.Lock()
		p = l.sources.published(trench).refused(l.failing)
		l.mu.Unlock()
	}
	return evaluate(in, p, metav1.NewTime(time.Now().UTC().Truncate(time.Second)))
}

// offer replaces the desired status of all objects, removes objects without one, and queues the
// rest.
func (l *leader) offer(list []wanted) {
	l.mu.Lock()
	known := make(map[types.UID]*object, len(list))
	for _, w := range list {
		o := l.objects[w.object.UID]
		if o == nil {
			o = &object{retry: backoff.Backoff{Min: 200 * time.Millisecond, Max: time.Minute, Jitter: 0.2}}
		}
		o.wanted = w
		known[w.object.UID] = o
	}
	l.objects = known
	failing := len(l.failing)
	maps.DeleteFunc(l.failing, func(id types.UID, _ error) bool { return known[id] == nil })
	if len(l.failing) < failing {
		l.reportFailures()
	}
	l.mu.Unlock()
	for _, w := range list {
		l.queue.Add(w.object.UID)
	}
}

// work writes until ctx ends. It waits for the rate limit before it takes an object from the
// queue, so that the status does not become outdated during the wait, and the most urgent object
// is written first.
func (l *leader) work(ctx context.Context) {
	for permitted := false; ; {
		if !permitted && l.limit.Wait(ctx) != nil {
			return
		}
		id, shutdown := l.queue.Get()
		if shutdown {
			return
		}
		again, wrote := l.process(ctx, id)
		permitted = !wrote // keep an unused permit of the rate limiter
		l.queue.Done(id)
		if !again.IsZero() {
			l.queue.AddAfter(id, time.Until(again))
		}
	}
}

// process settles the newest desired status of an object. It returns the time of the next attempt,
// zero if none is needed without a change, and reports whether it sent a write.
func (l *leader) process(ctx context.Context, id types.UID) (again time.Time, wrote bool) {
	l.mu.Lock()
	o, away := l.objects[id], l.away
	if o == nil {
		l.mu.Unlock()
		return again, false
	}
	w := o.wanted
	l.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return again, false
	case time.Now().Before(away):
		return away, false
	case !l.holds():
		return time.Now().Add(holdInterval), false
	}
	attempts := o.attempts
	again, err := l.settle(ctx, w, o)
	wrote = o.attempts > attempts
	l.mu.Lock()
	defer l.mu.Unlock()
	o.settled = true
	switch {
	case !wrote || ctx.Err() != nil:
	case err == nil || answered(err):
		l.retry.Reset()
	case !time.Now().Before(l.away): // only the first failure of concurrent writes sets the back-off
		l.throttle.Log(l.log.Warn, "", "API server does not answer, status will be written later", "error", err)
		l.away = time.Now().Add(l.retry.Next())
	}
	if l.objects[id] == o && l.failing[id] != err {
		delete(l.failing, id)
		if err != nil {
			l.failing[id] = err
		}
		l.reportFailures()
		latest.Wake(l.sources.changed) // the condition Published lists the refusals
	}
	return again, wrote
}

// reportFailures reports one of the current errors. It selects by UID, so that the reported error
// is stable.
func (l *leader) reportFailures() {
	var first error
	if len(l.failing) > 0 {
		first = l.failing[slices.Min(slices.Collect(maps.Keys(l.failing)))]
	}
	l.failed(first)
}

// class returns the priority of an object in the queue, 0 first: 0 for new objects, 1 for known
// ones and new Ingresses, 2 for known Ingresses, which may be numerous.
func (l *leader) class(id types.UID) (class int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.objects[id]
	if o != nil && o.settled {
		class++
	}
	if o != nil && o.wanted.resource == ingresses {
		class++
	}
	return class
}

// order is the storage of a queue with priority classes. It implements workqueue.Queue.
type order struct {
	class   func(types.UID) int
	classes [3][]types.UID
}

// Touch implements workqueue.Queue. A queued object that is added again keeps its position.
func (*order) Touch(types.UID) {}

// Push implements workqueue.Queue.
func (o *order) Push(id types.UID) {
	class := o.class(id)
	o.classes[class] = append(o.classes[class], id)
}

// Len implements workqueue.Queue.
func (o *order) Len() (n int) {
	for _, ids := range o.classes {
		n += len(ids)
	}
	return n
}

// Pop implements workqueue.Queue.
func (o *order) Pop() (id types.UID) {
	for i, ids := range o.classes {
		if len(ids) > 0 {
			id, o.classes[i] = ids[0], ids[1:]
			break
		}
	}
	return id
}
