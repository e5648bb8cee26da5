// Package node runs vipgate on real Kubernetes nodes: two kubelets with containerd and runc, the
// scheduler and the controllers. It applies deployments/quickstart, sends requests to its VIP, and
// rolls, drains and deletes meanwhile.
//
// `make test-node` runs it, in namespaces of its own for mounts, network and processes. Both nodes
// share these: their pods are on one bridge, and the network of the host that a pod may use is the
// same on both.
package node
