package kubee2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/kubernetes"
)

// TestPublish covers every condition that prevents the publication of a Trench's addresses, and
// then their publication, change and removal.
func TestPublish(t *testing.T) {
	p := newPublisher(t)
	p.publish(`{fromService: lb, ingressClass: external, gatewayClass: external}`)
	p.role("leases")
	p.start()
	p.wantStatus(false, "NONE: status and Events are not written; see the Lease vipgate-trench-a")

	// Each missing prerequisite in turn.
	p.role("none")
	p.wantPublished("SourceUnreadable", "ingresses in namespace trench-a cannot be read: bind a Role")
	p.wantStatus(false, "INCOMPLETE (SourceUnreadable): ")
	p.wantEvent("Warning", "SourceUnreadable")
	p.role("none", "ingresses", "gateways")
	p.wantPublished("SourceUnreadable", "the API server does not have gateways.gateway.networking.k8s.io v1")
	p.cluster.Apply(t, kubernetes.GatewayAPI(t))
	p.wantPublished("SourceMissing", "Service trench-a/lb of spec.publish.fromService does not exist")
	p.wantStatus(false, "INCOMPLETE (SourceMissing): Service trench-a/lb")
	p.cluster.Apply(t, "{apiVersion: v1, kind: Service, metadata: {name: lb, namespace: trench-a}, "+
		"spec: {type: LoadBalancer, ports: [{port: 80}]}}")
	p.wantPublished("SourceEmpty", "Service trench-a/lb of spec.publish.fromService has no address")
	for _, reason := range []string{"SourceUnreadable", "SourceMissing", "SourceEmpty"} {
		if !strings.Contains(p.kube.Output(), "reason="+reason) {
			t.Errorf("the log has no line with %s", reason)
		}
	}

	// The address of a cloud load balancer has the mode VIP, and ports.
	p.cluster.Apply(t, publishGateways)
	p.cluster.Apply(t, strings.Replace(service, ",2000::1", "", 1))
	p.status(serviceResource, "lb", `{"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "VIP", `+
		`"ports": [{"port": 80, "protocol": "TCP"}]}, {"hostname": "lb.example.com"}]}}`)
	p.wantPublished("Published", "192.0.2.1, lb.example.com for Services, Ingresses of class external (2), "+
		"Gateways of class external (1)")
	p.wantEvent("Normal", "Published")
	p.wantStatus(false, "publication  192.0.2.1, lb.example.com for Services") // false: web has no pods
	p.wantShown(serviceResource, "web", "192.0.2.1 Proxy, lb.example.com")
	p.wantShown(ingressResource, "mine", "192.0.2.1, lb.example.com")
	p.wantShown(ingressResource, "annotated", "192.0.2.1, lb.example.com")
	p.wantShown(gatewayResource, "mine", "IPAddress 192.0.2.1, Hostname lb.example.com")
	for _, resource := range []schema.GroupVersionResource{ingressResource, gatewayResource} {
		p.wantShown(resource, "foreign", "")
	}

	// The Role does not allow the status of Gateways.
	p.role("gateways/status", "ingresses", "gateways")
	p.status(serviceResource, "lb", `{"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}`)
	p.wantPublished("StatusRefused", "the API server refuses the status of 1 objects")
	p.wantShown(ingressResource, "mine", "192.0.2.1")
	p.role("none", "ingresses", "gateways")
	p.wantPublished("Published", "")
	p.wantShown(gatewayResource, "mine", "IPAddress 192.0.2.1")

	// An older Trench owns the classes.
	const second = "a-second-trench"
	p.patch(v1alpha1.Resource, second, `{"spec": {"publish": {"addresses": ["192.0.2.9"], "ingressClass": "external"}}}`)
	p.wantPublished("ClassHeld", "the older Trench a-second-trench has ingressClass external")
	p.status(serviceResource, "lb", `{"loadBalancer": {"ingress": [{"ip": "192.0.2.2"}]}}`)
	p.wantShown(gatewayResource, "mine", "IPAddress 192.0.2.2")
	p.wantShown(serviceResource, "web", "192.0.2.2 Proxy")
	p.marker("marker-1")
	p.marker("marker-2")
	p.wantShown(ingressResource, "mine", "192.0.2.1")
	p.patch(v1alpha1.Resource, second, `{"spec": {"publish": null}}`)
	p.wantPublished("Published", "192.0.2.2 for Services")
	p.wantShown(ingressResource, "mine", "192.0.2.2")

	// While the Trench is refused, no new address is published. Each Service that leaves is
	// processed in a separate pass of the leader, so the writes of the first pass are complete
	// after the second Service.
	p.cluster.Apply(t, strings.Replace(strings.Replace(publishTrench, "PUBLISH",
		`{addresses: [192.0.2.3], ingressClass: external, gatewayClass: external}`, 1), "name: a,",
		`name: a, gateways: [{name: g, address: 20.0.0.1}],`, 1))
	p.wantPublished("NotAccepted", "the addresses that are published stay")
	p.leave("marker-1")
	p.leave("marker-2")
	for resource, want := range map[schema.GroupVersionResource]string{
		serviceResource: "192.0.2.2 Proxy", ingressResource: "192.0.2.2", gatewayResource: "IPAddress 192.0.2.2",
	} {
		name := "mine"
		if resource == serviceResource {
			name = "web"
		}
		if got, err := p.shown(t.Context(), resource, name); err != nil || got != want {
			t.Errorf("%s of a Trench that is refused shows %q, want %q: %v", resource.Resource, got, want, err)
		}
	}
	p.publish(`{addresses: [192.0.2.3], ingressClass: external, gatewayClass: external}`)
	p.wantShown(gatewayResource, "mine", "IPAddress 192.0.2.3")
	p.wantShown(ingressResource, "mine", "192.0.2.3")

	// A Service that leaves keeps the conditions of other controllers.
	p.status(serviceResource, "web", `{"conditions": [{"type": "example.com/Other", "status": "True", "reason": "Other",`+
		`"message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}`)
	p.wantCondition("web", v1alpha1.Accepted, metav1.ConditionTrue)
	p.leave("web")
	left, err := p.core.Services(namespace).Get(t.Context(), "web", metav1.GetOptions{})
	p.must(err)
	if meta.FindStatusCondition(left.Status.Conditions, "example.com/Other") == nil {
		t.Errorf("conditions %+v of a Service that has left", left.Status.Conditions)
	}
}

