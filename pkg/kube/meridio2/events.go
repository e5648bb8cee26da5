package meridio2

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/logs"
)

const (
	// maxNote is the API server's limit for the note of an Event, in bytes.
	maxNote = 1024
	// maxPrefix is the maximum length of an object's name in the name of its Event.
	maxPrefix = 200
)

// Events creates an Event for each refused object. All pods of a Gateway use the same names, so
// that each refusal has only one Event. It implements task.Task.
type Events struct {
	Options
	sent     map[string]bool // by name of the Event
	throttle logs.Throttle
}

// NewEvents returns a reporter of refusals.
func NewEvents(o Options) *Events { return &Events{Options: o, sent: map[string]bool{}} }

// String implements task.Task.
func (*Events) String() string { return "Events" }

// Run creates Events until ctx ends, and returns ctx's error. Failures are retried.
func (e *Events) Run(ctx context.Context) error {
	retry := backoff.Backoff{Min: time.Second, Max: time.Minute, Jitter: 0.2}
	for {
		input, changed := e.Input.Get()
		var due <-chan time.Time // nil without a retry
		if err := e.send(ctx, refusals(input.Result)); err == nil {
			retry.Reset()
		} else if ctx.Err() == nil {
			e.throttle.Log(e.Log.Warn, "", "Event not created, retrying", "error", err)
			due = time.After(retry.Next())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-due:
		}
	}
}

// refusals returns the problems of refused objects. A missing Gateway has no Events.
func refusals(r translation.Result) (all []translation.Problem) {
	for _, v := range r.Verdicts() {
		// A deletion is intended and needs no Event.
		if !v.Accepted && v.Reason != ReasonDeleting && v.Object.Name != "" {
			all = append(all, translation.Problem{Object: v.Object, Reason: v.Reason, Message: v.Message})
		}
		all = append(all, v.Problems...)
	}
	return all
}

// send creates missing Events, and removes resolved refusals from sent, so that a new occurrence
// creates an Event again.
func (e *Events) send(ctx context.Context, all []translation.Problem) error {
	wanted := make(map[string]bool, len(all))
	var failed error
	for _, p := range all {
		name := eventName(p)
		wanted[name] = true
		if e.sent[name] {
			continue
		}
		if err := e.create(ctx, name, p); err != nil {
			// A failure must not prevent the remaining Events.
			failed = cmp.Or(failed, err)
			continue
		}
		e.Log.Warn("object refused", "kind", p.Object.Kind, "name", p.Object.Name, "reason", p.Reason, "error", p.Message)
		e.sent[name] = true
	}
	maps.DeleteFunc(e.sent, func(name string, _ bool) bool { return !wanted[name] })
	return failed
}

// eventName derives the name of an Event from the refusal, so that it is equal in all pods.
func eventName(p translation.Problem) string {
	hash := sha256.Sum256([]byte(strings.Join([]string{string(p.Object.UID), p.Reason, p.Message}, "\x00")))
	// Before a dot, the name of an object must end with a letter or digit.
	prefix := strings.TrimRight(p.Object.Name[:min(len(p.Object.Name), maxPrefix)], ".-")
	return fmt.Sprintf("%s.%x", prefix, hash[:8])
}

func (e *Events) create(ctx context.Context, name string, p translation.Problem) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&eventsv1.Event{
		TypeMeta:            metav1.TypeMeta{APIVersion: eventsv1.SchemeGroupVersion.String(), Kind: "Event"},
		ObjectMeta:          metav1.ObjectMeta{Namespace: p.Object.Namespace, Name: name},
		EventTime:           metav1.NowMicro(),
		ReportingController: "vipgate.io/kube",
		ReportingInstance:   e.Pod,
		Action:              "Translate",
		Reason:              p.Reason,
		Regarding:           p.Object,
		Note:                strings.ToValidUTF8(p.Message[:min(len(p.Message), maxNote)], ""),
		Type:                corev1.EventTypeWarning,
	})
	if err != nil {
		return fmt.Errorf("failed to encode Event %s: %w", name, err)
	}
	_, err = e.Client.Resource(eventsv1.SchemeGroupVersion.WithResource("events")).Namespace(p.Object.Namespace).
		Create(ctx, &unstructured.Unstructured{Object: content}, metav1.CreateOptions{FieldManager: manager})
	// Another pod of the Gateway may have created the Event.
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("failed to create Event %s/%s: %w", p.Object.Namespace, name, err)
	}
	return nil
}
