package publication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

const (
	// echoTime is the maximum time for the watch to return a write, and the least time between a write
	// and one of a record of targets. An older version after it comes from an etcd that was restored.
	echoTime = 10 * time.Second
	// contestTime is the delay before the leader repairs a difference while the desired status is
	// unchanged. The cause may be a second leader with newer objects, which the watch is to return.
	contestTime = 2 * time.Second
)

// undeclared is in an answer of code 500: the CRD of the object lacks a field.
const undeclared = "field not declared in schema"

// object is a leader's state of an object. It determines when to write, and never the content.
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
func (leader *leader) settle(ctx context.Context, wanted wanted, object *object) (again time.Time, err error) {
	now, desired := time.Now(), wanted.conditions+"\n"+wanted.addresses
	// A back-off belongs to the status that was refused, so a different status is tried immediately.
	if desired != object.tried {
		object.retry.Reset()
		object.notUntil = time.Time{}
	}
	switch {
	// The watch is about to return the last write, or all nodes would read many records of targets.
	case (wanted.onlyTargets || older(wanted.object.ResourceVersion, object.version)) && now.Before(object.echo):
		return object.echo, object.err
	case !wanted.conditionsDiffer && !wanted.addressesDiffer:
		object.conditions, object.addresses, object.contested = wanted.conditions, wanted.addresses, time.Time{}
		object.retry.Reset()
		object.err = nil
		return again, nil
	case now.Before(object.notUntil):
		return object.notUntil, object.err
	}
	// If the object differs although the desired status is unchanged, another writer has changed it.
	// Restore it at most once per interval, so that two controllers do not overwrite each other in a
	// loop.
	foreignConditions := wanted.conditionsDiffer && !wanted.onlyTargets && object.conditions == wanted.conditions
	foreignAddresses := wanted.addressesDiffer && object.addresses == wanted.addresses
	restores := foreignConditions || foreignAddresses
	if !restores {
		object.contested = time.Time{}
	} else if object.contested.IsZero() {
		object.contested = now
	}
	if next := object.next(leader.restore); restores && now.Before(next) {
		switch {
		case wanted.addressesDiffer && !foreignAddresses: // new addresses: write now
			restores = false
		case foreignAddresses && wanted.conditionsDiffer && !foreignConditions:
			// Write the new conditions now, and keep the other writer's addresses until next.
			again, wanted.status, restores = next, wanted.kept, false
		default:
			return next, object.err
		}
	}
	// Optimistic concurrency: the resource version of the evaluated object makes a stale write fail.
	version, err := leader.apply(ctx, wanted)
	leader.count(wanted.resource.Resource, err)
	object.attempts++
	object.tried = desired
	if err != nil {
		object.notUntil = time.Now().Add(object.retry.Next())
		if ctx.Err() != nil || apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return object.notUntil, object.err // the watch is about to return the newer object or its deletion
		}
		object.err = err
		// An address that the API server refuses must not hide the conditions that name it.
		if apierrors.IsInvalid(err) && wanted.conditionsDiffer && wanted.addressesDiffer {
			leader.applyConditions(ctx, wanted, object)
		}
		leader.report(wanted, err)
		return object.notUntil, err
	}
	// Events follow the write, so that a refused status is not announced.
	object.retry.Reset()
	object.err = nil
	object.conditions, object.addresses, object.version, object.echo = wanted.conditions, wanted.addresses, version,
		time.Now().Add(echoTime)
	leader.log.Debug("status written", "kind", wanted.object.Kind, "namespace", wanted.object.Namespace, "name",
		wanted.object.Name)
	if restores {
		object.restored, object.contested = now, time.Time{}
		wanted.events = append(wanted.events, event{
			true, "StatusRestored", "Publish", "another writer had changed the status that " + fieldManager +
				" applies; stop the other controller, or give the object another class",
		})
	}
	leader.recorder.add(wanted.object, wanted.events)
	return again, nil
}

// applyConditions applies only the conditions of an object whose addresses were refused, because
// the conditions explain the refusal.
func (leader *leader) applyConditions(ctx context.Context, wanted wanted, object *object) {
	wanted.status = wanted.kept
	version, err := leader.apply(ctx, wanted)
	leader.count(wanted.resource.Resource, err)
	if err != nil {
		return
	}
	object.conditions, object.version, object.echo = wanted.conditions, version, time.Now().Add(echoTime)
	leader.recorder.add(wanted.object, wanted.events)
}

// next returns the earliest time to replace the status of another writer.
func (object *object) next(interval time.Duration) time.Time {
	next := object.contested.Add(contestTime)
	if at := object.restored.Add(interval); !object.restored.IsZero() && at.After(next) {
		next = at
	}
	return next
}

// apply applies the status to the evaluated resource version, and returns the new version.
func (leader *leader) apply(ctx context.Context, wanted wanted) (version string, err error) {
	body, err := json.Marshal(map[string]any{
		"apiVersion": wanted.object.APIVersion,
		"kind":       wanted.object.Kind,
		"metadata": map[string]any{
			"namespace": wanted.object.Namespace, "name": wanted.object.Name, "uid": wanted.object.UID,
			"resourceVersion": wanted.object.ResourceVersion,
		},
		"status": wanted.status,
	})
	if err != nil {
		return "", fmt.Errorf("failed to encode the status of %s %s: %w", wanted.object.Kind, wanted.object.Name, err)
	}
	// Server-side apply with force: the fields of this field manager have no second owner.
	force := true
	var object *unstructured.Unstructured
	object, err = leader.client.Resource(wanted.resource).Namespace(wanted.object.Namespace).Patch(ctx,
		wanted.object.Name, types.ApplyPatchType,
		body, metav1.PatchOptions{FieldManager: fieldManager, Force: &force}, "status")
	if err != nil {
		if strings.Contains(err.Error(), undeclared) && wanted.resource.Group == v1alpha1.Group {
			err = fmt.Errorf("%w; the CRD %s is older, apply deployments/kubernetes", err, wanted.resource.GroupResource())
		}
		return "", fmt.Errorf("failed to apply the status of %s %s/%s: %w",
			wanted.object.Kind, wanted.object.Namespace, wanted.object.Name, err)
	}
	return object.GetResourceVersion(), nil
}

// report logs the error of a write, at a limited rate.
func (leader *leader) report(wanted wanted, err error) {
	switch {
	case apierrors.IsForbidden(err):
		leader.throttle.Log(leader.log.Error, wanted.resource.Resource+wanted.object.Namespace,
			"RBAC does not allow to patch status; bind the Role of vipgate in the namespace",
			"resource", wanted.resource.Resource+"/status", "namespace", wanted.object.Namespace, "error", err)
	case answered(err):
		leader.throttle.Log(leader.log.Warn, wanted.resource.Resource+wanted.object.Namespace, "status refused, retrying",
			"error", err)
	}
}

// answered reports whether err is the API server's answer about one object, as opposed to a
// failure to reach the server or an overload.
func answered(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && (strings.Contains(status.Status().Message, undeclared) ||
		status.Status().Code >= 400 && status.Status().Code < http.StatusInternalServerError &&
			!apierrors.IsTooManyRequests(err))
}

// older reports whether resource version a is older than b; b may be empty.
func older(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && c < 0
}
