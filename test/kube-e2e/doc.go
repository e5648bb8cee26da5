// Package kubee2e tests vipgate in Kubernetes from the objects of the API server to the gateway's
// routes and the answers of applications. Only the kubelet, Multus and the controllers are
// simulated: the test creates Pods, writes their status, and ends their applications.
package kubee2e
