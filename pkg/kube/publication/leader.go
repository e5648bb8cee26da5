package publication

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
)

const (
	// FieldManager owns the fields that are applied.
	FieldManager = "vipgate"

	// writers is how many writes may be under way: one that the API server answers late delays none of
	// the others. Their rate is the client's.
	writers = 8
	// passInterval is the least time between two looks at all objects.
	passInterval = 100 * time.Millisecond
	// echoTime is how long the watch may take to bring a write back. Later an older version is one of
	// an etcd that was restored from a backup.
	echoTime = 10 * time.Second
	// contestTime is how long a difference without another desired status waits: it may be the work of
	// another leader that has seen newer objects, which are on their way.
	contestTime = 2 * time.Second
	// endTimeout is how long Events of the last writes may take at the stop.
	endTimeout = time.Second
)

// leader writes the status of objects. One goroutine uses it, and starts those that write.
type leader struct {
	client   dynamic.Interface
	sources  sources
	log      *slog.Logger
	mu       sync.Mutex // guards recorder and throttle during a pass
	recorder recorder
	throttle logs.Throttle
	count    func(resource string, err error)
	restore  time.Duration // timing.restore
	failed   func(error)   // takes the first error of each pass; nil: none
	// holds reports whether the Lease is this process's: it is asked before each write, and each
	// holdInterval.
	holds        func() bool
	holdInterval time.Duration
	retry        backoff.Backoff
	notUntil     time.Time // while the API server is away
	objects      map[types.UID]*object
}

// object is what is remembered of an object, for as long as it exists. It decides when to write,
// never what.
type object struct {
	// conditions and addresses were written or found last.
	conditions, addresses string
	settled               time.Time // in a pass; zero: it is new
	version               string    // resource version after the last write, awaited until echo
	echo                  time.Time
	contested             time.Time // since when another writer's status is there; zero: it is not
	restored              time.Time // last write against another writer
	// After an error: no write until a time, unless of another status than was tried. refused is the
	// API server's answer.
	retry    backoff.Backoff
	notUntil time.Time
	tried    string
	refused  error
}

func newLeader(watch, write dynamic.Interface, o Options, restore time.Duration, failed func(error)) *leader {
	count := func(resource string, err error) { o.Metrics.PublicationWrite(resource, resultOf(err)) }
	return &leader{
		client:  write,
		sources: sources{client: watch, log: o.Log, changed: make(chan struct{}, 1), followers: map[source]*follower{}},
		recorder: recorder{
			client: write, pod: o.Pod, log: o.Log, count: count, sent: map[string]*series{},
		},
		log: o.Log, count: count, restore: restore, failed: failed,
		retry: backoff.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2},
		holds: func() bool { return true }, holdInterval: defaultTiming().retry,
		objects: map[types.UID]*object{},
	}
}

// run writes until ctx or the time with the Lease ends, and then returns.
func (l *leader) run(ctx context.Context, input *latest.Value[Input]) {
	defer l.sources.stop()
	defer l.end(ctx)
	held := time.NewTicker(l.holdInterval)
	defer held.Stop()
	for ctx.Err() == nil && l.holds() {
		in, changed := input.Get()
		again := l.pass(ctx, in, func() bool {
			select {
			case <-changed:
				return true
			default:
				return len(l.sources.changed) > 0
			}
		})
		if backoff.Sleep(ctx, passInterval) != nil {
			return
		}
		var timer <-chan time.Time // nil: never
		if !again.IsZero() {
			timer = time.After(time.Until(again))
		}
		for waits := true; waits && l.holds(); {
			select {
			case <-held.C:
				continue
			case <-ctx.Done():
			case <-changed:
			case <-l.sources.changed:
			case <-timer:
			}
			waits = false
		}
	}
}

// end sends the Events of what was written before the stop.
func (l *leader) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := l.recorder.flush(ctx, func() bool { return false }); err != nil {
		l.log.Warn("Events discarded at the stop", "count", len(l.recorder.pending), "error", err)
	}
}

