package pods

import (
	"bytes"
	"context"
	"fmt"
	"path"
	"slices"

	"go.yaml.in/yaml/v4"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// logLines is the number of lines of each log, the newest.
const logLines = 20_000

// ownContainers are the containers of vipgate in a trench pod. Containers that others add may have
// secrets in their arguments and logs.
var ownContainers = []string{Frontend, LB, Kube, "sysctls"}

// collect adds logs and manifests of the trench.
func (c *Cluster) collect(ctx context.Context, to *collector, secrets *masker) {
	pods, err := c.Pods(ctx)
	if err != nil || len(pods) == 0 {
		return // Members was refused before
	}
	trench := pods[0].Labels[trenchLabel]
	for _, pod := range pods {
		statuses := slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses)
		for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			if slices.Contains(ownContainers, container.Name) {
				c.addLog(ctx, to, pod.Name, container.Name, false)
				if slices.ContainsFunc(statuses, func(status corev1.ContainerStatus) bool {
					return status.Name == container.Name && status.RestartCount > 0
				}) {
					c.addLog(ctx, to, pod.Name, container.Name, true)
				}
			}
		}
	}
	objects, err := dynamic.NewForConfig(c.config)
	if err != nil {
		return // NewCluster created a client of the same configuration
	}
	list := func(group, version, resource string, keep func(unstructured.Unstructured) bool) {
		kind := schema.GroupVersionResource{Group: group, Version: version, Resource: resource}
		to.add(ctx, path.Join("manifests", resource+".yaml"), func(ctx context.Context, out *bytes.Buffer) error {
			found, err := objects.Resource(kind).Namespace(c.Namespace).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, object := range found.Items {
				if !keep(object) {
					continue
				}
				text, err := yaml.Dump(secrets.scrub(object.Object, false), yaml.WithLineWidth(-1))
				if err != nil {
					return fmt.Errorf("failed to render %s: %w", object.GetName(), err)
				}
				fmt.Fprintf(out, "---\n%s", text)
			}
			return nil
		})
	}
	// kube translates all Services of the class with their EndpointSlices and pods.
	services := func(object unstructured.Unstructured) bool {
		class, _, _ := unstructured.NestedString(object.Object, "spec", "loadBalancerClass")
		return class == "vipgate.io/"+trench
	}
	all := func(unstructured.Unstructured) bool { return true }
	list("", "v1", "services", services)
	list("discovery.k8s.io", "v1", "endpointslices", all)
	list("", "v1", "pods", func(object unstructured.Unstructured) bool {
		labels := object.GetLabels()
		return labels[trenchLabel] == trench || labels["vipgate.io/trench"] == trench
	})
	list("apps", "v1", "deployments", func(object unstructured.Unstructured) bool {
		label, _, _ := unstructured.NestedString(object.Object, "spec", "template", "metadata", "labels", trenchLabel)
		return label == trench
	})
	list("vipgate.io", "v1alpha1", "trenches", all)
	list("vipgate.io", "v1alpha1", "trenchreports", all)
	list("", "v1", "configmaps", func(object unstructured.Unstructured) bool {
		mounts := func(volume corev1.Volume) bool {
			return volume.ConfigMap != nil && volume.ConfigMap.Name == object.GetName()
		}
		return slices.ContainsFunc(pods, func(pod corev1.Pod) bool { return slices.ContainsFunc(pod.Spec.Volumes, mounts) })
	})
}

func (c *Cluster) addLog(ctx context.Context, to *collector, pod, container string, previous bool) {
	name := "log.txt"
	if previous {
		name = "previous-log.txt"
	}
	to.add(ctx, path.Join(pod, container, name), func(ctx context.Context, out *bytes.Buffer) error {
		lines := int64(logLines)
		text, err := c.core.Pods(c.Namespace).GetLogs(pod, &corev1.PodLogOptions{
			Container: container, Previous: previous, TailLines: &lines, Timestamps: true,
		}).DoRaw(ctx)
		out.Write(text)
		return err
	})
}
