package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

func both(names ...string) [len(vip.Families)][]string { return [...][]string{names, names} }

// A set that returns is current again, short generations are forgotten first, and old ones too.
func TestGenerations(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var generations Generations
	note := func(want bool, after time.Duration, names ...string) {
		t.Helper()
		now = now.Add(after)
		if got := generations.Note(both(names...), now); got != want {
			t.Errorf("Note(%v) = %v", names, got)
		}
	}
	list := func() (list []string) {
		for _, generation := range generations.Earlier {
			list = append(list, fmt.Sprintf("%v %v", generation.Targets[0], generation.Seconds))
		}
		return list
	}
	want := func(want ...string) {
		t.Helper()
		if got := list(); !slices.Equal(got, want) {
			t.Errorf("earlier generations are %q, want %q", got, want)
		}
	}
	note(true, 0, "a", "b")
	want() // the empty set before is no generation
	note(false, time.Minute, "a", "b")
	note(true, 0, "a")
	want("[a b] 60")
	note(true, minGeneration/2, "a", "b")
	want() // a flap
	note(true, 0, "a")
	note(true, minGeneration, "a", "b")
	want("[a] 3")
	note(true, time.Second, "a", "b", "c")
	want("[a b] 61", "[a] 3")
	for i := range 20 {
		note(true, minGeneration+time.Duration(i)*time.Millisecond, "a", "b", fmt.Sprintf("c%02d", i))
	}
	want("[a b] 61", "[a b c18] 3.019", "[a b c17] 3.018", "[a b c16] 3.017")
	note(true, generationAge+time.Second, "d")
	want("[a b c19] 43201")
	// A wall clock that jumps back.
	note(true, -time.Hour, "e")
	want("[a b c19] 43201") // and the short one before is forgotten
}

// A short set without a family is not forgotten when that family joins it, as in a new pod, whose
// tables of both families are not written together. Any other short set is.
func TestFirstSetOfOneFamily(t *testing.T) {
	type tables = [len(vip.Families)][]string
	known := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	now := known.Add(generationAge + time.Hour)
	for name, test := range map[string]struct {
		short, next tables
		complete    bool
	}{
		"IPv6 joins":                   {tables{{"a", "b"}, nil}, tables{{"a", "b"}, {"a", "b"}}, true},
		"IPv4 joins":                   {tables{nil, {"a"}}, tables{{"a"}, {"a"}}, true},
		"IPv6 leaves":                  {tables{{"a"}, {"a"}}, tables{{"a"}, nil}, false},
		"IPv6 joins, another target":   {tables{{"a"}, nil}, tables{{"a", "b"}, {"a", "b"}}, false},
		"another target of one family": {tables{{"a"}, nil}, tables{{"a", "b"}, nil}, false},
	} {
		t.Run(name, func(t *testing.T) {
			generations := Generations{Since: known}
			generations.Note(test.short, now)
			generations.Note(test.next, now.Add(minGeneration-time.Millisecond))
			if got := generations.Complete(now.Add(minGeneration)); got != test.complete {
				t.Errorf("Complete() = %v, want %v", got, test.complete)
			}
		})
	}
}

// In each slot Earlier returns the targets that the tables of the earlier sets have there.
func TestEarlierTargets(t *testing.T) {
	const size, seed, limit = 101, 7, 2
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		sets := make([][]string, 1+random.IntN(4))
		for i := range sets {
			for name := range 6 {
				if random.IntN(2) == 0 {
					sets[i] = append(sets[i], fmt.Sprint("t", name))
				}
			}
		}
		gone := fmt.Sprint("t", random.IntN(6))
		keep := func(name string) bool { return name != gone }
		got := Earlier(size, seed, sets[0], sets[1:], limit, keep)
		for slot := range uint32(size) {
			var want []string
			owner := func(names []string) string {
				if table := maglev(names, size, seed); table != nil {
					return names[table[slot]]
				}
				return ""
			}
			for _, set := range sets[1:] {
				name := owner(set)
				if len(sets[0]) > 0 && name != "" && name != owner(sets[0]) && keep(name) && !slices.Contains(want, name) &&
					len(want) < limit {
					want = append(want, name)
				}
			}
			if !slices.Equal(got[slot], want) {
				t.Fatalf("round %d, slot %d: %v, want %v", round, slot, got[slot], want)
			}
		}
	}
}
