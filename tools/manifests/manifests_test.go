package manifests

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/vipgate/vipgate/test/harness"
)

// withoutKube are the values that the component without-kube corresponds to.
func withoutKube(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, "deployments/components/without-kube/trench-file.yaml"))
	harness.Must(t, err)
	var m corev1.ConfigMap
	harness.Must(t, yaml.UnmarshalStrict(data, &m))
	text, err := yaml.Marshal(map[string]any{
		"kube": map[string]any{"enabled": false}, "trench": map[string]any{"file": m.Data["trench.yaml"]},
	})
	harness.Must(t, err)
	return string(text)
}

// variants are components and the values of the chart that render the same objects.
func variants(t *testing.T) map[string]struct {
	components []string
	values     string
} {
	return map[string]struct {
		components []string
		values     string
	}{
		"base":         {nil, ""},
		"without kube": {[]string{"without-kube"}, withoutKube(t)},
		"unprivileged": {[]string{"unprivileged"}, "sysctls: {privilegedInitContainer: false}"},
		"monitoring": {
			[]string{"monitoring"},
			"monitoring: {podMonitor: true, rules: true, dashboard: true}",
		},
		"network policy": {[]string{"network-policy"}, "networkPolicy: {enabled: true}"},
		"unprivileged without kube": {
			[]string{"without-kube", "unprivileged"}, withoutKube(t) + "sysctls: {privilegedInitContainer: false}\n",
		},
	}
}

func TestChartAndBaseRenderTheSameObjects(t *testing.T) {
	for name, v := range variants(t) {
		t.Run(name, func(t *testing.T) {
			got, version, err := chart(t, "vipgate", values(t, v.values))
			harness.Must(t, err)
			want := overlay(t, version, v.components...)
			for _, key := range slices.Sorted(maps.Keys(want)) {
				compare(t, key, got[key], want[key])
			}
			for key := range got {
				if want[key] == nil {
					t.Errorf("only the chart has %s", key)
				}
			}
		})
	}
}

// compare reports the paths at which two values differ.
func compare(t *testing.T, path string, got, want any) {
	t.Helper()
	g, gotMap := got.(map[string]any)
	w, wantMap := want.(map[string]any)
	if gotMap && wantMap {
		keys := slices.Sorted(maps.Keys(w))
		for key := range g {
			if _, ok := w[key]; !ok {
				keys = append(keys, key)
			}
		}
		for _, key := range keys {
			compare(t, path+"."+key, g[key], w[key])
		}
		return
	}
	if reflect.DeepEqual(got, want) || empty(got) && empty(want) {
		return
	}
	// YAML in a string, such as an annotation in JSON or a file of a ConfigMap.
	if g, ok := got.(string); ok {
		if w, ok := want.(string); ok {
			var a, b any
			if yaml.Unmarshal([]byte(g), &a) == nil && yaml.Unmarshal([]byte(w), &b) == nil && reflect.DeepEqual(a, b) {
				return
			}
		}
	}
	t.Errorf("%s: the chart has\n%v\nthe base\n%v", path, got, want)
}

// empty reports whether a value is absent or a list without elements.
func empty(v any) bool {
	list, ok := v.([]any)
	return v == nil || ok && len(list) == 0
}

// typed are the types that objects of the core are decoded into.
func typed(kind string) any {
	switch kind {
	case "Deployment":
		return &appsv1.Deployment{}
	case "Pod":
		return &corev1.Pod{}
	case "ServiceAccount":
		return &corev1.ServiceAccount{}
	case "ConfigMap":
		return &corev1.ConfigMap{}
	case "Secret":
		return &corev1.Secret{}
	case "Namespace":
		return &corev1.Namespace{}
	case "Service":
		return &corev1.Service{}
	case "Role":
		return &rbacv1.Role{}
	case "RoleBinding":
		return &rbacv1.RoleBinding{}
	case "PodDisruptionBudget":
		return &policyv1.PodDisruptionBudget{}
	case "NetworkPolicy":
		return &networkingv1.NetworkPolicy{}
	}
	return nil
}

