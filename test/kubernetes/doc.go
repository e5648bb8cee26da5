// Package kubernetes gives tests a Kubernetes API server: etcd and kube-apiserver as processes,
// without a controller manager, a scheduler or a kubelet.
//
// Both are built from tools/kubernetes/go.mod into bin/tools, by `make test-kube`; [Missing] names
// the missing executable. In `make test`, which sets VIPGATE_TEST_KUBE=0, tests that call [Start]
// are skipped and counted.
//
// Without controllers a deleted namespace is never removed, no EndpointSlices are created, and
// only the test changes Pods: a deleted Pod with a node name and a grace period remains, with its
// deletion timestamp, until the test deletes it with a grace period of zero.
//
// A [Cluster]'s processes and files end with its test, or with the last test of a package that uses
// [Main]. The next Start removes the leftovers of a killed run: the folder's name contains the ID of
// the process that created it.
package kubernetes
