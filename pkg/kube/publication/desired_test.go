package publication

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/vip"
)

var at = metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))

func trench(streams ...any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "vipgate.io/v1alpha1", "kind": "Trench",
		"metadata": map[string]any{"namespace": "ns", "name": "a", "uid": "t"},
		"spec":     map[string]any{"attractor": map[string]any{}, "streams": streams},
	}}
}

func service(ingress ...corev1.LoadBalancerIngress) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "s", ResourceVersion: "7"},
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: ingress}},
	}
}

func accepted(vips ...vip.VIP) translation.ServiceVerdict {
	v := translation.ServiceVerdict{VIPs: vips}
	v.Object = corev1.ObjectReference{Kind: "Service", Namespace: "ns", Name: "web"}
	v.Accepted, v.Reason, v.Message, v.Stream, v.Targets = true, "Accepted", "serves them", "ns.web", 2
	return v
}

func refused(reason string) translation.ServiceVerdict {
	v := accepted()
	v.Accepted, v.Reason, v.Message, v.Stream = false, reason, "the remedy", ""
	return v
}

func withProblems(v translation.ServiceVerdict, n int) translation.ServiceVerdict {
	for i := range n {
		v.Problems = append(v.Problems, translation.Problem{
			Object: corev1.ObjectReference{Kind: "Pod", Namespace: "ns", Name: fmt.Sprintf("web-%d", i)},
			Reason: "NetworkMissing", Message: "attach it to the network",
		})
	}
	return v
}

func input(t *unstructured.Unstructured, s *corev1.Service, v ...translation.ServiceVerdict) Input {
	in := Input{Objects: translation.Objects{Trench: t, Services: []*corev1.Service{s}}}
	in.Result.Trench = translation.Verdict{Generation: 3, Accepted: true, Reason: "Valid", Message: "written"}
	in.Result.Services = v
	in.Siblings = []*corev1.Pod{pod("a-0", both()), pod("a-1", noTargets())}
	return in
}

// with2 returns an input with two pods whose frontends have the given status.
func with2(in Input, s *frontendv1.Status) Input {
	in.Siblings = []*corev1.Pod{pod("a-0", s), pod("a-1", s)}
	return in
}

// failingTarget is the status of a frontend that advertises a VIP although a target fails.
func failingTarget() *frontendv1.Status {
	s := vipStatus(vip4, announced, ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY)
	s.Readiness.Detail = "stream ns.web: 1 of 2 targets ready, needs 1; web-1 (10.0.0.1): port 8080: connection refused"
	return statusOf(s)
}

// without returns the verdict on a Service without targets.
func without(v translation.ServiceVerdict) translation.ServiceVerdict {
	v.Targets = 0
	v.Problems = []translation.Problem{{Object: v.Object, Reason: translation.ReasonNoPods, Message: "add the label"}}
	return v
}

func hostname(name string) corev1.LoadBalancerIngress {
	return corev1.LoadBalancerIngress{Hostname: name}
}

