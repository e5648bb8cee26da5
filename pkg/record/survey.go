package record

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
)

// The format of a file of bbolt, version 2, as of bbolt 1.5. Numbers are in the order
// of the machine.
const (
	pageSize    = 4096
	pageHeader  = 16 // number (8 bytes), kind (2), count (2), overflow (4)
	elementSize = 16 // branch: offset (4), key (4), page (8). leaf: flags (4), offset (4), key (4), value (4)

	metaMagic   = 0xED0CDAED
	metaVersion = 2
	metaSize    = 56 // before its checksum

	branchPage   = 0x01
	leafPage     = 0x02
	freelistPage = 0x10

	bucketFlag   = 0x01 // of an element of a leaf
	bucketHeader = 16   // page (8), sequence (8); an inline page follows when that is 0

	firstPage = 2 // behind the two meta pages
	// maxFile is the largest file that is taken for one of ours: thousands of times
	// what 1000 targets need. It keeps the list of free pages shorter than 65535, above
	// which bbolt writes its length elsewhere.
	maxFile = 65534 * pageSize
)

// survey looks at a whole file, in memory, and tells a collector what it holds. It is there because bbolt trusts its file: of one that was changed it
// may allocate without end, recurse without end, or read beyond the end in a goroutine
// of its own, and each of that ends the process. Only a file that was surveyed is given
// to bbolt.
//
// It is stricter than bbolt's own check. That every page is in use once or free, and
// that keys are in their order, is in both. Beyond that a page's first key is the one
// that the page above has, and both meta pages must be whole: bbolt takes the
// older one when the newer one is not, and so loses a transaction; but a process that
// is killed does not tear a page.
type survey struct {
	data  []byte
	pages uint64 // the first page number that was never used
	seen  []bool // by page
	found *collector
}

// surveyFile checks a file and tells what it holds.
func surveyFile(data []byte, found *collector) error {
	if len(data) < firstPage*pageSize || len(data) > maxFile {
		return fmt.Errorf("it has %d bytes, not %d to %d", len(data), firstPage*pageSize, maxFile)
	}
	metas := [firstPage]meta{}
	for i := range metas {
		m, err := readMeta(data[i*pageSize:])
		if err != nil {
			return fmt.Errorf("meta page %d: %w", i, err)
		}
		if m.transaction%firstPage != uint64(i) {
			return fmt.Errorf("meta page %d is of transaction %d", i, m.transaction)
		}
		metas[i] = m
	}
	newest, other := metas[0], metas[1]
	if other.transaction > newest.transaction {
		newest, other = other, newest
	}
	if newest.transaction-other.transaction != 1 {
		return fmt.Errorf("its meta pages are of transactions %d and %d", newest.transaction, other.transaction)
	}
	if newest.pages > maxFile/pageSize || newest.pages < firstPage {
		return fmt.Errorf("it says to have %d pages", newest.pages)
	}
	s := &survey{data: data, pages: newest.pages, seen: make([]bool, newest.pages), found: found}
	s.seen[0], s.seen[1] = true, true
	free, err := s.freelist(newest.freelist)
	if err != nil {
		return fmt.Errorf("list of free pages: %w", err)
	}
	if err := s.tree(newest.root, nil, bounds{}); err != nil {
		return err
	}
	for id, used := range s.seen {
		if used == free[id] {
			return fmt.Errorf("page %d is in use: %t, and free: %t", id, used, free[id])
		}
	}
	_, err = found.end(newest.transaction)
	return err
}

// meta is a meta page.
type meta struct{ root, freelist, pages, transaction uint64 }

func readMeta(page []byte) (meta, error) {
	b := page[pageHeader:]
	h := fnv.New64a()
	_, _ = h.Write(b[:metaSize])
	switch {
	case u32(b) != metaMagic:
		return meta{}, errors.New("it is not of bbolt")
	case u32(b[4:]) != metaVersion:
		return meta{}, fmt.Errorf("it is of version %d of bbolt's format, not %d", u32(b[4:]), metaVersion)
	case u64(b[metaSize:]) != h.Sum64():
		return meta{}, errors.New("its checksum is another")
	case u32(b[8:]) != pageSize:
		return meta{}, fmt.Errorf("pages have %d bytes, not %d", u32(b[8:]), pageSize)
	}
	// Between the roots of the tree and of the list of free pages is a sequence number.
	return meta{root: u64(b[16:]), freelist: u64(b[32:]), pages: u64(b[40:]), transaction: u64(b[48:])}, nil
}

func u16(b []byte) uint16 { return binary.NativeEndian.Uint16(b) }
func u32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }
func u64(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }

// page returns a page with its overflow, and notes that it is in use.
func (s *survey) page(id uint64) ([]byte, error) {
	if id < firstPage || id >= s.pages || (id+1)*pageSize > uint64(len(s.data)) {
		return nil, fmt.Errorf("page %d is not in the file", id)
	}
	p := s.data[id*pageSize:]
	n := uint64(u32(p[12:])) + 1
	if u64(p) != id || id+n > s.pages || (id+n)*pageSize > uint64(len(s.data)) {
		return nil, fmt.Errorf("page %d says to be page %d and %d more", id, u64(p), n-1)
	}
	for i := id; i < id+n; i++ {
		if s.seen[i] {
			return nil, fmt.Errorf("page %d is in use twice", i)
		}
		s.seen[i] = true
	}
	return p[:n*pageSize], nil
}

