package record

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// FuzzDecodeRecord: whatever has the right checksum is refused, or is a record that can
// be used and is written as it was read.
func FuzzDecodeRecord(f *testing.F) {
	x := target(5000, "s", "a")
	f.Add(true, targetKey(5000), encodeTarget(x)[overhead:])
	x.DrainEnd, x.IPs, x.Flows = time.Unix(1_800_000_000, 5), x.IPs[1:], [2]bool{false, true}
	f.Add(true, targetKey(1), encodeTarget(x)[overhead:])
	f.Add(true, []byte{1}, []byte{1, 3, 1})
	f.Add(false, []byte("s"), encodeStream(stream("s", 1009, "a", "b", "c"))[overhead:])
	f.Add(false, []byte("s"), encodeStream(Stream{Name: "s", Size: 2, Seed: 1, Stage: Pending, Tables: [2][]string{{}, nil}})[overhead:])
	f.Add(false, []byte("s"), binary.AppendUvarint([]byte{1, 7, 1, 0}, 1<<60))
	f.Fuzz(func(t *testing.T, isTarget bool, key, fields []byte) {
		b := append(make([]byte, overhead), fields...)
		var again []byte
		if isTarget {
			got, err := decodeTarget(key, seal(targetKind, key, b))
			if err != nil {
				return
			}
			again = encodeTarget(got)
			once, err := decodeTarget(key, again)
			if err != nil || got.check() != nil || got.Number != binary.BigEndian.Uint32(key) {
				t.Fatalf("%+v, %+v: %v", got, once, err)
			}
			if diff := differ(Records{Targets: map[uint32]Target{1: got}}, Records{Targets: map[uint32]Target{1: once}}); diff != "" {
				t.Fatal(diff)
			}
		} else {
			got, err := decodeStream(key, seal(streamKind, key, b))
			if err != nil {
				return
			}
			again = encodeStream(got)
			once, err := decodeStream(key, again)
			if err != nil || got.check() != nil || got.Name != string(key) {
				t.Fatalf("%+v, %+v: %v", got, once, err)
			}
			if diff := differ(Records{Streams: map[string]Stream{"": got}}, Records{Streams: map[string]Stream{"": once}}); diff != "" {
				t.Fatal(diff)
			}
		}
		// A varint may be written in more bytes than it needs, no other thing.
		if len(again) > len(b) {
			t.Fatalf("%d bytes were read, %d are written", len(b), len(again))
		}
	})
}

// FuzzDecodeFile: a file that was changed, and whose meta pages have their checksums
// all the same, is refused, or bbolt reads it and finds the same. The fuzzer chooses
// what to change, in 5 bytes each: where, and which bits.
func FuzzDecodeFile(f *testing.F) {
	large, _ := grown(f, f.TempDir())
	files := [][]byte{large}
	for _, n := range []int{0, 1, 3} {
		dir := f.TempDir()
		s := mustOpen(f, dir)
		mustWrite(f, s, filled(n, 12).change())
		mustWrite(f, s, Change{RemoveTargets: []uint32{5000, 5003}})
		mustClose(f, s)
		data, err := os.ReadFile(filepath.Join(dir, fileName))
		if err != nil {
			f.Fatal(err)
		}
		files = append(files, data)
	}
	for i, data := range files {
		for page := range uint32(len(data) / pageSize) {
			edit := func(at uint32, bits byte) []byte {
				return append(binary.BigEndian.AppendUint32(nil, page*pageSize+at), bits)
			}
			f.Add(uint8(i), edit(10, 1))
			f.Add(uint8(i), append(edit(8, 3), edit(20, 0x11)...))
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, edits []byte) {
		data := bytes.Clone(files[int(which)%len(files)])
		for ; len(edits) >= 5; edits = edits[5:] {
			data[binary.BigEndian.Uint32(edits)%uint32(len(data))] ^= edits[4]
		}
		for page := range firstPage {
			p := data[page*pageSize+pageHeader:]
			h := fnv.New64a()
			_, _ = h.Write(p[:metaSize])
			binary.NativeEndian.PutUint64(p[metaSize:], h.Sum64())
		}
		c := newCollector()
		if err := surveyFile(data, c); err != nil {
			return
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, fileName), data, 0o600); err != nil {
			t.Fatal(err)
		}
		s := mustOpen(t, dir)
		holds(t, s, c.Records)
		change := filled(2, 9).change()
		next, fits := c.with(change)
		if err := s.Write(change); (err == nil) != fits {
			t.Fatalf("%v, but the change is good: %t", err, fits)
		}
		if fits {
			holds(t, s, next)
		}
		mustClose(t, s)
	})
}
