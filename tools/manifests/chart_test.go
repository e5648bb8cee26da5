package manifests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/vipgate/vipgate/test/harness"
)

const deployment = "Deployment trench-a/vipgate"

func TestSchemaRefusesValues(t *testing.T) {
	for name, c := range map[string]struct{ values, want string }{
		"unknown value":          {"replica: 3", "replica"},
		"no pod":                 {"replicas: 0", "replicas"},
		"a drain without end":    {"drainSeconds: 0", "drainSeconds"},
		"a duration":             {"drainSeconds: 10s", "drainSeconds"},
		"unknown data plane":     {"dataplane: ipvs", "dataplane"},
		"registry without slash": {"image: {registry: registry.example.com}", "registry"},
		"path without slash":     {"spiffe: {trustDomain: example.org, path: a}", "path"},
		"name that is no label":  {"trench: {name: Trench_A}", "name"},
		"name of 56 characters":  {"trench: {name: " + strings.Repeat("a", 56) + "}", "name"},
		"namespace of 64":        {"rbac: {namespaces: [" + strings.Repeat("a", 64) + "]}", "namespaces"},
		"namespace without a Role": {
			"trench: {spec: {namespaces: [trench-a, other], attractor: {name: a, vips: [], gateways: []}}}",
			"rbac.namespaces lacks other",
		},
		"no attractor":              {"trench: {spec: {network: {name: a}}}", "attractor"},
		"VIP without length":        {"trench: {spec: {attractor: {name: a, vips: [20.0.0.1], gateways: []}}}", "vips"},
		"no trench file":            {"kube: {enabled: false}", "file"},
		"interface name too long":   {"networks: {external: {name: a, interface: sixteen-letters-}}", "interface"},
		"memory in Kubernetes' way": {"lb: {goMemLimit: 230Mi}", "goMemLimit"},
		"sysctl of the node":        {"sysctls: {pod: [{name: vm.swappiness, value: \"1\"}]}", "sysctls"},
		"unknown speaker":           {"speaker: frr", "speaker"},
		"no AS of frr-k8s":          {"{speaker: frr-k8s, frrk8s: {announcers: [192.0.2.1], node: 192.0.2.2}}", "asn"},
		"no announcers":             {"{speaker: frr-k8s, frrk8s: {asn: 64500, node: 192.0.2.2}}", "announcers"},
		"port above the API's":      {"frrk8s: {port: 20179}", "port"},
		"frr-k8s without kube":      {"{speaker: frr-k8s, kube: {enabled: false}}", "kube"},
		"number as sysctl":          {"sysctls: {pod: [{name: net.ipv4.ip_forward, value: 1}]}", "value"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := chart(t, "vipgate", values(t, c.values))
			harness.WantError(t, err, c.want)
		})
	}
	_, _, err := chart(t, "vipgate", nil)
	harness.WantError(t, err, "trench.spec.attractor is missing")
}

// As helm lint --strict, with the default values.
func TestChartsLint(t *testing.T) {
	for _, name := range []string{"vipgate", "vipgate-crds"} {
		for _, m := range lint.RunAll(filepath.Join(root, "charts", name), nil, namespace).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}

func TestValuesOfTheChart(t *testing.T) {
	o, _, err := chart(t, "vipgate", values(t, `
replicas: 3
drainSeconds: 60
priorityClassName: mine
nodeSelector: {zone: a}
tolerations: [{key: edge, operator: Exists}]
podLabels: {team: net}
podAnnotations: {note: x}
image: {registry: registry.example.com/, tag: v9, pullPolicy: Always}
imagePullSecrets: [{name: pull}]
networks: {external: {name: uplink, interface: net1}, targets: null}
dataplane: none
spiffe: {trustDomain: example.com, path: /a/b}
sysctls: {privilegedInitContainer: false, pod: [{name: net.ipv4.ip_forward, value: "1"}]}
lb: {goMemLimit: 500MiB, resources: {limits: {memory: 1Gi}}, extraEnv: [{name: VIPGATE_LOG_LEVEL, value: debug}]}
frontend: {noDelay: false}
`))
	harness.Must(t, err)
	d := decode[appsv1.Deployment](t, o, deployment)
	pod := d.Spec.Template.Spec
	if *d.Spec.Replicas != 3 || *pod.TerminationGracePeriodSeconds != 89 || pod.PriorityClassName != "mine" ||
		pod.NodeSelector["zone"] != "a" || pod.Tolerations[0].Key != "edge" || pod.ImagePullSecrets[0].Name != "pull" {
		t.Errorf("pod: %+v", pod)
	}
	metadata := d.Spec.Template.ObjectMeta
	if metadata.Labels["team"] != "net" || metadata.Annotations["note"] != "x" ||
		metadata.Annotations["k8s.v1.cni.cncf.io/networks"] != `[{"interface":"net1","name":"uplink"}]` {
		t.Errorf("metadata: %+v", metadata)
	}
	if len(pod.InitContainers) != 1 || pod.SecurityContext.Sysctls[0].Name != "net.ipv4.ip_forward" {
		t.Errorf("the sysctls are not the pod's: %+v", pod.SecurityContext)
	}
	lb := pod.Containers[slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == "lb" })]
	environment := map[string]string{}
	for _, e := range lb.Env {
		environment[e.Name] = e.Value
	}
	for name, want := range map[string]string{
		"VIPGATE_DRAIN_TIME": "60s", "VIPGATE_DATAPLANE": "none", "GOMEMLIMIT": "500MiB", "VIPGATE_LOG_LEVEL": "debug",
		"VIPGATE_SPIFFE_ID": "spiffe://example.com/a/b/lb", "VIPGATE_FRONTEND_ID": "spiffe://example.com/a/b/frontend",
	} {
		if environment[name] != want {
			t.Errorf("%s is %q, want %q", name, environment[name], want)
		}
	}
	if lb.Image != "registry.example.com/vipgate/lb:v9" || lb.ImagePullPolicy != corev1.PullAlways ||
		lb.Resources.Limits.Memory().String() != "1Gi" {
		t.Errorf("lb: %+v", lb)
	}
	for _, c := range pod.Containers {
		if slices.Contains(c.SecurityContext.Capabilities.Add, "SYS_PTRACE") {
			t.Errorf("%s has SYS_PTRACE without noDelay", c.Name)
		}
	}
}

