package serving

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// stream is one stream with its targets and their tallies by family.
type stream struct {
	trench.Stream
	members []targetset.Member
	// shadowed holds the indices of leaving members whose name another member has taken: the data
	// plane has one target per name.
	shadowed  map[int]bool
	tallies   [len(vip.Families)]tally
	settleEnd time.Time // of the wait for first verdicts; zero: over
	gathering *gathering
	vips      [len(vip.Families)][]int32 // indices of its VIPs in Evaluator.vips
	// dirty and gathers report whether the stream is in Evaluator.dirty and in Evaluator.gathering.
	dirty, gathers bool
}

// tally counts the targets of one family of one stream. A target counts once, however many
// addresses of the family it has.
type tally struct {
	total, ready, starting, overdue, draining, drained uint32

	deferred uint32 // starting targets whose checks lack a source address
	alive    uint32 // would be ready if the kernel forwarded to them
	leaving  uint32 // drain and pass their checks
	problem  string // of the first target that is not ready
	failing  string // of the first target that its checks, or its neighbor entry, failed

	drainEnd time.Time // until when draining targets make up for missing ones; zero when they do not
	// relieved is set while draining targets make up for live targets that the kernel is about to
	// forward to: the VIPs do not drain with them.
	relieved bool
}

func (s *stream) setMembers(members []targetset.Member) {
	s.members, s.shadowed = members, map[int]bool{}
	// Members that leave come last, the one that stays longest first.
	seen := make(map[string]bool, len(members))
	for i, m := range members {
		if seen[m.Name] {
			s.shadowed[i] = true
		}
		seen[m.Name] = true
	}
}

// keys yields the addresses of the targets; a nil stream has none.
func (s *stream) keys() iter.Seq2[healthcheck.Key, *targetset.Member] {
	return func(yield func(healthcheck.Key, *targetset.Member) bool) {
		for i := 0; s != nil && i < len(s.members); i++ {
			m := &s.members[i]
			for _, ip := range m.IPs {
				if !yield(healthcheck.Key{Stream: s.Name, Name: m.Name, Addr: ip}, m) {
					return
				}
			}
		}
	}
}

// enough reports whether n targets are enough.
func (s *stream) enough(n uint32) bool { return n > 0 && n >= uint32(s.MinReady) }

// ready reports whether the stream has enough ready targets in some family, and waits for no more.
func (s *stream) ready() bool {
	return s.gathering.over && slices.ContainsFunc(s.tallies[:], func(t tally) bool { return s.enough(t.ready) })
}

// settles reports whether first verdicts on targets of a family are awaited.
func (s *stream) settles(f vip.Family) bool {
	return !s.settleEnd.IsZero() && s.tallies[f].starting > 0
}

// count counts the targets of a stream.
func (e *Evaluator) count(s *stream) {
	s.tallies = [len(vip.Families)]tally{}
	var ends [len(vip.Families)][]time.Time // of drains of targets that live and are forwarded to
	for i := range s.members {
		m := &s.members[i]
		shadowed := s.shadowed[i] && e.kernel != nil
		for _, ip := range m.IPs {
			f := vip.FamilyOf(ip)
			t := &s.tallies[f]
			h, known := e.healthOf(s, m, ip)
			t.total++
			unreachable := e.kernel.unreachable(ip)
			why := unreachable
			if why == "" && known && h.State != healthcheck.Ready {
				why = h.LastError
			}
			failed := unreachable != "" || known && h.State == healthcheck.NotReady
			if why != "" && m.Draining == healthcheck.Ready && (t.problem == "" || failed && t.failing == "") {
				problem := fmt.Sprintf("%s (%s): %s", m.Name, ip, why)
				t.problem = cmp.Or(t.problem, problem)
				if failed {
					t.failing = problem
				}
			}
			passes := known && unreachable == "" && h.State == healthcheck.Ready
			forwarded := passes && !shadowed && e.kernel.serves(s.Name, f, m.Name)
			switch {
			case m.Draining == healthcheck.Drained:
				t.drained++
			case m.Draining == healthcheck.Draining:
				t.draining++
				if passes && !shadowed {
					t.leaving++
				}
				if forwarded {
					ends[f] = append(ends[f], m.DrainEnd)
				}
			case unreachable != "":
			case !known || h.State == healthcheck.Starting:
				t.starting++
				if h.Deferred {
					t.deferred++
				}
			case passes:
				t.alive++
				if forwarded {
					t.ready++
				}
			case h.State == healthcheck.Overdue:
				t.overdue++
			}
		}
	}
	for f := range s.tallies {
		t := &s.tallies[f]
		// The targets that drain longest fill the gap, until the last one needed ends.
		missing := s.MinReady - int(t.ready)
		if missing > 0 && missing <= len(ends[f]) {
			slices.SortFunc(ends[f], func(x, y time.Time) int { return y.Compare(x) })
			t.drainEnd = ends[f][missing-1]
			t.relieved = s.enough(t.alive) && e.kernel.able(s.Name, vip.Family(f))
		}
	}
}

// healthOf returns the health of one address of a target. An address whose family is not checked
// has the health of the target's other address.
func (e *Evaluator) healthOf(s *stream, m *targetset.Member, ip netip.Addr) (healthcheck.Health, bool) {
	if !s.Check.Families.Has(vip.FamilyOf(ip)) {
		for _, other := range m.IPs {
			if s.Check.Families.Has(vip.FamilyOf(other)) {
				ip = other
			}
		}
	}
	h, known := e.health[healthcheck.Key{Stream: s.Name, Name: m.Name, Addr: ip}]
	return h, known
}

// view returns one address of a target as operators see it.
func (e *Evaluator) view(s *stream, m *targetset.Member, k healthcheck.Key) targetset.View {
	h, known := e.healthOf(s, m, k.Addr)
	if !known {
		h.State = healthcheck.Starting
	}
	v := targetset.View{Health: h, Checks: h.State, Origins: m.Origins, Owner: m.Owner}
	v.Key = k
	if m.Draining != healthcheck.Ready {
		v.State, v.DrainEnd, v.DrainCause = m.Draining, m.DrainEnd, m.Cause
	}
	return v
}

// describe explains why a stream does not serve.
func (s *stream) describe(f vip.Family) string { return s.counts(f, s.tallies[f].problem) }

// counts returns how many targets of a stream are ready, with a problem.
func (s *stream) counts(f vip.Family, problem string) string {
	t := &s.tallies[f]
	d := fmt.Sprintf("stream %s: %d of %d targets ready", s.Name, t.ready, t.total)
	if t.draining > 0 {
		d += fmt.Sprintf(", %d draining", t.draining)
	}
	if t.drained > 0 {
		d += fmt.Sprintf(", %d drained by an operator", t.drained)
	}
	d += fmt.Sprintf(", needs %d", s.MinReady)
	if problem != "" {
		d += "; " + problem
	}
	return bounded(d)
}

// bounded truncates a detail to the length that the frontend accepts.
func bounded(detail string) string {
	if len(detail) > readiness.MaxDetailBytes {
		return detail[:readiness.MaxDetailBytes-3] + "..."
	}
	return detail
}
