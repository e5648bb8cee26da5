package frontend

import (
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

type vipState struct {
	Decision  gate.Decision
	Reported  bool                   // the readiness source reports the VIP
	Since     time.Time              // start of the current shown advertisement
	Readiness readiness.VIPReadiness // while Reported
}

// configured reports whether the VIP is in the attractor.
func (st *vipState) configured() bool { return st.Decision.Reason != gate.NotConfigured }

// shown returns the advertisement for status, logs and events. A VIP that BIRD exports to no
// gateway counts as withdrawn, although the announcer sent it to BIRD.
func shown(d gate.Decision) gate.Advertisement {
	if !d.Advertised() {
		return gate.Withdrawn
	}
	return d.Advertisement
}

// state is the state of all VIPs, for readers that must not block the controller.
type state struct {
	mu      sync.RWMutex
	vips    vip.Table[vipState]
	changed *latest.Value[uint64]
}

// applyReadiness stores a report of the readiness source.
func (s *state) applyReadiness(delta journal.Delta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A complete report lacks the VIPs that the load balancer no longer has.
	if delta.Complete {
		for _, st := range s.vips.All() {
			st.Reported, st.Readiness = false, readiness.VIPReadiness{}
		}
	}
	// Add all new VIPs in one batch: each growth of the table sorts it.
	s.vips.Add(vip.Of(delta.Changed, func(r *readiness.VIPReadiness) vip.VIP { return r.VIP }))
	// This runs with every decision: its cost must depend on the delta's VIPs, not on all VIPs.
	for i := range delta.Changed {
		st := s.vips.Next(delta.Changed[i].VIP)
		st.Reported, st.Readiness = true, delta.Changed[i]
	}
	for _, v := range delta.Removed {
		if st := s.vips.Next(v); st != nil {
			st.Reported, st.Readiness = false, readiness.VIPReadiness{}
		}
	}
	if delta.Complete || len(delta.Removed) > 0 {
		s.discardUnknown()
	}
}

// discardUnknown discards VIPs that are neither in the attractor nor reported.
func (s *state) discardUnknown() {
	s.vips.DeleteFunc(func(_ vip.VIP, st *vipState) bool { return !st.configured() && !st.Reported })
}

type causes struct {
	reason func(gate.Reason, vip.Family) string // cause of a reason for VIPs of a family, or ""
	shared func(vip.Family) string              // suffix for VIPs that are not announced, or ""
	// policies name the attributes that a decision changes.
	policies *policy.Lookup
}

// applyDecisions applies a batch and adds its transitions to changes.
func (s *state) applyDecisions(d decisions, c causes, changes *journal.Changes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.vips.Add(vip.Of(d.Changes, func(ch *gate.Change) vip.VIP { return ch.VIP }))
	removed, detail := false, s.details(c)
	for _, ch := range d.Changes {
		st := s.vips.Next(ch.VIP)
		// A new reason alone does not change the start of the advertisement.
		if st.Since.IsZero() || shown(ch.From) != shown(ch.To) {
			st.Since = d.At
		}
		st.Decision = ch.To
		removed = removed || !st.configured()
		transition := journal.Transition{
			Family: ch.VIP.Family(), From: shown(ch.From).String(), To: shown(ch.To).String(),
			Reason: ch.To.Reason.String(),
			New:    ch.From.Reason == gate.NotConfigured && shown(ch.From) == shown(ch.To),
		}
		cause, attributes := "", c.policies.Cause(ch)
		// A reason alone may change the attributes.
		if attributes != "" && !transition.Changed() {
			transition.New = true
		}
		if transition.Notable() {
			cause = detail(ch, attributes)
		}
		changes.Add(ch.VIP, transition, cause)
	}
	if removed {
		s.discardUnknown()
	}
}

// details returns a function that explains changes of one batch. Attributes come first, because a
// table truncates the end.
func (s *state) details(c causes) func(gate.Change, string) string {
	// A batch may have many VIPs, so the detail is computed once for each reason, family and policy.
	type cause struct {
		reason     gate.Reason
		family     vip.Family
		attributes string
	}
	known := map[cause]string{}
	var last cause
	var lastDetail string
	var shared [len(vip.Families)]string
	for _, f := range vip.Families {
		shared[f] = c.shared(f)
	}
	return func(ch gate.Change, attributes string) (detail string) {
		// The load balancer explains its own verdict for each VIP.
		switch ch.To.Reason {
		case gate.LBNotReady, gate.LBDraining, gate.LastResort, gate.Suspected:
			if detail = s.vips.Next(ch.VIP).Readiness.Detail; detail != "" {
				detail = joined(attributes, detail)
			}
		}
		if detail == "" {
			// Neighbors in a batch mostly share the cause: compare before the map lookup.
			c0 := cause{ch.To.Reason, ch.VIP.Family(), attributes}
			if c0 != last || len(known) == 0 {
				if _, asked := known[c0]; !asked {
					known[c0] = joined(attributes, c.reason(c0.reason, c0.family))
				}
				last, lastDetail = c0, known[c0]
			}
			detail = lastDetail
		}
		if more := shared[ch.VIP.Family()]; more != "" && ch.To.Advertisement != gate.Announced {
			detail = joined(detail, more)
		}
		return detail
	}
}

// joined returns the parts of a detail that are not empty.
func joined(detail, more string) string { return strings.Trim(detail+"; "+more, "; ") }

// advertised returns the number of advertised VIPs.
func (s *state) advertised() int {
	counts := s.expected()
	return counts[vip.IPv4] + counts[vip.IPv6]
}

// has reports whether a VIP is configured or reported.
func (s *state) has(v vip.VIP) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.vips.Get(v) != nil
}

// serves reports whether a VIP is advertised, and whether it is in the attractor.
func (s *state) serves(v vip.VIP) (advertised, configured bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	st := s.vips.Get(v)
	if st == nil || !st.configured() {
		return false, false
	}
	return st.Decision.Advertised(), true
}

// expected returns the number of VIPs of each family that BIRD should export to the gateways.
func (s *state) expected() (counts [len(vip.Families)]int) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for v, st := range s.vips.All() {
		if st.Decision.Advertisement != gate.Withdrawn {
			counts[v.Family()]++
		}
	}
	return counts
}

// metrics returns the VIPs of the attractor for a scrape.
func (o *observer) metrics() []metrics.VIP {
	s, policies := o.state, o.policies.Load()
	s.mu.RLock()
	defer s.mu.RUnlock()
	list := make([]metrics.VIP, 0, s.vips.Len())
	for v, st := range s.vips.All() {
		if st.configured() {
			one := metrics.VIP{VIP: v, State: shown(st.Decision).String(), Reason: st.Decision.Reason.String()}
			one.Policy, one.PolicyState = policies.Use(v, st.Decision)
			list = append(list, one)
		}
	}
	return list
}
