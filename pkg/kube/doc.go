// Package kube is the process that writes the trench file from objects of Kubernetes.
//
// The file outlives the process and the API server: it is replaced only by the translation of a
// snapshot of synced caches, and stays as it is while there is none, while the Trench is refused,
// and when the process stops. A file <trench file>.stale beside it says since when it may be old.
package kube