func TestEvaluate(t *testing.T) {
	refusedTrench := input(trench(), service(hostname("kept")))
	refusedTrench.Result.Trench = translation.Verdict{Generation: 4, Reason: "Invalid", Message: "spec: required"}
	problem := input(trench(), service(), accepted(vip4))
	problem.Result.Trench.Problems = []translation.Problem{{
		Object: corev1.ObjectReference{Kind: "Secret", Name: "gw"}, Reason: "PasswordMissing", Message: "create it",
	}}
	class := "external"
	ingress := &networkingv1.Ingress{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "i", UID: "i"},
		Spec:       networkingv1.IngressSpec{IngressClassName: &class},
	}
	stream := map[string]any{"name": "vm", "vips": []any{"2000::1/128"}}
	publishes := trench()
	publishes.Object["spec"].(map[string]any)["publish"] = map[string]any{"gatewayClass": "g"}
	refusedPublishes := input(publishes, service())
	refusedPublishes.Result.Trench = refusedTrench.Result.Trench
	gateway := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "g", "uid": "g"}}}
	toGateways := published{
		replaces: true, addresses: []corev1.LoadBalancerIngress{ingressOf("192.0.2.1"), ingressOf("lb.example.com")},
		ingresses: []*networkingv1.Ingress{ingress}, gateways: []*unstructured.Unstructured{gateway},
	}
	left := service()
	left.Status.Conditions = []metav1.Condition{{Type: "vipgate.io/Accepted", Status: metav1.ConditionTrue}}
	var b strings.Builder
	for _, c := range []struct {
		name      string
		in        Input
		published published
	}{
		{"nothing read yet", Input{}, published{}},
		{"accepted", input(trench(), service(), accepted(vip4, vip6)), published{}},
		{"VIPs changed", input(trench(), service(ingressOf("20.0.0.9")), accepted(vip6)), published{}},
		{"refused at first", input(trench(), service(), refused("VIPHeld")), published{}},
		{"refused later", input(trench(), service(ingressOf("20.0.0.1")), refused("VIPHeld")), published{}},
		{"pods refused", input(trench(), service(), withProblems(accepted(vip4), 2)), published{}},
		{"target fails, VIP up", with2(input(trench(), service(), accepted(vip4)), failingTarget()), published{}},
		{"no target", input(trench(), service(), without(accepted(vip4))), published{}},
		{"many pods refused", input(trench(), service(), withProblems(accepted(vip4), 9)), published{}},
		{"Trench refused", refusedTrench, published{}},
		{"Trench with a problem", problem, published{}},
		{"stream of the Trench", input(trench(stream), service()), published{}},
		{"other addresses", input(trench(), service(), accepted(vip4)), published{
			replaces: true, addresses: []corev1.LoadBalancerIngress{ingressOf("192.0.2.1"), ingressOf("lb.example.com")},
			ingresses: []*networkingv1.Ingress{ingress},
		}},
		{"no other address yet", input(trench(), service(hostname("kept")), accepted(vip4)), published{
			replaces: true, ingresses: []*networkingv1.Ingress{ingress},
		}},
		{"published to Gateways", input(publishes, service()), toGateways},
		{"source missing", input(publishes, service()), published{
			replaces: true, problems: []publishProblem{{reasonSourceMissing, "create it"}},
		}},
		{"refused Trench that publishes", refusedPublishes, toGateways},
		{"Service that has left", input(trench(), left), published{}},
	} {
		fmt.Fprintf(&b, "# %s\n", c.name)
		for _, w := range evaluate(withReports(c.in), c.published, at) {
			fmt.Fprintf(&b, "%s %s\n", w.object.Kind, w.object.Name)
			conditions, _ := w.status["conditions"].([]metav1.Condition)
			for _, c := range conditions {
				fmt.Fprintf(&b, "  %s=%s %s (%d): %s\n", c.Type, c.Status, c.Reason, c.ObservedGeneration, c.Message)
			}
			text, err := json.Marshal(w.status["loadBalancer"])
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "  loadBalancer: %s\n", text)
			if addresses := w.status["addresses"]; addresses != nil {
				fmt.Fprintf(&b, "  addresses: %v\n", addresses)
			}
			for _, e := range w.events {
				fmt.Fprintf(&b, "  Event warning=%t %s: %s\n", e.warning, e.reason, e.note)
			}
		}
		b.WriteByte('\n')
	}
	golden(t, "evaluate.golden", b.String())
}

// applied returns the input with the desired status of evaluate applied to its Service and Trench.
func applied(t *testing.T, in Input, now metav1.Time) Input {
	t.Helper()
	for _, w := range evaluate(withReports(in), published{}, now) {
		text, err := json.Marshal(w.status)
		if err != nil {
			t.Fatal(err)
		}
		if w.object.Kind == "Service" {
			s := service()
			if err := json.Unmarshal(text, &s.Status); err != nil {
				t.Fatal(err)
			}
			in.Objects.Services = []*corev1.Service{s}
			continue
		}
		var status map[string]any
		if err := json.Unmarshal(text, &status); err != nil {
			t.Fatal(err)
		}
		status["observedGeneration"] = in.Result.Trench.Generation // int64, as decoded from the API server
		for _, c := range status["conditions"].([]any) {
			c.(map[string]any)["observedGeneration"] = in.Result.Trench.Generation
		}
		in.Objects.Trench = in.Objects.Trench.DeepCopy()
		in.Objects.Trench.Object["status"] = status
	}
	return in
}

// A Service that lost its stream keeps the record of its last accepted form.
func TestRecordWithoutStream(t *testing.T) {
	for _, record := range []string{"form", ""} {
		s, got := service(), ""
		if record != "" {
			s.Status.Conditions = []metav1.Condition{{Type: "vipgate.io/LastAccepted", Message: record}}
		}
		if last := lastAccepted(s, refused("PortTranslation")); last != nil {
			got = last.Message
		}
		if got != record {
			t.Errorf("the record %q becomes %q", record, got)
		}
	}
}

func TestNoWriteWithoutDifference(t *testing.T) {
	in := applied(t, input(trench(), service(), accepted(vip4, vip6)), at)
	later := metav1.NewTime(at.Add(time.Hour))
	for _, w := range evaluate(withReports(in), published{}, later) {
		if w.conditionsDiffer || w.addressesDiffer || len(w.events) > 0 {
			t.Errorf("%s %s differs, events %v", w.object.Kind, w.object.Name, w.events)
		}
	}
	// A changed status has a new transition time; an equal one keeps the transition time.
	in.Siblings = []*corev1.Pod{pod("a-0", noTargets())}
	for _, w := range evaluate(withReports(in), published{}, later) {
		for _, c := range w.status["conditions"].([]metav1.Condition) {
			want := at
			if strings.HasSuffix(c.Type, "Advertised") {
				want = later
			}
			if !c.LastTransitionTime.Equal(&want) {
				t.Errorf("%s of %s since %v, want %v", c.Type, w.object.Name, c.LastTransitionTime, want)
			}
		}
	}
}

