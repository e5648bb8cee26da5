// Package secrettest is an API server that implements the watch protocol of Kubernetes for
// Secrets.
//
// It grants nothing but watches of one Secret by its name, to one token. Its answers match
// kube-apiserver 1.37. Without a resource version, the header is followed immediately by ADDED
// for a Secret that exists, and by nothing for a Secret that does not. With sendInitialEvents, a
// bookmark marks the end of the initial events. test/kubernetes runs the same client against the
// real API server.
package secrettest
