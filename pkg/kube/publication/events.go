package publication

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
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
	// eventQPS and eventBurst limit Events, so that Events of many objects do not delay status writes.
	eventQPS, eventBurst = 25, 50
)

var eventResource = eventsv1.SchemeGroupVersion.WithResource("events")

type event struct {
	warning              bool
	reason, action, note string
}

// changes returns the Events for the conditions of an object that differ from the live ones. The
// Events of unchanged conditions were sent with their write, possibly by an earlier leader.
func changes(verdict translation.Verdict, wanted, live []metav1.Condition) (events []event) {
	for _, condition := range wanted {
		l := find(live, condition.Type)
		same := l != nil && l.Status == condition.Status
		switch strings.TrimPrefix(condition.Type, v1alpha1.Group+"/") {
		case v1alpha1.Accepted:
			if !same || l.Reason != condition.Reason {
				events = append(events, event{
					condition.Status != metav1.ConditionTrue, condition.Reason, "Translate",
					condition.Message,
				})
			}
		case v1alpha1.Advertised:
			switch {
			case condition.Reason == notAccepted || condition.Status == metav1.ConditionUnknown:
			case condition.Status == metav1.ConditionTrue && !same:
				events = append(events, event{false, "Advertised", "Advertise", condition.Message})
			case condition.Status == metav1.ConditionFalse && (!same || l.Reason != condition.Reason):
				// A new VIP takes time to be advertised. Warn only if it was advertised before.
				lost := l != nil && l.Status == metav1.ConditionTrue
				events = append(events, event{lost, "NotAdvertised", "Advertise", condition.Message})
			}
		case v1alpha1.TargetsReady:
			switch fails := condition.Reason == checkFailed; {
			case fails && (!same || l.Reason != condition.Reason):
				events = append(events, event{true, condition.Reason, "Check", condition.Message})
			case condition.Status == metav1.ConditionTrue && l != nil && l.Reason == checkFailed:
				events = append(events, event{false, v1alpha1.TargetsReady, "Check", condition.Message})
			}
		}
	}
	return append(events, problemEvents(verdict, live)...)
}

// problemEvents returns an Event for each problem that no live condition names.
func problemEvents(verdict translation.Verdict, live []metav1.Condition) (events []event) {
	if !verdict.Accepted {
		return nil
	}
	for _, problem := range verdict.Problems[:min(len(verdict.Problems), maxListed)] {
		note := describe(verdict, problem)
		named := func(condition metav1.Condition) bool { return strings.Contains(condition.Message, note) }
		if !slices.ContainsFunc(live, named) {
			// NoPods is not a warning: a Service is often created before its pods.
			events = append(events, event{problem.Reason != translation.ReasonNoPods, problem.Reason, "Translate", note})
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

func (recorder *recorder) add(object corev1.ObjectReference, events []event) {
	recorder.mu.Lock()
	defer recorder.mu.Unlock()
	for i, event := range events {
		// The name of an Event contains its time, which must be unique.
		recorder.pending = append(recorder.pending, record{object, event, time.Now().Add(time.Duration(i))})
	}
	if more := len(recorder.pending) - maxPending; more > 0 {
		recorder.log.Warn("Events discarded: the API server does not take them", "count", more)
		recorder.pending = recorder.pending[more:]
	}
	latest.Wake(recorder.added)
}

// first returns the oldest Event in the queue, without removing it.
func (recorder *recorder) first() (record, bool) {
	recorder.mu.Lock()
	defer recorder.mu.Unlock()
	if len(recorder.pending) == 0 {
		return record{}, false
	}
	return recorder.pending[0], true
}

// done removes an Event from the queue, unless it was discarded.
func (recorder *recorder) done(record record) {
	recorder.mu.Lock()
	defer recorder.mu.Unlock()
	// add may have discarded the Event while it was sent.
	if len(recorder.pending) > 0 && recorder.pending[0] == record {
		recorder.pending = recorder.pending[1:]
	}
}

// run sends Events until ctx ends, and then the Events of the last writes within endTimeout.
func (recorder *recorder) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := recorder.flush(ctx); err != nil {
			_ = recorder.retry.Wait(ctx)
			continue
		}
		recorder.retry.Reset()
		select {
		case <-recorder.added:
		case <-ctx.Done():
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := recorder.flush(ctx); err != nil {
		recorder.log.Warn("Events discarded at the stop", "count", len(recorder.pending), "error", err)
	}
}

// flush sends the queued Events. If the API server does not answer, it keeps the remaining Events
// in the queue and returns the error.
func (recorder *recorder) flush(ctx context.Context) error {
	// Remove expired series, which bounds the map.
	maps.DeleteFunc(recorder.sent, func(_ string, s *series) bool { return time.Since(s.last) > seriesTime })
	for {
		record, ok := recorder.first()
		if !ok {
			return nil
		}
		if err := recorder.limit.Wait(ctx); err != nil {
			return fmt.Errorf("failed to send Events: %w", err)
		}
		err := recorder.send(ctx, record)
		recorder.count("events", err)
		if err != nil {
			if !answered(err) {
				return err
			}
			recorder.log.Warn("Event refused", "object", record.object.Name, "error", err)
		}
		recorder.done(record)
	}
}

func (recorder *recorder) send(ctx context.Context, record record) error {
	key := strings.Join([]string{string(record.object.UID), record.reason, record.note}, "\x00")
	client := recorder.client.Resource(eventResource).Namespace(record.object.Namespace)
	if s := recorder.sent[key]; s != nil {
		patch, err := json.Marshal(map[string]any{"series": eventsv1.EventSeries{
			Count: s.count + 1, LastObservedTime: metav1.NewMicroTime(record.time),
		}})
		if err != nil {
			return fmt.Errorf("failed to encode Event %s: %w", s.name, err)
		}
		if _, err = client.Patch(ctx, s.name, types.MergePatchType, patch, metav1.PatchOptions{}); err == nil {
			s.count, s.last = s.count+1, record.time
			return nil
		} else if !apierrors.IsNotFound(err) {
			return fmt.Errorf("failed to patch Event %s/%s: %w", record.object.Namespace, s.name, err)
		}
	}
	// A new Event, or one that the API server deleted after its time to live.
	event := recorder.event(record)
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(event)
	if err != nil {
		return fmt.Errorf("failed to encode Event %s: %w", event.Name, err)
	}
	// ToUnstructured encodes the zero time as null.
	delete(content["metadata"].(map[string]any), "creationTimestamp")
	_, err = client.Create(ctx, &unstructured.Unstructured{Object: content}, metav1.CreateOptions{})
	// The Event exists already if the answer to an earlier attempt was lost.
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("failed to create Event %s/%s: %w", event.Namespace, event.Name, err)
	}
	recorder.sent[key] = &series{name: event.Name, last: record.time, count: 1}
	return nil
}

func (recorder *recorder) event(record record) *eventsv1.Event {
	event := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: record.object.Namespace, Name: fmt.Sprintf("%s.%x", record.object.Name, record.time.UnixNano()),
		},
		EventTime:           metav1.NewMicroTime(record.time),
		ReportingController: v1alpha1.Group + "/kube",
		ReportingInstance:   recorder.pod,
		Action:              record.action,
		Reason:              record.reason,
		Regarding:           record.object,
		Note:                strings.ToValidUTF8(record.note[:min(len(record.note), maxNote)], ""),
		Type:                corev1.EventTypeNormal,
	}
	if record.warning {
		event.Type = corev1.EventTypeWarning
	}
	event.TypeMeta = metav1.TypeMeta{APIVersion: eventsv1.SchemeGroupVersion.String(), Kind: "Event"}
	return event
}
