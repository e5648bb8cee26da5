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

// Options of a Cluster. Every field is required, but of Trench and Gateway one is.
type Options struct {
	Config            *rest.Config
	Namespace, Trench string
	// Gateway is one of Meridio 2, in place of the Trench; Pod is then the own one.
	Gateway, Pod string
	Log          *slog.Logger
}

// Snapshot is what the API server has. Its objects are shared: they must not be changed.
type Snapshot struct {
	translation.Objects
	// Meridio2 are the objects with a Gateway in place of the Trench.
	Meridio2 meridio2.Objects
	// Siblings are the pods of the trench itself, which hold lb and frontend; with a Gateway, the own
	// one.
	Siblings []*corev1.Pod
	// Changed is when the first of the changes since the last snapshot was received.
	Changed time.Time
}

// State is how current the snapshot is.
type State struct {
	// Synced is since when there is a snapshot; zero: there is none yet.
	Synced time.Time
	// Stale is since when the snapshot may differ from what the API server has, or has no Trench. The
	// zero Failure: all is current.
	Stale Failure
}

// Cluster follows the objects of one Trench. It implements task.Task. Create one with [New].
type Cluster struct {
	Options
	clients *clients
	probe   condition
	missing condition // the Trench does not exist

	changes chan struct{} // has a token after a change of the snapshot
	wake    chan struct{} // has a token when reconcile may have something to do

	stateMu sync.Mutex // orders changes of the state and their logs
	state   latest.Value[State]

	mu        sync.Mutex
	followers map[key]*follower
	// trench and keys are in force once synced is not zero. A nil trench does not exist.
	trench *unstructured.Unstructured
	keys   []key // besides those of the Trench and of its pods
	synced time.Time
	first  time.Time // the first change since the last snapshot; zero: there is none
	errors uint64    // of followers that ended
}

// New returns a cluster that follows nothing yet.
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

// Config returns how the API server is reached. When the server hangs, connections of other clients
// with this configuration are closed, too.
func (c *Cluster) Config() *rest.Config { return rest.CopyConfig(c.clients.config) }

// Changes has a token after every change of the snapshot, from the first one on.
func (c *Cluster) Changes() <-chan struct{} { return c.changes }

// State returns how current the snapshot is.
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
		for _, f := range c.followers { // they remain, for a Snapshot
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

// Snapshot returns what the synced caches have, and reports whether there is one.
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

// objects appends the objects of a follower to others.
func objects[T metav1.Object](f *follower, to []T) []T {
	all := f.store.list()
	to = slices.Grow(to, len(all))
	for _, o := range all {
		to = append(to, o.(T))
	}
	return to
}

// reconcile starts the caches that the Trench needs, and takes the Trench into force once all of
// them are synced.
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
		keys = inForce // the translation refuses it
	}
	synced := fixed.store.isSynced()
	for _, k := range keys {
		synced = c.start(ctx, k).store.isSynced() && synced
	}
	if !synced {
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

// changed is called after a change of the store of a follower.
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

// start returns the follower of a key, which it starts unless it runs.
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

// stopExcept ends the followers that are not needed, and waits for them. Those of the Trench and of
// its pods stay.
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
