package lb

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/target"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// sources combines the sources of targets. It belongs to the loop; registry and
// drains run as tasks of their own, from which it takes the newest state.
type sources struct {
	use      Sources
	file     *target.TrenchFile
	registry *target.Registry
	drains   *target.Drains
	set      *target.Set
	// states is what people see of the sources.
	states *latest.Value[[]sourceState]

	// orders are the drains by hand, with their ends on the monotonic clock.
	orders map[target.ID]orderSeen
	// next is when a drain ends, so that update has something to do; zero for never.
	next time.Time
	// stale says that states has to be made anew.
	stale bool
}

// orderSeen is a drain by hand, and when it ends by our clock: that is worked out
// once, so that a wall clock that jumps later moves nothing.
type orderSeen struct {
	target.DrainOrder
	target.Order
}

// sourceState is a source with what the set makes of it.
type sourceState struct {
	target.SourceState
	Targets int
}

func newSources(o TargetOptions, r *target.Registry, d *target.Drains) *sources {
	return &sources{
		use: o.Sources, file: target.NewTrenchFile(o.OnFileGone), registry: r, drains: d,
		set: target.NewSet(), states: latest.New([]sourceState(nil)), orders: map[target.ID]orderSeen{},
	}
}

// configure takes over a trench file.
func (s *sources) configure(now time.Time, c *trench.Config, subnets []netip.Prefix) {
	ground := target.Ground{Subnets: subnets, VIPs: slices.Clone(c.Attractor.VIPs)}
	slices.SortFunc(ground.VIPs, vip.Compare)
	s.set.Configure(c.Streams, ground)
	if s.use.File {
		s.file.Configure(now, c.Streams)
	}
	s.registry.Configure(c.Streams, ground)
}

// missing notes that the trench file cannot be read at all. A bad one leaves in
// force what was.
func (s *sources) missing(now time.Time, err error) {
	var refused *trench.Errors
	if err != nil && !errors.As(err, &refused) {
		s.file.Lose(now, err)
	}
}

// update works out what changed in the set of targets.
func (s *sources) update(now time.Time) target.Changes {
	changed, fileNext := s.file.Take(now)
	s.set.Offer(target.File, changed)
	if s.use.Registry {
		s.set.Offer(target.Registered, s.registry.Take())
	}
	s.set.ByHand(s.byHand(now))
	c := s.set.Update(now)
	s.next = earlier(fileNext, c.Next)
	s.stale = true
	return c
}

// byHand gives the drains by hand ends by our clock.
func (s *sources) byHand(now time.Time) map[target.ID]target.Order {
	all := s.drains.All()
	seen, orders := make(map[target.ID]orderSeen, len(all)), make(map[target.ID]target.Order, len(all))
	for id, o := range all {
		was, known := s.orders[id]
		if !known || was.DrainOrder != o {
			was = orderSeen{o, target.Order{End: now.Add(o.Left(now))}}
		}
		seen[id], orders[id] = was, was.Order
	}
	s.orders = seen
	return orders
}

// publish shows the sources, if anything about them may have changed. It costs
// time of the order of all targets, so that the loop asks for it now and then only.
func (s *sources) publish() {
	if !s.stale {
		return
	}
	s.stale = false
	var states []sourceState
	add := func(st target.SourceState, o target.Origin) {
		st.Problems = append(s.set.Problems(o), st.Problems...)
		states = append(states, sourceState{st, s.set.Count(o)})
	}
	if s.use.File {
		add(s.file.State(), target.File)
	}
	if s.use.Registry {
		add(s.registry.State(), target.Registered)
	}
	s.states.Set(states)
}

// earlier returns the earlier of two times, of which zero means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
