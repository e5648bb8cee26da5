package kube

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/vipgate/vipgate/test/harness"
)

// loadBalancerTemplate holds the relevant part of Meridio 2's template for load balancer pods.
const loadBalancerTemplate = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: stateless-load-balancer, namespace: ns-a}
spec:
  selector: {matchLabels: {app: stateless-load-balancer}}
  template:
    metadata: {labels: {app: stateless-load-balancer}}
    spec:
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: loadbalancer
          image: load-balancer
          env: [{name: MERIDIO_READINESS_DIR, value: /var/run/meridio}]
          volumeMounts: [{name: lb-run, mountPath: /var/run/meridio}]
        - name: router
          image: router
          volumeMounts:
            - {name: bird-run, mountPath: /var/run/bird}
            - {name: bird-etc, mountPath: /etc/bird}
            - {name: bird-log, mountPath: /var/log/bird}
            - {name: lb-run, mountPath: /var/run/meridio, readOnly: true}
      volumes:
        - {name: lb-run, emptyDir: {medium: Memory}}
        - {name: bird-run, emptyDir: {medium: Memory}}
        - {name: bird-etc, emptyDir: {medium: Memory}}
        - {name: bird-log, emptyDir: {medium: Memory}}
`

// swapped returns the template after the patch of deployments/meridio2, as the API server merges
// and validates it.
func (f *meridio2Fixture) swapped() *appsv1.Deployment {
	f.Helper()
	f.Apply(f.T, loadBalancerTemplate)
	patch, err := yaml.ToJSON([]byte(f.manifest("../../deployments/meridio2/swap.yaml")))
	harness.Must(f, err)
	resource := appsv1.SchemeGroupVersion.WithResource("deployments")
	u, err := f.objects.Resource(resource).Namespace("ns-a").Patch(f.Context(), "stateless-load-balancer",
		types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldValidation: metav1.FieldValidationStrict})
	harness.Must(f, err)
	d := &appsv1.Deployment{}
	harness.Must(f, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, d))
	return d
}

// checkSwap checks the parts of Meridio 2's template that the patch does not change.
func (f *meridio2Fixture) checkSwap() {
	f.Helper()
	d := f.swapped()
	pod := d.Spec.Template.Spec
	names := func(all []corev1.Container) (names []string) {
		for _, c := range all {
			names = append(names, c.Name)
		}
		slices.Sort(names)
		return names
	}
	if got := names(pod.InitContainers); !slices.Equal(got, []string{"kube"}) {
		f.Errorf("init containers %v", got)
	}
	if got := names(pod.Containers); !slices.Equal(got, []string{"frontend", "loadbalancer"}) {
		f.Errorf("containers %v", got)
	}
	volumes := map[string]bool{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = false
	}
	for _, c := range append(pod.InitContainers, pod.Containers...) {
		for _, m := range c.VolumeMounts {
			if _, exists := volumes[m.Name]; !exists {
				f.Errorf("%s mounts the volume %s, which does not exist", c.Name, m.Name)
			}
			volumes[m.Name] = true
		}
	}
	for name, used := range volumes {
		if !used {
			f.Errorf("nothing mounts the volume %s", name)
		}
	}
	kube, frontend := pod.InitContainers[0], pod.Containers[slices.IndexFunc(pod.Containers, isFrontend)]
	if a, b := kube.SecurityContext.RunAsUser, frontend.SecurityContext.RunAsUser; *a != *b {
		f.Errorf("kube is user %d and may not open the admin socket of the frontend, user %d", *a, *b)
	}
	if a, b := variable(kube, "VIPGATE_TRENCH_FILE"), variable(frontend, "VIPGATE_TRENCH_FILE"); a != b || a == "" {
		f.Errorf("kube writes %s, frontend reads %s", a, b)
	}
}

func isFrontend(c corev1.Container) bool { return c.Name == "frontend" }

func variable(c corev1.Container, name string) string {
	i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == name })
	if i < 0 {
		return ""
	}
	return c.Env[i].Value
}
