package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// unknownSize is the size of the tables of a stream whose chain does not name it.
const unknownSize = 1009

// noStream is the stream of numbers whose target is not known.
const noStream = "-"

var errNewcomer = errors.New("the target is not installed")

// gather finds what an earlier process installed: by the names of chains and the comments
// of their rules, and by the protocol number of rules and routes. What is complete is
// applied, what is torn is pending. A number whose target is not known, since a crash or
// another process left only its rule and routes, is to be removed unless adopt finds the
// target by its addresses.
func gather(k kernelSide, o Options, now time.Time) (installed, error) {
	r := installed{Targets: map[uint32]installedTarget{}, Streams: map[string]installedStream{}}
	numbers, err := k.owned()
	if err != nil {
		return r, fmt.Errorf("list our rules and routes: %w", err)
	}
	c, err := k.read(numbers)
	if err != nil {
		return r, fmt.Errorf("read the data plane: %w", err)
	}
	if more := slices.Sorted(maps.Keys(c.slots)); !slices.Equal(more, numbers) {
		// Targets of which only chains are left.
		if c, err = k.read(more); err != nil {
			return r, fmt.Errorf("read the data plane: %w", err)
		}
	}
	names := map[[2]string]bool{}
	for _, number := range slices.Sorted(maps.Keys(c.slots)) {
		s := c.slots[number]
		t := installedTarget{Number: number, Stream: s.stream, Name: s.name, Flows: s.flows, Stage: stageApplied}
		t.DrainEnd, t.Drain = s.drainEndAt(now)
		for _, f := range vip.Families {
			// A link that went down took the route with it.
			if a := s.hops[f]; a.IsValid() {
				t.IPs = append(t.IPs, a)
			} else if a := s.ips[f]; a.IsValid() {
				t.IPs = append(t.IPs, a)
			}
		}
		key := [2]string{s.stream, s.name}
		switch {
		case s.label == label{} && !slices.Contains(numbers, number):
			continue // Nothing of it has our marks.
		case s.stream == "" || s.name == "" || names[key] || number > o.Mask:
			t.Stream, t.Name, t.Stage = noStream, fmt.Sprint(number), stageRemoving
		case len(t.IPs) == 0:
			t.Stage = stageRemoving
		case len(slotDrift(t, s, false)) > 0:
			t.Stage = stagePending
		}
		names[key] = true
		r.Targets[number] = t
	}
	for name, s := range c.streams {
		// A chain that only has such a name is another process's.
		ours := s.ours || len(s.families()) > 0
		for _, t := range r.Targets {
			ours = ours || t.Stream == name
		}
		if ours {
			r.Streams[name] = gatherStream(s, r.Targets, c.vips)
		}
	}
	return r, nil
}

func gatherStream(s *streamContent, all map[uint32]installedTarget, vips map[vip.VIP]string) installedStream {
	x := installedStream{Name: s.name, Size: s.size, Seed: s.seed, Stage: stageApplied}
	for v, stream := range vips {
		if stream == s.name {
			x.VIPs = append(x.VIPs, v)
		}
	}
	slices.SortFunc(x.VIPs, vip.Compare)
	targets := map[string]installedTarget{}
	for _, t := range all {
		if t.Stream == s.name {
			targets[t.Name] = t
		}
	}
	torn := s.size < 2 || s.seed == 0
	var tables [len(vip.Families)][]uint32
	for _, f := range vip.Families {
		if s.tables[f] == nil {
			continue
		}
		in := map[string]struct{}{}
		for _, number := range s.tables[f] {
			if t := all[number]; t.Stream == s.name && t.Stage != stageRemoving {
				in[t.Name] = struct{}{}
			}
		}
		x.Tables[f] = slices.Sorted(maps.Keys(in))
		if !torn {
			tables[f] = tableOf(x.Tables[f], targets, s.size, s.seed)
		}
	}
	if torn {
		// Whatever these are, the stream is written again.
		x.Size, x.Seed = unknownSize, 1
	}
	if torn || len(streamDrift(x, tables, s, vips).drift) > 0 {
		x.Stage = stagePending
	}
	return x
}

// adopt matches what was found in the kernel with the first Wanted. A number without a
// known target belongs to the one with the addresses of its routes. Of held streams,
// what is wanted counts as installed, so that the difference is drift.
func (e *engine) adopt(now time.Time) {
	for _, name := range slices.Sorted(maps.Keys(e.wanted.Streams)) {
		m := e.memory(name)
		for _, t := range e.wanted.Streams[name].Targets {
			if _, ok := m.targets[t.Name]; !ok && slices.Contains(t.Roles[:], Serving) {
				e.adoptNumber(name, t)
			}
		}
		if e.held(name) {
			e.adoptHeld(name, now)
		}
	}
}

func (e *engine) adoptNumber(stream string, w Target) {
	unknown := e.streams[noStream]
	if unknown == nil {
		return
	}
	for _, t := range sortedTargets(unknown.targets) {
		same := len(t.IPs) > 0 && t.Number <= e.o.Mask
		for _, a := range t.IPs {
			same = same && addressOf(w.IPs, vip.FamilyOf(a)) == a
		}
		if !same {
			continue
		}
		delete(unknown.targets, t.Name)
		t.Stream, t.Name, t.Stage = stream, w.Name, stagePending
		e.keepTarget(t)
		e.streams[stream].asked[t.Name] = recall(t, nil)
		return
	}
}

func (e *engine) adoptHeld(name string, now time.Time) {
	m := e.streams[name]
	if _, ok := e.installed.Streams[name]; !ok && len(m.targets) == 0 {
		return // It was never installed.
	}
	v := e.view(name, now)
	v.number = func(string) (uint32, error) { return 0, errNewcomer }
	p := planStream(v)
	for _, t := range p.targets {
		e.keepTarget(t)
	}
	for _, f := range vip.Families {
		// Without the targets that are not forwarded to, as before the restart.
		for _, target := range slices.Clone(p.stream.Tables[f]) {
			if t := p.targets[target]; !slotStands(t, e.actual.slots[t.Number], f) {
				p.drop(target, f)
			}
		}
	}
	e.keepStream(p.stream)
	m.asked = p.asked
}
