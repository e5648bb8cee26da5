package cluster

import (
	"context"
	"errors"
	"log/slog"
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
	// Siblings lists the pods that run lb and frontend of the trench; with a Gateway, only the pod of
	// this process.
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
	// trench and keys are in force once synced is not zero. trench is nil if the Trench does not
	// exist.
	trench *unstructured.Unstructured
	keys   []key // without the keys of the Trench and of its pods
	synced time.Time
	first  time.Time // the first change since the last snapshot; zero without a change
	errors uint64    // error count of stopped followers
}

// New returns a cluster. Run starts the caches.
func New(o Options) (*Cluster, error) {
	clients, err := newClients(o.Config)
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		Options: o, clients: clients, followers: map[key]*follower{},
		changes: make(chan struct{}, 1), wake: make(chan struct{}, 1),
	}
	c.probe.changed, c.missing.changed = c.updateState, c.updateState
	return c, nil
}

// Config returns the client configuration. Clients created from it share the connection tracker:
// all of their connections are closed when the API server hangs.
func (c *Cluster) Config() *rest.Config { return rest.CopyConfig(c.clients.config) }

// Changes returns a channel that has a token after the first sync and after each later change.
func (c *Cluster) Changes() <-chan struct{} { return c.changes }

// State returns the state of the caches.
func (c *Cluster) State() *latest.Value[State] { return &c.state }

// String implements task.Task.
func (*Cluster) String() string { return "cluster" }

// Run follows until ctx ends.
func (c *Cluster) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var probes sync.WaitGroup
	probes.Go(func() { c.probeServer(ctx) })
	defer func() {
		cancel()
		probes.Wait()
		for _, f := range c.followers { // stopped but kept: Snapshot still reads their stores
			f.stop()
		}
		c.clients.connections.CloseAll()
	}()
	for {
		c.reconcile(ctx)
		select {
		case <-c.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Snapshot returns the content of the caches, and reports whether all were synced.
func (c *Cluster) Snapshot() (Snapshot, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.synced.IsZero() {
		return Snapshot{}, false
	}
	s := Snapshot{Changed: c.first}
	c.first = time.Time{}
	if s.Changed.IsZero() {
		s.Changed = time.Now()
	}
	if c.Gateway != "" {
		s.Meridio2.Gateway = c.trench
	} else {
		s.Trench = c.trench
	}
	s.Siblings = objects[*corev1.Pod](c.followers[c.siblings()], nil)
	for _, k := range c.keys {
		switch f := c.followers[k]; k.kind {
		case services:
			s.Services = objects(f, s.Services)
		case endpointSlices:
			s.EndpointSlices = objects(f, s.EndpointSlices)
		case pods:
			s.Pods = objects(f, s.Pods)
		case secrets:
			s.Secrets = objects(f, s.Secrets)
		case gatewayRouters:
			s.Meridio2.Routers = objects(f, s.Meridio2.Routers)
		}
	}
	return s, true
}

// objects appends the objects of a follower to a slice.
func objects[T metav1.Object](f *follower, to []T) []T {
	all := f.store.list()
	to = slices.Grow(to, len(all))
	for _, o := range all {
		to = append(to, o.(T))
	}
	return to
}

// reconcile starts the caches that the Trench names. Once all of them are synced, the Trench takes
// effect and the caches that it no longer names stop.
func (c *Cluster) reconcile(ctx context.Context) {
	defer c.updateState()
	own := c.start(ctx, c.own())
	fixed := c.start(ctx, c.siblings())
	if !own.store.isSynced() {
		return
	}
	var trench *unstructured.Unstructured
	if all := own.store.list(); len(all) > 0 {
		trench = all[0].(*unstructured.Unstructured)
	}
	c.mu.Lock()
	inForce := c.keys
	c.mu.Unlock()
	keys, readable := c.needed(trench)
	if !readable {
		keys = inForce // the translation refuses the Trench; keep its caches
	}
	synced := fixed.store.isSynced()
	for _, k := range keys {
		synced = c.start(ctx, k).store.isSynced() && synced
	}
	if !synced {
		// The Trench in force keeps its caches until the new ones are synced.
		c.stopExcept(slices.Concat(inForce, keys))
		return
	}

	c.mu.Lock()
	changed := c.synced.IsZero() || c.trench != trench || !slices.Equal(c.keys, keys)
	c.trench, c.keys = trench, keys
	if changed && c.first.IsZero() {
		c.first = time.Now()
	}
	if c.synced.IsZero() {
		c.synced = time.Now()
	}
	c.mu.Unlock()
	var missing error
	if trench == nil {
		missing = errors.New("does not exist")
	}
	c.missing.report(c.own().String(), missing)
	c.stopExcept(keys)
	if changed {
		latest.Wake(c.changes)
	}
}

// changed handles a change in the store of a follower. Changes of caches in force reach the
// snapshot directly; changes of any other cache run reconcile.
func (c *Cluster) changed(k key) {
	c.mu.Lock()
	part := !c.synced.IsZero() && (k == c.siblings() || slices.Contains(c.keys, k))
	if part && c.first.IsZero() {
		c.first = time.Now()
	}
	c.mu.Unlock()
	if part {
		latest.Wake(c.changes)
	} else {
		latest.Wake(c.wake)
	}
}

// start returns the follower of a key, and starts it if it does not run.
func (c *Cluster) start(ctx context.Context, k key) *follower {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.followers[k]
	if f == nil {
		f = newFollower(k.String(), func() { c.changed(k) }, c.updateState)
		c.followers[k] = f
		f.start(ctx, c.clients.source(k, c.Trench))
	}
	return f
}

// stopExcept stops the followers that keep does not list, and waits for their end. The followers
// of the Trench and of its pods always run.
func (c *Cluster) stopExcept(keep []key) {
	c.mu.Lock()
	var ended []*follower
	for k, f := range c.followers {
		if k != c.own() && k != c.siblings() && !slices.Contains(keep, k) {
			ended = append(ended, f)
			delete(c.followers, k)
		}
	}
	c.mu.Unlock()
	for _, f := range ended {
		f.stop()
		_, n := f.failure()
		c.mu.Lock()
		c.errors += n
		c.mu.Unlock()
	}
}