// TestRefusedAddressesLeaveConditions uses an admission policy in place of any reason for which an
// API server may reject an address.
func TestRefusedAddressesLeaveConditions(t *testing.T) {
	p := newPublisher(t)
	p.cluster.Apply(t, `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-such-address}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [UPDATE], resources: [services/status]}]
  validations:
    - expression: >-
        !has(object.status.loadBalancer.ingress) || object.status.loadBalancer.ingress.all(i, i.ip != '192.0.2.66')
      message: no such address
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-such-address}
spec: {policyName: no-such-address, validationActions: [Deny]}
`)
	p.publish("{addresses: [192.0.2.1]}")
	p.cluster.Apply(t, strings.Replace(service, ",2000::1", "", 1))
	p.wait(func(ctx context.Context) error { // until the policy is in force
		_, err := p.objects.Resource(serviceResource).Namespace(namespace).Patch(ctx, "web", types.MergePatchType,
			[]byte(`{"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.66"}]}}}`), metav1.PatchOptions{}, "status")
		if err == nil || !strings.Contains(err.Error(), "no such address") {
			return fmt.Errorf("the policy is not in force: %w", err)
		}
		return nil
	})
	p.role("none")
	p.start()
	p.wantShown(serviceResource, "web", "192.0.2.1 Proxy")
	p.wantCondition("web", v1alpha1.Accepted, metav1.ConditionTrue)

	// Addresses and conditions change in the same write.
	p.must(p.kube.Kill())
	p.publish("{addresses: [192.0.2.66]}")
	p.patch(serviceResource, "web", `{"metadata": {"annotations": {"vipgate.io/vips": "2000::1"}}}`)
	p.restart()
	p.wait(func(ctx context.Context) error {
		s, err := p.core.Services(namespace).Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.Group+"/"+v1alpha1.Accepted)
		if c == nil || !strings.Contains(c.Message, "2000::1") {
			return fmt.Errorf("condition %+v", c)
		}
		return nil
	})
	p.wantShown(serviceResource, "web", "192.0.2.1 Proxy")
	p.publish("{addresses: [192.0.2.2]}")
	p.wantShown(serviceResource, "web", "192.0.2.2 Proxy")
}

