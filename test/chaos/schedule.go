package main

import (
	"math/rand/v2"
	"slices"
	"time"
)

// breadth is how far the faults of a group may reach.
type breadth int

const (
	// quiet faults may cause no UPDATE at all.
	quiet breadth = iota
	// ofTargets faults touch the VIPs of single streams.
	ofTargets
	// ofGateway faults affect the updates of one gateway.
	ofGateway
	// ofEdits faults are changes of the trench file that cause UPDATEs.
	ofEdits
	// wide faults touch every VIP.
	wide
)

// String describes the updates that a group may cause.
func (b breadth) String() string {
	return []string{"no updates", "targets", "one gateway", "edits", "anything"}[b]
}

// fault is a fault with its start and duration.
type fault struct {
	ID       int
	Kind     *kind
	Arg      int           // which variant of the kind, below Kind.Args
	Salt     uint64        // decides the details
	Start    time.Duration // after the begin of its group
	Duration time.Duration
}

// String returns the fault and its variant.
func (f fault) String() string { return f.Kind.Name + " " + f.Kind.describe(f.Arg) }

// group is faults that overlap, between two calm points.
type group struct {
	Number  int
	Breadth breadth
	Gateway int // of breadth ofGateway
	// Serial is true when each fault begins after the previous one was healed, so that no other
	// fault disturbs its effects.
	Serial bool
	Faults []fault
}

// Sizes of a group and gaps in it: about 2 s a fault, calm points included.
const (
	leastFaults = 3
	mostFaults  = 8
	longestGap  = 1200 * time.Millisecond
	// recovery keeps a resource from being broken again before its driver is done.
	recovery = 300 * time.Millisecond
)

// plan returns the groups of n faults of these kinds, a pure function of the seed.
func plan(seed uint64, n int, kinds []*kind) []group {
	r := rand.New(rand.NewPCG(seed, 0x76697067617465))
	var groups []group
	for id := 1; id <= n; {
		g := group{Number: len(groups) + 1, Gateway: r.IntN(gateways), Serial: r.IntN(100) < 40}
		switch dice := r.IntN(100); {
		case dice < 15:
			g.Breadth = quiet
		case dice < 35:
			g.Breadth = ofTargets
		case dice < 55:
			g.Breadth = ofGateway
		case dice < 70:
			g.Breadth = ofEdits
		default:
			g.Breadth = wide
		}
		if !slices.ContainsFunc(kinds, g.allows) {
			continue
		}
		want := min(leastFaults+r.IntN(mostFaults-leastFaults+1), n-id+1)
		g.Faults = fill(r, g, id, want, kinds)
		id += want
		groups = append(groups, g)
	}
	return groups
}

// fill draws the faults of a group. No two of them hold the same resource at the
// same time.
func fill(r *rand.Rand, g group, id, n int, kinds []*kind) []fault {
	allowed := slices.DeleteFunc(slices.Clone(kinds), func(k *kind) bool { return !g.allows(k) })
	free := map[string]time.Duration{} // when a resource is free again
	var faults []fault
	var at time.Duration
	for len(faults) < n {
		f := draw(r, allowed, g)
		f.ID, f.Start = id+len(faults), at
		if slices.ContainsFunc(f.Kind.holds(f.Arg), func(resource string) bool { return free[resource] > at }) {
			at += 20 * time.Millisecond // in the end everything is free
			continue
		}
		for _, resource := range f.Kind.holds(f.Arg) {
			free[resource] = at + f.Duration + recovery
		}
		faults = append(faults, f)
		if g.Serial {
			at += f.Duration + recovery
		}
		at += time.Duration(r.Int64N(int64(longestGap)))
	}
	return faults
}

// length returns the time until every fault of the group is healed.
func (g group) length() time.Duration {
	var last time.Duration
	for _, f := range g.Faults {
		last = max(last, f.Start+f.Duration)
	}
	return last
}

// allows reports whether a kind may be in the group at all.
func (g group) allows(k *kind) bool { return len(g.variants(k)) > 0 }

// variants returns the variants of a kind that may be in the group.
func (g group) variants(k *kind) []int {
	var all []int
	for arg := range k.Args {
		if g.Breadth == wide || k.Breadth == quiet ||
			k.Breadth == g.Breadth && (g.Breadth != ofGateway || k.touches(arg).gateways == 1<<g.Gateway) {
			all = append(all, arg)
		}
	}
	return all
}

// draw draws a fault of one of the kinds.
func draw(r *rand.Rand, allowed []*kind, g group) fault {
	total := 0
	for _, k := range allowed {
		total += k.weight(g.Breadth)
	}
	dice := r.IntN(total)
	k := allowed[0]
	for _, k = range allowed {
		if dice -= k.weight(g.Breadth); dice < 0 {
			break
		}
	}
	variants := g.variants(k)
	f := fault{Kind: k, Arg: variants[r.IntN(len(variants))], Salt: r.Uint64(), Duration: k.Least}
	if k.Most > k.Least {
		f.Duration += time.Duration(r.Int64N(int64(k.Most - k.Least)))
	}
	return f
}
