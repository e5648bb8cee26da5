package publication

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// seriesTime is the time in which a repeated Event increments the count of the first one.
	seriesTime = 10 * time.Minute
	// maxNote is the API server's limit for the note of an Event, in bytes.
	maxNote = 1024
	// maxPending is the maximum number of queued Events while the API server is unreachable.
	maxPending = 1000
	// eventQPS and eventBurst limit Events, so that Events of many objects do not delay status
	// writes.
	eventQPS, eventBurst = 25, 50
)

var eventResource = eventsv1.SchemeGroupVersion.WithResource("events")

// event is an Event about an object.
type event struct {
	warning              bool
	reason, action, note string
}

// changes returns the Events for the conditions of an object that differ from the live ones. The
// Events of unchanged conditions were sent with their write, possibly by an earlier leader.
func changes(v translation.Verdict, wanted, live []metav1.Condition) (events []event) {
	for _, w := range wanted {
		l := find(live, w.Type)
		same := l != nil && l.Status == w.Status
		switch strings.TrimPrefix(w.Type, v1alpha1.Group+"/") {
		case v1alpha1.Accepted:
			if !same || l.Reason != w.Reason {
				events = append(events, event{w.Status != metav1.ConditionTrue, w.Reason, "Translate", w.Message})
			}
		case v1alpha1.Advertised:
			switch {
			case w.Reason == notAccepted || w.Status == metav1.ConditionUnknown:
			case w.Status == metav1.ConditionTrue && !same:
				events = append(events, event{false, "Advertised", "Advertise", w.Message})
			case w.Status == metav1.ConditionFalse && (!same || l.Reason != w.Reason):
				// A new VIP takes time to be advertised. Warn only if it was advertised before.
				lost := l != nil && l.Status == metav1.ConditionTrue
				events = append(events, event{lost, "NotAdvertised", "Advertise", w.Message})
			}
		case v1alpha1.TargetsReady:
			switch fails := w.Reason == checkFailed; {
			case fails && (!same || l.Reason != w.Reason):
				events = append(events, event{true, w.Reason, "Check", w.Message})
			case w.Status == metav1.ConditionTrue && l != nil && l.Reason == checkFailed:
				events = append(events, event{false, v1alpha1.TargetsReady, "Check", w.Message})
			}
		}
	}
	return append(events, problemEvents(v, live)...)
}

// problemEvents returns an Event for each problem that no live condition names.
func problemEvents(v translation.Verdict, live []metav1.Condition) (events []event) {
	if !v.Accepted {
		return nil
	}
	for _, p := range v.Problems[:min(len(v.Problems), maxListed)] {
		note := describe(v, p)
		if !slices.ContainsFunc(live, func(l metav1.Condition) bool { return strings.Contains(l.Message, note) }) {
			// NoPods is not a warning: a Service is often created before its pods.
			events = append(events, event{p.Reason != translation.ReasonNoPods, p.Reason, "Translate", note})
		}
	}
	return events
}

// recorder sends Events concurrently with status writes, with a separate rate limit.
type recorder struct {
	client dynamic.Interface
	pod    string
	log    *slog.Logger
	count  func(resource string, err error)
	limit  flowcontrol.RateLimiter
	retry  backoff.Backoff
	added  chan struct{}
	sent   map[string]*series // used by run only

	mu      sync.Mutex
	pending []record
}

type record struct {
	object corev1.ObjectReference
	event
	time time.Time
}

type series struct {
	name  string
	last  time.Time
	count int32
}

// add queues Events about an object.
func (r *recorder) add(object corev1.ObjectReference, events []event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, e := range events {
		// The name of an Event contains its time, which must be unique.
		r.pending = append(r.pending, record{object, e, time.Now().Add(time.Duration(i))})
	}
	if more := len(r.pending) - maxPending; more > 0 {
		r.log.Warn("Events discarded: the API server does not take them", "count", more)
		r.pending = r.pending[more:]
	}
	latest.Wake(r.added)
}

