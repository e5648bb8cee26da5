package translation_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
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
		{func() { s.Annotations["vipgate.io/vips"] = strings.Repeat(" ", 32<<10) }, ""},
	} {
		step.change()
		got := translation.Record(s)
		if got != step.want {
			t.Errorf("step %d: %s, want %s", i+1, got, step.want)
		}
		s.Status.Conditions = []metav1.Condition{{Type: "vipgate.io/LastAccepted", Message: got}}
	}
}
