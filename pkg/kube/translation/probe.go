package translation

import (
	"cmp"
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
)

// suggestCheck returns the check of the first readinessProbe of HTTP or gRPC, for a Service that
// has the TCP check by default; "" without one. All pods of a trench must return the same.
func suggestCheck(service *corev1.Service, stream *trench.Stream, list []*endpoint) string {
	if _, written := service.Annotations[v1alpha1.CheckAnnotation]; written || stream.Check.Kind() != "tcp" {
		return ""
	}
	for _, endpoint := range list {
		if endpoint.pod == nil {
			continue
		}
		for _, container := range endpoint.pod.Spec.Containers {
			if probe := container.ReadinessProbe; probe != nil {
				if check := checkOf(probe.ProbeHandler, container.Ports); check != nil {
					text, _ := json.Marshal(check) // of texts and numbers
					return string(text)
				}
			}
		}
	}
	return ""
}

// checkOf returns the check of a probe in the form of the annotation; nil for other probes.
func checkOf(probe corev1.ProbeHandler, ports []corev1.ContainerPort) map[string]any {
	switch {
	case probe.HTTPGet != nil:
		port := probe.HTTPGet.Port.IntVal
		if probe.HTTPGet.Port.Type == intstr.String {
			named := slices.IndexFunc(ports, func(port corev1.ContainerPort) bool {
				return port.Name == probe.HTTPGet.Port.StrVal
			})
			if named < 0 {
				return nil
			}
			port = ports[named].ContainerPort
		}
		check := map[string]any{"port": port, "path": cmp.Or(probe.HTTPGet.Path, "/")}
		if probe.HTTPGet.Scheme == corev1.URISchemeHTTPS {
			check["tls"] = map[string]bool{"insecure": true} // as the kubelet does
		}
		return map[string]any{"http": check}
	case probe.GRPC != nil:
		check := map[string]any{"port": probe.GRPC.Port}
		if probe.GRPC.Service != nil && *probe.GRPC.Service != "" {
			check["service"] = *probe.GRPC.Service
		}
		return map[string]any{"grpc": check}
	}
	return nil
}