// TestIngressStatusConformance runs the cases of kubernetes-sigs/ingress-controller-conformance
// for the status of an Ingress: it shows the addresses of the Ingress, independent of its rules,
// and no address for a class without a controller.
func TestIngressStatusConformance(t *testing.T) {
	p := newPublisher(t)
	p.role("none", "ingresses")
	p.publish("{addresses: [192.0.2.1], ingressClass: conformance}")
	p.start()
	p.wantPublished("Published", "(0)")
	backend := func(name string) *networkingv1.IngressBackend {
		return &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{
			Name: name, Port: networkingv1.ServiceBackendPort{Number: 8080},
		}}
	}
	prefix, exact := networkingv1.PathTypePrefix, networkingv1.PathTypeExact
	rule := func(host string, paths ...networkingv1.HTTPIngressPath) networkingv1.IngressRule {
		return networkingv1.IngressRule{Host: host, IngressRuleValue: networkingv1.IngressRuleValue{
			HTTP: &networkingv1.HTTPIngressRuleValue{Paths: paths},
		}}
	}
	path := func(path string, kind networkingv1.PathType) networkingv1.HTTPIngressPath {
		return networkingv1.HTTPIngressPath{Path: path, PathType: &kind, Backend: *backend("echo")}
	}
	class, unknown := "conformance", "some-invalid-class-name"
	for name, c := range map[string]struct {
		spec networkingv1.IngressSpec
		want string
	}{
		"default-backend": {networkingv1.IngressSpec{IngressClassName: &class, DefaultBackend: backend("echo")}, "192.0.2.1"},
		"host-rules": {networkingv1.IngressSpec{
			IngressClassName: &class,
			TLS:              []networkingv1.IngressTLS{{Hosts: []string{"foo.bar.com"}, SecretName: "conformance-tls"}},
			Rules: []networkingv1.IngressRule{
				rule("*.foo.com", path("/", prefix)), rule("foo.bar.com", path("/", prefix)),
			},
		}, "192.0.2.1"},
		"path-rules": {networkingv1.IngressSpec{IngressClassName: &class, Rules: []networkingv1.IngressRule{
			rule("exact-path-rules", path("/foo", exact)),
			rule("mixed-path-rules", path("/foo", prefix), path("/foo", exact), path("/aaa/bbb/", prefix)),
		}}, "192.0.2.1"},
		"load-balancing": {networkingv1.IngressSpec{
			IngressClassName: &class, Rules: []networkingv1.IngressRule{rule("load-balancing", path("/", prefix))},
		}, "192.0.2.1"},
		"test-ingress-class": {networkingv1.IngressSpec{
			IngressClassName: &unknown, Rules: []networkingv1.IngressRule{rule("ingress-class", path("/", prefix))},
		}, ""},
	} {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&networkingv1.Ingress{
			TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "Ingress"},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: c.spec,
		})
		p.must(err)
		_, err = p.objects.Resource(ingressResource).Namespace(namespace).Create(t.Context(),
			&unstructured.Unstructured{Object: content}, metav1.CreateOptions{})
		p.must(err)
	}
	for _, name := range []string{"default-backend", "host-rules", "path-rules", "load-balancing"} {
		p.wantShown(ingressResource, name, "192.0.2.1")
	}
	p.wantPublished("Published", "Ingresses of class conformance (4)")
	p.wantShown(ingressResource, "test-ingress-class", "")
}
