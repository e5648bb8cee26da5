package record

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"
)

// grown is a file as it is after some life: with branch pages, free pages and pages
// of more than one.
func grown(t failer, dir string) ([]byte, Records) {
	t.Helper()
	s := mustOpen(t, dir)
	want := filled(20, 10)
	big := stream("big", 1009)
	for i := range 1500 {
		big.Tables[0] = append(big.Tables[0], fmt.Sprintf("target-%05d", i))
	}
	want.Streams[big.Name] = big
	mustWrite(t, s, filled(30, 10).change())
	var gone Change
	for n := range filled(30, 10).Targets {
		if _, stays := want.Targets[n]; !stays {
			gone.RemoveTargets = append(gone.RemoveTargets, n)
		}
	}
	for name := range filled(30, 10).Streams {
		if _, stays := want.Streams[name]; !stays {
			gone.RemoveStreams = append(gone.RemoveStreams, name)
		}
	}
	mustWrite(t, s, gone)
	mustWrite(t, s, want.change())
	holds(t, s, want)
	mustClose(t, s)
	data, err := os.ReadFile(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	return data, want
}

// opens opens a file with this content in dir. What it holds is what was written, or it
// is damaged and moved aside whole, and the store in its place works.
func opens(t failer, dir string, content []byte, want Records) (damaged error) {
	t.Helper()
	path := filepath.Join(dir, fileName)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	s, damage, err := Open(dir, discard)
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, s)
	if damage != nil {
		want = Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}}
		if moved, err := os.ReadFile(damage.Path); err != nil || string(moved) != string(content) {
			t.Fatalf("%s has %d bytes of %d: %v", damage.Path, len(moved), len(content), err)
		}
		if !strings.Contains(damage.Err.Error(), path) {
			t.Fatal(damage.Err)
		}
		damaged = damage.Err
	}
	holds(t, s, want)
	if damaged == nil {
		// Nor does a change of it lose anything.
		c := filled(2, 30).change()
		next, _ := want.with(c)
		mustWrite(t, s, c)
		holds(t, s, next)
	}
	return damaged
}

func TestATruncatedFileIsDamaged(t *testing.T) {
	data, want := grown(t, t.TempDir())
	dir := t.TempDir()
	whole := 0
	for _, off := range []int{-1, 0, 1} {
		for size := off; size <= len(data); size += pageSize {
			if size < 0 || size > len(data) {
				continue
			}
			if opens(t, dir, data[:size], want) == nil {
				whole++
			}
		}
	}
	if whole == 0 {
		t.Error("not even the whole file was taken")
	}
	t.Logf("%d pages, %d lengths were enough", len(data)/pageSize, whole)
}

// Every byte that means something is changed, one at a time and some together.
func TestAChangedFileIsDamagedOrAsItWas(t *testing.T) {
	data, want := grown(t, t.TempDir())
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(3, 4))
	damaged, fine := 0, 0
	try := func(content []byte) {
		if opens(t, dir, content, want) != nil {
			damaged++
		} else {
			fine++
		}
	}
	// The heads of all pages and of their elements, and bytes of all kinds.
	for page := range len(data) / pageSize {
		for at := page % 3; at < 48; at += 3 {
			content := slices.Clone(data)
			content[page*pageSize+at] ^= byte(1 << random.IntN(8))
			try(content)
		}
	}
	for range 300 {
		content := slices.Clone(data)
		for range 1 + random.IntN(3) {
			content[random.IntN(len(content))] = byte(random.Uint32())
		}
		try(content)
	}
	// Pages that change places, and pages of zeros.
	for range 100 {
		content := slices.Clone(data)
		a, b := random.IntN(len(data)/pageSize), random.IntN(len(data)/pageSize)
		switch random.IntN(3) {
		case 0:
			copy(content[a*pageSize:][:pageSize], data[b*pageSize:])
		case 1:
			copy(content[a*pageSize:][:pageSize], make([]byte, pageSize))
		default:
			copy(content[a*pageSize:][:pageSize], data[b*pageSize:])
			copy(content[b*pageSize:][:pageSize], data[a*pageSize:])
		}
		try(content)
	}
	t.Logf("%d were damaged, %d as they were", damaged, fine)
	if damaged == 0 || fine == 0 {
		t.Error("one of both never happened")
	}
}

