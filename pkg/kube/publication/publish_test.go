package publication

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

func TestClassOfIngress(t *testing.T) {
	class := "field"
	for name, c := range map[string]struct {
		ingress networkingv1.Ingress
		want    string
	}{
		"none":  {},
		"field": {networkingv1.Ingress{Spec: networkingv1.IngressSpec{IngressClassName: &class}}, "field"},
		"annotation": {networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{
			Annotations: map[string]string{"kubernetes.io/ingress.class": "annotation"},
		}}, "annotation"},
		"both": {networkingv1.Ingress{
			ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"kubernetes.io/ingress.class": "annotation"}},
			Spec:       networkingv1.IngressSpec{IngressClassName: &class},
		}, "annotation"},
		"empty annotation": {networkingv1.Ingress{
			ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"kubernetes.io/ingress.class": ""}},
			Spec:       networkingv1.IngressSpec{IngressClassName: &class},
		}, "field"},
	} {
		if got := classOf(&c.ingress); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// publishing returns a Trench whose spec.publish names each kind of object.
func publishing() *v1alpha1.Trench {
	return &v1alpha1.Trench{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"},
		Spec: v1alpha1.Spec{Publish: &v1alpha1.Publish{
			Addresses: []string{"192.0.2.1"}, IngressClass: "i", GatewayClass: "g",
		}},
	}
}

func TestPublishedCondition(t *testing.T) {
	ok := published{addresses: []corev1.LoadBalancerIngress{ingressOf("192.0.2.1"), hostname("lb")}}
	verdict := translation.Verdict{Generation: 4, Accepted: true}
	live := metav1.Condition{
		Type: "Published", Status: metav1.ConditionFalse, Reason: reasonSourceEmpty, Message: "m", ObservedGeneration: 3,
	}
	missing := ok
	missing.problems = []publishProblem{{reasonSourceMissing, "no Service"}, {reasonClassHeld, "another Trench"}}
	pending := missing
	pending.pending = true
	bad := verdict
	bad.Problems = []translation.Problem{
		{Reason: translation.ReasonPasswordMissing, Message: "no"},
		{Reason: translation.ReasonAddressNotPublished, Message: "bad host"},
	}
	none := publishing()
	none.Spec.Publish = nil
	for name, c := range map[string]struct {
		trench  *v1alpha1.Trench
		p       published
		verdict translation.Verdict
		live    []metav1.Condition
		want    string // reason, "" without a condition
		message string
		event   bool
	}{
		"no publish": {trench: none, verdict: verdict, live: []metav1.Condition{live}},
		"complete": {
			publishing(), ok, verdict, nil, "Published",
			"192.0.2.1, lb for Services, Ingresses of class i (0), Gateways of class g (0)", true,
		},
		"Trench refused": {
			publishing(), ok,
			translation.Verdict{},
			nil, notAccepted,
			"the Trench is not accepted: the addresses that are published stay", false,
		},
		"pending":       {trench: publishing(), p: pending, verdict: verdict},
		"still pending": {publishing(), pending, verdict, []metav1.Condition{live}, reasonSourceEmpty, "m", false},
		"problems": {
			publishing(), missing, verdict,
			[]metav1.Condition{live},
			reasonSourceMissing,
			"no Service; another Trench", true,
		},
		"a refused address": {publishing(), ok, bad, nil, translation.ReasonAddressNotPublished, "bad host", true},
	} {
		c.trench.Status.Conditions = c.live
		got := c.p.condition(c.trench, c.verdict)
		var reason, message string
		if got != nil {
			reason, message = got.Reason, got.Message
			if (got.Status == metav1.ConditionTrue) != (reason == reasonPublished) {
				t.Errorf("%s: status %s with %s", name, got.Status, reason)
			}
		}
		events := publishEvents(got, find(c.live, "Published"))
		if reason != c.want || message != c.message || len(events) > 0 != c.event {
			t.Errorf("%s: %q %q, Events %v", name, reason, message, events)
		}
	}
}

// A refused write is a problem of the Trench until the API server accepts it.
func TestRefusedWriteIsAProblem(t *testing.T) {
	p := published{ingresses: []*networkingv1.Ingress{{ObjectMeta: metav1.ObjectMeta{UID: "i"}}}}
	u := &unstructured.Unstructured{}
	u.SetUID("g")
	p.gateways = append(p.gateways, u)
	failing := map[types.UID]error{"i": errNetwork, "another": errForbidden}
	if got := p.refused(failing); len(got.problems) != 0 {
		t.Errorf("problems %v", got.problems)
	}
	failing["g"] = errForbidden
	if got := p.refused(failing); len(got.problems) != 1 || got.problems[0].reason != reasonStatusRefused {
		t.Errorf("problems %v", got.problems)
	}
}

func TestGatewayStatus(t *testing.T) {
	both := corev1.LoadBalancerIngress{IP: "192.0.2.1", Hostname: "lb.example.com"}
	u := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"addresses": []any{
		map[string]any{"type": "IPAddress", "value": "192.0.2.1"},
		map[string]any{"type": "Hostname", "value": "lb.example.com"},
	}}}}
	if w := gatewayStatus(u, published{addresses: []corev1.LoadBalancerIngress{both}}); w.addressesDiffer {
		t.Errorf("equal addresses differ: %s", w.addresses)
	}
	if w := gatewayStatus(u, published{addresses: []corev1.LoadBalancerIngress{hostname("lb")}}); !w.addressesDiffer {
		t.Error("other addresses do not differ")
	}
	if w := gatewayStatus(u, published{}); len(w.status) != 0 {
		t.Errorf("without an address the status is %v", w.status)
	}
	var many published
	for range maxGatewayAddresses + 1 {
		many.addresses = append(many.addresses, ingressOf("192.0.2.1"))
	}
	if n := len(gatewayStatus(u, many).status["addresses"].([]gatewayAddress)); n != maxGatewayAddresses {
		t.Errorf("%d addresses", n)
	}
}

