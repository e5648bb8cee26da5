package record

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

var discard = slog.New(slog.DiscardHandler)

// testing both of *testing.T and *rapid.T.
type failer interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// mustOpen opens records that are not damaged.
func mustOpen(t failer, dir string) *Store {
	t.Helper()
	s, damage, err := Open(dir, discard)
	if err != nil || damage != nil {
		t.Fatalf("Open: %+v, %v", damage, err)
	}
	return s
}

func mustClose(t failer, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func mustWrite(t failer, s *Store, c Change) {
	t.Helper()
	if err := s.Write(c); err != nil {
		t.Fatal(err)
	}
}

// holds fails when the records are others.
func holds(t failer, s *Store, want Records) {
	t.Helper()
	got, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	if diff := differ(want, got); diff != "" {
		t.Fatalf("records (-want +got)\n%s", diff)
	}
}

func differ(want, got Records) string {
	if reflect.DeepEqual(want, got) {
		return "" // many times as fast
	}
	return cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, vip.VIP{}))
}

func target(number uint32, stream, name string) Target {
	a := netip.AddrFrom4([4]byte{10, byte(number >> 16), byte(number >> 8), byte(number)})
	six := netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(number >> 16), 14: byte(number >> 8), 15: byte(number)})
	return Target{Number: number, Stream: stream, Name: name, IPs: []netip.Addr{a, six}, Flows: [2]bool{true, true}, Stage: Applied}
}

func stream(name string, size uint32, targets ...string) Stream {
	slices.Sort(targets)
	return Stream{
		Name: name, VIPs: []vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("30.0.0.0/24"), vip.Require("2000::1/128")},
		Size: size, Seed: 1, DrainTime: 5 * time.Second, Tables: [2][]string{targets, nil}, Stage: Applied,
	}
}

// filled is n streams of m targets.
func filled(n, m int) Records {
	r := Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}}
	number := uint32(5000)
	for i := range n {
		s := stream(fmt.Sprintf("stream-%d", i), 1009)
		for range m {
			t := target(number, s.Name, fmt.Sprintf("target-%d", number))
			r.Targets[number] = t
			s.Tables[0] = append(s.Tables[0], t.Name)
			s.Tables[1] = append(s.Tables[1], t.Name)
			number++
		}
		r.Streams[s.Name] = s
	}
	return r
}

// change writes all of the records.
func (r Records) change() Change {
	var c Change
	for _, t := range r.Targets {
		c.Targets = append(c.Targets, t)
	}
	for _, s := range r.Streams {
		c.Streams = append(c.Streams, s)
	}
	return c
}

func TestWhatIsWrittenIsThereAfterOpeningAgain(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	holds(t, s, Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}})
	want := filled(3, 4)
	odd := Target{
		Number: 1<<32 - 1, Stream: "s", Name: "odd", IPs: []netip.Addr{netip.MustParseAddr("fd00::1")}, Flows: [2]bool{false, true},
		DrainEnd: time.Unix(1_800_000_000, 123_456_789), Stage: Removing,
	}
	want.Targets[odd.Number] = odd
	empty := Stream{Name: "empty", Size: 131071, Seed: 1<<32 - 1, Stage: Pending, Tables: [2][]string{nil, {}}}
	want.Streams[empty.Name] = empty
	mustWrite(t, s, want.change())
	holds(t, s, want)
	mustClose(t, s)
	mustClose(t, s)
	if info, err := os.Stat(filepath.Join(dir, fileName)); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatal(info, err)
	}
	s = mustOpen(t, dir)
	defer mustClose(t, s)
	holds(t, s, want)
}

func TestAChangeRemovesFirst(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	defer mustClose(t, s)
	a, b := target(1, "s", "a"), target(2, "s", "b")
	mustWrite(t, s, Change{Targets: []Target{a, b}, Streams: []Stream{stream("s", 7, "a", "b"), stream("other", 7)}})
	// a has another number, b changes places with nobody, and c takes that of a.
	a2, c := target(3, "s", "a"), target(1, "s", "c")
	changed := stream("s", 11, "a", "c")
	mustWrite(t, s, Change{
		RemoveTargets: []uint32{1, 2, 77}, Targets: []Target{a2, c},
		RemoveStreams: []string{"s", "other", "nobody"}, Streams: []Stream{changed},
	})
	holds(t, s, Records{Targets: map[uint32]Target{3: a2, 1: c}, Streams: map[string]Stream{"s": changed}})
	// Two change their names in one change.
	a3, c3 := target(1, "s", "a"), target(3, "s", "c")
	mustWrite(t, s, Change{Targets: []Target{a3, c3}})
	holds(t, s, Records{Targets: map[uint32]Target{1: a3, 3: c3}, Streams: map[string]Stream{"s": changed}})
	mustWrite(t, s, Change{})
}

