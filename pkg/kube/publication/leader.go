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
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
)

const (
	// fieldManager is the owner of the applied fields.
	fieldManager = "vipgate"

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

func newLeader(watch, write dynamic.Interface, options Options, restore time.Duration) *leader {
	count := func(resource string, err error) { options.Metrics.PublicationWrite(resource, resultOf(err)) }
	retry := backoff.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2}
	return &leader{
		client: write,
		sources: sources{
			client: watch, log: options.Log, changed: make(chan struct{}, 1), followers: map[source]*cluster.Mirror{},
		},
		recorder: &recorder{
			client: write, pod: options.Pod, log: options.Log, count: count, sent: map[string]*series{}, retry: retry,
			limit: flowcontrol.NewTokenBucketRateLimiter(eventQPS, eventBurst), added: make(chan struct{}, 1),
		},
		log: options.Log, count: count, restore: restore, retry: retry,
		failed: func(error) {}, holds: func() bool { return true },
		limit:   flowcontrol.NewTokenBucketRateLimiter(qps, burst),
		objects: map[types.UID]*object{}, failing: map[types.UID]error{},
	}
}

// run writes status until ctx ends, and returns after the last write.
func (leader *leader) run(ctx context.Context, input *latest.Value[Input]) {
	defer leader.sources.follow(ctx, nil)
	leader.queue = workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[types.UID]{
		Queue: workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[types.UID]{Queue: &order{class: leader.class}}),
	})
	// The recorder outlives ctx to send the Events of the last writes.
	recording, stop := context.WithCancel(context.WithoutCancel(ctx))
	var events, writes sync.WaitGroup
	events.Go(func() { leader.recorder.run(recording) })
	for range writers {
		writes.Go(func() { leader.work(ctx) })
	}
	defer func() {
		leader.queue.ShutDown()
		writes.Wait()
		stop()
		events.Wait()
	}()
	for {
		begin := time.Now()
		in, changed := input.Get()
		leader.offer(leader.evaluate(ctx, in))
		// The watch returns each write as a change. With many objects their evaluation must not starve
		// the writers of CPU time.
		if backoff.Sleep(ctx, max(evaluateInterval, 4*time.Since(begin))) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-leader.sources.changed:
		}
	}
}

// evaluate returns the desired status of the objects, with the addresses of spec.publish.
func (leader *leader) evaluate(ctx context.Context, input Input) []wanted {
	var p published
	trench, err := decode(input)
	if trench != nil && err == nil {
		leader.sources.follow(ctx, needed(trench))
		leader.mu.Lock()
		p = leader.sources.published(trench).refused(leader.failing)
		leader.mu.Unlock()
	}
	return evaluate(input, p, metav1.NewTime(time.Now().UTC().Truncate(time.Second)))
}

// offer replaces the desired status of all objects, removes those without one, and queues the rest.
func (leader *leader) offer(list []wanted) {
	leader.mu.Lock()
	known := make(map[types.UID]*object, len(list))
	for _, wanted := range list {
		o := leader.objects[wanted.object.UID]
		if o == nil {
			o = &object{retry: backoff.Backoff{Min: 200 * time.Millisecond, Max: time.Minute, Jitter: 0.2}}
		}
		// Keep the state of earlier writes, such as the back-off.
		o.wanted = wanted
		known[wanted.object.UID] = o
	}
	leader.objects = known
	failing := len(leader.failing)
	maps.DeleteFunc(leader.failing, func(uid types.UID, _ error) bool { return known[uid] == nil })
	if len(leader.failing) < failing {
		leader.reportFailures()
	}
	leader.mu.Unlock()
	for _, wanted := range list {
		// Add without mu: the queue calls class, which locks it.
		leader.queue.Add(wanted.object.UID)
	}
}

// work writes until ctx ends. It waits for the rate limit before it takes an object from the
// queue, so that the status does not become outdated during the wait, and the most urgent object
// is written first.
func (leader *leader) work(ctx context.Context) {
	for permitted := false; ; {
		if !permitted && leader.limit.Wait(ctx) != nil {
			return
		}
		uid, shutdown := leader.queue.Get()
		if shutdown {
			return
		}
		again, wrote := leader.process(ctx, uid)
		permitted = !wrote // keep an unused permit of the rate limiter
		leader.queue.Done(uid)
		if !again.IsZero() {
			leader.queue.AddAfter(uid, time.Until(again))
		}
	}
}

// process settles the newest desired status of an object. It returns the time of the next attempt,
// zero if none is needed without a change, and reports whether it sent a write.
func (leader *leader) process(ctx context.Context, uid types.UID) (again time.Time, wrote bool) {
	leader.mu.Lock()
	object, away := leader.objects[uid], leader.away
	if object == nil {
		leader.mu.Unlock()
		return again, false
	}
	wanted := object.wanted
	leader.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return again, false
	case time.Now().Before(away):
		return away, false
	case !leader.holds():
		return time.Now().Add(holdInterval), false
	}
	attempts := object.attempts
	again, err := leader.settle(ctx, wanted, object)
	wrote = object.attempts > attempts
	leader.mu.Lock()
	defer leader.mu.Unlock()
	object.settled = true
	switch {
	case !wrote || ctx.Err() != nil:
	case err == nil || answered(err):
		// Every answer proves that the API server is reachable.
		leader.retry.Reset()
	case !time.Now().Before(leader.away): // only the first failure of concurrent writes sets the back-off
		leader.throttle.Log(leader.log.Warn, "", "API server does not answer, status will be written later", "error", err)
		leader.away = time.Now().Add(leader.retry.Next())
	}
	// offer may have removed the object during the write.
	if leader.objects[uid] == object && leader.failing[uid] != err {
		delete(leader.failing, uid)
		if err != nil {
			leader.failing[uid] = err
		}
		leader.reportFailures()
		latest.Wake(leader.sources.changed) // the condition Published lists the refusals
	}
	return again, wrote
}

// reportFailures reports one of the current errors, selected by UID so that the report is stable.
func (leader *leader) reportFailures() {
	var first error
	if len(leader.failing) > 0 {
		first = leader.failing[slices.Min(slices.Collect(maps.Keys(leader.failing)))]
	}
	leader.failed(first)
}

// class returns the priority of an object in the queue, 0 first: 0 for new objects, 1 for known
// ones and new Ingresses, 2 for known Ingresses, which may be numerous.
func (leader *leader) class(uid types.UID) (class int) {
	leader.mu.Lock()
	defer leader.mu.Unlock()
	object := leader.objects[uid]
	if object != nil && object.settled {
		class++
	}
	if object != nil && object.wanted.resource == ingresses {
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
func (order *order) Push(uid types.UID) {
	class := order.class(uid)
	order.classes[class] = append(order.classes[class], uid)
}

// Len implements workqueue.Queue.
func (order *order) Len() (n int) {
	for _, ids := range order.classes {
		n += len(ids)
	}
	return n
}

// Pop implements workqueue.Queue.
func (order *order) Pop() (uid types.UID) {
	for i, ids := range order.classes {
		if len(ids) > 0 {
			uid, order.classes[i] = ids[0], ids[1:]
			break
		}
	}
	return uid
}
