package cluster

import (
	"context"
	"maps"
	"slices"
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

// Caches returns the caches of the Trench in force and of a Trench whose caches are not synced
// yet.
func (c *Cluster) Caches() (all []Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range slices.SortedFunc(maps.Keys(c.followers), compareKeys) {
		f := c.followers[k]
		failure, _ := f.failure()
		all = append(all, Cache{k.kind.String(), f.what, f.store.isSynced(), f.store.len(), failure})
	}
	return all
}

// Errors returns the number of failed lists, watches and probes.
func (c *Cluster) Errors() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, n := c.probe.failure()
	n += c.errors
	for _, f := range c.followers {
		_, errors := f.failure()
		n += errors
	}
	return n
}

// updateState publishes and logs a change of the state.
func (c *Cluster) updateState() {
	c.stateMu.Lock()
	defer c.stateMu.Unlock()
	old, s := c.state.Load(), c.currentState()
	if s == old {
		return
	}
	c.state.Set(s)
	switch {
	case s.Stale.Since.IsZero() && !old.Stale.Since.IsZero():
		c.Log.Info("in sync with the API server again", "after", time.Since(old.Stale.Since).Round(time.Millisecond))
	case s.Stale.Since != old.Stale.Since && old.Stale.Since.IsZero():
		c.Log.Warn("out of sync with the API server", "error", s.Stale.Cause)
	case s.Stale.Cause != old.Stale.Cause:
		c.Log.Debug("out of sync with the API server", "error", s.Stale.Cause, "since", s.Stale.Since)
	}
	if old.Synced.IsZero() && !s.Synced.IsZero() {
		c.Log.Info("all caches synced")
	}
}

// currentState returns the state; Stale is the oldest failure that persists.
func (c *Cluster) currentState() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	conditions := []*condition{&c.probe, &c.missing}
	for _, k := range slices.SortedFunc(maps.Keys(c.followers), compareKeys) {
		conditions = append(conditions, &c.followers[k].condition)
	}
	s := State{Synced: c.synced}
	for _, condition := range conditions {
		f, _ := condition.failure()
		if !f.Since.IsZero() && (s.Stale.Since.IsZero() || f.Since.Before(s.Stale.Since)) {
			s.Stale = f
		}
	}
	return s
}

// probeServer periodically gets the Trench, or the Gateway. On a timeout it closes all
// connections.
func (c *Cluster) probeServer(ctx context.Context) {
	client, resource := c.clients.trenches, v1alpha1.Resource.Resource
	if c.Gateway != "" {
		client, resource = c.clients.gateways, meridio2.GatewayResource().Resource
	}
	for backoff.Sleep(ctx, probeInterval) == nil {
		call, cancel := context.WithTimeout(ctx, probeTimeout)
		err := c.clients.get(client, c.Namespace, resource).Name(c.own().name).Do(call).Error()
		hangs := call.Err() != nil
		cancel()
		if ctx.Err() != nil {
			return
		}
		if apierrors.IsNotFound(err) {
			err = nil
		}
		c.probe.report("API server "+c.clients.config.Host, err)
		if hangs {
			c.clients.connections.CloseAll()
		}
	}
}