// A page of an older transaction in the place of a newer one is whole in itself. Only
// when it is the meta page, which is written last, there is nothing wrong: that is a
// process that was killed before it wrote it.
func TestAPageThatWasNotWrittenIsFoundOut(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, fileName)
	s := mustOpen(t, dir)
	x := target(1, "s", "a")
	var files [][]byte
	var want, before Records
	for i := range 12 {
		x.Stage = Stage(1 + i%3)
		before, want = want, Records{Targets: map[uint32]Target{1: x}, Streams: map[string]Stream{}}
		mustWrite(t, s, Change{Targets: []Target{x}})
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, data)
	}
	mustClose(t, s)
	newest := files[len(files)-1]
	found := 0
	for i, old := range files[:len(files)-1] {
		for page := range len(newest) / pageSize {
			content, want := slices.Clone(newest), want
			if page < firstPage && i >= len(files)-3 { // a meta page is written every other time
				want = before
			}
			if len(old) < (page+1)*pageSize || string(old[page*pageSize:][:pageSize]) == string(newest[page*pageSize:][:pageSize]) {
				continue
			}
			copy(content[page*pageSize:], old[page*pageSize:][:pageSize])
			if opens(t, dir, content, want) != nil {
				found++
			}
		}
	}
	if found == 0 {
		t.Error("none was found")
	}
}

// spoiled is a small file that was changed with care: what was changed has a right
// checksum.
func TestAFileOfOddContentIsDamaged(t *testing.T) {
	const summaryOnly = "summary"
	for name, tt := range map[string]struct {
		spoil func(tx *bbolt.Tx) error
		want  string
	}{
		"a newer record": {func(tx *bbolt.Tx) error {
			b := encodeTarget(target(1, "s", "a"))
			b[4]++
			binary.BigEndian.PutUint32(b, checksum(targetKind, targetKey(1), b[4:]))
			return tx.Bucket([]byte(targetKind)).Put(targetKey(1), b)
		}, "version 2"},
		"a newer summary": {func(tx *bbolt.Tx) error {
			b := summary{}.encode()
			b[4]++
			binary.BigEndian.PutUint32(b, checksum(summaryKind, summaryKey, b[4:]))
			return tx.Bucket([]byte(summaryKind)).Put(summaryKey, b)
		}, "version 2"},
		"another bucket": {func(tx *bbolt.Tx) error {
			_, err := tx.CreateBucket([]byte("zones"))
			return err
		}, `bucket "zones"`},
		"a bucket in a bucket": {func(tx *bbolt.Tx) error {
			_, err := tx.Bucket([]byte(targetKind)).CreateBucket([]byte("x"))
			return err
		}, "flags"},
		"a bucket too few": {func(tx *bbolt.Tx) error { return tx.DeleteBucket([]byte(streamKind)) }, "buckets"},
		"no summary":       {func(tx *bbolt.Tx) error { return tx.Bucket([]byte(summaryKind)).Delete(summaryKey) }, summaryOnly},
		"another's summary": {func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte(summaryKind)).Put(summaryKey, summary{targets: 7}.encode())
		}, "its summary says 7"},
		"a record too many": {func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte(targetKind)).Put(targetKey(9), encodeTarget(target(9, "s", "z")))
		}, "2 targets"},
		"a record too few": {func(tx *bbolt.Tx) error { return tx.Bucket([]byte(targetKind)).Delete(targetKey(1)) }, "0 targets"},
		"a name twice": {func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte(targetKind)).Put(targetKey(9), encodeTarget(target(9, "s", "a")))
		}, "the number 1 as well"},
		"a record of another number": {func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte(targetKind)).Put(targetKey(1), encodeTarget(target(9, "s", "a")))
		}, "checksum"},
		"a number of 3 bytes": {func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte(targetKind)).Put([]byte{0, 0, 1}, encodeTarget(target(1, "s", "a")))
		}, "3 bytes"},
		"a number of 0": {func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte(targetKind)).Put(targetKey(0), encodeTarget(target(0, "s", "b")))
		}, "number is 0"},
		"a table of no size": {func(tx *bbolt.Tx) error {
			x := stream("s", 0)
			return tx.Bucket([]byte(streamKind)).Put([]byte("s"), encodeStream(x))
		}, "0 entries"},
		"a record of nothing": {func(tx *bbolt.Tx) error { return tx.Bucket([]byte(streamKind)).Put([]byte("s"), nil) }, "ends too early"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := mustOpen(t, dir)
			mustWrite(t, s, Change{Targets: []Target{target(1, "s", "a")}})
			if err := s.db.Update(tt.spoil); err != nil {
				t.Fatal(err)
			}
			mustClose(t, s)
			s, damage, err := Open(dir, discard)
			if err != nil {
				t.Fatal(err)
			}
			defer mustClose(t, s)
			if damage == nil || !strings.Contains(damage.Err.Error(), tt.want) {
				t.Fatalf("%+v, want %q", damage, tt.want)
			}
		})
	}
}

