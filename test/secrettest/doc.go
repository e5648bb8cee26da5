// Package secrettest is an API server that speaks the watch protocol of Kubernetes for Secrets.
//
// It grants nothing but watches of one Secret by its name, to one token. What it answers was
// compared with kube-apiserver 1.37: without a resource version the header is followed at once by ADDED for a
// Secret that exists, and by nothing for one that does not; with sendInitialEvents a bookmark marks
// the end of that. test/kubernetes runs the same client against the real one.
package secrettest
