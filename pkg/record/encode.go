package record

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// A record is kept as
//
//	checksum  4 bytes, CRC-32C of the kind, the key and all that follows
//	version   1 byte
//	fields    numbers are varints, texts and lists have their length before them
//
// under the number of a target (4 bytes) or the name of a stream. All that is not a
// varint has its most significant byte first.
const (
	recordVersion = 1
	overhead      = 5 // checksum and version
)

// The kinds of records, each a bucket of its own.
const (
	targetKind  = "targets"
	streamKind  = "streams"
	summaryKind = "summary"
)

var (
	kinds = []string{streamKind, summaryKind, targetKind}

	errShort   = errors.New("it ends too early")
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// seal fills in checksum and version of a record whose fields begin at overhead.
func seal(kind string, key, record []byte) []byte {
	record[4] = recordVersion
	binary.BigEndian.PutUint32(record, checksum(kind, key, record[4:]))
	return record
}

func checksum(kind string, key, rest []byte) uint32 {
	c := crc32.Update(crc32.Checksum([]byte(kind), castagnoli), castagnoli, key)
	return crc32.Update(c, castagnoli, rest)
}

// open returns the fields of a record.
func open(kind string, key, record []byte) ([]byte, error) {
	if len(record) < overhead {
		return nil, errShort
	}
	if got, want := checksum(kind, key, record[4:]), binary.BigEndian.Uint32(record); got != want {
		return nil, fmt.Errorf("its checksum is %08x, that of its content %08x", want, got)
	}
	if v := record[4]; v != recordVersion {
		return nil, fmt.Errorf("it is of version %d, and this program knows version %d: a newer one wrote it", v, recordVersion)
	}
	return record[overhead:], nil
}

func targetKey(number uint32) []byte { return binary.BigEndian.AppendUint32(nil, number) }

func encodeTarget(t Target) []byte {
	b := make([]byte, overhead, 128)
	b = append(b, byte(t.Stage), flags(t.Flows))
	if t.DrainEnd.IsZero() {
		b = append(b, 0)
	} else {
		b = append(b, 1)
		b = binary.AppendVarint(b, t.DrainEnd.UnixNano())
	}
	b = appendText(b, t.Stream)
	b = appendText(b, t.Name)
	b = binary.AppendUvarint(b, uint64(len(t.IPs)))
	for _, a := range t.IPs {
		b = appendText(b, string(a.AsSlice()))
	}
	return seal(targetKind, targetKey(t.Number), b)
}

func decodeTarget(key, record []byte) (t Target, err error) {
	if len(key) != 4 {
		return t, fmt.Errorf("the number of a target is written in %d bytes", len(key))
	}
	fields, err := open(targetKind, key, record)
	if err != nil {
		return t, err
	}
	r := reader{left: fields}
	t.Number = binary.BigEndian.Uint32(key)
	t.Stage = Stage(r.byte())
	t.Flows = r.flags()
	if r.bool() {
		t.DrainEnd = time.Unix(0, r.varint())
	}
	t.Stream, t.Name = r.text(), r.text()
	for range r.length() {
		t.IPs = append(t.IPs, r.address())
	}
	if err := r.end(); err != nil {
		return t, err
	}
	return t, t.check()
}

func encodeStream(s Stream) []byte {
	b := make([]byte, overhead, 512)
	b = append(b, byte(s.Stage))
	b = binary.AppendUvarint(b, uint64(s.Size))
	b = binary.AppendUvarint(b, uint64(s.Seed))
	b = binary.AppendVarint(b, int64(s.DrainTime))
	b = binary.AppendUvarint(b, uint64(len(s.VIPs)))
	for _, v := range s.VIPs {
		b = appendText(b, string(v.Prefix().Addr().AsSlice()))
		b = append(b, byte(v.Prefix().Bits()))
	}
	for _, table := range s.Tables {
		if table == nil {
			b = append(b, 0)
			continue
		}
		b = append(b, 1)
		b = binary.AppendUvarint(b, uint64(len(table)))
		for _, name := range table {
			b = appendText(b, name)
		}
	}
	return seal(streamKind, []byte(s.Name), b)
}

func decodeStream(key, record []byte) (s Stream, err error) {
	fields, err := open(streamKind, key, record)
	if err != nil {
		return s, err
	}
	r := reader{left: fields}
	s.Name = string(key)
	s.Stage = Stage(r.byte())
	s.Size, s.Seed = r.uint32(), r.uint32()
	s.DrainTime = time.Duration(r.varint())
	for range r.length() {
		a, bits := r.address(), r.byte()
		v, err := vip.FromPrefix(netip.PrefixFrom(a, int(bits)))
		r.fail(err)
		s.VIPs = append(s.VIPs, v)
	}
	for f := range s.Tables {
		if !r.bool() {
			continue
		}
		n := r.length()
		s.Tables[f] = make([]string, 0, n)
		for range n {
			s.Tables[f] = append(s.Tables[f], r.text())
		}
	}
	if err := r.end(); err != nil {
		return s, err
	}
	return s, s.check()
}

// summary is of all records. With it a file in which a record is missing, twice or
// old is found out, although each of its records is whole.
type summary struct {
	targets, streams uint64
	sum              uint64 // of the checksums of all records, modulo 2^64
	// transaction is the one that wrote it, which is the last one.
	transaction uint64
}

var summaryKey = []byte("all")

func (s summary) encode() []byte {
	b := make([]byte, overhead, 32)
	for _, n := range []uint64{s.targets, s.streams, s.sum, s.transaction} {
		b = binary.AppendUvarint(b, n)
	}
	return seal(summaryKind, summaryKey, b)
}

func decodeSummary(key, record []byte) (s summary, err error) {
	fields, err := open(summaryKind, key, record)
	if err != nil {
		return s, err
	}
	r := reader{left: fields}
	s.targets, s.streams, s.sum, s.transaction = r.uvarint(), r.uvarint(), r.uvarint(), r.uvarint()
	return s, r.end()
}

// checksumOf is the checksum that a whole record begins with.
func checksumOf(record []byte) uint64 { return uint64(binary.BigEndian.Uint32(record)) }

func flags(on [len(vip.Families)]bool) (b byte) {
	for i, is := range on {
		if is {
			b |= 1 << i
		}
	}
	return b
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// reader reads fields one by one. Once something is wrong it returns zeros, and end
// tells what.
type reader struct {
	left []byte
	err  error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	if r.err != nil {
		r.left = nil
	}
}

// end tells what was wrong, if it is only that something is left.
func (r *reader) end() error {
	if r.err == nil && len(r.left) > 0 {
		return fmt.Errorf("%d bytes follow its end", len(r.left))
	}
	return r.err
}

func (r *reader) take(n uint64) []byte {
	if n > uint64(len(r.left)) {
		r.fail(errShort)
		return nil
	}
	b := r.left[:n]
	r.left = r.left[n:]
	return b
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) bool() bool {
	b := r.byte()
	if b > 1 {
		r.fail(fmt.Errorf("%d is neither yes nor no", b))
	}
	return b == 1
}

func (r *reader) flags() (on [len(vip.Families)]bool) {
	b := r.byte()
	for i := range on {
		on[i] = b&(1<<i) != 0
	}
	if b>>len(on) != 0 {
		r.fail(fmt.Errorf("%#x are no families", b))
	}
	return on
}

func (r *reader) uvarint() uint64 {
	n, size := binary.Uvarint(r.left)
	if size <= 0 {
		r.fail(errShort)
		return 0
	}
	r.left = r.left[size:]
	return n
}

func (r *reader) varint() int64 {
	n, size := binary.Varint(r.left)
	if size <= 0 {
		r.fail(errShort)
		return 0
	}
	r.left = r.left[size:]
	return n
}

func (r *reader) uint32() uint32 {
	n := r.uvarint()
	if n > math.MaxUint32 {
		r.fail(fmt.Errorf("%d has more than 32 bits", n))
		return 0
	}
	return uint32(n)
}

// length reads how many things follow. Each has at least a byte, so that a wrong
// number does not take more memory than the record.
func (r *reader) length() int {
	n := r.uvarint()
	if n > uint64(len(r.left)) {
		r.fail(errShort)
		return 0
	}
	return int(n)
}

func (r *reader) text() string { return string(r.take(r.uvarint())) }

func (r *reader) address() netip.Addr {
	a, ok := netip.AddrFromSlice(r.take(r.uvarint()))
	if !ok {
		r.fail(errors.New("an address has neither 4 nor 16 bytes"))
	}
	return a
}
