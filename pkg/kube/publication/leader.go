package publication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

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

// leader writes the status of objects. One goroutine uses it.
type leader struct {
	client   dynamic.Interface
	sources  sources
	recorder recorder
	log      *slog.Logger
	throttle logs.Throttle
	count    func(resource string, err error)
	restore  time.Duration // timing.restore
	failed   func(error)   // takes the first error of each pass; nil: none
	retry    backoff.Backoff
	notUntil time.Time // while the API server is away
	objects  map[types.UID]*object
}

// object is what is remembered of an object, for as long as it exists. It decides when to write,
// never what.
type object struct {
	// conditions and addresses were written or found last.
	conditions, addresses string
	version               string // resource version after the last write, awaited until echo
	echo                  time.Time
	contested             time.Time // since when another writer's status is there; zero: it is not
	restored              time.Time // last write against another writer
	retry                 backoff.Backoff
	notUntil              time.Time // after an error
}

func newLeader(watch, write dynamic.Interface, o Options, restore time.Duration, failed func(error)) *leader {
	count := func(resource string, err error) { o.Metrics.PublicationWrite(resource, resultOf(err)) }
	return &leader{
		client:  write,
		sources: sources{client: watch, changed: make(chan struct{}, 1), followers: map[source]*follower{}},
		recorder: recorder{
			client: write, pod: o.Pod, log: o.Log, count: count, sent: map[string]*series{},
		},
		log: o.Log, count: count, restore: restore, failed: failed,
		retry:   backoff.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.2},
		objects: map[types.UID]*object{},
	}
}

// run writes until ctx ends, and then returns.
func (l *leader) run(ctx context.Context, input *latest.Value[Input]) {
	defer l.sources.stop()
	defer l.end(ctx)
	for ctx.Err() == nil {
		in, changed := input.Get()
		again := l.pass(ctx, in)
		if backoff.Sleep(ctx, passInterval) != nil {
			return
		}
		var timer <-chan time.Time // nil: never
		if !again.IsZero() {
			timer = time.After(time.Until(again))
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-l.sources.changed:
		case <-timer:
		}
	}
}

// end sends the Events of what was written before the stop.
func (l *leader) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := l.recorder.flush(ctx); err != nil {
		l.log.Warn("Events discarded at the stop", "count", len(l.recorder.pending), "error", err)
	}
}

// pass writes each status that differs, and returns when to look again without a change; zero:
// never.
func (l *leader) pass(ctx context.Context, in Input) (again time.Time) {
	var p published
	trench, err := decode(in)
	if trench != nil && err == nil {
		l.sources.follow(ctx, trench)
		p = l.sources.published(trench)
	}
	if time.Now().Before(l.notUntil) {
		return l.notUntil
	}
	earliest := func(t time.Time) {
		if again.IsZero() || t.Before(again) {
			again = t
		}
	}
	var first error
	known := map[types.UID]*object{}
	for _, w := range evaluate(in, p, metav1.NewTime(time.Now().UTC().Truncate(time.Second))) {
		o := l.objects[w.object.UID]
		if o == nil {
			o = &object{retry: backoff.Backoff{Min: 200 * time.Millisecond, Max: time.Minute, Jitter: 0.2}}
		}
		known[w.object.UID] = o
		if first != nil && !answered(first) {
			continue // the API server is away
		}
		next, err := l.settle(ctx, w, o)
		if !next.IsZero() {
			earliest(next)
		}
		if err != nil && (first == nil || !answered(err)) {
			first = err
		}
	}
	l.objects = known
	if first == nil || answered(first) {
		if err := l.recorder.flush(ctx); err != nil {
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
	l.failed(first)
	return again
}

// settle writes the status of one object if it differs, and returns when to look again, zero for
// after a change.
func (l *leader) settle(ctx context.Context, w wanted, o *object) (again time.Time, err error) {
	now := time.Now()
	switch {
	case older(w.object.ResourceVersion, o.version) && now.Before(o.echo):
		return o.echo, nil // the write has not come back yet
	case !w.conditionsDiffer && !w.addressesDiffer:
		o.conditions, o.addresses, o.contested = w.conditions, w.addresses, time.Time{}
		o.retry.Reset()
		return again, nil
	case now.Before(o.notUntil):
		return o.notUntil, nil
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
	if err != nil {
		o.notUntil = time.Now().Add(o.retry.Next())
		if ctx.Err() != nil || apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return o.notUntil, nil // the newer object is on its way, or its deletion
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
	l.recorder.add(w.object, w.events)
	return again, nil
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