// pass writes each status that differs, and returns when to look again without a change; zero:
// never. It ends early once there is newer input: with a thousand objects it takes long.
func (l *leader) pass(ctx context.Context, in Input, newer func() bool) (again time.Time) {
	var p published
	trench, err := decode(in)
	if trench != nil && err == nil {
		l.sources.follow(ctx, trench)
		p = l.sources.published(trench).refused(l.objects)
	}
	if time.Now().Before(l.notUntil) {
		return l.notUntil
	}
	earliest := func(t time.Time) {
		if !t.IsZero() && (again.IsZero() || t.Before(again)) {
			again = t
		}
	}
	var mu sync.Mutex // guards again and first
	var first error
	away := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return first != nil && !answered(first)
	}
	var running errgroup.Group
	running.SetLimit(writers)
	start, whole := time.Now(), true
	for _, w := range l.ordered(evaluate(in, p, metav1.NewTime(start.UTC().Truncate(time.Second)))) {
		if whole = time.Since(start) < passInterval || !newer(); !whole || away() || ctx.Err() != nil {
			break
		}
		running.Go(func() error {
			if !l.holds() {
				return nil
			}
			next, err := l.settle(ctx, w, l.objects[w.object.UID])
			mu.Lock()
			defer mu.Unlock()
			earliest(next)
			if err != nil && (first == nil || !answered(err)) {
				first = err
			}
			return nil
		})
	}
	_ = running.Wait() // never fails
	if !whole {
		earliest(time.Now())
	}
	if first == nil || answered(first) {
		if err := l.recorder.flush(ctx, newer); err != nil {
			first = err
		}
	}
	switch {
	case ctx.Err() != nil:
		return again
	case first == nil || answered(first):
		l.retry.Reset()
	default:
		l.throttle.Log(l.log.Warn, "", "API server does not answer, status will be written later", "error", first)
		l.notUntil = time.Now().Add(l.retry.Next())
		earliest(l.notUntil)
	}
	if first != nil || whole {
		l.failed(first)
	}
	return again
}

