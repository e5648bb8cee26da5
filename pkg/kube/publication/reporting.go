package publication

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/logs"
)

// publishReport writes the report to the TrenchReport of this process's Pod after each change, and
// renews it, until ctx ends.
func (publisher *Publisher) publishReport(ctx context.Context) error {
	var (
		notUntil, renewed time.Time
		throttle          logs.Throttle
		log               = publisher.options.Log
		retry             = backoff.Backoff{Min: publisher.timing.report, Max: 15 * time.Second, Jitter: 0.2}
	)
	for {
		report, reported := publisher.frontend.report.Get()
		input, changed := publisher.input.Get()
		var timer <-chan time.Time // nil without a deadline
		wait := func(until time.Time) { timer = time.After(time.Until(until)) }
		pod := own(input.Siblings, publisher.options.Pod)
		switch {
		case pod == nil:
			if input.Objects.Trench != nil {
				throttle.Log(log.Warn, "", "own Pod not found among the pods of the trench: nothing is reported",
					"pod", publisher.options.Pod, "label", v1alpha1.TrenchPodLabel+"="+publisher.options.Trench)
			}
		case report.Time.IsZero(): // no status or error of the frontend yet
		case time.Now().Before(notUntil):
			wait(notUntil)
		case has(input.Reports[pod.UID], report) && time.Since(renewed) < publisher.timing.renewal:
			retry.Reset()
			wait(renewed.Add(publisher.timing.renewal))
		default:
			now := time.Now()
			report.Renewed = now.UTC()
			err := publisher.writeReport(ctx, pod, report)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			publisher.options.Metrics.PublicationWrite(v1alpha1.ReportResource.Resource, resultOf(err))
			publisher.state.Update(func(state State) State { state.ReportError = err; return state })
			switch {
			case apierrors.IsForbidden(err):
				throttle.Log(log.Error, "", "RBAC or the admission policy does not allow to write the own report; "+
					"bind the Role of vipgate, and let kube have a token that is bound to its Pod",
					"resource", v1alpha1.ReportResource.Resource, "error", err)
			case apierrors.IsNotFound(err):
				throttle.Log(log.Error, "", "the kind TrenchReport is not installed; apply deployments/kubernetes",
					"error", err)
			case err != nil:
				throttle.Log(log.Warn, "", "report not written, retrying", "error", err)
			}
			// Wait after success, too, because the watch has not returned the write yet.
			delay := publisher.timing.report
			if err != nil {
				delay = retry.Next()
			} else {
				renewed = now
			}
			notUntil = time.Now().Add(delay)
			wait(notUntil)
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

// has reports whether reported, the report in the API server, equals report.
func has(reported Reported, report Report) bool {
	return !reported.Invalid && !reported.Renewed.IsZero() && reported.Report.equal(report)
}

func own(pods []*corev1.Pod, name string) *corev1.Pod {
	i := slices.IndexFunc(pods, func(pod *corev1.Pod) bool { return pod.Name == name })
	if i < 0 {
		return nil
	}
	return pods[i]
}