func TestAChangeThatBreaksTheRulesIsRefusedAndNothingIsWritten(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	defer mustClose(t, s)
	before := Records{Targets: map[uint32]Target{1: target(1, "s", "a")}, Streams: map[string]Stream{"s": stream("s", 7, "a")}}
	mustWrite(t, s, before.change())
	bad := func(change func(*Target)) Change {
		x := target(2, "s", "b")
		change(&x)
		return Change{Targets: []Target{target(9, "s", "fine"), x}, RemoveStreams: []string{"s"}}
	}
	badStream := func(change func(*Stream)) Change {
		x := stream("x", 7, "a", "b")
		change(&x)
		return Change{Streams: []Stream{stream("fine", 7), x}, RemoveTargets: []uint32{1}}
	}
	ip := netip.MustParseAddr
	for name, tt := range map[string]struct {
		change Change
		want   string
	}{
		"number 0":         {bad(func(t *Target) { t.Number = 0 }), "number is 0"},
		"no name":          {bad(func(t *Target) { t.Name = "" }), "not a name"},
		"name with space":  {bad(func(t *Target) { t.Name = "a b" }), "not a name"},
		"name too long":    {bad(func(t *Target) { t.Name = strings.Repeat("a", 256) }), "not a name"},
		"stream with tab":  {bad(func(t *Target) { t.Stream = "a\tb" }), "not a name"},
		"no stage":         {bad(func(t *Target) { t.Stage = 0 }), "no stage 0"},
		"unknown stage":    {bad(func(t *Target) { t.Stage = 4 }), "no stage 4"},
		"no address":       {bad(func(t *Target) { t.IPs = nil }), "0 addresses"},
		"three addresses":  {bad(func(t *Target) { t.IPs = append(t.IPs, ip("10.0.0.9")) }), "3 addresses"},
		"two of a family":  {bad(func(t *Target) { t.IPs = []netip.Addr{ip("10.0.0.9"), ip("10.0.0.8")} }), "two ipv4"},
		"mapped address":   {bad(func(t *Target) { t.IPs = []netip.Addr{ip("::ffff:10.0.0.9")} }), "not the address"},
		"address of link":  {bad(func(t *Target) { t.IPs = []netip.Addr{ip("fe80::1%eth0")} }), "not the address"},
		"invalid address":  {bad(func(t *Target) { t.IPs = []netip.Addr{{}} }), "not the address"},
		"number twice":     {bad(func(t *Target) { t.Number = 9 }), "number 9 is in the change twice"},
		"name twice":       {bad(func(t *Target) { t.Name = "fine" }), "fine of stream s is in the change twice"},
		"name of another":  {bad(func(t *Target) { t.Name = "a" }), "a of stream s has the number 1, and cannot have 2 as well"},
		"no entries":       {badStream(func(s *Stream) { s.Size = 0 }), "0 entries"},
		"many entries":     {badStream(func(s *Stream) { s.Size = 1<<17 + 1 }), "131073 entries"},
		"seed 0":           {badStream(func(s *Stream) { s.Seed = 0 }), "seed is 0"},
		"negative drain":   {badStream(func(s *Stream) { s.DrainTime = -1 }), "drain time is -1ns"},
		"stream's stage":   {badStream(func(s *Stream) { s.Stage = 9 }), "no stage 9"},
		"stream's name":    {badStream(func(s *Stream) { s.Name = "ä" }), "not a name"},
		"stream twice":     {badStream(func(s *Stream) { s.Name = "fine" }), "fine is in the change twice"},
		"no VIP":           {badStream(func(s *Stream) { s.VIPs[0] = vip.VIP{} }), "VIP that is none"},
		"order of VIPs":    {badStream(func(s *Stream) { slices.Reverse(s.VIPs) }), "VIPs are not in their order"},
		"VIP twice":        {badStream(func(s *Stream) { s.VIPs[1] = s.VIPs[0] }), "VIPs are not in their order"},
		"order of targets": {badStream(func(s *Stream) { slices.Reverse(s.Tables[0]) }), "names of a table are not in their order"},
		"target in table":  {badStream(func(s *Stream) { s.Tables[1] = []string{""} }), "not a name"},
	} {
		t.Run(name, func(t *testing.T) {
			err := s.Write(tt.change)
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), s.path) {
				t.Fatalf("Write: %v, want %q", err, tt.want)
			}
			holds(t, s, before)
		})
	}
}

