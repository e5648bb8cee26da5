package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// A hanging server is detected within the sum of both. Only a probe detects it, because watches
// stay open, even without etcd.
const (
	probeInterval = 5 * time.Second
	probeTimeout  = 5 * time.Second
)

// Cache describes one cache.
type Cache struct {
	Kind    string // such as "Pods"
	What    string // such as "Pods in namespace trench-a"
	Synced  bool
	Objects int
	Failure Failure
}

// Caches returns the caches of the Trench in force and of a Trench whose caches are not synced yet.
func (cluster *Cluster) Caches() (all []Cache) {
	cluster.mu.Lock()
	defer cluster.mu.Unlock()
	for _, key := range slices.SortedFunc(maps.Keys(cluster.followers), compareKeys) {
		follower := cluster.followers[key]
		failure, _ := follower.failure()
		all = append(all, Cache{key.kind.String(), follower.what, follower.store.isSynced(), follower.store.len(), failure})
	}
	return all
}

// Errors returns the number of failed lists, watches and probes.
func (cluster *Cluster) Errors() uint64 {
	cluster.mu.Lock()
	defer cluster.mu.Unlock()
	_, n := cluster.probe.failure()
	n += cluster.errors
	for _, follower := range cluster.followers {
		_, errors := follower.failure()
		n += errors
	}
	return n
}

func (cluster *Cluster) updateState() {
	cluster.stateMu.Lock()
	defer cluster.stateMu.Unlock()
	old, state := cluster.state.Load(), cluster.currentState()
	if state == old {
		return
	}
	cluster.state.Set(state)
	switch {
	case state.Stale.Since.IsZero() && !old.Stale.Since.IsZero():
		cluster.Log.Info("in sync with the API server again", "after", time.Since(old.Stale.Since).Round(time.Millisecond))
	case state.Stale.Since != old.Stale.Since && old.Stale.Since.IsZero():
		cluster.Log.Warn("out of sync with the API server", "error", state.Stale.Cause)
	case state.Stale.Cause != old.Stale.Cause:
		// Causes may alternate during one outage; only its start is a warning.
		cluster.Log.Debug("out of sync with the API server", "error", state.Stale.Cause, "since", state.Stale.Since)
	}
	if old.Synced.IsZero() && !state.Synced.IsZero() {
		cluster.Log.Info("all caches synced")
	}
}

// currentState returns the state; Stale is the oldest failure that persists.
func (cluster *Cluster) currentState() State {
	cluster.mu.Lock()
	defer cluster.mu.Unlock()
	conditions := []*condition{&cluster.probe, &cluster.missing}
	for _, key := range slices.SortedFunc(maps.Keys(cluster.followers), compareKeys) {
		// The Trench names a refused cache, which must not end the use of the others.
		if follower := cluster.followers[key]; !follower.isRefused() {
			conditions = append(conditions, &follower.condition)
		}
	}
	state := State{Synced: cluster.synced}
	// Of failures with the same start the first counts, so the order must be stable.
	for _, condition := range conditions {
		failure, _ := condition.failure()
		if !failure.Since.IsZero() && (state.Stale.Since.IsZero() || failure.Since.Before(state.Stale.Since)) {
			state.Stale = failure
		}
	}
	return state
}

// probeServer periodically gets the Trench, or the Gateway. On a timeout it closes all connections.
func (cluster *Cluster) probeServer(ctx context.Context) {
	client, resource := cluster.clients.trenches, v1alpha1.Resource.Resource
	if cluster.Gateway != "" {
		client, resource = cluster.clients.gateways, meridio2.GatewayResource().Resource
	}
	for backoff.Sleep(ctx, probeInterval) == nil {
		call, cancel := context.WithTimeout(ctx, probeTimeout)
		err := cluster.clients.get(client, cluster.Namespace, resource).Name(cluster.own().name).Do(call).Error()
		// Read the result before cancel, which also sets it.
		hangs := call.Err() != nil
		cancel()
		if ctx.Err() != nil {
			return
		}
		if apierrors.IsNotFound(err) {
			// The server responds. The cache of the Trench reports that it is missing.
			err = nil
		}
		cluster.probe.report("API server "+cluster.clients.config.Host, err)
		if hangs {
			cluster.clients.connections.CloseAll()
		}
	}
}

// condition records the failure of one operation, and counts its errors.
type condition struct {
	changed func() // called after every change, without mu held

	mu     sync.Mutex
	failed Failure
	errors uint64
}

// Failure is the start time and cause of a failure. It is zero without one.
type Failure struct {
	Since time.Time
	Cause string
}

// report records the result of an attempt; a nil error ends the failure.
func (condition *condition) report(what string, err error) {
	if request := (*url.Error)(nil); errors.As(err, &request) {
		err = request.Err // what already names the request
	}
	condition.mu.Lock()
	before := condition.failed
	if err == nil {
		condition.failed = Failure{}
	} else {
		condition.errors++
		condition.failed.Cause = fmt.Sprintf("%s: %v", what, err)
		if condition.failed.Since.IsZero() {
			condition.failed.Since = time.Now()
		}
	}
	differs := condition.failed != before
	condition.mu.Unlock()
	if differs {
		condition.changed()
	}
}

func (condition *condition) failure() (Failure, uint64) {
	condition.mu.Lock()
	defer condition.mu.Unlock()
	return condition.failed, condition.errors
}