// The Role of the chart follows from the Trench.
func TestRoleOfTheChart(t *testing.T) {
	o, _, err := chart(t, "vipgate", values(t, `
trench:
  name: t
  spec:
    nodeDrain: true
    publish: {addresses: [192.0.2.1], ingressClass: nginx, gatewayClass: external}
    attractor:
      name: a
      vips: [20.0.0.1/32]
      gateways:
        - {name: g1, address: 192.0.2.2, passwordSecret: {name: keys, key: g1}}
        - {name: g2, address: 192.0.2.3, passwordSecret: {name: keys, key: g2}}
        - {name: g3, address: 192.0.2.4}
rbac: {namespaces: [application-a]}
`))
	harness.Must(t, err)
	resources := map[string][]string{}
	for _, role := range []string{"trench-a/vipgate", "application-a/vipgate-trench-a-t"} {
		published := 0
		for _, r := range decode[rbacv1.Role](t, o, "Role "+role).Rules {
			for _, resource := range r.Resources {
				resources[resource] = r.ResourceNames
				if strings.HasPrefix(resource, "ingresses") || strings.HasPrefix(resource, "gateways") {
					published++
				}
			}
		}
		if published != 4 {
			t.Errorf("Role %s allows %d resources of Ingresses and Gateways, want them and their status", role, published)
		}
	}
	if !slices.Equal(resources["secrets"], []string{"keys"}) ||
		!slices.Equal(resources["leases"], []string{"vipgate-t", "turn-vipgate-t"}) {
		t.Errorf("resources %v", resources)
	}
	// Without spec.nodeDrain there is no ClusterRole.
	nodes := decode[rbacv1.ClusterRole](t, o, "ClusterRole <nil>/vipgate-nodes-trench-a-t")
	binding := decode[rbacv1.ClusterRoleBinding](t, o, "ClusterRoleBinding <nil>/vipgate-nodes-trench-a-t")
	if len(nodes.Rules) != 1 || binding.RoleRef.Name != nodes.Name || binding.Subjects[0].Namespace != namespace {
		t.Errorf("ClusterRole %+v, binding %+v", nodes, binding)
	}
	further := decode[rbacv1.RoleBinding](t, o, "RoleBinding application-a/vipgate-trench-a-t")
	if further.Subjects[0].Namespace != namespace {
		t.Errorf("subjects %+v", further.Subjects)
	}
}

// Names that YAML reads as numbers, and namespaces of the greatest length, are permitted.
func TestNamesOfTheChart(t *testing.T) {
	for name, further := range map[string]string{
		"123": strings.Repeat("a", 63), "true": "1e3", "1e3": "true", strings.Repeat("a", 55): "123",
	} {
		o, _, err := chart(t, "vipgate", values(t, fmt.Sprintf(`
trench: {name: %q, spec: {namespaces: [trench-a, %q], attractor: {name: a, vips: [20.0.0.1/32], gateways: []}}}
rbac: {namespaces: [%[2]q]}
`, name, further)))
		harness.Must(t, err)
		d := decode[appsv1.Deployment](t, o, deployment)
		role := "Role " + further + "/vipgate-trench-a-" + name
		if label := d.Spec.Template.Labels["vipgate.io/trench-pod"]; label != name || o["Trench trench-a/"+name] == nil ||
			o[role] == nil {
			t.Errorf("%s: label %q", name, label)
		}
	}
}

