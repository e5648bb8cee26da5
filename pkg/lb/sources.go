package lb

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// sources combines the sources of targets. It belongs to the loop; registry and
// drains run as tasks of their own, from which it takes the newest state.
type sources struct {
	use      Sources
	file     *targetset.TrenchFile
	registry *registry.Registry
	drains   *targetset.Drains
	set      *targetset.Set
	// states is what people see of the sources.
	states *latest.Value[[]sourceState]

	// next is when a drain ends, so that update has something to do; zero for never.
	next time.Time
	// stale says that states has to be rebuilt.
	stale bool
}

// sourceState is a source with what the set makes of it.
type sourceState struct {
	targetset.SourceState
	Targets int
}

func newSources(o TargetOptions, r *registry.Registry, d *targetset.Drains) *sources {
	return &sources{
		use: o.Sources, file: targetset.NewTrenchFile(o.OnFileGone), registry: r, drains: d,
		set: targetset.New(), states: latest.New([]sourceState(nil)),
	}
}

// configure takes over a trench file.
func (s *sources) configure(now time.Time, c *trench.Config, subnets []netip.Prefix) {
	policy := targetset.AddressPolicy{Subnets: subnets, VIPs: slices.Clone(c.Attractor.VIPs)}
	slices.SortFunc(policy.VIPs, vip.Compare)
	s.set.Configure(c.Streams, policy)
	if s.use.File {
		s.file.Configure(now, c.Streams)
	}
	s.registry.Configure(c.Streams, policy)
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
func (s *sources) update(now time.Time) targetset.Changes {
	s.set.Offer(targetset.OriginFile, s.file.Take())
	if s.use.Registry {
		s.set.Offer(targetset.OriginRegistry, s.registry.Take())
	}
	s.set.SetManualDrains(s.drains.All())
	c := s.set.Update(now)
	s.next = c.Next
	s.stale = true
	return c
}

// publish shows the sources, if anything about them may have changed. It costs
// time of the order of all targets, so that the loop asks for it now and then only.
func (s *sources) publish() {
	if !s.stale {
		return
	}
	s.stale = false
	var states []sourceState
	add := func(st targetset.SourceState, o targetset.Origin) {
		st.Problems = append(s.set.Problems(o), st.Problems...)
		states = append(states, sourceState{st, s.set.Count(o)})
	}
	if s.use.File {
		add(s.file.State(), targetset.OriginFile)
	}
	if s.use.Registry {
		add(s.registry.State(), targetset.OriginRegistry)
	}
	s.states.Set(states)
}
