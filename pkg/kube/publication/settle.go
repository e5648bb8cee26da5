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
	// echoTime is the maximum time for the watch to return a write. An older version after that time
	// comes from an etcd that was restored from a backup.
	echoTime = 10 * time.Second
	// contestTime is the delay before the leader repairs a difference while the desired status is
	// unchanged. The cause may be a second leader that has newer objects, which the watch is about to
	// return.
	contestTime = 2 * time.Second
)

// object is the state that a leader keeps for an object. It determines the time of a write, and
// never its content.
type object struct {
	wanted  wanted // newest desired status; guarded by leader.mu, as the next field
	settled bool   // process has handled the object at least once

	// The queue ensures that only one goroutine at a time uses the fields below.

	// conditions and addresses are the last written or observed status.
	conditions, addresses string
	version               string // resource version after the last write, awaited until echo
	echo                  time.Time
	contested             time.Time // when another writer's status was first seen; zero without it
	restored              time.Time // last write that replaced the status of another writer
	// After an error, the status that was tried is not written again before notUntil; a different
	// status is. err is set until a write succeeds or is not needed.
	retry    backoff.Backoff
	notUntil time.Time
	tried    string
	err      error
	attempts int
}

// settle writes the status of one object if it differs. It returns the time of the next attempt,
// or zero to wait for a change. Goroutines call it concurrently for different objects.
func (l *leader) settle(ctx context.Context, w wanted, o *object) (again time.Time, err error) {
	now, desired := time.Now(), w.conditions+"\n"+w.addresses
	if desired != o.tried {
		o.retry.Reset()
		o.notUntil = time.Time{}
	}
	switch {
	case older(w.object.ResourceVersion, o.version) && now.Before(o.echo):
		return o.echo, o.err // wait until the watch returns the last write
	case !w.conditionsDiffer && !w.addressesDiffer:
		o.conditions, o.addresses, o.contested = w.conditions, w.addresses, time.Time{}
		o.retry.Reset()
		o.err = nil
		return again, nil
	case now.Before(o.notUntil):
		return o.notUntil, o.err
	}
	// If the object differs although the desired status is unchanged, another writer has changed it.
	// Restore it at most once per interval, so that two controllers do not overwrite each other in a
	// loop.
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
		case w.addressesDiffer && !foreignAddresses: // new addresses: write now
			restores = false
		case foreignAddresses && w.conditionsDiffer && !foreignConditions:
			// Write the new conditions now, and keep the other writer's addresses until next.
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
			return o.notUntil, o.err // the watch is about to return the newer object or its deletion
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

// applyConditions applies only the conditions of an object whose addresses were refused, because
// the conditions explain the refusal.
func (l *leader) applyConditions(ctx context.Context, w wanted, o *object) {
	w.status = w.kept
	version, err := l.apply(ctx, w)
	l.count(w.resource.Resource, err)
	if err != nil {
		return
	}
	o.conditions, o.version, o.echo = w.conditions, version, time.Now().Add(echoTime)
	l.recorder.add(w.object, w.events)
}

// next returns the earliest time to replace the status of another writer.
func (o *object) next(interval time.Duration) time.Time {
	next := o.contested.Add(contestTime)
	if at := o.restored.Add(interval); !o.restored.IsZero() && at.After(next) {
		next = at
	}
	return next
}

// apply applies the status to the evaluated resource version, and returns the new version.
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

// report logs the error of a write, at a limited rate.
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

// answered reports whether err is the API server's answer about one object, as opposed to a
// failure to reach the server or an overload.
func answered(err error) bool {
	var s apierrors.APIStatus
	return errors.As(err, &s) && s.Status().Code >= 400 && s.Status().Code < http.StatusInternalServerError &&
		!apierrors.IsTooManyRequests(err)
}

// older reports whether resource version a is older than b; b may be empty.
func older(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && c < 0
}
