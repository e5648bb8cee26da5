package cluster

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func pod(name, version string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version, UID: types.UID(name)}}
}

// again is a recreated pod: the same name with a new UID.
func again(name, version string) *corev1.Pod {
	p := pod(name, version)
	p.UID += "-again"
	return p
}

// TestStore checks the content of the store after each event, and whether the store reports a
// change.
func TestStore(t *testing.T) {
	type event func(*store) error
	set := func(name, version string) event { return func(s *store) error { return s.Update(pod(name, version)) } }
	remove := func(name, version string) event { return func(s *store) error { return s.Delete(pod(name, version)) } }
	replace := func(pods ...any) event { return func(s *store) error { return s.Replace(pods, "") } }
	bookmark := func(version string) event { return func(s *store) error { return s.Bookmark(version) } }
	changes := 0
	s := newStore(func() { changes++ })
	for i, step := range []struct {
		name    string
		event   event
		want    string
		changed bool
	}{
		{"first list without objects", replace(), "", true},
		{"list", replace(pod("a", "5"), pod("b", "7")), "a@5 b@7", true},
		{"the same list", replace(pod("a", "5"), pod("b", "7")), "a@5 b@7", false},
		{"list with a newer object", replace(pod("a", "5"), pod("b", "8")), "a@5 b@8", true},
		{"list with an older object", replace(pod("a", "5"), pod("b", "7")), "a@5 b@7", true},
		{"list with an object of the same name", replace(pod("a", "5"), again("b", "7")), "a@5 b@7", true},
		{"list with another object", replace(pod("a", "5"), pod("c", "7")), "a@5 c@7", true},
		{"list with one more", replace(pod("a", "5"), pod("b", "7"), pod("c", "7")), "a@5 b@7 c@7", true},
		{"list with one less", replace(pod("a", "5"), pod("b", "7")), "a@5 b@7", true},
		{"new version", set("a", "9"), "a@9 b@7", true},
		{"twice", set("a", "9"), "a@9 b@7", false},
		{"older version", set("a", "8"), "a@9 b@7", false},
		{"more digits", set("a", "10"), "a@10 b@7", true},
		{"older deletion", remove("a", "9"), "a@10 b@7", false},
		{"deletion", remove("a", "12"), "b@7", true},
		{"deletion twice", remove("a", "12"), "b@7", false},
		{"version before the deletion", set("a", "11"), "b@7", false},
		{"created again", set("a", "13"), "a@13 b@7", true},
		{"deletion of an unknown object", remove("c", "15"), "a@13 b@7", false},
		{"version before that deletion", set("c", "14"), "a@13 b@7", false},
		{"bookmark before the deletion", bookmark("14"), "a@13 b@7", false},
		{"the same version after it", set("c", "14"), "a@13 b@7", false},
		{"list of an older state", replace(pod("a", "3")), "a@3", true},
		{"version after it", set("c", "4"), "a@3 c@4", true},
		{"deletion with the version of the object", remove("c", "4"), "a@3", true},
		{"the same version after it", set("c", "4"), "a@3", false},
		{"created again after it", set("c", "5"), "a@3 c@5", true},
		{"no resource version", set("a", "x"), "a@x c@5", true},
	} {
		changes = 0
		if err := step.event(s); err != nil {
			t.Fatalf("%d, %s: %v", i, step.name, err)
		}
		var got []string
		for _, o := range s.list() {
			got = append(got, o.GetName()+"@"+o.GetResourceVersion())
		}
		slices.Sort(got)
		if text := strings.Join(got, " "); text != step.want || (changes == 1) != step.changed || changes > 1 {
			t.Errorf("%d, %s: %q with %d changes, want %q, changed %v", i, step.name, text, changes, step.want, step.changed)
		}
	}
	if err := bookmark("20")(s); err != nil || len(s.deleted) > 0 {
		t.Errorf("after a bookmark %v is remembered: %v", s.deleted, err)
	}
}

// strip keeps only the fields that the translations and the readiness gates read.
func TestStripKeepsWhatTargetsNeed(t *testing.T) {
	keptSpec := func(image string) corev1.PodSpec {
		ports := []corev1.ContainerPort{{Name: "http", ContainerPort: 80, Protocol: corev1.ProtocolUDP}}
		return corev1.PodSpec{
			Containers:     []corev1.Container{{Name: "app", Image: image, Ports: ports}},
			InitContainers: []corev1.Container{{Name: "sidecar", Image: image, Ports: ports}},
			NodeName:       "node", HostNetwork: true,
			ReadinessGates: []corev1.PodReadinessGate{{ConditionType: "a/b"}},
		}
	}
	keptStatus := corev1.PodStatus{
		Phase: corev1.PodRunning, Reason: "Evicted", Conditions: []corev1.PodCondition{{Type: corev1.PodReady}},
		PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}},
	}
	full := pod("a", "1")
	full.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet"}}
	full.Annotations = map[string]string{"other": "x", networkStatus: "[]", "vipgate.io/vips": "{}"}
	full.Labels = map[string]string{"l": "x"}
	full.Spec, full.Status = keptSpec("app"), keptStatus
	full.Spec.Volumes = []corev1.Volume{{Name: "v"}}
	full.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app"}}
	x, err := strip(full)
	if err != nil {
		t.Fatal(err)
	}
	want := pod("a", "1")
	want.Annotations = map[string]string{networkStatus: "[]"}
	want.Labels = map[string]string{"l": "x"}
	want.Spec, want.Status = keptSpec(""), keptStatus
	if !reflect.DeepEqual(x, want) {
		t.Errorf("got %+v, want %+v", x, want)
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{lastApplied: "{}", "a": "b"}}}
	if _, err := strip(service); err != nil || len(service.Annotations) != 1 {
		t.Errorf("%v, %v", service.Annotations, err)
	}
}
