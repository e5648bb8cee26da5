package metrics

import (
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vipgate/vipgate/pkg/vip"
)

// VIP is the state of one VIP at a scrape.
type VIP struct {
	VIP vip.VIP
	// State is a frontend's advertisement or a load balancer's readiness, and Reason its cause.
	State, Reason string
	// Ready and Total count targets; both are 0 in a frontend.
	Ready, Total uint32
	// Policy is the index of the routing policy in use and PolicyState the state that selects its
	// attributes; empty without a policy, and in a load balancer.
	Policy      int
	PolicyState string
}

// Transition is a change that several VIPs of one decision share.
type Transition struct {
	Family vip.Family
	// To is the new state, and Reason its cause.
	To, Reason string
	// Changed reports whether the VIPs' state changed, Removed whether they left the configuration.
	Changed, Removed bool
}

// count is one combination of the labels of the counts.
type count struct {
	family        vip.Family
	state, reason string
}

// vips collects the metrics of VIPs. Each scrape reads their state, so that the cost of a
// decision does not depend on its number of VIPs.
type vips struct {
	states                []string // by value of the state metric; the last has no reason metric
	state, reason, counts Metric
	targets               bool // export the numbers of targets
	transitions           *prometheus.CounterVec

	mu   sync.Mutex
	read func() []VIP
	seen map[count]struct{} // every combination since the start
}

func newVIPs(state, reason, counts, transitions Metric, states ...string) *vips {
	return &vips{
		states: states, state: state, reason: reason, counts: counts, transitions: transitions.counters(),
		read: func() []VIP { return nil }, seen: map[count]struct{}{},
	}
}

// VIPs sets the function by which a scrape reads the state of all VIPs. It must return a new slice.
func (metrics *vips) VIPs(read func() []VIP) {
	metrics.mu.Lock()
	defer metrics.mu.Unlock()
	metrics.read = read
}

// Count counts n VIPs with the same transition in one decision.
func (metrics *vips) Count(t Transition, n int) {
	if t.Changed {
		metrics.transitions.WithLabelValues(label(t.To), t.Reason).Add(float64(n))
	}
	if t.Removed {
		return
	}
	metrics.mu.Lock()
	defer metrics.mu.Unlock()
	metrics.seen[count{t.Family, label(t.To), t.Reason}] = struct{}{}
}

func (metrics *vips) collect(send send) {
	metrics.mu.Lock()
	// Do not hold the mutex during read: decisions, which call Count, must not wait for a scrape.
	read := metrics.read
	metrics.mu.Unlock()
	all := read()
	counts := map[count]int{}
	for _, state := range all {
		state.State = label(state.State)
		name, family := state.VIP.String(), state.VIP.Family()
		counts[count{family, state.State, state.Reason}]++
		level := slices.Index(metrics.states, state.State)
		send(metrics.state, float64(level), name, family.String())
		if level < len(metrics.states)-1 {
			send(metrics.reason, 1, name, family.String(), state.Reason)
		}
		if state.PolicyState != "" {
			send(frontendVIPPolicy, 1, name, family.String(), strconv.Itoa(state.Policy), state.PolicyState)
		}
		if metrics.targets {
			send(lbVIPReadyTargets, float64(state.Ready), name, family.String())
			send(lbVIPTargets, float64(state.Total), name, family.String())
		}
	}
	metrics.mu.Lock()
	for c := range counts {
		metrics.seen[c] = struct{}{}
	}
	// Send 0 for a combination without VIPs, so that its series continues.
	for c := range metrics.seen {
		counts[c] += 0
	}
	metrics.mu.Unlock()
	for c, n := range counts {
		send(metrics.counts, float64(n), c.family.String(), c.state, c.reason)
	}
}

// label converts the name of a state, such as "not ready", to a label value.
func label(name string) string { return strings.ReplaceAll(name, " ", "_") }