func TestOnlyTargetsDiffer(t *testing.T) {
	other := published{replaces: true, addresses: []corev1.LoadBalancerIngress{ingressOf("192.0.2.1")}}
	for name, c := range map[string]struct {
		names       []string
		vips        []vip.VIP
		published   published
		onlyTargets bool
	}{
		"nothing":                {[]string{"a"}, []vip.VIP{vip4, vip6}, published{}, false},
		"targets":                {[]string{"a", "b"}, []vip.VIP{vip4, vip6}, published{}, true},
		"targets and addresses":  {[]string{"a", "b"}, []vip.VIP{vip4, vip6}, other, false},
		"targets and conditions": {[]string{"a", "b"}, []vip.VIP{vip4}, published{}, false},
	} {
		verdict := accepted(vip4, vip6)
		verdict.Names = []string{"a"}
		in := applied(t, input(trench(), service(), verdict), at)
		in.Result.Services[0].Names, in.Result.Services[0].VIPs = c.names, c.vips
		for _, w := range evaluate(withReports(in), c.published, metav1.NewTime(at.Add(time.Hour))) {
			if w.object.Kind == "Service" && w.onlyTargets != c.onlyTargets {
				t.Errorf("%s: only the targets differ: %v", name, w.onlyTargets)
			}
		}
	}
}

// A record of targets that was not written yet has another time in each evaluation, which would end
// the back-off of a refused write.
func TestTimeOfRecordIsNoDifference(t *testing.T) {
	verdict := accepted(vip4, vip6)
	verdict.Names = []string{"a"}
	in, texts := input(trench(), service(), verdict), map[string]bool{}
	for _, now := range []time.Time{at.Time, at.Add(time.Second)} {
		texts[evaluate(withReports(in), published{}, metav1.NewTime(now))[1].conditions] = true
	}
	if len(texts) != 1 {
		t.Errorf("%v", texts)
	}
}

// The status of a Trench has the holders of VIPs, also an empty list, which differs from none, and
// keeps them while the Trench is refused.
func TestHoldersOfTrench(t *testing.T) {
	one := []v1alpha1.Holder{{Namespace: "ns", Name: "web", UID: "s", VIPs: []string{"20.0.0.1/32"}}}
	other := []v1alpha1.Holder{{Namespace: "ns", Name: "web", UID: "s", VIPs: []string{"20.0.0.2/32"}}}
	in := applied(t, input(trench(), service()), at) // as by an older leader
	for i, step := range []struct {
		holders []v1alpha1.Holder // nil: the Trench is refused
		want    string
		differs bool
	}{
		{nil, "<nil>", false},
		{[]v1alpha1.Holder{}, "[]", true},
		{one, "[{ns web s [20.0.0.1/32]}]", true},
		{nil, "[{ns web s [20.0.0.1/32]}]", false},
		{other, "[{ns web s [20.0.0.2/32]}]", true},
		{[]v1alpha1.Holder{}, "[]", true},
	} {
		for _, differs := range []bool{step.differs, false} {
			in.Result.Holders = step.holders
			w := evaluate(withReports(in), published{}, at)[0]
			if got := fmt.Sprint(w.status["holders"]); got != step.want || w.conditionsDiffer != differs {
				t.Errorf("step %d: %s, differs %t; want %s, %t", i+1, got, w.conditionsDiffer, step.want, differs)
			}
			in = applied(t, in, at)
		}
	}
}

// events returns the reasons of the Events that evaluate returns for the Service.
func events(in Input) string {
	var all []string
	for _, w := range evaluate(withReports(in), published{}, at) {
		for _, e := range w.events {
			if w.object.Kind == "Service" {
				all = append(all, e.reason)
			}
		}
	}
	return strings.Join(all, " ")
}

func TestEventPerChangeOfReason(t *testing.T) {
	in := input(trench(), service(), refused("VIPHeld"))
	step := func(want string, v translation.ServiceVerdict, siblings ...*corev1.Pod) {
		t.Helper()
		in.Result.Services, in.Siblings = []translation.ServiceVerdict{v}, siblings
		if got := events(in); got != want {
			t.Errorf("Events %q, want %q", got, want)
		}
		in = applied(t, in, at)
		if got := events(in); got != "" {
			t.Errorf("Events %q of a status that is written", got)
		}
	}
	good, bad, dead := pod("a", both()), pod("a", noTargets()), pod("a", nil)
	step("VIPHeld", refused("VIPHeld"), good)
	step("NoVIPs", refused("NoVIPs"), good)
	step("Accepted Advertised", accepted(vip4, vip6), good)
	step("", accepted(vip4, vip6), good, pod("b", noTargets())) // still advertised by one pod
	step("NotAdvertised", accepted(vip4, vip6), bad)
	step("NotAdvertised", accepted(vip4, vip6), dead)
	step("Advertised NetworkMissing", withProblems(accepted(vip4, vip6), 1), good)
	step("NetworkMissing", withProblems(accepted(vip4, vip6), 2), good)
	step("", withProblems(accepted(vip4, vip6), 1), good)
	step("VIPHeld", refused("VIPHeld"), good)
}