// What makes bbolt allocate or recurse without end is found before bbolt reads it.
func TestAFileThatWouldEndTheProcessIsDamaged(t *testing.T) {
	data, want := grown(t, t.TempDir())
	newest := data
	if u64(data[pageSize+pageHeader+48:]) > u64(data[pageHeader+48:]) {
		newest = data[pageSize:]
	}
	m, err := readMeta(newest)
	if err != nil {
		t.Fatal(err)
	}
	root := func(content []byte) []byte { return content[m.root*pageSize:] }
	// branch is the first branch page.
	branch := 0
	for page := firstPage; page < len(data)/pageSize; page++ {
		if p := data[page*pageSize:]; u16(p[8:]) == branchPage && u64(p) == uint64(page) {
			branch = page
		}
	}
	if branch == 0 {
		t.Fatal("the file has no branch page")
	}
	seal := func(content []byte) { // both meta pages have their checksums again
		for _, p := range [][]byte{content, content[pageSize:]} {
			h := fnv.New64a()
			_, _ = h.Write(p[pageHeader:][:metaSize])
			binary.NativeEndian.PutUint64(p[pageHeader+metaSize:], h.Sum64())
		}
	}
	for name, spoil := range map[string]func(content []byte){
		"a list of free pages without end": func(c []byte) {
			p := c[m.freelist*pageSize:]
			binary.NativeEndian.PutUint16(p[10:], math.MaxUint16)
			binary.NativeEndian.PutUint64(p[16:], 1<<40)
		},
		"a page in use that is free": func(c []byte) {
			p := c[m.freelist*pageSize:]
			binary.NativeEndian.PutUint64(p[16:], m.root)
		},
		"a branch that leads to itself": func(c []byte) { binary.NativeEndian.PutUint64(c[branch*pageSize+24:], uint64(branch)) },
		"a branch of a key that is no page's": func(c []byte) {
			binary.NativeEndian.PutUint32(c[branch*pageSize+20:], 1)
		},
		"a branch beyond the file": func(c []byte) { binary.NativeEndian.PutUint64(c[branch*pageSize+24:], 1<<50) },
		"a bucket that is its root": func(c []byte) {
			binary.NativeEndian.PutUint64(root(c)[16+u32(root(c)[20:])+u32(root(c)[24:]):], m.root)
		},
		"elements without end":    func(c []byte) { binary.NativeEndian.PutUint16(root(c)[10:], math.MaxUint16) },
		"a key without end":       func(c []byte) { binary.NativeEndian.PutUint32(root(c)[24:], math.MaxUint32) },
		"a value without end":     func(c []byte) { binary.NativeEndian.PutUint32(root(c)[28:], math.MaxUint32) },
		"an overflow without end": func(c []byte) { binary.NativeEndian.PutUint32(root(c)[12:], math.MaxUint32) },
		"pages without end": func(c []byte) {
			for _, p := range [][]byte{c, c[pageSize:]} {
				binary.NativeEndian.PutUint64(p[pageHeader+40:], 1<<60)
			}
			seal(c)
		},
		"a root beyond the file": func(c []byte) {
			for _, p := range [][]byte{c, c[pageSize:]} {
				binary.NativeEndian.PutUint64(p[pageHeader+16:], 1<<40)
			}
			seal(c)
		},
		"no list of free pages": func(c []byte) {
			for _, p := range [][]byte{c, c[pageSize:]} {
				binary.NativeEndian.PutUint64(p[pageHeader+32:], math.MaxUint64)
			}
			seal(c)
		},
		"pages of 1 GiB": func(c []byte) {
			for _, p := range [][]byte{c, c[pageSize:]} {
				binary.NativeEndian.PutUint32(p[pageHeader+8:], 1<<30)
			}
			seal(c)
		},
		"one transaction twice": func(c []byte) {
			copy(c[pageHeader:][:metaSize+8], c[pageSize+pageHeader:])
		},
		"transactions far apart": func(c []byte) {
			binary.NativeEndian.PutUint64(c[pageHeader+48:], 1000)
			seal(c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			content := slices.Clone(data)
			spoil(content)
			if err := opens(t, t.TempDir(), content, want); err == nil {
				t.Error("nothing was found")
			} else {
				t.Log(err)
			}
		})
	}
}

