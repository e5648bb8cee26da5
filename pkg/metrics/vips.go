package metrics

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/vipgate/vipgate/pkg/vip"
)

// vipState is the state of one VIP. A scrape copies it: keep it small.
type vipState struct {
	state, reason string
	ready, total  uint32
}

// count is one combination of the labels of the counts.
type count struct {
	family        vip.Family
	state, reason string
}

// vips collects the metrics of VIPs. A scrape copies the records under the lock and builds the
// metrics without it: ten thousand VIPs block a writer for about a millisecond, and no writer is in
// the path of a decision.
type vips struct {
	states                []string // by value of the state metric; the last has no reason metric
	state, reason, counts Metric
	targets               bool // numbers of targets have metrics

	mu    sync.Mutex
	known map[vip.VIP]vipState
	seen  map[count]int // VIPs of each combination seen so far
}

func newVIPs(state, reason, counts Metric, states ...string) *vips {
	return &vips{
		states: states, state: state, reason: reason, counts: counts,
		known: map[vip.VIP]vipState{}, seen: map[count]int{},
	}
}

// set sets the state of a VIP and reports whether it changed; the first state is not a change.
func (v *vips) set(x vip.VIP, s vipState) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	was, known := v.known[x]
	if known {
		v.seen[count{x.Family(), was.state, was.reason}]--
	}
	v.known[x] = s
	v.seen[count{x.Family(), s.state, s.reason}]++
	return known && was.state != s.state
}

func (v *vips) remove(x vip.VIP) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if was, known := v.known[x]; known {
		v.seen[count{x.Family(), was.state, was.reason}]--
		delete(v.known, x)
	}
}

func (v *vips) collect(send send) {
	v.mu.Lock()
	known, seen := maps.Clone(v.known), maps.Clone(v.seen)
	v.mu.Unlock()

	for x, s := range known {
		name, family := x.String(), x.Family().String()
		level := slices.Index(v.states, s.state)
		send(v.state, float64(level), name, family)
		if level < len(v.states)-1 {
			send(v.reason, 1, name, family, s.reason)
		}
		if v.targets {
			send(LBVIPReadyTargets, float64(s.ready), name, family)
			send(LBVIPTargets, float64(s.total), name, family)
		}
	}
	for c, n := range seen {
		send(v.counts, float64(n), c.family.String(), c.state, c.reason)
	}
}

// label converts the name of a state, such as "not ready", to a label value.
func label(name string) string { return strings.ReplaceAll(name, " ", "_") }
