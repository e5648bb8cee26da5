package plan

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// targetNames returns n sorted names.
func targetNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("target-%d", i+1)
	}
	slices.Sort(names)
	return names
}

// These tables are an agreement between the pods of a trench, which run different
// versions while one is rolled out: a flow that a gateway moves between them would
// change its target. The values were computed by another program from the
// description of maglev. They must never change.
func TestMaglevNeverChanges(t *testing.T) {
	for _, tt := range []struct {
		names      []string
		size, seed uint32
		want       []uint16
	}{
		{[]string{"target-1", "target-2", "target-3"}, 13, 1, []uint16{1, 0, 0, 1, 2, 2, 0, 1, 0, 0, 2, 1, 2}},
		{[]string{"target-1", "target-2", "target-3"}, 13, 2, []uint16{1, 2, 0, 1, 0, 0, 0, 2, 2, 1, 2, 0, 1}},
		{[]string{"target-1", "target-3"}, 13, 1, []uint16{0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1}},
		{[]string{"a"}, 7, math.MaxUint32, make([]uint16, 7)},
		{nil, 1009, 1, nil},
	} {
		if got := maglev(tt.names, tt.size, tt.seed); !slices.Equal(got, tt.want) {
			t.Errorf("%v, size %d, seed %d: %v, want %v", tt.names, tt.size, tt.seed, got, tt.want)
		}
	}
	for _, tt := range []struct {
		names      int
		size, seed uint32
		want       string // SHA-256 of the entries, 2 bytes each, most significant first
	}{
		{10, 1009, 1, "93e2b42e26c63a4d851fd62cc64fcba6ae5c4700fee13a7e1a8aae06d4dd0916"},
		{100, 10007, 7, "5456793a87769b677c691c94bcd20a25d08e01744c912fccf2660d59a035503f"},
		{100, 65537, math.MaxUint32, "2829699366a8f5bdb18c90f5a41afe8b057154696d6d78bb7ec1e1e01c50e454"},
	} {
		var b []byte
		for _, e := range maglev(targetNames(tt.names), tt.size, tt.seed) {
			b = binary.BigEndian.AppendUint16(b, e)
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != tt.want {
			t.Errorf("%d names, size %d, seed %d: %x, want %s", tt.names, tt.size, tt.seed, sum, tt.want)
		}
	}
}

var (
	someSizes = rapid.SampledFrom([]uint32{2, 3, 5, 7, 11, 13, 101, 251, 1009})
	someNames = rapid.SliceOfNDistinct(rapid.StringMatching(`[A-Za-z0-9_.-]{1,60}`), 1, 40, rapid.ID[string])
)

// shares counts the entries of each of n names.
func shares(table []uint16, n int) []int {
	of := make([]int, n)
	for _, e := range table {
		of[e]++
	}
	return of
}

func TestMaglevSharesAreEqual(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := someNames.Draw(t, "names")
		slices.Sort(names)
		size := someSizes.Draw(t, "size")
		table := maglev(names, size, rapid.Uint32Min(1).Draw(t, "seed"))
		if len(table) != int(size) {
			t.Fatalf("%d entries", len(table))
		}
		if of := shares(table, len(names)); slices.Max(of)-slices.Min(of) > 1 {
			t.Fatalf("shares %v", of)
		}
	})
}

// The table is independent of the set's history: of the order of additions, and of removed
// names.
func TestMaglevDependsOnTheSetOfNamesOnly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := someNames.Draw(t, "names")
		size, seed := someSizes.Draw(t, "size"), rapid.Uint32Min(1).Draw(t, "seed")
		set := map[string]bool{}
		for _, name := range rapid.Permutation(append(names, someNames.Draw(t, "guests")...)).Draw(t, "order") {
			set[name] = true
			maglev(slices.Sorted(maps.Keys(set)), size, seed)
		}
		maps.DeleteFunc(set, func(name string, _ bool) bool { return !slices.Contains(names, name) })
		slices.Sort(names)
		was := slices.Clone(names)
		got, want := maglev(slices.Sorted(maps.Keys(set)), size, seed), maglev(names, size, seed)
		if !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
		if !slices.Equal(names, was) {
			t.Fatal("the names were changed")
		}
	})
}

