package publication

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/logs"
)

const (
	// renewInterval is the interval at which an unchanged report is written. The kubelet renews the
	// Lease of its node at the same interval.
	renewInterval = 10 * time.Second
	// missedRenewals is the number of renewals of this process's report after which a report without
	// renewal is old: 20 to 30 s. Counting renewals does not depend on the clocks of nodes, and no
	// report ages while the API server is unreachable.
	missedRenewals = 3
	// missedNotReady replaces missedRenewals for a Pod that is not Ready: 10 to 20 s.
	missedNotReady = 2
)

// Reported is the report of a Pod in the API server.
type Reported struct {
	Report
	Invalid bool // the report cannot be decoded
	Old     bool // the report is no longer renewed
}

func (reported Reported) equal(o Reported) bool {
	return reported.Invalid == o.Invalid && reported.Old == o.Old && reported.Report.equal(o.Report)
}

// gather adds the reports of the pods to the input and publishes it to the leader, until ctx
// ends. The renewal of an unchanged report does not change the input.
func (publisher *Publisher) gather(ctx context.Context) error {
	publisher.followReports(ctx)
	defer publisher.reports.End()
	ages := ages{interval: publisher.timing.renewal, seen: map[types.UID]renewal{}}
	input, changed := publisher.options.Input.Get()
	for {
		// Before the first answer, each pod may have a report.
		listed, err := publisher.reports.State()
		reports := publisher.readReports(input.Siblings)
		ages.mark(input.Siblings, publisher.options.Pod, reports)
		if (listed || err != nil) &&
			(!maps.EqualFunc(reports, input.Reports, Reported.equal) || input.Reports == nil) {
			input.Reports = reports
			publisher.input.Set(input)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
			input, changed = publisher.options.Input.Get()
		case <-publisher.reported:
		}
	}
}

// followReports keeps the reports of the trench current until ctx ends.
func (publisher *Publisher) followReports(ctx context.Context) {
	var throttle logs.Throttle
	publisher.reports.Start(ctx, v1alpha1.ReportResource.Resource,
		publisher.watch.Resource(v1alpha1.ReportResource).Namespace(publisher.options.Namespace),
		metav1.ListOptions{LabelSelector: v1alpha1.TrenchPodLabel + "=" + publisher.options.Trench},
		func(watches bool, err error) {
			if !watches && ctx.Err() == nil {
				publisher.reports.Attempted(err)
				throttle.Log(publisher.options.Log.Warn, "", "reports of the trench's pods not listed, retrying",
					"resource", v1alpha1.ReportResource.Resource, "error", err)
			}
		})
}

// readReports returns the reports of pods by UID. It accepts only a report that has the name of
// the Pod and is owned by it; the admission policy allows each Pod to write only this one.
func (publisher *Publisher) readReports(pods []*corev1.Pod) map[types.UID]Reported {
	all := map[types.UID]Reported{}
	for _, pod := range pods {
		o, exists, err := publisher.reports.GetByKey(pod.Namespace + "/" + pod.Name)
		object, ok := o.(*unstructured.Unstructured)
		if err != nil || !exists || !ok || !owns(pod, object) {
			continue
		}
		reported := Reported{}
		text, err := json.Marshal(object.Object["report"])
		if err == nil {
			err = json.Unmarshal(text, &reported.Report)
		}
		if err != nil || object.Object["report"] == nil {
			reported = Reported{Invalid: true}
		}
		all[pod.UID] = reported
	}
	return all
}

// owns reports whether a Pod is the only owner of an object.
func owns(pod *corev1.Pod, object *unstructured.Unstructured) bool {
	owners := object.GetOwnerReferences()
	return len(owners) == 1 && owners[0].Kind == "Pod" && owners[0].UID == pod.UID
}

// ages detects reports that are no longer renewed. It measures time in renewals of this process's
// report in the API server. A write before the end of the interval, because of a change, does not
// count as a renewal.
type ages struct {
	interval time.Duration
	own      int       // number of renewals of this process's report
	last     time.Time // the last of these renewals
	seen     map[types.UID]renewal
}

// renewal is the newest renewal of a report, and the value of ages.own when it was received.
type renewal struct {
	renewed time.Time
	at      int
}

// mark sets Old in the reports that are no longer renewed.
func (ages *ages) mark(pods []*corev1.Pod, own string, reports map[types.UID]Reported) {
	// Count the renewals of the own report first: they measure the age of every report.
	for _, pod := range pods {
		reported, ok := reports[pod.UID]
		if since := reported.Renewed.Sub(ages.last); ok && pod.Name == own && (since >= ages.interval || since < 0) {
			ages.last = reported.Renewed
			if since > 0 { // not of a clock that was set back
				ages.own++
			}
		}
	}
	seen := map[types.UID]renewal{}
	for _, pod := range pods {
		reported, ok := reports[pod.UID]
		if !ok {
			continue
		}
		last, known := ages.seen[pod.UID]
		if !known || !last.renewed.Equal(reported.Renewed) {
			// Every different time is a renewal, even an earlier one: the pod's clock may be set back.
			last = renewal{reported.Renewed, ages.own}
		}
		seen[pod.UID] = last
		limit := missedRenewals
		if !translation.IsReady(pod) {
			limit = missedNotReady
		}
		reported.Old = ages.own-last.at >= limit
		reports[pod.UID] = reported
	}
	ages.seen = seen
}

// writeReport writes the report to the TrenchReport of pod.
func (publisher *Publisher) writeReport(ctx context.Context, pod *corev1.Pod, report Report) error {
	body, err := json.Marshal(map[string]any{
		"apiVersion": v1alpha1.ReportKind.GroupVersion().String(),
		"kind":       v1alpha1.ReportKind.Kind,
		"metadata": map[string]any{
			"namespace": pod.Namespace, "name": pod.Name,
			"labels": map[string]string{v1alpha1.TrenchPodLabel: publisher.options.Trench},
			"ownerReferences": []any{map[string]any{
				"apiVersion": "v1", "kind": "Pod", "name": pod.Name, "uid": pod.UID,
			}},
		},
		"report": report,
	})
	if err != nil {
		return fmt.Errorf("failed to encode the report: %w", err)
	}
	force := true
	_, err = publisher.write.Resource(v1alpha1.ReportResource).Namespace(pod.Namespace).Patch(ctx, pod.Name,
		types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: fieldManager, Force: &force})
	if err != nil {
		return fmt.Errorf("failed to write %s %s/%s: %w", v1alpha1.ReportKind.Kind, pod.Namespace, pod.Name, err)
	}
	return nil
}
