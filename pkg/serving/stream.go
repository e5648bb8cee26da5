package serving

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// stream is one stream with its targets and their tallies by family.
type stream struct {
	trench.Stream
	members []targetset.Member
	// names holds the name of each member in the data plane, which has one target per name: a leaving
	// member whose name another one has taken has its address there, too.
	names     []string
	tallies   [len(vip.Families)]tally
	settleEnd time.Time // of the wait for first verdicts; zero: over
	gathering *gathering
	vips      [len(vip.Families)][]int32 // indices of its VIPs in Evaluator.vips
	prepare   [len(vip.Families)]bool    // it is to serve VIPs that another stream keeps
	// opened reports whether the stream has been ready: a target that becomes ready now warms up.
	opened bool
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
	failed   uint32 // with lastResort: fail their checks, and are forwarded to
	cold     uint32 // tenths of a target by which ready ones count less
	problem  string // of the first target that is not ready
	failing  string // of the first target that its checks, or its neighbor entry, failed

	drainEnd time.Time // until when draining targets make up for missing ones; zero when they do not
	// relieved is set while draining targets make up for live targets that the kernel is about to
	// forward to: the VIPs do not drain with them.
	relieved bool
}

func (stream *stream) setMembers(members []targetset.Member) {
	stream.members, stream.names = members, make([]string, len(members))
	// Members that leave come last, the one that stays longest first.
	seen := make(map[string]bool, len(members))
	for i, member := range members {
		stream.names[i] = member.Name
		if seen[member.Name] {
			stream.names[i] += "@" + member.IPs[0].String()
		}
		seen[member.Name] = true
	}
}

// keys yields the addresses of the targets; a nil stream has none.
func (stream *stream) keys() iter.Seq2[healthcheck.Key, *targetset.Member] {
	return func(yield func(healthcheck.Key, *targetset.Member) bool) {
		for i := 0; stream != nil && i < len(stream.members); i++ {
			member := &stream.members[i]
			for _, ip := range member.IPs {
				if !yield(healthcheck.Key{Stream: stream.Name, Name: member.Name, Addr: ip}, member) {
					return
				}
			}
		}
	}
}

func (stream *stream) enough(n uint32) bool { return n > 0 && n >= uint32(stream.MinReady) }

// ready reports whether the stream has enough ready targets in some family, and waits for no more.
func (stream *stream) ready() bool {
	return stream.gathering.over && slices.ContainsFunc(stream.tallies[:],
		func(t tally) bool { return stream.enough(t.ready) })
}

// settles reports whether first verdicts on targets of a family are awaited.
func (stream *stream) settles(f vip.Family) bool {
	return !stream.settleEnd.IsZero() && stream.tallies[f].starting > 0
}

func (evaluator *Evaluator) count(now time.Time, stream *stream) {
	stream.tallies = [len(vip.Families)]tally{}
	var ends [len(vip.Families)][]time.Time // of drains of targets that live and are forwarded to
	for i := range stream.members {
		member := &stream.members[i]
		for _, ip := range member.IPs {
			family := vip.FamilyOf(ip)
			counts := &stream.tallies[family]
			health, known := evaluator.healthOf(stream, member, ip)
			counts.total++
			unreachable := evaluator.kernel.unreachable(ip)
			why := unreachable
			// The data plane's reason comes first: it also explains why checks fail.
			if why == "" && known && health.State != healthcheck.Ready {
				why = health.LastError
			}
			failed := unreachable != "" || known && health.State == healthcheck.NotReady
			// A draining target leaves anyway, so its problem does not explain the state of the stream.
			if why != "" && member.Draining == healthcheck.Ready && (counts.problem == "" || failed && counts.failing == "") {
				problem := fmt.Sprintf("%s (%s): %s", member.Name, ip, why)
				counts.problem = cmp.Or(counts.problem, problem)
				if failed {
					counts.failing = problem
				}
			}
			passes := known && unreachable == "" && health.State == healthcheck.Ready
			forwarded := passes && evaluator.kernel.serves(stream.Name, family, stream.names[i])
			switch {
			case member.Draining == healthcheck.Drained:
				counts.drained++
			case member.Draining == healthcheck.Draining:
				counts.draining++
				if passes {
					counts.leaving++
				}
				if forwarded {
					ends[family] = append(ends[family], member.DrainEnd)
				}
			// Not counted as starting: a result of its check would not make it ready.
			case unreachable != "":
			case !known || health.State == healthcheck.Starting:
				counts.starting++
				if health.Deferred {
					counts.deferred++
				}
			case passes:
				counts.alive++
				if forwarded {
					counts.ready++
					counts.cold += evaluator.cold(now, stream, health.Key)
				}
			case health.State == healthcheck.Overdue:
				counts.overdue++
			case stream.LastResort == trench.Depreferred && evaluator.kernel.serves(stream.Name, family, stream.names[i]):
				counts.failed++
			}
		}
	}
	for f := range stream.tallies {
		counts := &stream.tallies[f]
		// The targets that drain longest fill the gap, until the last one needed ends.
		missing := stream.MinReady - int(counts.ready)
		if missing > 0 && missing <= len(ends[f]) {
			slices.SortFunc(ends[f], func(x, y time.Time) int { return y.Compare(x) })
			counts.drainEnd = ends[f][missing-1]
			counts.relieved = stream.enough(counts.alive) && evaluator.kernel.able(stream.Name, vip.Family(f))
		}
	}
}

// healthOf returns the health of one address of a target. An address whose family is not checked
// has the health of the target's other address.
func (evaluator *Evaluator) healthOf(stream *stream, member *targetset.Member, ip netip.Addr) (healthcheck.Health,
	bool,
) {
	if !stream.Check.Families.Has(vip.FamilyOf(ip)) {
		for _, other := range member.IPs {
			if stream.Check.Families.Has(vip.FamilyOf(other)) {
				ip = other
			}
		}
	}
	h, known := evaluator.health[healthcheck.Key{Stream: stream.Name, Name: member.Name, Addr: ip}]
	return h, known
}

// view returns one address of a target as operators see it.
func (evaluator *Evaluator) view(s *stream, member *targetset.Member, key healthcheck.Key) targetset.View {
	health, known := evaluator.healthOf(s, member, key.Addr)
	if !known {
		health.State = healthcheck.Starting
	}
	view := targetset.View{Health: health, Checks: health.State, Origins: member.Origins, Owner: member.Owner}
	view.Key = key
	if member.Draining != healthcheck.Ready {
		view.State, view.DrainEnd, view.DrainCause = member.Draining, member.DrainEnd, member.Cause
	}
	return view
}

// describe explains why a stream does not serve.
func (stream *stream) describe(f vip.Family) string {
	return stream.counts(f, stream.tallies[f].problem)
}

// counts returns how many targets of a stream are ready, with a problem.
func (stream *stream) counts(f vip.Family, problem string) string {
	counts := &stream.tallies[f]
	d := fmt.Sprintf("stream %s: %d of %d targets ready", stream.Name, counts.ready, counts.total)
	if counts.draining > 0 {
		d += fmt.Sprintf(", %d draining", counts.draining)
	}
	if counts.drained > 0 {
		d += fmt.Sprintf(", %d drained by an operator", counts.drained)
	}
	d += fmt.Sprintf(", needs %d", stream.MinReady)
	if problem != "" {
		d += "; " + problem
	}
	return bounded(d)
}

// bounded returns a detail, which may have an answer of a target, as the frontend accepts it.
func bounded(detail string) string { return logs.Line(detail, readiness.MaxDetailBytes) }