// first returns the oldest Event in the queue, without removing it.
func (r *recorder) first() (record, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) == 0 {
		return record{}, false
	}
	return r.pending[0], true
}

// done removes an Event from the queue, unless it was discarded.
func (r *recorder) done(e record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) > 0 && r.pending[0] == e {
		r.pending = r.pending[1:]
	}
}

// run sends Events until ctx ends, and then the Events of the last writes within endTimeout.
func (r *recorder) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := r.flush(ctx); err != nil {
			_ = r.retry.Wait(ctx)
			continue
		}
		r.retry.Reset()
		select {
		case <-r.added:
		case <-ctx.Done():
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := r.flush(ctx); err != nil {
		r.log.Warn("Events discarded at the stop", "count", len(r.pending), "error", err)
	}
}

// flush sends the queued Events. If the API server does not answer, it keeps the remaining Events
// in the queue and returns the error.
func (r *recorder) flush(ctx context.Context) error {
	for key, s := range r.sent {
		if time.Since(s.last) > seriesTime {
			delete(r.sent, key)
		}
	}
	for {
		e, ok := r.first()
		if !ok {
			return nil
		}
		if err := r.limit.Wait(ctx); err != nil {
			return fmt.Errorf("failed to send Events: %w", err)
		}
		err := r.send(ctx, e)
		r.count("events", err)
		if err != nil {
			if !answered(err) {
				return err
			}
			r.log.Warn("Event refused", "object", e.object.Name, "error", err)
		}
		r.done(e)
	}
}

func (r *recorder) send(ctx context.Context, e record) error {
	key := strings.Join([]string{string(e.object.UID), e.reason, e.note}, "\x00")
	client := r.client.Resource(eventResource).Namespace(e.object.Namespace)
	if s := r.sent[key]; s != nil {
		patch, err := json.Marshal(map[string]any{"series": eventsv1.EventSeries{
			Count: s.count + 1, LastObservedTime: metav1.NewMicroTime(e.time),
		}})
		if err != nil {
			return fmt.Errorf("failed to encode Event %s: %w", s.name, err)
		}
		if _, err = client.Patch(ctx, s.name, types.MergePatchType, patch, metav1.PatchOptions{}); err == nil {
			s.count, s.last = s.count+1, e.time
			return nil
		} else if !apierrors.IsNotFound(err) {
			return fmt.Errorf("failed to patch Event %s/%s: %w", e.object.Namespace, s.name, err)
		}
	}
	x := r.event(e)
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(x)
	if err != nil {
		return fmt.Errorf("failed to encode Event %s: %w", x.Name, err)
	}
	delete(content["metadata"].(map[string]any), "creationTimestamp")
	_, err = client.Create(ctx, &unstructured.Unstructured{Object: content}, metav1.CreateOptions{})
	// The Event exists already if the answer to an earlier attempt was lost.
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("failed to create Event %s/%s: %w", x.Namespace, x.Name, err)
	}
	r.sent[key] = &series{name: x.Name, last: e.time, count: 1}
	return nil
}

func (r *recorder) event(e record) *eventsv1.Event {
	x := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: e.object.Namespace, Name: fmt.Sprintf("%s.%x", e.object.Name, e.time.UnixNano()),
		},
		EventTime:           metav1.NewMicroTime(e.time),
		ReportingController: v1alpha1.Group + "/kube",
		ReportingInstance:   r.pod,
		Action:              e.action,
		Reason:              e.reason,
		Regarding:           e.object,
		Note:                strings.ToValidUTF8(e.note[:min(len(e.note), maxNote)], ""),
		Type:                corev1.EventTypeNormal,
	}
	if e.warning {
		x.Type = corev1.EventTypeWarning
	}
	x.TypeMeta = metav1.TypeMeta{APIVersion: eventsv1.SchemeGroupVersion.String(), Kind: "Event"}
	return x
}
