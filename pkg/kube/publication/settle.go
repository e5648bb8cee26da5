package publication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/vipgate/vipgate/pkg/backoff"
)

const (
	// echoTime is how long the watch may take to bring a write back. Later an older version is one of
	// an etcd that was restored from a backup.
	echoTime = 10 * time.Second
	// contestTime is how long a difference without another desired status waits: it may be the work of
	// another leader that has seen newer objects, which are on their way.
	contestTime = 2 * time.Second
)

// object is what a leader remembers of an object, for as long as it exists. It decides when to
// write, never what.
type object struct {
	wanted  wanted // newest; guarded by leader.mu, as the next field
	settled bool   // it was taken from the queue before

	// One goroutine at a time uses the rest.

	// conditions and addresses were written or found last.
	conditions, addresses string
	version               string // resource version after the last write, awaited until echo
	echo                  time.Time
	contested             time.Time // since when another writer's status is there; zero: it is not
	restored              time.Time // last write against another writer
	// After an error: no write until a time, unless of another status than was tried. err holds until a
	// write succeeds or is not needed.
	retry    backoff.Backoff
	notUntil time.Time
	tried    string
	err      error
	attempts int
}

// settle writes the status of one object if it differs, and returns when to look again, zero for
// after a change. Several goroutines call it, for different objects.
func (l *leader) settle(ctx context.Context, w wanted, o *object) (again time.Time, err error) {
	now, desired := time.Now(), w.conditions+"\n"+w.addresses
	if desired != o.tried {
		o.retry.Reset()
		o.notUntil = time.Time{}
	}
	switch {
	case older(w.object.ResourceVersion, o.version) && now.Before(o.echo):
		return o.echo, o.err // the write has not come back yet
	case !w.conditionsDiffer && !w.addressesDiffer:
		o.conditions, o.addresses, o.contested = w.conditions, w.addresses, time.Time{}
		o.retry.Reset()
		o.err = nil
		return again, nil
	case now.Before(o.notUntil):
		return o.notUntil, o.err
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
			return next, o.err
		}
	}
	version, err := l.apply(ctx, w)
	l.count(w.resource.Resource, err)
	o.attempts++
	o.tried = desired
	if err != nil {
		o.notUntil = time.Now().Add(o.retry.Next())
		if ctx.Err() != nil || apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return o.notUntil, o.err // the newer object is on its way, or its deletion
		}
		o.err = err
		if apierrors.IsInvalid(err) && w.conditionsDiffer && w.addressesDiffer {
			l.applyConditions(ctx, w, o)
		}
		l.report(w, err)
		return o.notUntil, err
	}
	o.retry.Reset()
	o.err = nil
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

// applyConditions applies the conditions of an object whose addresses were refused: they must not
// take with them what explains it.
func (l *leader) applyConditions(ctx context.Context, w wanted, o *object) {
	w.status = w.kept
	version, err := l.apply(ctx, w)
	l.count(w.resource.Resource, err)
	if err == nil {
		o.conditions, o.version, o.echo = w.conditions, version, time.Now().Add(echoTime)
	}
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