// The paper's own form, with whole permutations.
func TestMaglevMatchesPaper(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := someNames.Draw(t, "names")
		slices.Sort(names)
		size, seed := someSizes.Draw(t, "size"), rapid.Uint32Min(1).Draw(t, "seed")
		wanted := make([][]uint32, len(names))
		for i, name := range names {
			sum := sha256.Sum256(append([]byte{byte(seed >> 24), byte(seed >> 16), byte(seed >> 8), byte(seed)}, name...))
			offset := binary.BigEndian.Uint64(sum[:]) % uint64(size)
			skip := binary.BigEndian.Uint64(sum[8:])%uint64(size-1) + 1
			for j := range uint64(size) {
				wanted[i] = append(wanted[i], uint32((offset+j*skip)%uint64(size)))
			}
		}
		entries := map[uint32]uint16{}
		for turn := 0; len(entries) < int(size); turn++ {
			i := turn % len(names)
			free := slices.IndexFunc(wanted[i], func(c uint32) bool { _, taken := entries[c]; return !taken })
			entries[wanted[i][free]] = uint16(i)
		}
		for c, got := range maglev(names, size, seed) {
			if got != entries[uint32(c)] {
				t.Fatalf("entry %d is %d, want %d", c, got, entries[uint32(c)])
			}
		}
	})
}

// When one of 10 names is removed, its tenth of the entries moves, and a few entries of the
// remaining names, fewer in larger tables. The share varies: 11.7 to 13.6 % of 1009 entries
// move in 9 of 10 cases.
func TestMaglevMovesFewEntries(t *testing.T) {
	names := targetNames(10)
	for _, tt := range []struct {
		size, seeds uint32
		most        float64 // percent, on average
	}{
		{1009, 100, 13}, {2003, 50, 12}, {10_007, 10, 11}, {65_537, 2, 10.5},
	} {
		var moved, own, all float64
		for seed := uint32(1); seed <= tt.seeds; seed++ {
			before := maglev(names, tt.size, seed)
			for gone := range names {
				left := slices.Delete(slices.Clone(names), gone, gone+1)
				for c, now := range maglev(left, tt.size, seed) {
					switch was := before[c]; {
					case int(was) == gone:
						own++
						moved++
					case names[was] != left[now]:
						moved++
					}
					all++
				}
			}
		}
		moved, own = 100*moved/all, 100*own/all
		t.Logf("%d entries: %.1f %% moved, %.1f %% were those of the name that went", tt.size, moved, own)
		if own < 9.9 || own > 10.1 || moved > tt.most {
			t.Errorf("%d entries: %.1f %% moved, %.1f %% were those of the name that went; want at most %v %%, and 10 %%",
				tt.size, moved, own, tt.most)
		}
	}
}

func TestMaglevOfMoreNamesThanEntries(t *testing.T) {
	names := targetNames(20)
	of := shares(maglev(names, 13, 1), len(names))
	want := append(slices.Repeat([]int{1}, 13), make([]int, 7)...)
	if !slices.Equal(of, want) {
		t.Errorf("shares %v, want %v", of, want)
	}
	many := make([]string, 70_000)
	for i := range many {
		many[i] = fmt.Sprintf("target-%05d", i)
	}
	of = shares(maglev(many, 131_071, 1), len(many))
	if slices.Contains(of[:maxShares], 0) || slices.Max(of[maxShares:]) > 0 {
		t.Error("the first 65535 names do not have all entries")
	}
}

func BenchmarkMaglev(b *testing.B) {
	for _, size := range []uint32{1009, 10_007, 65_537} {
		for _, n := range []int{1, 10, 100, 1000} {
			b.Run(fmt.Sprintf("entries=%d/names=%d", size, n), func(b *testing.B) {
				names := targetNames(n)
				for b.Loop() {
					maglev(names, size, 1)
				}
			})
		}
	}
}
