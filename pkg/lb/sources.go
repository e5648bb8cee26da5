package lb

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

// sources combines the sources of targets. It belongs to the loop.
type sources struct {
	options  TargetOptions
	file     *targetset.TrenchFile
	registry *registry.Registry
	drains   *drains.Drains[targetset.ID]
	set      *targetset.Set
	states   *latest.Value[[]sourceState] // for status
	stale    bool                         // states must be updated
	next     time.Time                    // when update must be called for a drain; or zero
}

// sourceState is a source with the number of its targets in the set.
type sourceState struct {
	targetset.SourceState
	Targets int
}

// newSources opens the state of the sources in the state directory.
func newSources(o TargetOptions, log *slog.Logger) (*sources, error) {
	if err := os.MkdirAll(o.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory (--state-dir): %w", err)
	}
	orders, err := drains.Open[targetset.ID](filepath.Join(o.StateDir, "drains.json"), log)
	if err != nil {
		return nil, err
	}
	o.Registry.Log = log
	if !o.Registry.Off {
		o.Registry.StateFile = filepath.Join(o.StateDir, "registrations.json")
	}
	return &sources{
		options: o, file: targetset.NewTrenchFile(o.OnFileGone), registry: registry.New(o.Registry), drains: orders,
		set: targetset.New(), states: latest.New([]sourceState(nil)),
	}, nil
}

// configure applies a trench file.
func (s *sources) configure(now time.Time, c *trench.Config) {
	vips := slices.Clone(c.Attractor.VIPs)
	slices.SortFunc(vips, vip.Compare)
	// The registry checks the same policy, so that a refused target gets the error in its call.
	policy := targetset.AddressPolicy{Subnets: s.options.Subnets, VIPs: vips}
	for _, gateway := range c.Attractor.Gateways {
		policy.Gateways = append(policy.Gateways, gateway.Address)
	}
	s.set.Configure(c.Streams, policy)
	if s.options.File {
		s.file.Configure(now, c.Streams)
	}
	s.registry.Configure(c.Streams, policy)
}

// hold returns the configuration to put in force for a trench file; see [change.Hold]. It holds old
// checks, too, which are in force beside their new ones.
func (p *process) hold(inForce, next *trench.Config, before trench.Held,
	confirmed string,
) (*trench.Config, trench.Held) {
	var isAlive change.Alive
	// Without targets in the file, no change of the file removes one.
	if p.Targets.File {
		// Before the first verdicts, at a restart, every target may be alive.
		var since time.Time
		if p.table.Synced() {
			since = time.Now()
			if len(before.Streams) > 0 {
				since = since.Add(-releaseTime)
			}
		}
		isAlive = alive(p.index.List(nil), since)
	}
	config, held := change.Hold(inForce, next, before, confirmed, isAlive)
	checks := p.checker.Held()
	switch id := change.IdentifyChecks(checks); {
	case id == "":
	case next.MaxRemoval == 100 || strings.Contains(confirmed+","+next.Confirm, id):
		p.checker.Release(checks)
	default:
		held.Checks, held.ID = slices.Sorted(maps.Keys(checks)), strings.TrimSuffix(id+","+held.ID, ",")
	}
	return config, held
}

// releaseTime is how long a held target may fail its checks before its removal takes effect. A
// shorter failure of the network must not end a hold, and later another pod may have the address.
const releaseTime = time.Minute

// alive reports which targets of the trench file pass their checks and do not drain, or did so at a
// time; each if that is zero.
func alive(views []targetset.View, since time.Time) change.Alive {
	ready, others := map[targetset.ID]bool{}, map[string]bool{}
	for _, view := range views {
		if view.State == healthcheck.Ready || view.Since.After(since) {
			ready[targetset.ID{Stream: view.Stream, Name: view.Name}] = true
		}
		if view.State == healthcheck.Ready && view.Origins != targetset.OriginSet(0).With(targetset.OriginFile) {
			others[view.Stream] = true
		}
	}
	return func(stream, target string) bool {
		// A stream with a ready target of another source does not lose all targets.
		return (since.IsZero() || ready[targetset.ID{Stream: stream, Name: target}]) && !others[stream]
	}
}

// missing notes that the trench file cannot be read. A refused one leaves the older in force.
func (s *sources) missing(now time.Time, err error) {
	if _, refused := errors.AsType[*trenchfile.Errors](err); err != nil && !refused {
		s.file.Lose(now, err)
	}
}

// update applies the offers of all sources, and returns the changes of the set of targets.
func (s *sources) update(now time.Time) targetset.Changes {
	s.set.Offer(targetset.OriginFile, s.file.Take())
	if !s.options.Registry.Off {
		s.set.Offer(targetset.OriginRegistry, s.registry.Take())
	}
	// An operator may have ordered or ended drains since the last update.
	orders, over := s.drains.All(now)
	s.set.SetManualDrains(orders)
	c := s.set.Update(now)
	s.next = targetset.Soonest(c.Next, over)
	s.stale = true
	return c
}

// publish updates states. It visits all targets, so it is called only once per heartbeat.
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
	if s.options.File {
		add(s.file.State(), targetset.OriginFile)
	}
	if !s.options.Registry.Off {
		add(s.registry.State(), targetset.OriginRegistry)
	}
	s.states.Set(states)
}
