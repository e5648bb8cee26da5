// Package cluster follows the objects of an API server that the trench file depends on.
//
// [Cluster] has one cache for each kind of object and namespace, filled by a reflector of client-go:
// the Trench, the pods of the trench itself, and in each namespace that the Trench names the
// Services, the EndpointSlices of Services without selector and the labelled Pods; one cache for
// each Secret that the Trench names, so that RBAC can name them, too.
//
// A [Snapshot] comes from caches that are all synced. A Trench that names other namespaces or
// Secrets is in force once their caches are synced, too; until then the previous Trench is, whose
// caches continue.
//
// [State] says since when the API server cannot be reached. A watch that ends, or is refused, shows
// it at once; a server that hangs is found by a probe, which then closes all connections, so that
// every watch begins again on another one.
package cluster