// freelist reads which pages are free.
func (s *survey) freelist(id uint64) ([]bool, error) {
	p, err := s.page(id)
	if err != nil {
		return nil, err
	}
	n := int(u16(p[10:]))
	if kind := u16(p[8:]); kind != freelistPage || pageHeader+8*n > len(p) {
		return nil, fmt.Errorf("page %d is of kind %#x and lists %d", id, kind, n)
	}
	free := make([]bool, s.pages)
	for i := range n {
		f := u64(p[pageHeader+8*i:])
		if f < firstPage || f >= s.pages || free[f] {
			return nil, fmt.Errorf("page %d cannot be free, or twice", f)
		}
		free[f] = true
	}
	return free, nil
}

// bounds of keys: the first is from, all are less than to; nil for none. bbolt finds a
// page in the one above it by its first key, and would have it twice if that were
// another.
type bounds struct{ from, to []byte }

// fit tells whether key i of a page lies within the bounds.
func (b bounds) fit(i int, key []byte) bool {
	return (i > 0 || b.from == nil || bytes.Equal(b.from, key)) && (b.to == nil || bytes.Compare(key, b.to) < 0)
}

// tree reads a page and those below it. bucket is nil in the root, which holds the
// buckets. It ends since no page is read twice.
func (s *survey) tree(id uint64, bucket []byte, keys bounds) error {
	p, err := s.page(id)
	if err != nil {
		return err
	}
	switch kind := u16(p[8:]); kind {
	case leafPage:
		return s.leaf(p, bucket, keys)
	case branchPage:
		return s.branch(p, bucket, keys)
	default:
		return fmt.Errorf("page %d is of kind %#x", id, kind)
	}
}

// element returns part of a page: length bytes, offset bytes after element i begins.
func element(p []byte, i int, offset, length uint64) ([]byte, error) {
	begin := uint64(pageHeader+elementSize*i) + offset
	if offset < elementSize || begin+length > uint64(len(p)) {
		return nil, fmt.Errorf("element %d of page %d lies beyond its end", i, u64(p))
	}
	return p[begin : begin+length : begin+length], nil
}

// count is the number of elements of a page.
func count(p []byte) (int, error) {
	n := int(u16(p[10:]))
	if pageHeader+elementSize*n > len(p) {
		return 0, fmt.Errorf("page %d says to have %d elements", u64(p), n)
	}
	return n, nil
}

func (s *survey) branch(p, bucket []byte, keys bounds) error {
	n, err := count(p)
	if err != nil {
		return err
	}
	if n == 0 {
		return fmt.Errorf("page %d leads to no other", u64(p))
	}
	key := func(i int) ([]byte, error) {
		e := p[pageHeader+elementSize*i:]
		return element(p, i, uint64(u32(e)), uint64(u32(e[4:])))
	}
	from, err := key(0)
	for i := range n {
		if err != nil {
			return err
		}
		below := bounds{from: from, to: keys.to}
		if i+1 < n {
			if below.to, err = key(i + 1); err != nil {
				return err
			}
		}
		if !keys.fit(i, from) || !below.fit(0, from) {
			return fmt.Errorf("page %d is not in order", u64(p))
		}
		if err := s.tree(u64(p[pageHeader+elementSize*i+8:]), bucket, below); err != nil {
			return err
		}
		from = below.to
	}
	return nil
}

func (s *survey) leaf(p, bucket []byte, keys bounds) error {
	n, err := count(p)
	if err != nil {
		return err
	}
	if n == 0 && keys.from != nil {
		return fmt.Errorf("page %d is empty", u64(p))
	}
	var last []byte
	for i := range n {
		e := p[pageHeader+elementSize*i:]
		flags, offset, size := u32(e), uint64(u32(e[4:])), uint64(u32(e[8:]))
		both, err := element(p, i, offset, size+uint64(u32(e[12:])))
		if err != nil {
			return err
		}
		key, value := both[:size:size], both[size:]
		if !keys.fit(i, key) || i > 0 && bytes.Compare(last, key) >= 0 {
			return fmt.Errorf("page %d is not in order", u64(p))
		}
		last = key
		switch {
		case flags == bucketFlag && bucket == nil:
			err = s.bucket(key, value)
		case flags == 0 && bucket != nil:
			err = s.found.add(bucket, key, value)
		default:
			err = fmt.Errorf("element %d of page %d has the flags %#x", i, u64(p), flags)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// bucket reads a bucket, which has pages of its own or is small.
func (s *survey) bucket(name, value []byte) error {
	if len(value) < bucketHeader {
		return fmt.Errorf("bucket %q has no root", name)
	}
	if err := s.found.begin(name); err != nil {
		return err
	}
	if id := u64(value); id != 0 {
		return s.tree(id, name, bounds{})
	}
	p := value[bucketHeader:]
	// bbolt would free a page with a number.
	if len(p) < pageHeader || u64(p) != 0 || u16(p[8:]) != leafPage || u32(p[12:]) != 0 {
		return fmt.Errorf("bucket %q has a bad page", name)
	}
	return s.leaf(p, name, bounds{})
}
