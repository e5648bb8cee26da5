package cluster

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"path"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/latest"
)

// Options configure a Cluster. Every field is required, except that Gateway replaces Trench, and
// only Gateway uses Pod.
type Options struct {
	Config            *rest.Config
	Namespace, Trench string
	// Gateway names a Gateway of Meridio 2 in place of the Trench, Pod the pod of this process.
	Gateway, Pod string
	Log          *slog.Logger
}

// Snapshot holds the objects of the synced caches. They are shared and must not be modified.
type Snapshot struct {
	translation.Objects
	// Meridio2 is set with a Gateway, and replaces Objects.
	Meridio2 meridio2.Objects
	// Siblings lists the pods that run lb and frontend of the trench; with a Gateway, only this pod.
	Siblings []*corev1.Pod
	// Changed is the time of the first change since the last snapshot.
	Changed time.Time
}

// State is how current the snapshot is.
type State struct {
	// Synced is the time of the first snapshot; zero before it.
	Synced time.Time
	// Stale is the reason why the snapshot may differ from the API server, or contains no Trench. It
	// is zero while all caches are current.
	Stale Failure
}

// Cluster follows the objects of one Trench. It implements task.Task. Create one with [New].
type Cluster struct {
	Options
	clients *clients
	probe   condition
	missing condition // the Trench does not exist

	changes chan struct{} // has a token after a change of the snapshot
	wake    chan struct{} // has a token when reconcile must run

	stateMu sync.Mutex // keeps log lines in the order of state changes
	state   latest.Value[State]

	mu        sync.Mutex
	followers map[key]*follower
	// trench and keys are in force once synced is not zero. trench is nil if there is no Trench.
	trench *unstructured.Unstructured
	keys   []key // without the keys of the Trench and of its pods
	synced time.Time
	first  time.Time // the first change since the last snapshot; zero without a change
	errors uint64    // error count of stopped followers
}

// New returns a cluster. Run starts the caches.
func New(options Options) (*Cluster, error) {
	clients, err := newClients(options.Config)
	if err != nil {
		return nil, err
	}
	cluster := &Cluster{
		Options: options, clients: clients, followers: map[key]*follower{},
		changes: make(chan struct{}, 1), wake: make(chan struct{}, 1),
	}
	cluster.probe.changed, cluster.missing.changed = cluster.updateState, cluster.updateState
	return cluster, nil
}

// Config returns the client configuration. Clients created from it share the connection tracker:
// all of their connections are closed when the API server hangs.
func (cluster *Cluster) Config() *rest.Config { return rest.CopyConfig(cluster.clients.config) }

// Changes returns a channel that has a token after the first sync and after each later change.
func (cluster *Cluster) Changes() <-chan struct{} { return cluster.changes }

// State returns the state of the caches.
func (cluster *Cluster) State() *latest.Value[State] { return &cluster.state }

// String implements task.Task.
func (*Cluster) String() string { return "cluster" }

