// Package node runs vipgate on real Kubernetes nodes: two kubelets with containerd and runc, the
// scheduler and the controllers. It applies deployments/quickstart and sends requests to its VIP
// during rolling updates, drains and deletions.
//
// `make test-node` runs it in separate mount, network and PID namespaces. Both nodes share them:
// their pods are on one bridge, and hostNetwork pods have the same network on both nodes.
package node