// The chart of the objects of the cluster has the same as the Kustomize deployment.
func TestChartOfTheDefinition(t *testing.T) {
	want := kustomize(t, filepath.Join(root, "deployments/kubernetes"))
	got, _, err := chart(t, "vipgate-crds", nil)
	harness.Must(t, err)
	if len(want) == 0 || len(got) != len(want) {
		t.Errorf("%d objects, want %d", len(got), len(want))
	}
	for key := range want {
		compare(t, key, got[key], want[key])
	}
	got, _, err = chart(t, "vipgate-crds", map[string]any{"networkStatusUsers": []any{"a", "b"}})
	harness.Must(t, err)
	policy := fmt.Sprint(got["ValidatingAdmissionPolicy <nil>/pods.vipgate.io"])
	if !strings.Contains(policy, `request.userInfo.username in ["a","b"])`) {
		t.Errorf("the users are not in %s", policy)
	}
}

// frrK8s are the values of the trench in test/e2e/testdata/frr-k8s.
const frrK8s = `
speaker: frr-k8s
frrk8s: {asn: 64500, announcers: [169.254.100.1], node: 169.254.100.150}
trench:
  spec:
    attractor:
      name: a
      vips: [20.0.0.1/32, "2000::1/128"]
      gateways: [{name: g1, address: 192.0.2.1, remoteASN: 64501}]
`

// The FRRConfiguration is what frr-k8s renders, and FRR loads, in the end-to-end tests. kube
// may read the sessions of frr-k8s with this speaker only.
func TestSpeakerFRRK8s(t *testing.T) {
	o, _, err := chart(t, "vipgate", values(t, frrK8s))
	harness.Must(t, err)
	text, err := os.ReadFile(filepath.Join(root, "test/e2e/testdata/frr-k8s/vipgate.yaml"))
	harness.Must(t, err)
	want := objects{}
	want.add(t, string(text))
	for key := range want {
		if o[key] == nil {
			t.Fatalf("no %s", key)
		}
		delete(o[key]["metadata"].(map[string]any), "labels")
		compare(t, key, o[key], want[key])
	}
	const sessions = " frr-k8s-system/vipgate-sessions-trench-a-trench-a"
	role := decode[rbacv1.Role](t, o, "Role"+sessions)
	binding := decode[rbacv1.RoleBinding](t, o, "RoleBinding"+sessions)
	if len(role.Rules) != 1 || !slices.Equal(role.Rules[0].Resources, []string{"bgpsessionstates"}) ||
		!slices.Equal(role.Rules[0].Verbs, []string{"list", "watch"}) || binding.RoleRef.Name != role.Name ||
		binding.Subjects[0].Namespace != namespace {
		t.Errorf("role %+v, binding %+v", role, binding)
	}
	pod := decode[appsv1.Deployment](t, o, deployment).Spec.Template.Spec
	kube, frontend := pod.InitContainers[1].Env, pod.Containers[1].Env
	if !slices.Contains(kube, corev1.EnvVar{Name: "VIPGATE_FRR_K8S_NAMESPACE", Value: "frr-k8s-system"}) {
		t.Errorf("kube does not read the sessions: %v", kube)
	}
	for name, value := range map[string]string{
		"SPEAKER": "external", "SPEAKER_ADDRESS": "169.254.100.150", "SPEAKER_AS": "64500",
		"SPEAKER_LOCAL_AS": "4200000000", "SPEAKER_LISTEN": "10179", "GATEWAY_STATE": "frr-k8s",
	} {
		if !slices.Contains(frontend, corev1.EnvVar{Name: "VIPGATE_" + name, Value: value}) {
			t.Errorf("the frontend has no VIPGATE_%s=%s: %v", name, value, frontend)
		}
	}

	capabilities := func(values map[string]any) []corev1.Capability {
		o, _, err := chart(t, "vipgate", values)
		harness.Must(t, err)
		s := decode[appsv1.Deployment](t, o, deployment).Spec.Template.Spec.Containers[1].SecurityContext
		if escalates := len(s.Capabilities.Add) > 0; *s.AllowPrivilegeEscalation != escalates {
			t.Errorf("the frontend has %v and allowPrivilegeEscalation %t", s.Capabilities.Add, !escalates)
		}
		return s.Capabilities.Add
	}
	routes := values(t, strings.Replace(frrK8s, "frrk8s: {", "frrk8s: {sourceRouting: true, ", 1))
	if none, some := capabilities(values(t, frrK8s)), capabilities(routes); len(none) > 0 || len(some) < 3 {
		t.Errorf("the frontend has the capabilities %v, and %v for source routing", none, some)
	}

	o, _, err = chart(t, "vipgate", values(t, strings.Replace(frrK8s, "speaker: frr-k8s", "speaker: bird", 1)))
	harness.Must(t, err)
	for key, object := range o {
		if text := fmt.Sprint(object); strings.Contains(text, "frrk8s") || strings.Contains(text, "FRR_K8S") ||
			strings.Contains(text, "VIPGATE_SPEAKER") {
			t.Errorf("%s names frr-k8s without it", key)
		}
	}
}
