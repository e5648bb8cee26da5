package plan

import (
	"cmp"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Generation is one set of targets that a stream's Maglev tables had.
type Generation struct {
	// Targets holds the sorted names of each family's table.
	Targets [len(vip.Families)][]string `json:"targets"`
	// Seconds is how long the tables were in force, up to Until.
	Seconds float64   `json:"seconds"`
	Until   time.Time `json:"until"`
}

// Generations holds the sets of targets of a stream: flows of earlier ones may still be open.
type Generations struct {
	Current Generation `json:"current"`
	// Earlier holds the generations before, the longest in force first.
	Earlier []Generation `json:"earlier"`
	// Since is the time from which on every set is remembered: the first start, or the end of a set
	// that was forgotten because it was short or there were too many.
	Since time.Time `json:"since"`
}

// Complete reports whether all sets of targets are known whose flows may still be open.
func (generations *Generations) Complete(now time.Time) bool {
	return !generations.Since.IsZero() && now.Sub(generations.Since) > generationAge
}

const (
	// minGeneration is how long a set is in force before it is worth remembering: few flows began in a
	// shorter one, such as while a target fails and returns.
	minGeneration = 3 * time.Second
	// maxGenerations limits the earlier generations. While targets start one after another, each is
	// the end of a short one, so the shortest is forgotten first.
	maxGenerations = 4
	// generationAge is how long after its end a generation is forgotten.
	generationAge = 12 * time.Hour
)

// Note records the tables that are in force now, and reports whether they are a new generation, or
// an earlier one is forgotten.
func (generations *Generations) Note(tables [len(vip.Families)][]string, now time.Time) bool {
	current := &generations.Current
	if current.Until.IsZero() {
		current.Until = now
	}
	if generations.Since.IsZero() {
		generations.Since = now
	}
	// A wall clock that jumps back must not shorten a generation.
	current.Seconds += max(0, now.Sub(current.Until).Seconds())
	current.Until = now
	same := sameTables(current.Targets, tables)
	forgotten := func(generation Generation) bool { return now.Sub(generation.Until) > generationAge }
	if same && !slices.ContainsFunc(generations.Earlier, forgotten) {
		return false
	}
	next := Generation{Targets: [...][]string{slices.Clone(tables[0]), slices.Clone(tables[1])}, Until: now}
	earlier := slices.Clone(generations.Earlier) // copies of the value are read concurrently
	if same {
		next = *current
	} else if current.Seconds >= minGeneration.Seconds() {
		earlier = append(earlier, *current)
	} else if !contained(current.Targets, tables) {
		generations.Since = now
	}
	// Targets that fail and return restore the earlier set: it is current again, and no second one.
	earlier = slices.DeleteFunc(earlier, func(generation Generation) bool {
		restored := sameTables(generation.Targets, tables)
		if restored {
			next.Seconds += generation.Seconds
		}
		return restored || len(generation.Targets[0])+len(generation.Targets[1]) == 0 || forgotten(generation)
	})
	slices.SortStableFunc(earlier, func(a, b Generation) int { return cmp.Compare(b.Seconds, a.Seconds) })
	if len(earlier) > maxGenerations {
		earlier, generations.Since = earlier[:maxGenerations], now
	}
	generations.Current, generations.Earlier = next, earlier
	return true
}

// contained reports whether each family's table, unless empty, is in force still: a short set without
// a family, as the first one of a pod may be, is not forgotten when that family joins it.
func contained(short, tables [len(vip.Families)][]string) bool {
	for _, family := range vip.Families {
		if len(short[family]) > 0 && !slices.Equal(short[family], tables[family]) {
			return false
		}
	}
	return true
}

// Sets returns the targets of the earlier generations.
func (generations *Generations) Sets() (sets [][len(vip.Families)][]string) {
	for _, generation := range generations.Earlier {
		sets = append(sets, generation.Targets)
	}
	return sets
}

// Gains reports whether a target enters a Maglev table that is not among the installed ones.
func (p *StreamPlan) Gains(installed *InstalledStream) bool {
	for _, family := range vip.Families {
		for _, name := range p.Stream.Tables[family] {
			if installed == nil || !contains(installed.Tables[family], name) {
				return true
			}
		}
	}
	return false
}

// Earlier computes the targets that each slot of a family had in earlier sets of targets, in their
// order: at most limit of them, other than the current one. Keep reports whether a target can still
// have flows.
func Earlier(
	size, seed uint32, current []string, earlier [][]string, limit int, keep func(string) bool,
) map[uint32][]string {
	slots := map[uint32][]string{}
	now := maglev(current, size, seed)
	if now == nil {
		return slots
	}
	for _, names := range earlier {
		if slices.Equal(names, current) || !slices.ContainsFunc(names, keep) {
			continue
		}
		for slot, index := range maglev(names, size, seed) {
			name := names[index]
			if name == current[now[slot]] || !keep(name) {
				continue
			}
			if slot := uint32(slot); len(slots[slot]) < limit && !slices.Contains(slots[slot], name) {
				slots[slot] = append(slots[slot], name)
			}
		}
	}
	return slots
}
