package fastpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// errFull reports that a map of an instance has no room for a content.
var errFull = errors.New("a map of the fast path is full")

// capacity holds the sizes of the maps of an instance.
type capacity struct {
	records, entries, hops, ports uint32
	vips                          [len(vip.Families)]uint32
}

// entryStride is the distance of the elements of an array of 4 bytes each in its memory.
const entryStride = 8

// instance is a loaded program with its maps. Except for table entries and the size of a record,
// elements of arrays never change while a packet may read them: records, hops and ranges of tables
// are allocated in sequence and never reused. When a map is full, a new instance replaces the old.
type instance struct {
	bytecodeObjects
	// memory maps the Maglev tables: system calls take 0.3 µs for each of up to 65 537 entries.
	memory   *ebpf.Memory
	capacity capacity
	vipMaps  [len(vip.Families)]*ebpf.Map

	// The copies of the maps in the kernel, which only this process changes.
	records []record
	entries []uint32
	hops    []hop
	owners  []Target // by hop
	vips    [len(vip.Families)]map[netip.Addr]uint32
	ports   map[uint32][]plan.Port // by record

	recordOf map[recordKey]uint32
	hopOf    map[hopKey]uint32
}

// recordKey identifies a record. A stream with another size or seed gets another record.
type recordKey struct {
	stream     string
	family     vip.Family
	size, seed uint32
}

type hopKey struct {
	Target
	Hop
}

// capacityFor returns the sizes for a content, with room for changes.
func capacityFor(content Content) (need capacity) {
	for _, stream := range content.Streams {
		for _, family := range stream.Families() {
			need.records++
			need.entries += uint32(len(stream.Tables[family]))
			need.vips[family] += uint32(len(hostVIPs(stream.VIPs, family)))
			need.ports += uint32(len(stream.Match))
		}
	}
	need.hops = uint32(len(content.Hops)) + 1 // hop 0 is unused
	for _, size := range []*uint32{
		&need.records, &need.entries, &need.hops, &need.ports, &need.vips[vip.IPv4], &need.vips[vip.IPv6],
	} {
		// A quarter more, and a power of two, to which the kernel rounds arrays up.
		need := max(*size, 8)
		*size = 1 << bits.Len32(need+need/4)
	}
	return need
}

// load loads the program with empty maps.
func load(size capacity) (*instance, error) {
	spec, err := loadBytecode()
	if err != nil {
		return nil, err
	}
	for name, entries := range map[string]uint32{
		bytecodeMapRecords: size.records, bytecodeMapTables: size.entries, bytecodeMapPorts: size.ports,
		bytecodeMapHops: size.hops, bytecodeMapCounters: size.hops,
		bytecodeMapVips4: size.vips[vip.IPv4], bytecodeMapVips6: size.vips[vip.IPv6],
	} {
		spec.Maps[name].MaxEntries = entries
	}
	spec.Maps[bytecodeMapTables].Flags |= unix.BPF_F_MMAPABLE
	loaded := &instance{
		capacity: size, hops: make([]hop, 1), owners: make([]Target, 1), ports: map[uint32][]plan.Port{},
		vips:     [len(vip.Families)]map[netip.Addr]uint32{{}, {}},
		recordOf: map[recordKey]uint32{}, hopOf: map[hopKey]uint32{},
	}
	if err := spec.LoadAndAssign(&loaded.bytecodeObjects, nil); err != nil {
		return nil, err
	}
	loaded.vipMaps = [len(vip.Families)]*ebpf.Map{loaded.Vips4, loaded.Vips6}
	if loaded.memory, err = loaded.Tables.Memory(); err != nil {
		return nil, errors.Join(err, loaded.Close())
	}
	return loaded, nil
}

