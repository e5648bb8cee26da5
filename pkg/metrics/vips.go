package metrics

import (
	"maps"
	"net/netip"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// VIP is the part of vip.VIP that this package uses.
type VIP interface{ Prefix() netip.Prefix }

// vipState is the state of one VIP. A scrape copies it: keep it small.
type vipState struct {
	state, reason string
	ready, total  uint32
}

// count is one combination of the labels of the counts.
type count struct{ family, state, reason string }

// vips collects the metrics of VIPs. A scrape copies the records under the lock and builds the
// metrics without it: ten thousand VIPs block a writer for about a millisecond, and no writer is in
// the path of a decision.
type vips struct {
	levels map[string]float64 // the value of each state
	best   string             // the state without a reason metric

	state, reason, counts *prometheus.Desc
	ready, total          *prometheus.Desc // nil: no metric

	mu    sync.Mutex
	known map[netip.Prefix]vipState
	seen  map[count]int // VIPs of each combination seen so far
}

func newVIPs(state, reason, counts *prometheus.Desc) *vips {
	return &vips{
		state: state, reason: reason, counts: counts,
		known: map[netip.Prefix]vipState{}, seen: map[count]int{},
	}
}

// set sets the state of a VIP and reports whether it changed; the first state is not a change.
func (v *vips) set(p netip.Prefix, s vipState) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	was, known := v.known[p]
	if known {
		v.seen[count{family(p), was.state, was.reason}]--
	}
	v.known[p] = s
	v.seen[count{family(p), s.state, s.reason}]++
	return known && was.state != s.state
}

func (v *vips) remove(p netip.Prefix) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if was, known := v.known[p]; known {
		v.seen[count{family(p), was.state, was.reason}]--
		delete(v.known, p)
	}
}

// Describe implements prometheus.Collector.
func (v *vips) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{v.state, v.reason, v.counts, v.ready, v.total} {
		if d != nil {
			ch <- d
		}
	}
}

// Collect implements prometheus.Collector.
func (v *vips) Collect(ch chan<- prometheus.Metric) {
	type record struct {
		prefix netip.Prefix
		vipState
	}
	v.mu.Lock()
	records := make([]record, 0, len(v.known))
	for p, s := range v.known {
		records = append(records, record{p, s})
	}
	seen := maps.Clone(v.seen)
	v.mu.Unlock()

	for _, r := range records {
		name, family := r.prefix.String(), family(r.prefix)
		ch <- gauge(v.state, v.levels[r.state], name, family)
		if r.state != v.best {
			ch <- gauge(v.reason, 1, name, family, r.reason)
		}
		if v.ready != nil {
			ch <- gauge(v.ready, float64(r.ready), name, family)
			ch <- gauge(v.total, float64(r.total), name, family)
		}
	}
	for c, n := range seen {
		ch <- gauge(v.counts, float64(n), c.family, c.state, c.reason)
	}
}

func gauge(d *prometheus.Desc, value float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

func counter(d *prometheus.Desc, value uint64) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value))
}

func family(p netip.Prefix) string {
	if p.Addr().Is4() {
		return "ipv4"
	}
	return "ipv6"
}

// label converts a name to a label value: "not ready" and the proto's VIP_STATE_NOT_READY are both
// "not_ready".
func label(name string) string {
	for _, prefix := range []string{"VIP_STATE_", "VIP_REASON_", "ADVERTISEMENT_REASON_", "ADVERTISEMENT_"} {
		if rest, is := strings.CutPrefix(name, prefix); is {
			name = rest
			break
		}
	}
	return strings.ReplaceAll(strings.ToLower(name), " ", "_")
}
