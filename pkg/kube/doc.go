// Package kube is the process that writes the trench file from Kubernetes objects.
//
// The trench file stays in force without the process and without the API server. Only the
// translation of a snapshot of synced caches replaces it; it is unchanged before the first sync,
// while the Trench is refused, and when the process stops. The file <trench file>.stale in the
// same directory holds the time since which the trench file may be outdated.
package kube
