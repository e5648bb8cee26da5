package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// unknownSize is the table size of a stream whose chain does not contain its size.
	unknownSize = 1009
	// noStream is the pseudo stream of fwmarks without a known target; no name has this character.
	noStream = "?"
)

// load recovers the objects of an earlier process from the names of chains, the comments of their
// rules, and the protocol number of rules and routes. Complete objects are applied, incomplete
// ones pending. A fwmark with only a rule and routes, after a crash or a change by another
// process, has no known target. It is removed unless adopt finds the target by its addresses.
func (engine *engine) load() error {
	numbers, err := engine.kernel.OwnedTables()
	if err != nil {
		return fmt.Errorf("list rules and routes of the data plane: %w", err)
	}
	state, err := engine.kernel.Read(numbers)
	if err == nil && !slices.Equal(slices.Sorted(maps.Keys(state.Targets)), numbers) {
		// Some targets have only chains: read again with the rules and routes of their fwmarks.
		state, err = engine.kernel.Read(slices.Sorted(maps.Keys(state.Targets)))
	}
	if err != nil {
		return fmt.Errorf("read the data plane: %w", err)
	}
	engine.targets = map[uint32]plan.InstalledTarget{}
	engine.fwmarks.next = engine.options.First
	names := map[[2]string]bool{}
	for _, number := range slices.Sorted(maps.Keys(state.Targets)) {
		kernel := state.Targets[number]
		target := plan.InstalledTarget{FWMark: number, Label: kernel.Label, Flows: kernel.Flows, Stage: plan.StageApplied}
		target.ResumeDrain(engine.now())
		for f := range target.IPs {
			// The kernel removes the route when its link goes down; the label has the address.
			target.IPs[f] = cmp.Or(kernel.NextHops[f], kernel.IPs[f])
		}
		key := [2]string{kernel.Stream, kernel.Name}
		switch {
		case kernel.Label == plan.Label{} && !slices.Contains(numbers, number):
			continue // the chain belongs to another process
		// A duplicate name or a fwmark outside the mask cannot be installed again: remove it.
		case kernel.Stream == "" || kernel.Name == "" || names[key] || number > engine.options.FWMarkMask():
			target.Stream, target.Name, target.Stage = noStream, fmt.Sprint(number), plan.StageRemoving
		case len(target.Addresses()) == 0:
			target.Stage = plan.StageRemoving
		case len(plan.TargetDrift(target, kernel, false)) > 0:
			target.Stage = plan.StagePending
		}
		names[key] = true
		engine.keepTarget(target)
		engine.fwmarks.next = max(engine.fwmarks.next, number+1)
	}
	for name, stream := range state.Streams {
		// A chain that only has the name of a stream belongs to another process.
		if stream.Owned || len(stream.Families()) > 0 || engine.streams[name] != nil {
			engine.keepStream(recoverStream(stream, engine.record(name).targets, state.VIPs))
		}
	}
	for guest := range state.Guests {
		engine.guests[guest] = engine.now().Add(restoredGuests)
	}
	for _, record := range engine.streams {
		for _, t := range record.targets {
			record.requests[t.Name] = plan.RequestOf(t, record.installed)
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
	for _, family := range s.Families() {
		x.Tables[family] = []string{}
		for name, t := range targets {
			if t.Stage != plan.StageRemoving && slices.Contains(s.Tables[family], t.FWMark) {
				x.Tables[family] = append(x.Tables[family], name)
			}
		}
		slices.Sort(x.Tables[family])
	}
	// Another process wrote a rule whose modulus is not the size of a Maglev table.
	if s.Seed == 0 || s.Size > plan.MaxTable || !big.NewInt(int64(s.Size)).ProbablyPrime(0) {
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
func (engine *engine) adopt(now time.Time) {
	for _, name := range slices.Sorted(maps.Keys(engine.desired.Streams)) {
		record := engine.record(name)
		stream := engine.desired.Streams[name]
		for _, target := range stream.Targets {
			if _, ok := record.targets[target.Name]; !ok && (stream.RouteAll || slices.Contains(target.Roles[:], plan.Serving)) {
				engine.adoptFWMark(name, target)
			}
		}
		if engine.holds.held(name) {
			engine.adoptHeld(name, now)
		}
	}
}

// adoptFWMark assigns a fwmark without a known target to the target to which its routes lead. It
// reports whether it found one.
func (engine *engine) adoptFWMark(stream string, target plan.Target) (adopted bool) {
	unknown, ips := engine.record(noStream), plan.ByFamily(target.IPs)
	for _, t := range plan.SortedTargets(unknown.targets) {
		same := len(t.Addresses()) > 0 && t.FWMark <= engine.options.FWMarkMask()
		for f, a := range t.IPs {
			same = same && (a == ips[f] || !a.IsValid())
		}
		if !same {
			continue
		}
		delete(unknown.targets, t.Name)
		unknown.reachedIn = nil
		t.Stream, t.Name, t.Stage = stream, target.Name, plan.StagePending
		engine.keepTarget(t)
		engine.streams[stream].requests[t.Name] = plan.RequestOf(t, nil)
		return true
	}
	return false
}

func (engine *engine) adoptHeld(name string, now time.Time) {
	record := engine.streams[name]
	if record.installed == nil && len(record.targets) == 0 {
		return // the stream was never installed
	}
	input := engine.input(name, now)
	input.AllocateFWMark = func() (uint32, error) { return 0, errors.New("the target is not installed") }
	next := plan.ForStream(input)
	for _, target := range next.Targets {
		engine.keepTarget(target)
		for _, family := range vip.Families {
			// Exclude targets that the kernel does not forward to, as before the restart.
			if !plan.Forwards(target, engine.observed.Targets[target.FWMark], family) {
				next.RemoveFromTable(target.Name, family)
			}
		}
	}
	engine.keepStream(next.Stream)
	record.requests = next.Requests
}
