package translation_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// A record counts the accepted forms: each form that differs from the last one increments the
// number.
func TestRecordCountsAcceptedForms(t *testing.T) {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
		"vipgate.io/vips": "20.0.0.1", "vipgate.io/typo": "x", "other": "y",
	}}}
	for i, step := range []struct {
		change func()
		want   string
	}{
		{func() {}, `{"generation":1,"annotations":{"vipgate.io/vips":"20.0.0.1"}}`},
		{func() { s.Annotations["other"] = "z" }, `{"generation":1,"annotations":{"vipgate.io/vips":"20.0.0.1"}}`},
		{
			func() { s.Spec.Ports = []corev1.ServicePort{{Port: 80}} },
			`{"generation":2,"annotations":{"vipgate.io/vips":"20.0.0.1"},"ports":[{"port":80,"targetPort":0}]}`,
		},
		{
			func() { s.Annotations["vipgate.io/vips"] = strings.Repeat(" ", 32<<10) },
			`{"generation":3,"annotations":{},"ports":[{"port":80,"targetPort":0}]}`,
		},
		{
			func() { s.Annotations["vipgate.io/vips"] += " " },
			`{"generation":3,"annotations":{},"ports":[{"port":80,"targetPort":0}]}`,
		},
		{func() { s.Annotations["vipgate.io/check"] = strings.Repeat(" ", 32<<10) }, ""},
	} {
		step.change()
		got := translation.Record(s)
		if got != step.want {
			t.Errorf("step %d: %s, want %s", i+1, got, step.want)
		}
		s.Status.Conditions = []metav1.Condition{{Type: "vipgate.io/LastAccepted", Message: got}}
	}
}

// A Service with more VIPs than its record has room for keeps those that the Trench lists while an
// edit is refused.
func TestFallBackWithManyVIPs(t *testing.T) {
	const both = "20.0.0.1/32 20.0.0.2/32"
	for _, c := range []struct {
		annotation, text string // edit
		accepted         bool
		want             string
	}{
		{v1alpha1.MinReadyAnnotation, "1", true, both},
		{v1alpha1.MinReadyAnnotation, "x", false, both},
		{v1alpha1.VIPsAnnotation, "20.0.0.2,20.0.0.1", true, both},
		{v1alpha1.VIPsAnnotation, "20.0.0.1", true, "20.0.0.1/32"},
		{v1alpha1.VIPsAnnotation, "20.0.0.1,20.0.0.3", true, "20.0.0.1/32 20.0.0.3/32"},
		{v1alpha1.VIPsAnnotation, "20.0.0.1,20.0.0.9", false, both},
	} {
		o := quoted(t, "other", "quota: {}", "")
		accept(t, o)
		o.Trench.Object["status"].(map[string]any)["holders"].([]any)[0].(map[string]any)["vips"] = []any{
			"20.0.0.1/32", "20.0.0.2/32",
		}
		s := o.Services[0]
		s.Annotations[v1alpha1.VIPsAnnotation] = "20.0.0.1," + strings.Repeat(" ", 40<<10) + "20.0.0.2"
		s.Status.Conditions[0].Message = translation.Record(s)
		s.Annotations[c.annotation] = c.text
		r := translation.Translate(o, options)
		if got := served(r)["other.s0"]; got != c.want || r.Services[0].Accepted != c.accepted {
			t.Errorf("%s %s: %s\n%s", c.annotation, c.text, got, r.Table())
		}
	}
}

// A form without room in a record is refused, unless the Service has its VIPs without any.
func TestFormBeyondRecord(t *testing.T) {
	for _, c := range []struct {
		more     int
		recorded bool
		accepted bool
	}{{-1, true, true}, {0, true, true}, {1, true, false}, {1, false, true}} {
		o := quoted(t, "other", "quota: {}", "")
		accept(t, o)
		s := o.Services[0]
		if !c.recorded {
			s.Status.Conditions = nil
		}
		without := s.DeepCopy()
		delete(without.Annotations, v1alpha1.VIPsAnnotation)
		without.Annotations[v1alpha1.CheckAnnotation] = `{"tcp":{"port":1}}`
		room := 32<<10 - len(translation.Record(without))
		s.Annotations[v1alpha1.CheckAnnotation] = `{"tcp":{"port":1}}` + strings.Repeat(" ", room+c.more)
		r := translation.Translate(o, options)
		if v := r.Services[0]; v.Accepted != c.accepted || len(v.VIPs) != 1 {
			t.Errorf("%+v: %s", c, r.Table())
		}
	}
}