// Run follows until ctx ends.
func (cluster *Cluster) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var probes sync.WaitGroup
	probes.Go(func() { cluster.probeServer(ctx) })
	defer func() {
		cancel()
		probes.Wait()
		for _, follower := range cluster.followers { // stopped but kept: Snapshot still reads their stores
			follower.stop()
		}
		cluster.clients.connections.CloseAll()
	}()
	for {
		cluster.reconcile(ctx)
		select {
		case <-cluster.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Snapshot returns the content of the caches, and reports whether all were synced.
func (cluster *Cluster) Snapshot() (Snapshot, bool) {
	cluster.mu.Lock()
	defer cluster.mu.Unlock()
	if cluster.synced.IsZero() {
		return Snapshot{}, false
	}
	snapshot := Snapshot{Changed: cluster.first, Objects: translation.Objects{Unreadable: map[string]string{}}}
	// The next change starts a new measurement.
	cluster.first = time.Time{}
	if snapshot.Changed.IsZero() {
		snapshot.Changed = time.Now()
	}
	if cluster.Gateway != "" {
		snapshot.Meridio2.Gateway = cluster.trench
	} else {
		snapshot.Trench = cluster.trench
	}
	snapshot.Siblings = objects[*corev1.Pod](cluster.followers[cluster.siblings()], nil)
	for _, key := range cluster.keys {
		follower := cluster.followers[key]
		if failure, _ := follower.failure(); follower.isRefused() { // no cause while the list is streamed
			snapshot.Unreadable[path.Join(key.namespace, key.name)] = cmp.Or(failure.Cause, follower.what)
		}
		switch key.kind {
		case services:
			snapshot.Services = objects(follower, snapshot.Services)
		case endpointSlices:
			snapshot.EndpointSlices = objects(follower, snapshot.EndpointSlices)
		case pods:
			snapshot.Pods = objects(follower, snapshot.Pods)
		case secrets:
			snapshot.Secrets = objects(follower, snapshot.Secrets)
		case gatewayRouters:
			snapshot.Meridio2.Routers = objects(follower, snapshot.Meridio2.Routers)
		}
	}
	return snapshot, true
}

// objects appends the objects of a follower to a slice.
func objects[T metav1.Object](follower *follower, to []T) []T {
	all := follower.store.list()
	to = slices.Grow(to, len(all))
	for _, object := range all {
		to = append(to, object.(T))
	}
	return to
}

// reconcile starts the caches that the Trench names. Once all of them are synced, the Trench takes
// effect and the caches that it no longer names stop.
func (cluster *Cluster) reconcile(ctx context.Context) {
	defer cluster.updateState()
	own := cluster.start(ctx, cluster.own())
	fixed := cluster.start(ctx, cluster.siblings())
	// The first list calls changed, which runs reconcile again.
	if !own.store.isSynced() {
		return
	}
	var trench *unstructured.Unstructured
	if all := own.store.list(); len(all) > 0 {
		trench = all[0].(*unstructured.Unstructured)
	}
	cluster.mu.Lock()
	inForce := cluster.keys
	cluster.mu.Unlock()
	keys, readable := cluster.needed(trench)
	if !readable {
		keys = inForce // the translation refuses the Trench; keep its caches
	}
	synced := fixed.store.isSynced()
	// Start every cache before waiting for one, so that they list concurrently.
	for _, key := range keys {
		follower := cluster.start(ctx, key)
		synced = (follower.store.isSynced() || follower.isRefused()) && synced
	}
	if !synced {
		// The Trench in force keeps its caches until the new ones are synced.
		cluster.stopExcept(slices.Concat(inForce, keys))
		return
	}

	cluster.mu.Lock()
	changed := cluster.synced.IsZero() || cluster.trench != trench || !slices.Equal(cluster.keys, keys)
	cluster.trench, cluster.keys = trench, keys
	if changed && cluster.first.IsZero() {
		cluster.first = time.Now()
	}
	if cluster.synced.IsZero() {
		cluster.synced = time.Now()
	}
	cluster.mu.Unlock()
	var missing error
	if trench == nil {
		missing = errors.New("does not exist")
	}
	// Report without mu: updateState locks it.
	cluster.missing.report(cluster.own().String(), missing)
	cluster.stopExcept(keys)
	if changed {
		latest.Wake(cluster.changes)
	}
}

// changed handles a change in the store of a follower. Changes of caches in force reach the
// snapshot directly; changes of any other cache run reconcile.
func (cluster *Cluster) changed(key key) {
	cluster.mu.Lock()
	part := !cluster.synced.IsZero() && (key == cluster.siblings() || slices.Contains(cluster.keys, key))
	if part && cluster.first.IsZero() {
		cluster.first = time.Now()
	}
	cluster.mu.Unlock()
	if part {
		latest.Wake(cluster.changes)
	} else {
		latest.Wake(cluster.wake)
	}
}

// start returns the follower of a key, and starts it if it does not run.
func (cluster *Cluster) start(ctx context.Context, key key) *follower {
	cluster.mu.Lock()
	defer cluster.mu.Unlock()
	follower := cluster.followers[key]
	if follower == nil {
		follower = newFollower(key.String(), func() { cluster.changed(key) }, cluster.updateState)
		follower.required = key.kind < services || key.kind > secrets
		cluster.followers[key] = follower
		follower.start(ctx, cluster.clients.source(key, cluster.Trench))
	}
	return follower
}

// stopExcept stops the followers that keep does not list, and waits for their end. The followers
// of the Trench and of its pods always run.
func (cluster *Cluster) stopExcept(keep []key) {
	cluster.mu.Lock()
	var ended []*follower
	for key, f := range cluster.followers {
		if key != cluster.own() && key != cluster.siblings() && !slices.Contains(keep, key) {
			ended = append(ended, f)
			delete(cluster.followers, key)
		}
	}
	cluster.mu.Unlock()
	// Stop without mu: the follower that ends may wait for it.
	for _, f := range ended {
		f.stop()
		_, n := f.failure()
		cluster.mu.Lock()
		// Errors must not decrease when a follower stops.
		cluster.errors += n
		cluster.mu.Unlock()
	}
}