// Addresses of spec.publish.fromService are published in the same way as spec.publish.addresses.
func TestProxied(t *testing.T) {
	mode := corev1.LoadBalancerIPModeVIP
	got := proxied(corev1.LoadBalancerIngress{IP: "192.0.2.1", IPMode: &mode, Ports: []corev1.PortStatus{{Port: 80}}})
	if *got.IPMode != corev1.LoadBalancerIPModeProxy || got.Ports != nil {
		t.Errorf("mode %s, ports %v", *got.IPMode, got.Ports)
	}
	if got = proxied(hostname("lb")); got.IPMode != nil {
		t.Error("a host name has a mode")
	}
}

func TestLeftStatus(t *testing.T) {
	mine, foreign := "vipgate.io/b", "example.com/lb"
	conditions := []metav1.Condition{{Type: "vipgate.io/Accepted"}, {Type: "other"}}
	for name, c := range map[string]struct {
		kind       corev1.ServiceType
		class      *string
		conditions []metav1.Condition
		want       bool
	}{
		"left":              {corev1.ServiceTypeClusterIP, nil, conditions, true},
		"another class":     {corev1.ServiceTypeLoadBalancer, &foreign, conditions, true},
		"another Trench":    {corev1.ServiceTypeLoadBalancer, &mine, conditions, false},
		"never of a Trench": {corev1.ServiceTypeClusterIP, nil, conditions[1:], false},
	} {
		s := service()
		s.Spec.Type, s.Spec.LoadBalancerClass, s.Status.Conditions = c.kind, c.class, c.conditions
		if _, got := leftStatus(s); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// While the API server is unreachable, its last answer on a source stays in force.
func TestAttempted(t *testing.T) {
	changed := make(chan struct{}, 1)
	f := cluster.NewMirror(changed)
	attempted(f, errForbidden)
	attempted(f, errNetwork)
	attempted(f, apierrors.NewResourceExpired("old"))
	if _, err := f.State(); !errors.Is(err, errForbidden) || len(changed) != 1 {
		t.Errorf("%v after an API server that is away", err)
	}
	// After a Role is bound, the API server may lack the resource.
	<-changed
	absent := apierrors.NewNotFound(schema.GroupResource{}, "")
	attempted(f, absent)
	attempted(f, apierrors.NewNotFound(schema.GroupResource{}, ""))
	if _, err := f.State(); err != error(absent) || len(changed) != 1 {
		t.Errorf("%v after another answer", err)
	}
	attempted(f, nil)
	if _, err := f.State(); err != nil {
		t.Error(err)
	}
}

func TestClassIsOfTheOldestTrench(t *testing.T) {
	other := func(name, class string, age time.Duration, namespaces ...any) *unstructured.Unstructured {
		u := trench()
		u.SetName(name)
		u.SetCreationTimestamp(metav1.NewTime(at.Add(-age)))
		u.Object["spec"].(map[string]any)["publish"] = map[string]any{"ingressClass": class}
		u.Object["spec"].(map[string]any)["namespaces"] = namespaces
		return u
	}
	own := publishing()
	own.CreationTimestamp = at
	for name, c := range map[string]struct {
		others []*unstructured.Unstructured
		want   bool
	}{
		"alone":              {[]*unstructured.Unstructured{other("a", "i", time.Hour)}, false}, // the same Trench
		"an older one":       {[]*unstructured.Unstructured{other("z", "i", time.Hour)}, true},
		"a younger one":      {[]*unstructured.Unstructured{other("0", "i", -time.Hour)}, false},
		"of the same second": {[]*unstructured.Unstructured{other("0", "i", 0), other("b", "i", 0)}, true},
		"of another class":   {[]*unstructured.Unstructured{other("z", "g", time.Hour)}, false},
		"of other namespaces": {[]*unstructured.Unstructured{
			other("z", "i", time.Hour, "ns-2"), other("y", "i", time.Hour, "ns-3"),
		}, false},
		"of a common namespace": {[]*unstructured.Unstructured{other("z", "i", time.Hour, "ns-2", "ns")}, true},
	} {
		f := cluster.NewMirror(make(chan struct{}, 1))
		s := &sources{followers: map[source]*cluster.Mirror{{resource: v1alpha1.Resource, namespace: "ns"}: f}}
		var p published
		if !s.held(&p, own, "ingressClass", "i") {
			t.Errorf("%s: published before the other Trenches are known", name)
		}
		var list []any
		for _, u := range c.others {
			list = append(list, u)
		}
		if err := f.Replace(list, "1"); err != nil {
			t.Fatal(err)
		}
		if got := s.held(&p, own, "ingressClass", "i"); got != c.want || len(p.problems) > 0 != got {
			t.Errorf("%s: %t, %v", name, got, p.problems)
		}
	}
}