// Whatever is written in whatever order: the store holds what a map would.
func TestTheStoreIsAMap(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		s := mustOpen(t, dir)
		defer func() { mustClose(t, s) }()
		want := Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}}
		number, letter := rapid.Uint32Range(1, 40), rapid.StringMatching(`[a-h]`)
		for range rapid.IntRange(1, 12).Draw(t, "changes") {
			c := Change{
				RemoveTargets: rapid.SliceOfN(number, 0, 10).Draw(t, "targets that go"),
				RemoveStreams: rapid.SliceOfN(letter, 0, 4).Draw(t, "streams that go"),
			}
			for _, n := range rapid.SliceOfNDistinct(number, 0, 20, rapid.ID[uint32]).Draw(t, "targets") {
				x := target(n, letter.Draw(t, "stream"), letter.Draw(t, "name"))
				x.Stage = Stage(rapid.IntRange(1, 3).Draw(t, "stage"))
				c.Targets = append(c.Targets, x)
			}
			for _, name := range rapid.SliceOfNDistinct(letter, 0, 4, rapid.ID[string]).Draw(t, "streams") {
				names := rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]{1,60}`), 0, 40, rapid.ID[string]).Draw(t, "table")
				c.Streams = append(c.Streams, stream(name, 1009, names...))
			}
			next, fits := want.with(c)
			if err := s.Write(c); (err == nil) != fits {
				t.Fatalf("Write: %v, but the change is good: %t", err, fits)
			}
			if fits {
				want = next
			}
			holds(t, s, want)
			if rapid.IntRange(0, 3).Draw(t, "open again") == 0 {
				mustClose(t, s)
				s = mustOpen(t, dir)
				holds(t, s, want)
			}
		}
		c := Change{}
		for n := range want.Targets {
			c.RemoveTargets = append(c.RemoveTargets, n)
		}
		for name := range want.Streams {
			c.RemoveStreams = append(c.RemoveStreams, name)
		}
		mustWrite(t, s, c)
		holds(t, s, Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}})
	})
}

// Pages split, merge, and become free: what bbolt writes is never taken for damage.
func TestALongLifeIsNoDamage(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	defer mustClose(t, s)
	random := rand.New(rand.NewPCG(5, 6))
	want := Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}}
	for round := range 400 {
		var c Change
		most := []int{3, 30, 300}[random.IntN(3)]
		for range random.IntN(most) {
			n := 1 + random.Uint32N(800)
			if random.IntN(2) == round/50%2 { // more, then fewer
				c.RemoveTargets = append(c.RemoveTargets, n)
			} else if !slices.ContainsFunc(c.Targets, func(x Target) bool { return x.Number == n }) {
				c.Targets = append(c.Targets, target(n, "s", fmt.Sprintf("%d-%0*d", n, 1+random.IntN(200), 0)))
			}
		}
		name := fmt.Sprintf("stream-%d", random.IntN(30))
		if random.IntN(2) == 0 {
			c.RemoveStreams = append(c.RemoveStreams, name)
		} else {
			x := stream(name, 1009)
			for i := range random.IntN(400) {
				x.Tables[0] = append(x.Tables[0], fmt.Sprintf("target-%04d", i))
			}
			c.Streams = append(c.Streams, x)
		}
		next, fits := want.with(c)
		if !fits {
			t.Fatal("the change is bad")
		}
		mustWrite(t, s, c)
		want = next
		data, err := readFile(s.path)
		if err != nil {
			t.Fatal(err)
		}
		found := newCollector()
		if err := surveyFile(data, found); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if diff := differ(want, found.Records); diff != "" {
			t.Fatalf("round %d (-want +got)\n%s", round, diff)
		}
	}
}

// with is what a change makes of records, and whether it may.
func (r Records) with(c Change) (Records, bool) {
	next := Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}}
	for n, t := range r.Targets {
		next.Targets[n] = t
	}
	for name, s := range r.Streams {
		next.Streams[name] = s
	}
	for _, n := range c.RemoveTargets {
		delete(next.Targets, n)
	}
	for _, name := range c.RemoveStreams {
		delete(next.Streams, name)
	}
	for _, t := range c.Targets {
		next.Targets[t.Number] = t
	}
	for _, s := range c.Streams {
		next.Streams[s.Name] = s
	}
	ids := map[string]bool{}
	for _, t := range next.Targets {
		ids[t.Stream+" "+t.Name] = true
	}
	return next, len(ids) == len(next.Targets)
}

func TestManyMayUseAStore(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 50 {
				n := uint32(1 + 100*i + j)
				if err := s.Write(Change{Targets: []Target{target(n, "s", fmt.Sprint(n))}}); err != nil {
					t.Error(err)
				}
				if r, err := s.Load(); err != nil || r.Targets[n].Number != n {
					t.Error(len(r.Targets), err)
				}
			}
		})
	}
	wg.Wait()
	mustClose(t, s)
	if err := s.Write(Change{RemoveTargets: []uint32{1}}); !errors.Is(err, errClosed) {
		t.Error(err)
	}
	if _, err := s.Load(); !errors.Is(err, errClosed) {
		t.Error(err)
	}
	s = mustOpen(t, dir)
	defer mustClose(t, s)
	if r, err := s.Load(); err != nil || len(r.Targets) != 200 {
		t.Fatal(len(r.Targets), err)
	}
}

func TestTheRecordsBelongToOneProcess(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, fileName)
	// Who has the lock may have half of something in the file.
	l, err := takeLock(filepath.Join(dir, lockName))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, damage, err := Open(dir, discard)
	if !errors.Is(err, ErrLocked) || damage != nil || !strings.Contains(err.Error(), path) {
		t.Fatal(damage, err)
	}
	if err := errors.Join(os.Remove(path), l.release()); err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, dir)
	// It waits for one that is about to end.
	opened := make(chan *Store, 1)
	go func() {
		s, _, err := Open(dir, discard)
		if err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	mustClose(t, s)
	if s = <-opened; s != nil {
		mustClose(t, s)
	}
	// A tool of bbolt that looks at the file.
	db, err := bbolt.Open(path, 0, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, damage, err := Open(dir, discard); !errors.Is(err, ErrLocked) || damage != nil {
		t.Error(damage, err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	mustClose(t, mustOpen(t, dir))
}

func TestRemoveLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	mustWrite(t, s, filled(1, 1).change())
	if err := s.Remove(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatal(left, err)
	}
	if err := s.Remove(); !errors.Is(err, errClosed) {
		t.Error(err)
	}
	s = mustOpen(t, dir)
	defer mustClose(t, s)
	holds(t, s, filled(0, 0))
}

// What stands in the way of the file is no damage, and the error says what to do.
func TestADirectoryThatCannotBeUsedIsAnError(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil func(dir string) error
		want  string
	}{
		"no directory":             {os.Remove, "make the directory"},
		"a file for a directory":   {func(dir string) error { return errors.Join(os.Remove(dir), os.WriteFile(dir, nil, 0o600)) }, "not a directory"},
		"a directory for the file": {func(dir string) error { return os.Mkdir(filepath.Join(dir, fileName), 0o700) }, "remove it"},
		"a FIFO for the file":      {func(dir string) error { return unix.Mkfifo(filepath.Join(dir, fileName), 0o600) }, "remove it"},
		"a link for the file":      {func(dir string) error { return os.Symlink("/nowhere", filepath.Join(dir, fileName)) }, "too many levels"},
		"a FIFO for the lock":      {func(dir string) error { return unix.Mkfifo(filepath.Join(dir, lockName), 0o600) }, "remove it"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			if err := errors.Join(os.Mkdir(dir, 0o700), tt.spoil(dir)); err != nil {
				t.Fatal(err)
			}
			s, damage, err := Open(dir, discard)
			if err == nil || s != nil || damage != nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), filepath.Join(dir, fileName)) {
				t.Fatalf("%+v, %v; want an error with %q", damage, err, tt.want)
			}
		})
	}
}

// memory mounts a file system of a few pages.
func memory(t *testing.T, flags uintptr, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", flags, "size="+size); err != nil {
		lab.Skip(t, "a tmpfs that can be mounted: "+err.Error())
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestAReadOnlyDirectoryIsAnError(t *testing.T) {
	dir := memory(t, unix.MS_RDONLY, "64k")
	if _, damage, err := Open(dir, discard); !errors.Is(err, syscall.EROFS) || damage != nil || !strings.Contains(err.Error(), "let this process") {
		t.Fatal(damage, err)
	}
}

// fill writes a file until nothing more fits into the file system.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if err := errors.Join(f.Close()); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}

func TestAFullDiskTakesNothingAwayAndIsForgotten(t *testing.T) {
	dir := memory(t, 0, "512k")
	hog := filepath.Join(dir, "hog")
	fill(t, hog)
	if _, damage, err := Open(dir, discard); !errors.Is(err, syscall.ENOSPC) || damage != nil {
		t.Fatal(damage, err)
	}
	if err := os.Remove(hog); err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, dir)
	defer func() { mustClose(t, s) }()
	want := filled(2, 3)
	mustWrite(t, s, want.change())

	for round := range 3 {
		fill(t, hog)
		for range 5 { // free pages of the file take small changes for a while
			if err := s.Write(filled(10, 50).change()); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), s.path) {
				t.Fatal(err)
			}
			holds(t, s, want)
		}
		// A process that starts now is no worse off.
		mustClose(t, s)
		s = mustOpen(t, dir)
		holds(t, s, want)
		if err := s.Write(filled(10, 50).change()); !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		if err := os.Remove(hog); err != nil {
			t.Fatal(err)
		}
		next, fits := want.with(filled(3+round, 5).change())
		if !fits {
			t.Fatal("the change is bad")
		}
		mustWrite(t, s, filled(3+round, 5).change())
		want = next
		holds(t, s, want)
	}
	mustClose(t, s)
	s = mustOpen(t, dir)
	holds(t, s, want)
}

// A damaged file cannot be moved into a directory that is full of nothing but bytes:
// a new name needs none.
func TestADamagedFileOnAFullDiskIsAnErrorOfTheDisk(t *testing.T) {
	dir := memory(t, 0, "64k")
	if err := os.WriteFile(filepath.Join(dir, fileName), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(dir, "hog"))
	if _, _, err := Open(dir, discard); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "hog")); err != nil {
		t.Fatal(err)
	}
	mustClose(t, mustOpen(t, dir))
	if _, err := os.Stat(filepath.Join(dir, fileName+newSuffix)); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func BenchmarkWriteOneTarget(b *testing.B) {
	for _, n := range []int{0, 100} {
		b.Run(fmt.Sprintf("records=%d", n*11), func(b *testing.B) {
			s, _, err := Open(b.TempDir(), discard)
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			if err := s.Write(filled(n, 10).change()); err != nil {
				b.Fatal(err)
			}
			x := target(9999, "stream-1", "one-more")
			for b.Loop() {
				x.Stage = x.Stage%3 + 1
				if err := s.Write(Change{Targets: []Target{x}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkWrite1100(b *testing.B) {
	s, _, err := Open(b.TempDir(), discard)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	c := filled(100, 10).change()
	for b.Loop() {
		if err := s.Write(c); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLoad1100(b *testing.B) {
	s, _, err := Open(b.TempDir(), discard)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	if err := s.Write(filled(100, 10).change()); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Load(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOpen1100(b *testing.B) {
	dir := b.TempDir()
	s, _, err := Open(dir, discard)
	if err != nil {
		b.Fatal(err)
	}
	if err := s.Write(filled(100, 10).change()); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		if s, _, err = Open(dir, discard); err != nil {
			b.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
}
