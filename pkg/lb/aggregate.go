package lb

import (
	"fmt"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/target"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxDetail is the longest detail of a VIP, in bytes (readiness.proto).
const maxDetail = 256

// aggregate computes the readiness of VIPs from the health of targets. A VIP is
// ready when at least one stream that serves it has minReady ready targets of
// the VIP's family (design section 6). The cost of a change follows the streams
// that it touches. It is not safe for concurrent use.
type aggregate struct {
	streams map[string]*stream
	serving map[vip.VIP][]*stream
	health  map[target.Key]target.Health
	current map[vip.VIP]readiness.VIPReadiness
}

// stream is one stream with its tallies by family.
type stream struct {
	trench.Stream
	tallies [len(vip.Families)]tally
}

// tally counts the targets of one family of one stream. A target counts once,
// however many addresses of the family it has.
type tally struct {
	total, ready, starting, overdue uint32
	problem                         string // what ails the first target that is not ready
}

func newAggregate() *aggregate {
	return &aggregate{health: map[target.Key]target.Health{}, current: map[vip.VIP]readiness.VIPReadiness{}}
}

// configure replaces VIPs and streams and returns what changed by that.
func (a *aggregate) configure(now time.Time, c *trench.Config) (changed []readiness.VIPReadiness, removed []vip.VIP) {
	a.streams, a.serving = map[string]*stream{}, map[vip.VIP][]*stream{}
	for _, s := range c.Streams {
		st := &stream{Stream: s}
		a.streams[s.Name] = st
		for _, v := range s.VIPs {
			a.serving[v] = append(a.serving[v], st)
		}
		a.count(st)
	}
	configured := vip.NewSet(c.Attractor.VIPs...)
	for v := range a.current {
		if !configured.Has(v) {
			removed = append(removed, v)
			delete(a.current, v)
		}
	}
	return a.judge(now, configured), removed
}

// apply takes over changed health and returns what changed by that.
func (a *aggregate) apply(now time.Time, changed []target.Health, removed []target.Key) []readiness.VIPReadiness {
	touched := map[*stream]struct{}{}
	for _, k := range removed {
		delete(a.health, k)
		if s, ok := a.streams[k.Stream]; ok {
			touched[s] = struct{}{}
		}
	}
	for _, h := range changed {
		a.health[h.Key] = h
		if s, ok := a.streams[h.Stream]; ok {
			touched[s] = struct{}{}
		}
	}
	vips := vip.Set{}
	for s := range touched {
		before := s.tallies
		a.count(s)
		for _, v := range s.VIPs {
			if s.tallies[v.Family()] != before[v.Family()] {
				vips[v] = struct{}{}
			}
		}
	}
	return a.judge(now, vips)
}

func (a *aggregate) count(s *stream) {
	s.tallies = [len(vip.Families)]tally{}
	for _, t := range s.Targets {
		var has, ready, starting, overdue [len(vip.Families)]bool
		for _, ip := range t.IPs {
			f := vip.FamilyOf(ip)
			has[f] = true
			h, known := a.health[target.Key{Stream: s.Name, Name: t.Name, Addr: ip}]
			switch {
			case !known || h.State == target.Starting:
				starting[f] = true
			case h.State == target.Ready:
				ready[f] = true
			case h.State == target.Overdue:
				overdue[f] = true
			}
			if known && h.State != target.Ready && h.LastError != "" && s.tallies[f].problem == "" {
				s.tallies[f].problem = fmt.Sprintf("%s (%s): %s", t.Name, ip, h.LastError)
			}
		}
		for _, f := range vip.Families {
			if !has[f] {
				continue
			}
			s.tallies[f].total++
			switch {
			case ready[f]:
				s.tallies[f].ready++
			case starting[f]:
				s.tallies[f].starting++
			case overdue[f]:
				s.tallies[f].overdue++
			}
		}
	}
}

func (a *aggregate) judge(now time.Time, vips vip.Set) []readiness.VIPReadiness {
	var changed []readiness.VIPReadiness
	for v := range vips {
		r := a.readiness(v)
		was, known := a.current[v]
		r.Since = was.Since
		if !known || was.State != r.State {
			r.Since = now
		}
		if !known || r != was { // no Draining here, so that all fields compare
			a.current[v] = r
			changed = append(changed, r)
		}
	}
	return changed
}

func (a *aggregate) readiness(v vip.VIP) readiness.VIPReadiness {
	r := readiness.VIPReadiness{VIP: v, State: readiness.NotReady}
	var starting, overdue uint32
	for _, s := range a.serving[v] {
		t := s.tallies[v.Family()]
		r.ReadyTargets += t.ready
		r.TotalTargets += t.total
		starting += t.starting
		overdue += t.overdue
		if t.ready >= uint32(s.MinReady) && t.ready > 0 {
			r.State = readiness.Ready
		} else if r.Detail == "" && t.total > 0 {
			r.Detail = describe(s, t)
		}
	}
	switch {
	case r.State == readiness.Ready:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_TARGETS_READY, ""
	case len(a.serving[v]) == 0:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_NO_STREAM, "no stream of the trench file lists this VIP"
	case r.TotalTargets == 0:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_NO_TARGETS, fmt.Sprintf("no target has an %s address", v.Family())
	case overdue > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE
	case starting > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_NOT_CHECKED
	default:
		r.Reason = readinessv1.VipReason_VIP_REASON_TOO_FEW_READY
	}
	return r
}

// describe says why a stream does not serve.
func describe(s *stream, t tally) string {
	d := fmt.Sprintf("stream %s: %d of %d targets ready, needs %d", s.Name, t.ready, t.total, s.MinReady)
	if t.problem != "" {
		d += "; " + t.problem
	}
	if len(d) > maxDetail {
		d = d[:maxDetail-3] + "..."
	}
	return d
}
