// Package cluster watches the API server for the objects that the trench file depends on.
//
// [Cluster] has one cache for each kind of object and namespace, filled by a reflector of
// client-go: the Trench, the pods that run lb and frontend, and, in each namespace that the Trench
// names, the Services, the EndpointSlices of Services without selector, and the labelled Pods. Each
// Secret that the Trench names has a separate cache, so that RBAC can grant access by name.
//
// A [Snapshot] is taken when all caches are synced. A Trench that adds namespaces or Secrets takes
// effect once their caches are synced; until then the previous Trench and its caches stay in force.
//
// [State] reports since when the API server is unreachable. A watch that ends or is refused
// reports it immediately. A probe detects a server that hangs, and closes all connections, so
// that every watch reconnects.
package cluster