// ordered remembers the objects of a list and no others, and orders it: Ingresses last, as they may
// be many; within both parts new objects first, then what was settled longest ago.
func (l *leader) ordered(list []wanted) []wanted {
	known := make(map[types.UID]*object, len(list))
	for _, w := range list {
		o := l.objects[w.object.UID]
		if o == nil {
			o = &object{retry: backoff.Backoff{Min: 200 * time.Millisecond, Max: time.Minute, Jitter: 0.2}}
		}
		known[w.object.UID] = o
	}
	l.objects = known
	rank := func(w wanted) int {
		if w.resource == ingresses {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(list, func(a, b wanted) int {
		return cmp.Or(rank(a)-rank(b), known[a.object.UID].settled.Compare(known[b.object.UID].settled))
	})
	return list
}

// settle writes the status of one object if it differs, and returns when to look again, zero for
// after a change. Several goroutines call it, for different objects.
func (l *leader) settle(ctx context.Context, w wanted, o *object) (again time.Time, err error) {
	o.settled = time.Now()
	now, desired := o.settled, w.conditions+"\n"+w.addresses
	if desired != o.tried {
		o.retry.Reset()
		o.notUntil, o.refused = time.Time{}, nil
	}
	switch {
	case older(w.object.ResourceVersion, o.version) && now.Before(o.echo):
		return o.echo, nil // the write has not come back yet
	case !w.conditionsDiffer && !w.addressesDiffer:
		o.conditions, o.addresses, o.contested = w.conditions, w.addresses, time.Time{}
		o.retry.Reset()
		o.refused = nil
		return again, nil
	case now.Before(o.notUntil):
		return o.notUntil, o.refused
	}
	// A difference without another desired status is the work of another writer.
	foreignConditions := w.conditionsDiffer && o.conditions == w.conditions
	foreignAddresses := w.addressesDiffer && o.addresses == w.addresses
	restores := foreignConditions || foreignAddresses
	if !restores {
		o.contested = time.Time{}
	} else if o.contested.IsZero() {
		o.contested = now
	}
	if next := o.next(l.restore); restores && now.Before(next) {
		switch {
		case w.addressesDiffer && !foreignAddresses: // new addresses
			restores = false
		case foreignAddresses && w.conditionsDiffer && !foreignConditions:
			again, w.status, restores = next, w.kept, false
		default:
			return next, nil
		}
	}
	version, err := l.apply(ctx, w)
	l.count(w.resource.Resource, err)
	o.tried, o.refused = desired, nil
	if err != nil {
		o.notUntil = time.Now().Add(o.retry.Next())
		if ctx.Err() != nil || apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return o.notUntil, nil // the newer object is on its way, or its deletion
		}
		if answered(err) {
			o.refused = err
		}
		if apierrors.IsInvalid(err) && w.conditionsDiffer && w.addressesDiffer {
			l.applyConditions(ctx, w, o)
		}
		l.report(w, err)
		return o.notUntil, err
	}
	o.retry.Reset()
	o.conditions, o.addresses, o.version, o.echo = w.conditions, w.addresses, version, time.Now().Add(echoTime)
	l.log.Debug("status written", "kind", w.object.Kind, "namespace", w.object.Namespace, "name", w.object.Name)
	if restores {
		o.restored, o.contested = now, time.Time{}
		w.events = append(w.events, event{
			true, "StatusRestored", "Publish", "another writer had changed the status that " + FieldManager +
				" applies; stop the other controller, or give the object another class",
		})
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.recorder.add(w.object, w.events)
	return again, nil
}

// applyConditions applies the conditions of an object whose addresses were refused: they must not
// take with them what explains it.
func (l *leader) applyConditions(ctx context.Context, w wanted, o *object) {
	w.status = w.kept
	version, err := l.apply(ctx, w)
	l.count(w.resource.Resource, err)
	if err != nil {
		return
	}
	o.conditions, o.version, o.echo = w.conditions, version, time.Now().Add(echoTime)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.recorder.add(w.object, w.events)
}

// next returns when the status may be written against another writer.
func (o *object) next(interval time.Duration) time.Time {
	next := o.contested.Add(contestTime)
	if at := o.restored.Add(interval); !o.restored.IsZero() && at.After(next) {
		next = at
	}
	return next
}

// apply applies the status to the version of the object that was looked at, and returns the version
// after it.
func (l *leader) apply(ctx context.Context, w wanted) (version string, err error) {
	body, err := json.Marshal(map[string]any{
		"apiVersion": w.object.APIVersion,
		"kind":       w.object.Kind,
		"metadata": map[string]any{
			"namespace": w.object.Namespace, "name": w.object.Name, "uid": w.object.UID,
			"resourceVersion": w.object.ResourceVersion,
		},
		"status": w.status,
	})
	if err != nil {
		return "", fmt.Errorf("failed to encode the status of %s %s: %w", w.object.Kind, w.object.Name, err)
	}
	force := true
	var u *unstructured.Unstructured
	u, err = l.client.Resource(w.resource).Namespace(w.object.Namespace).Patch(ctx, w.object.Name, types.ApplyPatchType,
		body, metav1.PatchOptions{FieldManager: FieldManager, Force: &force}, "status")
	if err != nil {
		return "", fmt.Errorf("failed to apply the status of %s %s/%s: %w",
			w.object.Kind, w.object.Namespace, w.object.Name, err)
	}
	return u.GetResourceVersion(), nil
}

// report logs an error of a write; one that repeats, seldom.
func (l *leader) report(w wanted, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case apierrors.IsForbidden(err):
		l.throttle.Log(l.log.Error, w.resource.Resource+w.object.Namespace,
			"RBAC does not allow to patch status; bind the Role of vipgate in the namespace",
			"resource", w.resource.Resource+"/status", "namespace", w.object.Namespace, "error", err)
	case answered(err):
		l.throttle.Log(l.log.Warn, w.resource.Resource+w.object.Namespace, "status refused, retrying", "error", err)
	}
}

// answered reports whether an error is the answer of an API server, about one object, and not that
// none answers.
func answered(err error) bool {
	var s apierrors.APIStatus
	return errors.As(err, &s) && s.Status().Code >= 400 && s.Status().Code < http.StatusInternalServerError &&
		!apierrors.IsTooManyRequests(err)
}

// older reports whether resource version a is before b; b may be empty.
func older(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && c < 0
}
