package cluster

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
)

// networkStatus is the annotation in which Multus lists the addresses of a pod.
const networkStatus = "k8s.v1.cni.cncf.io/network-status"

// lastApplied is the annotation in which kubectl apply stores a copy of the object.
const lastApplied = corev1.LastAppliedConfigAnnotation

// strip removes the fields that no translation reads, in place; for 5 000 pods they take most of
// the memory. It is a cache.TransformFunc.
func strip(object any) (any, error) {
	o, err := meta.Accessor(object)
	if err != nil {
		return object, nil // a tombstone of client-go
	}
	o.SetManagedFields(nil)
	if pod, ok := object.(*corev1.Pod); ok {
		stripPod(pod)
	} else if annotations := o.GetAnnotations(); annotations[lastApplied] != "" {
		annotations = maps.Clone(annotations)
		delete(annotations, lastApplied)
		o.SetAnnotations(annotations)
	}
	return object, nil
}

// stripPod keeps the metadata with the annotation of Multus, and of spec and status only the node,
// the addresses, the readiness and the ports.
func stripPod(pod *corev1.Pod) {
	maps.DeleteFunc(pod.Annotations, func(name, _ string) bool { return name != networkStatus })
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i, container := range containers {
			containers[i] = corev1.Container{Name: container.Name, Ports: container.Ports}
		}
	}
	pod.Spec = corev1.PodSpec{
		Containers: pod.Spec.Containers, InitContainers: pod.Spec.InitContainers,
		NodeName: pod.Spec.NodeName, HostNetwork: pod.Spec.HostNetwork, ReadinessGates: pod.Spec.ReadinessGates,
	}
	pod.Status = corev1.PodStatus{
		Phase: pod.Status.Phase, Reason: pod.Status.Reason, Conditions: pod.Status.Conditions,
		PodIP: pod.Status.PodIP, PodIPs: pod.Status.PodIPs,
	}
}
