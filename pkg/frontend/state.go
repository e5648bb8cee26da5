package frontend

import (
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/vip"
)

// vipState is the state of one VIP.
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

// state is the state of all VIPs and the events, for readers that must not block the controller.
type state struct {
	mu      sync.RWMutex
	vips    vip.Table[vipState]
	events  events
	changed *latest.Value[uint64]
}

// reportedVIPs holds the VIPs of an update of the readiness source.
type reportedVIPs struct {
	changed  []readiness.VIPReadiness // must not be modified
	removed  []vip.VIP
	complete bool // no other VIP is reported
}

func (s *state) applyReadiness(updates []reportedVIPs) {
	s.mu.Lock()
	defer s.mu.Unlock()
	unreported := false
	for _, u := range updates {
		if u.complete {
			for _, st := range s.vips.All() {
				st.Reported, st.Readiness = false, readiness.VIPReadiness{}
			}
		}
		s.vips.Add(func(yield func(vip.VIP) bool) {
			for i := range u.changed {
				if !yield(u.changed[i].VIP) {
					return
				}
			}
		})
		// This runs with every decision, so its cost must depend on the VIPs of the delta and not on
		// the number of all VIPs.
		for i := range u.changed {
			st := s.vips.Next(u.changed[i].VIP)
			st.Reported, st.Readiness = true, u.changed[i]
		}
		for _, v := range u.removed {
			if st := s.vips.Next(v); st != nil {
				st.Reported, st.Readiness = false, readiness.VIPReadiness{}
			}
		}
		unreported = unreported || u.complete || len(u.removed) > 0
	}
	if unreported {
		s.discardUnknown()
	}
}

// discardUnknown discards VIPs that are neither in the attractor nor reported.
func (s *state) discardUnknown() {
	s.vips.DeleteFunc(func(_ vip.VIP, st *vipState) bool { return !st.configured() && !st.Reported })
}

// causes explain decisions.
type causes struct {
	reason func(gate.Reason, vip.Family) string // cause of a reason for VIPs of a family, or ""
	shared func(vip.Family) string              // suffix for VIPs that are not announced, or ""
}

// outcome is the effect of a batch of decisions.
type outcome struct {
	tally   status.Tally[transition]
	changes []event // changed advertisements; empty if too many for one log line each
	bulk    *bulk   // nil if each VIP has its own event
}

// changed returns the number of VIPs whose advertisement changed.
func (o *outcome) changed() (n int) {
	for _, t := range o.tally.List() {
		if t.Transition.changed() {
			n += t.Count
		}
	}
	return n
}

// applyDecisions applies a batch and adds its events. With each, it returns the changes even of a
// large batch.
func (s *state) applyDecisions(d decisions, c causes, each bool) (out outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.vips.Add(func(yield func(vip.VIP) bool) {
		for i := range d.Changes {
			if !yield(d.Changes[i].VIP) {
				return
			}
		}
	})
	removed := false
	for _, ch := range d.Changes {
		st := s.vips.Next(ch.VIP)
		if st.Since.IsZero() || shown(ch.From) != shown(ch.To) {
			st.Since = d.At
		}
		st.Decision = ch.To
		removed = removed || !st.configured()
		out.tally.Add(transitionOf(ch))
	}
	// Log lines count changed advertisements. Events also include new VIPs.
	changed, notable := out.changed(), 0
	for _, t := range out.tally.List() {
		if t.Transition.notable() {
			notable += t.Count
		}
	}
	detail := s.details(c)
	if notable > status.MaxSingle {
		out.bulk = s.bulk(d, notable, detail)
		s.events.add(event{Time: d.At, Position: d.Position, Bulk: out.bulk})
	}
	each = each || changed <= status.MaxSingle
	if out.bulk == nil || changed > 0 && each {
		for _, ch := range d.Changes {
			t := transitionOf(ch)
			if !t.notable() {
				continue
			}
			e := event{
				Time: d.At, VIP: ch.VIP, From: ch.From, To: ch.To, Position: d.Position, Detail: detail(ch),
			}
			if out.bulk == nil {
				s.events.add(e)
			}
			if t.changed() {
				out.changes = append(out.changes, e)
			}
		}
	}
	if removed {
		s.discardUnknown()
	}
	return out
}

// bulk returns the common event of a batch with n notable changes.
func (s *state) bulk(d decisions, n int, detail func(gate.Change) string) *bulk {
	type kind struct {
		transition
		detail string
	}
	b := &bulk{}
	groups, details := map[kind]uint16{}, 0
	groupOf := func(k kind) uint16 {
		index, known := groups[k]
		if !known && k.detail != "" {
			if details++; details > maxEventDetails {
				k.detail = ""
				index, known = groups[k]
			}
		}
		if !known {
			index = uint16(len(b.groups))
			groups[k] = index
			b.groups = append(b.groups, group{transition: k.transition, detail: k.detail})
		}
		return index
	}
	var last kind
	var index uint16
	b.members = s.events.members(n, func(yield func(member) bool) {
		for _, ch := range d.Changes {
			t := transitionOf(ch)
			if !t.notable() {
				continue
			}
			// Adjacent VIPs often have the same transition and detail.
			if k := (kind{t, detail(ch)}); k != last || len(b.groups) == 0 {
				last, index = k, groupOf(k)
			}
			if !yield(member{ch.VIP, index}) {
				return
			}
		}
	})
	for _, m := range b.list {
		b.groups[m.group].count++
	}
	return b
}

// details returns a function that explains changes of one batch.
func (s *state) details(c causes) func(gate.Change) string {
	// A batch may have many VIPs, so the detail is computed once for each reason and family.
	type cause struct {
		reason gate.Reason
		family vip.Family
	}
	known := map[cause]string{}
	var last cause
	var lastDetail string
	var shared [len(vip.Families)]string
	for _, f := range vip.Families {
		shared[f] = c.shared(f)
	}
	return func(ch gate.Change) (detail string) {
		if ch.To.Reason == gate.LBNotReady || ch.To.Reason == gate.LBDraining {
			detail = s.vips.Next(ch.VIP).Readiness.Detail
		}
		if detail == "" {
			c0 := cause{ch.To.Reason, ch.VIP.Family()}
			if c0 != last || len(known) == 0 {
				if _, asked := known[c0]; !asked {
					known[c0] = c.reason(c0.reason, c0.family)
				}
				last, lastDetail = c0, known[c0]
			}
			detail = lastDetail
		}
		if more := shared[ch.VIP.Family()]; more != "" && ch.To.Advertisement != gate.Announced {
			detail = strings.TrimPrefix(detail+"; "+more, "; ")
		}
		return detail
	}
}

// advertised returns the number of advertised VIPs.
func (s *state) advertised() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	n := 0
	for _, st := range s.vips.All() {
		if st.Decision.Advertisement != gate.Withdrawn {
			n++
		}
	}
	return n
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
func (s *state) metrics() []metrics.VIP {
	s.mu.RLock()
	defer s.mu.RUnlock()
	list := make([]metrics.VIP, 0, s.vips.Len())
	for v, st := range s.vips.All() {
		if st.configured() {
			list = append(list, metrics.VIP{
				VIP: v, State: shown(st.Decision).String(), Reason: st.Decision.Reason.String(),
			})
		}
	}
	return list
}