func TestTheLastThreeDamagedFilesAreKept(t *testing.T) {
	dir := t.TempDir()
	var moved []string
	for range 5 {
		if err := os.WriteFile(filepath.Join(dir, fileName), []byte("nonsense"), 0o600); err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		s, damage, err := Open(dir, discard)
		if err != nil || damage == nil {
			t.Fatal(damage, err)
		}
		mustClose(t, s)
		moved = append(moved, damage.Path)
		at, err := time.Parse("20060102T150405.000000Z", strings.TrimPrefix(filepath.Base(damage.Path), fileName+damagedSuffix))
		if err != nil || at.Before(before.Add(-time.Second)) || at.After(time.Now()) {
			t.Fatal(at, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"+damagedSuffix+"*"))
	if err != nil || !slices.Equal(left, moved[2:]) {
		t.Fatalf("%v, want %v; %v", left, moved[2:], err)
	}
}

// Somebody truncates the file of a process that runs: pages that were mapped are gone.
func TestAFileThatIsTruncatedWhileItIsOpenIsAnError(t *testing.T) {
	for name, use := range map[string]func(s *Store) error{
		"load":  func(s *Store) error { _, err := s.Load(); return err },
		"write": func(s *Store) error { return s.Write(filled(1, 20).change()) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := mustOpen(t, dir)
			mustWrite(t, s, filled(20, 10).change())
			if err := os.Truncate(filepath.Join(dir, fileName), 0); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				if err := use(s); !errors.Is(err, errFault) || !strings.Contains(err.Error(), "start the program again") {
					t.Fatal(err)
				}
			}
			if _, err := s.Load(); !errors.Is(err, errFault) {
				t.Error(err)
			}
			mustClose(t, s)
			s, damage, err := Open(dir, discard)
			if err != nil || damage == nil {
				t.Fatal(damage, err)
			}
			mustClose(t, s)
		})
	}
}

// A process that was killed while it made its first file leaves one with another name.
func TestAFileThatWasBeingMadeIsNoDamage(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, fileName+newSuffix), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	mustClose(t, mustOpen(t, dir))
	if _, err := os.Stat(filepath.Join(dir, fileName+newSuffix)); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
