// Package kubernetes gives tests a Kubernetes API server: etcd and kube-apiserver as processes,
// without a controller manager, a scheduler or a kubelet.
//
// Both are built from tools/kubernetes/go.mod into bin/tools, by `make test-kube`; [Missing] names
// what is missing. In `make test`, which sets VIPGATE_TEST_KUBE=0, tests that call [Start] are
// skipped and counted.
//
// Without controllers a namespace that is deleted never goes, nothing creates EndpointSlices, and a
// Pod changes only as the test writes: a deleted Pod with a node name and a grace period stays,
// with its deletion timestamp, until the test deletes it with a grace period of zero.
//
// A [Cluster]'s processes and files end with its test. What a killed run left is removed by the
// next Start: the folder's name carries the process that created it.
package kubernetes
