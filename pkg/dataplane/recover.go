package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// unknownSize is the table size of a stream whose chain does not contain its size.
	unknownSize = 1009
	// noStream is the pseudo stream of fwmarks without a known target.
	noStream = "-"
)

// load recovers the objects of an earlier process from the names of chains, the comments of their
// rules, and the protocol number of rules and routes. Complete objects are applied, incomplete
// ones pending. A fwmark with only a rule and routes, after a crash or a change by another
// process, has no known target. It is removed unless adopt finds the target by its addresses.
func (e *engine) load() error {
	numbers, err := e.kernel.OwnedTables()
	if err != nil {
		return fmt.Errorf("list rules and routes of the data plane: %w", err)
	}
	c, err := e.kernel.Read(numbers)
	if err == nil && !slices.Equal(slices.Sorted(maps.Keys(c.Targets)), numbers) {
		// Some targets have only chains: read again with the rules and routes of their fwmarks.
		c, err = e.kernel.Read(slices.Sorted(maps.Keys(c.Targets)))
	}
	if err != nil {
		return fmt.Errorf("read the data plane: %w", err)
	}
	e.targets = map[uint32]plan.InstalledTarget{}
	e.fwmarks.next = e.options.First
	names := map[[2]string]bool{}
	for _, number := range slices.Sorted(maps.Keys(c.Targets)) {
		s := c.Targets[number]
		t := plan.InstalledTarget{FWMark: number, Label: s.Label, Flows: s.Flows, Stage: plan.StageApplied}
		t.ResumeDrain(e.now())
		for f := range t.IPs {
			// The kernel removes the route when its link goes down; the label has the address.
			t.IPs[f] = cmp.Or(s.NextHops[f], s.IPs[f])
		}
		key := [2]string{s.Stream, s.Name}
		switch {
		case s.Label == plan.Label{} && !slices.Contains(numbers, number):
			continue // the chain belongs to another process
		case s.Stream == "" || s.Name == "" || names[key] || number > e.options.Mask:
			t.Stream, t.Name, t.Stage = noStream, fmt.Sprint(number), plan.StageRemoving
		case len(t.Addresses()) == 0:
			t.Stage = plan.StageRemoving
		case len(plan.TargetDrift(t, s, false)) > 0:
			t.Stage = plan.StagePending
		}
		names[key] = true
		e.keepTarget(t)
		e.fwmarks.next = max(e.fwmarks.next, number+1)
	}
	for name, s := range c.Streams {
		// A chain that only has the name of a stream belongs to another process.
		if s.Owned || len(s.Families()) > 0 || e.streams[name] != nil {
			e.keepStream(recoverStream(s, e.record(name).targets, c.VIPs))
		}
	}
	for _, m := range e.streams {
		for _, t := range m.targets {
			m.requests[t.Name] = plan.RequestOf(t, m.installed)
		}
	}
	return nil
}

func recoverStream(
	s *plan.KernelStream, targets map[string]plan.InstalledTarget, vips map[vip.VIP]string,
) plan.InstalledStream {
	x := plan.InstalledStream{Name: s.Name, Size: s.Size, Seed: s.Seed, Match: s.Match, Stage: plan.StageApplied}
	for v, stream := range vips {
		if stream == s.Name {
			x.VIPs = append(x.VIPs, v)
		}
	}
	slices.SortFunc(x.VIPs, vip.Compare)
	for _, f := range s.Families() {
		x.Tables[f] = []string{}
		for name, t := range targets {
			if t.Stage != plan.StageRemoving && slices.Contains(s.Tables[f], t.FWMark) {
				x.Tables[f] = append(x.Tables[f], name)
			}
		}
		slices.Sort(x.Tables[f])
	}
	if s.Size < 2 || s.Seed == 0 {
		// Any valid values suffice, because a pending stream is rewritten.
		x.Size, x.Seed, x.Stage = unknownSize, 1, plan.StagePending
	} else if len(plan.StreamDrift(x, x.Kernel(targets, new(plan.TableCaches)), s, vips).Drift) > 0 {
		x.Stage = plan.StagePending
	}
	return x
}

// adopt matches the recovered state with the first desired state. A fwmark without a known target
// is assigned to the target whose addresses are the next hops of its routes. For held streams the
// desired state is recorded as installed, so that the difference is reported as drift.
func (e *engine) adopt(now time.Time) {
	for _, name := range slices.Sorted(maps.Keys(e.desired.Streams)) {
		m := e.record(name)
		s := e.desired.Streams[name]
		for _, t := range s.Targets {
			if _, ok := m.targets[t.Name]; !ok && (s.RouteAll || slices.Contains(t.Roles[:], plan.Serving)) {
				e.adoptFWMark(name, t)
			}
		}
		if e.holds.held(name) {
			e.adoptHeld(name, now)
		}
	}
}

// adoptFWMark assigns a fwmark without a known target to w if its routes lead to w. It reports
// whether it found one.
func (e *engine) adoptFWMark(stream string, w plan.Target) (adopted bool) {
	unknown, ips := e.record(noStream), plan.ByFamily(w.IPs)
	for _, t := range plan.SortedTargets(unknown.targets) {
		same := len(t.Addresses()) > 0 && t.FWMark <= e.options.Mask
		for f, a := range t.IPs {
			same = same && (a == ips[f] || !a.IsValid())
		}
		if !same {
			continue
		}
		delete(unknown.targets, t.Name)
		unknown.reachedIn = nil
		t.Stream, t.Name, t.Stage = stream, w.Name, plan.StagePending
		e.keepTarget(t)
		e.streams[stream].requests[t.Name] = plan.RequestOf(t, nil)
		return true
	}
	return false
}

func (e *engine) adoptHeld(name string, now time.Time) {
	m := e.streams[name]
	if m.installed == nil && len(m.targets) == 0 {
		return // the stream was never installed
	}
	v := e.input(name, now)
	v.AllocateFWMark = func() (uint32, error) { return 0, errors.New("the target is not installed") }
	p := plan.ForStream(v)
	for _, t := range p.Targets {
		e.keepTarget(t)
		for _, f := range vip.Families {
			// Exclude targets that the kernel does not forward to, as before the restart.
			if !plan.Forwards(t, e.observed.Targets[t.FWMark], f) {
				p.RemoveFromTable(t.Name, f)
			}
		}
	}
	e.keepStream(p.Stream)
	m.requests = p.Requests
}