// suspend makes the packets of a stream continue to nftables.
func (loaded *instance) suspend(stream string) error {
	for key, index := range loaded.recordOf {
		if key.stream == stream && loaded.records[index].Size > 0 {
			if err := loaded.setSize(index, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// setSize changes the size of a record, which the program reads with one instruction.
func (loaded *instance) setSize(index, size uint32) error {
	loaded.records[index].Size = size
	return loaded.Records.Put(index, loaded.records[index])
}

// apply writes the difference to a content. It returns errFull if a map has no room.
func (loaded *instance) apply(content Content) error {
	vips := [len(vip.Families)]map[netip.Addr]uint32{{}, {}}
	active := map[uint32]uint32{} // sizes of the records of the content
	for _, stream := range content.Streams {
		for _, family := range stream.Families() {
			index, err := loaded.record(stream, family)
			if err != nil {
				return err
			}
			if err := loaded.setTable(index, stream, family, content.Hops); err != nil {
				return err
			}
			if err := loaded.setPorts(index, stream.Match); err != nil {
				return err
			}
			active[index] = uint32(len(stream.Tables[family]))
			for _, address := range hostVIPs(stream.VIPs, family) {
				vips[family][address] = index
			}
		}
	}
	// VIPs first: both streams of a moving VIP are suspended, and the old one must not resume with it.
	for _, family := range vip.Families {
		if err := loaded.setVIPs(family, vips[family]); err != nil {
			return err
		}
	}
	for index := range loaded.records {
		if size := active[uint32(index)]; loaded.records[index].Size != size {
			if err := loaded.setSize(uint32(index), size); err != nil {
				return err
			}
		}
	}
	return nil
}

// record returns the record of one family of a stream. A new one has size 0.
func (loaded *instance) record(stream Stream, family vip.Family) (uint32, error) {
	size := uint32(len(stream.Tables[family]))
	key := recordKey{stream.Name, family, size, stream.Seed}
	if index, known := loaded.recordOf[key]; known {
		return index, nil
	}
	index, offset := uint32(len(loaded.records)), uint32(len(loaded.entries))
	if index == loaded.capacity.records || size > loaded.capacity.entries-offset {
		return 0, errFull
	}
	loaded.records = append(loaded.records, record{Offset: offset, Seed: stream.Seed})
	loaded.entries = append(loaded.entries, make([]uint32, size)...)
	loaded.recordOf[key] = index
	return index, loaded.setSize(index, 0)
}

func (loaded *instance) setTable(index uint32, stream Stream, family vip.Family, hops map[Target]Hop) error {
	// Most neighboring entries differ, so remember each target instead of the last.
	indices := map[uint32]uint32{0: 0}
	offset := loaded.records[index].Offset
	var value [4]byte
	for i, fwmark := range stream.Tables[family] {
		entry, known := indices[fwmark]
		if !known {
			var err error
			if entry, err = loaded.hop(Target{fwmark, family}, hops); err != nil {
				return err
			}
			indices[fwmark] = entry
		}
		if entry != 0 && stream.Asks != nil && stream.Asks(family, uint32(i)) {
			entry |= asks
		}
		if at := offset + uint32(i); loaded.entries[at] != entry {
			loaded.entries[at] = entry
			// A copy of 4 bytes is one store, and packets read the old or the new entry.
			binary.LittleEndian.PutUint32(value[:], entry)
			if _, err := loaded.memory.WriteAt(value[:], int64(at)*entryStride); err != nil {
				return fmt.Errorf("write map %s: %w", loaded.Tables, err)
			}
		}
	}
	return nil
}

// hop returns the index of a target's hop; 0 without one.
func (loaded *instance) hop(target Target, hops map[Target]Hop) (uint32, error) {
	next, ok := hops[target]
	if !ok {
		return 0, nil
	}
	key := hopKey{target, next}
	if index, known := loaded.hopOf[key]; known {
		return index, nil
	}
	index := uint32(len(loaded.hops))
	if index == loaded.capacity.hops {
		return 0, errFull
	}
	loaded.hops, loaded.owners = append(loaded.hops, next.layout()), append(loaded.owners, target)
	loaded.hopOf[key] = index
	return index, loaded.Hops.Put(index, loaded.hops[index])
}

func (loaded *instance) setPorts(index uint32, want []plan.Port) error {
	have := loaded.ports[index]
	if plan.SameMatch(have, want) {
		return nil
	}
	total := len(want) - len(have)
	for _, ports := range loaded.ports {
		total += len(ports)
	}
	if total > int(loaded.capacity.ports) {
		return errFull
	}
	if gone := portKeys(index, plan.MissingPorts(want, have)); len(gone) > 0 {
		if _, err := loaded.Ports.BatchDelete(gone, nil); err != nil {
			return err
		}
	}
	if added := portKeys(index, plan.MissingPorts(have, want)); len(added) > 0 {
		if _, err := loaded.Ports.BatchUpdate(added, make([]uint8, len(added)), nil); err != nil {
			return err
		}
	}
	loaded.ports[index] = want
	loaded.records[index].Match = 0
	if want != nil {
		loaded.records[index].Match = 1
	}
	return loaded.Records.Put(index, loaded.records[index])
}

func (loaded *instance) setVIPs(family vip.Family, want map[netip.Addr]uint32) error {
	have := loaded.vips[family]
	if len(want) > int(loaded.capacity.vips[family]) {
		return errFull
	}
	if maps.Equal(have, want) {
		return nil
	}
	var gone, changed []netip.Addr
	var indices []uint32
	for address := range have {
		if _, stays := want[address]; !stays {
			gone = append(gone, address)
		}
	}
	for address, index := range want {
		if old, known := have[address]; !known || old != index {
			changed, indices = append(changed, address), append(indices, index)
		}
	}
	loaded.vips[family] = want
	if len(gone) > 0 {
		if _, err := loaded.vipMaps[family].BatchDelete(addressKeys(family, gone), nil); err != nil {
			return fmt.Errorf("remove VIPs: %w", err)
		}
	}
	if len(changed) > 0 {
		if _, err := loaded.vipMaps[family].BatchUpdate(addressKeys(family, changed), indices, nil); err != nil {
			return fmt.Errorf("add VIPs: %w", err)
		}
	}
	return nil
}

func addressKeys(family vip.Family, addresses []netip.Addr) any {
	if family == vip.IPv4 {
		keys := make([][4]byte, len(addresses))
		for i, address := range addresses {
			keys[i] = address.As4()
		}
		return keys
	}
	keys := make([][16]byte, len(addresses))
	for i, address := range addresses {
		keys[i] = address.As16()
	}
	return keys
}

// counters adds the packets of each target to total.
func (loaded *instance) counters(total map[uint32]Counter) error {
	for index, owner := range loaded.owners {
		if index == 0 {
			continue
		}
		var perCPU []Counter
		if err := loaded.Counters.Lookup(uint32(index), &perCPU); err != nil {
			return err
		}
		sum := total[owner.FWMark]
		for _, counter := range perCPU {
			sum.Packets, sum.Bytes = sum.Packets+counter.Packets, sum.Bytes+counter.Bytes
		}
		total[owner.FWMark] = sum
	}
	return nil
}

// verify returns an error if another process changed a map.
func (loaded *instance) verify() error {
	return errors.Join(
		verifyArray(loaded.Records, loaded.records), verifyArray(loaded.Hops, loaded.hops), loaded.verifyTables(),
		verifyVIPs(loaded.Vips4, loaded.vips[vip.IPv4]), verifyVIPs(loaded.Vips6, loaded.vips[vip.IPv6]),
		loaded.verifyPorts(),
	)
}

// foreign is the error of a map that another process changed.
func foreign(changed *ebpf.Map) error { return fmt.Errorf("another process changed map %s", changed) }

func (loaded *instance) verifyTables() error {
	memory := make([]byte, entryStride*len(loaded.entries))
	if _, err := loaded.memory.ReadAt(memory, 0); err != nil {
		return fmt.Errorf("read map %s: %w", loaded.Tables, err)
	}
	for at, want := range loaded.entries {
		if binary.LittleEndian.Uint32(memory[at*entryStride:]) != want {
			return foreign(loaded.Tables)
		}
	}
	return nil
}

func (loaded *instance) verifyPorts() error {
	want := map[port]bool{}
	for index, ports := range loaded.ports {
		for _, key := range portKeys(index, ports) {
			want[key] = true
		}
	}
	found := 0
	var key port
	var value uint8
	entries := loaded.Ports.Iterate()
	for ; entries.Next(&key, &value); found++ {
		if !want[key] {
			return foreign(loaded.Ports)
		}
	}
	if found != len(want) || entries.Err() != nil {
		return errors.Join(foreign(loaded.Ports), entries.Err())
	}
	return nil
}

// verifyArray compares the first elements of an array with a copy.
func verifyArray[V comparable](array *ebpf.Map, want []V) error {
	if len(want) == 0 {
		return nil
	}
	var cursor ebpf.MapBatchCursor
	keys, values := make([]uint32, len(want)), make([]V, len(want))
	count, err := array.BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read map %s: %w", array, err)
	}
	if count != len(want) || !slices.Equal(values, want) {
		return foreign(array)
	}
	return nil
}

func verifyVIPs(hash *ebpf.Map, want map[netip.Addr]uint32) error {
	found := 0
	var key []byte
	var index uint32
	for entries := hash.Iterate(); entries.Next(&key, &index); found++ {
		address, _ := netip.AddrFromSlice(key)
		if record, known := want[address]; !known || record != index {
			return foreign(hash)
		}
	}
	if found != len(want) {
		return foreign(hash)
	}
	return nil
}
