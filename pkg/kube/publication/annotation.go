package publication

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/logs"
)

var pods = corev1.SchemeGroupVersion.WithResource("pods")

// annotate keeps the annotation of the own Pod equal to the report until ctx ends.
func (p *Publisher) annotate(ctx context.Context) error {
	var (
		notUntil time.Time
		throttle logs.Throttle
		log      = p.options.Log
		retry    = backoff.Backoff{Min: p.timing.report, Max: 15 * time.Second, Jitter: 0.2}
	)
	for {
		report, reported := p.frontend.report.Get()
		input, changed := p.options.Input.Get()
		var timer <-chan time.Time // nil: never
		switch pod := own(input.Siblings, p.options.Pod); {
		case pod == nil:
			if input.Objects.Trench != nil {
				throttle.Log(log.Warn, "", "own Pod not found among the pods of the trench: nothing is reported",
					"pod", p.options.Pod, "label", v1alpha1.TrenchPodLabel+"="+p.options.Trench)
			}
		case report.Time.IsZero(): // the frontend was not asked yet
		case current(pod, report):
			retry.Reset()
		case time.Now().Before(notUntil):
			timer = time.After(time.Until(notUntil))
		default:
			err := p.patchReport(ctx, pod, report)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			p.options.Metrics.PublicationWrite(pods.Resource, resultOf(err))
			p.state.Update(func(s State) State { s.ReportError = err; return s })
			switch {
			case apierrors.IsForbidden(err):
				throttle.Log(log.Error, "", "RBAC does not allow to patch the own Pod; bind the Role of vipgate",
					"resource", "pods/status", "error", err)
			case err != nil:
				throttle.Log(log.Warn, "", "report not written, retrying", "error", err)
			}
			// Also after a success: the watch has not brought it back yet.
			delay := p.timing.report
			if err != nil {
				delay = retry.Next()
			}
			notUntil = time.Now().Add(delay)
			timer = time.After(delay)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-reported:
		case <-changed:
		case <-timer:
		}
	}
}

func own(pods []*corev1.Pod, name string) *corev1.Pod {
	i := slices.IndexFunc(pods, func(p *corev1.Pod) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return pods[i]
}

// current reports whether the Pod has the report.
func current(pod *corev1.Pod, report Report) bool {
	has, err := readReport(pod)
	return err == nil && has.equal(report)
}

// patchReport writes the annotation, and nothing else, by the status of the Pod: the right to patch
// that is not one to change the images of pods.
func (p *Publisher) patchReport(ctx context.Context, pod *corev1.Pod, report Report) error {
	text, err := json.Marshal(report)
	if err != nil {
		return fmt.Errorf("failed to encode the report: %w", err)
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "annotations": map[string]string{v1alpha1.ReportAnnotation: string(text)},
	}})
	if err != nil {
		return fmt.Errorf("failed to encode the report: %w", err)
	}
	_, err = p.write.Resource(pods).Namespace(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch,
		metav1.PatchOptions{FieldManager: FieldManager}, "status")
	if err != nil {
		return fmt.Errorf("failed to write the report to Pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}