// Kubernetes drops unknown fields: a misspelled one is never noticed there.
func TestEveryFieldExists(t *testing.T) {
	all := overlay(t, "v0", "monitoring", "network-policy", "ingresses", "gateways", "gateway-password")
	maps.Copy(all, kustomize(t, filepath.Join(root, "deployments/quickstart")))
	maps.Copy(all, kustomize(t, filepath.Join(root, "deployments/example")))
	maps.Copy(all, kustomize(t, filepath.Join(root, "deployments/probe")))
	for _, file := range []string{
		"example/namespace-role.yaml", "example/service.yaml", "example/application.yaml", "host/static-pod.yaml",
	} {
		text, err := os.ReadFile(filepath.Join(root, "deployments", file))
		harness.Must(t, err)
		all.add(t, string(text))
	}
	apart := []string{"Trench", "NetworkAttachmentDefinition", "PodMonitor", "PrometheusRule"}
	seen := map[string]bool{}
	for key, object := range all {
		kind, _ := object["kind"].(string)
		seen[kind] = true
		into := typed(kind)
		if into == nil {
			if !slices.Contains(apart, kind) {
				t.Errorf("%s: unknown kind", key)
			}
			continue
		}
		text, err := yaml.Marshal(object)
		harness.Must(t, err)
		if err := yaml.UnmarshalStrict(text, into); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
	if len(seen) < 14 {
		t.Errorf("only %v were rendered", slices.Sorted(maps.Keys(seen)))
	}
}

func decode[T any](t *testing.T, o objects, key string) T {
	t.Helper()
	text, err := yaml.Marshal(o[key])
	harness.Must(t, err)
	var into T
	harness.Must(t, yaml.UnmarshalStrict(text, &into))
	return into
}

// The token is in the volume of one container, a native sidecar, and nowhere else.
func TestOnlyKubeHasAToken(t *testing.T) {
	pod := decode[appsv1.Deployment](t, overlay(t, "v0"), "Deployment trench-a/vipgate").Spec.Template.Spec
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Error("the pod mounts a token into every container")
	}
	tokens := map[string]bool{}
	for _, v := range pod.Volumes {
		if v.Projected != nil {
			for _, s := range v.Projected.Sources {
				tokens[v.Name] = tokens[v.Name] || s.ServiceAccountToken != nil
			}
		}
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		has := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return tokens[m.Name] })
		if has != (c.Name == "kube") {
			t.Errorf("%s has a token: %t", c.Name, has)
		}
		if c.Name == "kube" && (c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways) {
			t.Error("kube is no native sidecar")
		}
	}
	account := decode[corev1.ServiceAccount](t, overlay(t, "v0"), "ServiceAccount trench-a/vipgate")
	if account.AutomountServiceAccountToken == nil || *account.AutomountServiceAccountToken {
		t.Error("pods of the service account mount a token")
	}
	for key := range overlay(t, "v0", "without-kube") {
		if kind, _, _ := strings.Cut(key, " "); kind == "Role" || kind == "RoleBinding" || kind == "Trench" {
			t.Errorf("without kube there is %s", key)
		}
	}
}

// The cached SVID of a container is in memory, in a volume that no other container mounts.
func TestOnlyOneContainerHasTheCachedSVID(t *testing.T) {
	pod := decode[appsv1.Deployment](t, overlay(t, "v0"), "Deployment trench-a/vipgate").Spec.Template.Spec
	all := slices.Concat(pod.InitContainers, pod.Containers)
	for _, name := range []string{"lb", "frontend"} {
		c := all[slices.IndexFunc(all, func(c corev1.Container) bool { return c.Name == name })]
		i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "VIPGATE_IDENTITY_CACHE" })
		if i < 0 {
			t.Errorf("%s keeps no SVID", name)
			continue
		}
		volume := ""
		for _, m := range c.VolumeMounts {
			if m.MountPath == filepath.Dir(c.Env[i].Value) {
				volume = m.Name
			}
		}
		var mounts []string
		for _, c := range all {
			if slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == volume }) {
				mounts = append(mounts, c.Name)
			}
		}
		inMemory := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
			return v.Name == volume && v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory
		})
		if !slices.Equal(mounts, []string{name}) || !inMemory {
			t.Errorf("%s keeps its SVID in volume %q: in memory: %t, mounted by %v", name, volume, inMemory, mounts)
		}
	}
}

// Secrets are readable by name only, and nothing belongs to the cluster.
func TestRoles(t *testing.T) {
	all := overlay(t, "v0", "gateway-password", "ingresses", "gateways")
	secrets := 0
	for key, object := range all {
		kind, _ := object["kind"].(string)
		if strings.HasPrefix(kind, "Cluster") {
			t.Errorf("%s belongs to the cluster", key)
		}
		if kind != "Role" {
			continue
		}
		for _, r := range decode[rbacv1.Role](t, all, key).Rules {
			if slices.Contains(r.Resources, "secrets") {
				secrets++
				if len(r.ResourceNames) == 0 {
					t.Errorf("%s allows every Secret", key)
				}
			}
			if slices.Contains(slices.Concat(r.Resources, r.Verbs, r.APIGroups), "*") {
				t.Errorf("%s has a wildcard", key)
			}
		}
	}
	if secrets != 1 {
		t.Errorf("%d rules for Secrets, want that of the gateway's password", secrets)
	}
	binding := decode[rbacv1.RoleBinding](t, all, "RoleBinding trench-a/vipgate")
	if s := binding.Subjects[0]; s.Namespace != namespace || s.Name != "vipgate" {
		t.Errorf("the subject is %+v", s)
	}
}
