package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/record"
	"github.com/vipgate/vipgate/pkg/vip"
)

// kernelSide is the kernel as the engine sees it: a fabric, or a model of one in
// tests.
type kernelSide interface {
	generation() (uint32, error)
	read(numbers []uint32) (*content, error)
	readBase() (bool, error)
	readStream(name string) (*streamContent, error)
	readSlots(numbers []uint32) (map[uint32]*slotContent, error)
	readVIPs() (map[vip.VIP]string, error)
	readWays(numbers []uint32) (map[uint32]*slotContent, error)
	write(c change) error
	addWays(slots []slotContent) map[uint32]error
	way(number uint32, family vip.Family) (netip.Addr, error)
	removeWays(numbers []uint32) error
	takenAmong(numbers []uint32) (map[uint32]string, error)
	forget(numbers []uint32) error
	owned() ([]uint32, error)
	removeAll() error
	surroundings() (*surroundings, error)
	close() error
}

// ledger is where records are kept: a record.Store, or a model of one in tests.
type ledger interface {
	Load() (record.Records, error)
	Write(c record.Change) error
	Close() error
}

// manyStreams is from how many streams on one look at everything is cheaper than a
// look at each.
const manyStreams = 8

// errRecords stands before every failure of the records.
var errRecords = errors.New("records cannot be written")

// streamMemory is what the engine knows of one stream.
type streamMemory struct {
	// wanted is what the last plan was made for.
	wanted *Stream
	// targets are those of the records, by name.
	targets map[string]record.Target
	asked   map[string]asked
	// dirty: the next pass plans for it. stale: what is known of its drift and state
	// is older than what is known of records and kernel.
	dirty, stale bool
	tables       [len(vip.Families)]tableCache
	fault        streamFault
	drift        []Drift
	state        *StreamState
	problems     []Problem
	failure      error
}

// engine brings the kernel from what is written down to what is wanted. It belongs
// to one goroutine.
type engine struct {
	o      Options
	log    *slog.Logger
	kernel kernelSide
	store  ledger
	now    func() time.Time

	records record.Records
	streams map[string]*streamMemory
	numbers numbering
	// refused are numbers that somebody else uses, with who.
	refused map[uint32]string

	// actual is what was last seen in the kernel; the ruleset's generation was
	// generation then, and we did own transactions since.
	actual     *content
	generation uint32
	own        uint32
	around     *surroundings
	// via are the links that last led to targets, and lost the targets whose routes
	// the kernel removed with a link.
	via  map[uint32][len(vip.Families)]int
	lost map[uint32]bool
	need need

	wanted *Wanted
	share  share
	owner  map[vip.VIP]string
	since  map[driftKey]time.Time
	// storeErr and lookErr keep everything as it is.
	storeErr, lookErr error
	// lookTime is how long the last look took.
	lookTime time.Duration
	// probed are numbers with who else uses them, as asked in this pass for the
	// newcomers, all at once.
	probed    map[uint32]string
	newcomers int
}

// need says what has to be looked at before anything else.
type need struct {
	// all is what is in nftables, ways are rules and routes, around are links,
	// addresses and neighbours.
	all, ways, around bool
	// downed are links that were down in between.
	downed []int
}

func newEngine(o Options, k kernelSide, s ledger) *engine {
	return &engine{
		o: o, log: o.Log, kernel: k, store: s, now: time.Now,
		streams: map[string]*streamMemory{}, refused: map[uint32]string{},
		via: map[uint32][len(vip.Families)]int{}, lost: map[uint32]bool{}, since: map[driftKey]time.Time{},
		need: need{all: true, ways: true, around: true},
	}
}

// load reads the records.
func (e *engine) load() error {
	r, err := e.store.Load()
	if err != nil {
		return fmt.Errorf("read the records: %w", err)
	}
	e.records = record.Records{Targets: map[uint32]record.Target{}, Streams: map[string]record.Stream{}}
	now := e.now()
	for _, s := range r.Streams {
		e.keepStream(s)
	}
	top := e.o.First
	for _, t := range r.Targets {
		if !t.DrainEnd.IsZero() {
			// The wall clock may have jumped: no drain gets longer by that.
			t.DrainEnd = now.Add(min(t.DrainEnd.Sub(now), r.Streams[t.Stream].DrainTime))
		}
		e.keepTarget(t)
		top = max(top, t.Number+1)
	}
	e.numbers = numbering{first: e.o.First, mask: e.o.Mask, next: top}
	for name, m := range e.streams {
		var s *record.Stream
		if r, ok := e.records.Streams[name]; ok {
			s = &r
		}
		for _, t := range m.targets {
			m.asked[t.Name] = recall(t, s)
		}
	}
	return nil
}

func (e *engine) memory(stream string) *streamMemory {
	m := e.streams[stream]
	if m == nil {
		m = &streamMemory{targets: map[string]record.Target{}, asked: map[string]asked{}, dirty: true, stale: true}
		e.streams[stream] = m
	}
	return m
}

func (e *engine) keepTarget(t record.Target) {
	e.records.Targets[t.Number] = t
	m := e.memory(t.Stream)
	m.targets[t.Name], m.stale = t, true
}

func (e *engine) keepStream(s record.Stream) {
	e.records.Streams[s.Name] = s
	e.memory(s.Name).stale = true
}

// write writes to the records, and remembers them.
func (e *engine) write(c record.Change) error {
	if len(c.Targets)+len(c.Streams)+len(c.RemoveTargets)+len(c.RemoveStreams) == 0 {
		return nil
	}
	if err := e.store.Write(c); err != nil {
		return fmt.Errorf("%w (%w): the data plane stays as it is", errRecords, err)
	}
	for _, number := range c.RemoveTargets {
		t := e.records.Targets[number]
		delete(e.records.Targets, number)
		delete(e.lost, number)
		delete(e.via, number)
		m := e.memory(t.Stream)
		if m.targets[t.Name].Number == number {
			delete(m.targets, t.Name)
		}
		m.stale = true
	}
	for _, name := range c.RemoveStreams {
		delete(e.records.Streams, name)
		e.memory(name).stale = true
	}
	for _, t := range c.Targets {
		e.keepTarget(t)
	}
	for _, s := range c.Streams {
		e.keepStream(s)
	}
	return nil
}

// pass makes the kernel be as wanted, as far as it can. mend also puts back what
// somebody else changed. Before the first Wanted, w is nil, it only looks.
func (e *engine) pass(w *Wanted, mend bool) {
	began := time.Now()
	e.lookErr = e.look()
	e.lookTime = time.Since(began)
	if e.lookErr != nil {
		if w != nil {
			e.wanted = w
		}
		return
	}
	e.compare()
	e.wanted = w
	if w == nil {
		return
	}
	e.reshare()
	now := e.now()
	for name, s := range w.Streams {
		m := e.memory(name)
		m.dirty = m.dirty || m.wanted != s || m.failure != nil
	}
	for name, m := range e.streams {
		m.dirty = m.dirty || w.Streams[name] == nil || mend && (len(m.drift) > 0 || !e.actual.base)
		for _, t := range m.targets {
			m.dirty = m.dirty || !t.DrainEnd.IsZero() && !now.Before(t.DrainEnd)
		}
	}
	e.countNewcomers()
	var plans []*planned
	next := e.numbers.next
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		m := e.streams[name]
		if !m.dirty {
			continue
		}
		m.failure, m.problems = nil, nil
		v := e.view(name, mend, now)
		if problem, ok := e.foreignStream(v); ok {
			m.problems = append(m.problems, problem)
			m.wanted, m.dirty = v.wanted, false
			continue
		}
		p := planStream(v)
		m.problems = append(m.problems, p.problems...)
		if len(p.problems) > 0 {
			m.failure = errors.New(p.problems[0].Detail)
		}
		if p.idle(v) {
			e.settle(name, &p)
			continue
		}
		plans = append(plans, &planned{streamPlan: p, view: v, memory: m})
	}
	if len(plans) > 0 || mend && !e.actual.base && len(e.records.Streams) > 0 {
		e.storeErr = nil
		if err := e.apply(plans, mend); errors.Is(err, errRecords) {
			e.storeErr = err
			// Numbers that were not written down are free still.
			e.numbers.next = next
		} else if err != nil {
			e.lookErr = err
		}
	}
	for name, m := range e.streams {
		if _, recorded := e.records.Streams[name]; !recorded && w.Streams[name] == nil && len(m.targets) == 0 {
			delete(e.streams, name)
		}
	}
	e.compare()
}

// settle remembers that a plan was carried out, or written down as to be.
func (e *engine) settle(name string, p *streamPlan) {
	m := e.streams[name]
	m.wanted, m.asked, m.dirty = e.wanted.Streams[name], p.asked, false
}

// reshare gives the VIPs to the streams.
func (e *engine) reshare() {
	s := shareOut(e.wanted.Streams, e.around.local)
	e.owner = map[vip.VIP]string{}
	for name, vips := range s.owned {
		for _, v := range vips {
			e.owner[v] = name
		}
		if !slices.Equal(vips, e.share.owned[name]) {
			e.memory(name).dirty = true
		}
	}
	for name := range e.share.owned {
		if m := e.streams[name]; m != nil && len(s.owned[name]) == 0 {
			m.dirty = true
		}
	}
	e.share = s
}

func (e *engine) view(name string, mend bool, now time.Time) view {
	m := e.streams[name]
	v := view{
		name: name, wanted: e.wanted.Streams[name], owned: e.share.owned[name], targets: maps.Clone(m.targets), before: m.asked, slots: e.actual.slots,
		broken: m.fault.broken, bare: m.fault.bare, mend: mend, now: now,
		dead: func(a netip.Addr) bool { return e.around.reason(a) != "" },
		lost: e.lostAndFound,
		number: func(string) (uint32, error) {
			return e.number()
		},
	}
	if r, ok := e.records.Streams[name]; ok {
		v.record = &r
	}
	return v
}

// foreignStream tells of a chain of the stream's name that no record names.
func (e *engine) foreignStream(v view) (Problem, bool) {
	if v.wanted == nil || v.record != nil || e.actual.streams[v.name] == nil {
		return Problem{}, false
	}
	return Problem{
		Object: "chain inet " + TableName + " " + streamChain(v.name),
		Detail: "it is there, but no record of ours names it, so it is somebody else's: stream " + v.name + " is not served",
		Remedy: "look at it with: nft list table inet " + TableName + "; and remove it, or rename the stream",
		VIPs:   v.owned,
	}, true
}

// number finds a number for a new target.
func (e *engine) number() (uint32, error) {
	return e.numbers.take(func(n uint32) (bool, error) {
		if _, ok := e.records.Targets[n]; ok {
			return true, nil
		}
		if _, ok := e.refused[n]; ok {
			return true, nil
		}
		if _, ok := e.actual.slots[n]; ok {
			e.refused[n] = "chain inet " + TableName + " " + targetChain(n) + ", or an element for it, is there, which no record of ours names"
			return true, nil
		}
		if _, ok := e.probed[n]; !ok {
			if err := e.probe(n); err != nil {
				return false, err
			}
		}
		who := e.probed[n]
		if who != "" {
			e.refused[n] = who
			e.log.Warn("a number is used by somebody else and is left out", "number", n, "by", who)
		}
		return who != "", nil
	})
}

// probe asks who else uses a number and those after it that this pass may need.
func (e *engine) probe(first uint32) error {
	if e.probed == nil {
		e.probed = map[uint32]string{}
	}
	var numbers []uint32
	for n := uint64(first); n <= uint64(e.o.Mask) && len(numbers) < max(1, e.newcomers); n++ {
		numbers = append(numbers, uint32(n))
	}
	by, err := e.kernel.takenAmong(numbers)
	if err != nil {
		return fmt.Errorf("find out who uses the numbers from %d to %d: %w", first, numbers[len(numbers)-1], err)
	}
	for _, n := range numbers {
		e.probed[n] = by[n]
	}
	return nil
}

// maxProbed bounds the numbers that are asked about at once.
const maxProbed = 1024

// countNewcomers counts the targets that may need a number in this pass.
func (e *engine) countNewcomers() {
	e.probed, e.newcomers = nil, 0
	for name, m := range e.streams {
		if w := e.wanted.Streams[name]; m.dirty && w != nil {
			for _, t := range w.Targets {
				if _, recorded := m.targets[t.Name]; !recorded && slices.Contains(t.Roles[:], Serving) {
					e.newcomers++
				}
			}
		}
	}
	e.newcomers = min(e.newcomers, maxProbed)
}

// numbering hands out numbers, those that were not used for the longest time first.
type numbering struct {
	first, mask, next uint32
}

// numberRange is how many numbers, from the first on, targets get.
const numberRange = 1 << 16

// take returns the next number that nobody uses.
func (n *numbering) take(used func(uint32) (bool, error)) (uint32, error) {
	end := min(uint64(n.first)+numberRange, uint64(n.mask)+1)
	for range end - uint64(n.first) {
		candidate := n.next
		if uint64(candidate) >= end || candidate < n.first {
			candidate = n.first
		}
		n.next = candidate + 1
		// 253 to 255 are the kernel's own tables.
		if candidate&^n.mask != 0 || candidate >= 253 && candidate <= 255 {
			continue
		}
		switch taken, err := used(candidate); {
		case err != nil:
			return 0, err
		case !taken:
			return candidate, nil
		}
	}
	return 0, fmt.Errorf("all numbers from %d to %d are used", n.first, end-1)
}

// look reads from the kernel what has to be read.
func (e *engine) look() error {
	n := e.need
	if e.actual == nil {
		n.all = true
	}
	if n.all {
		if err := e.readAll(); err != nil {
			return err
		}
	} else if n.ways {
		if err := e.readWays(); err != nil {
			return err
		}
	}
	if n.all || n.ways || n.around {
		s, err := e.kernel.surroundings()
		if err != nil {
			return fmt.Errorf("look at links, addresses and neighbours: %w", err)
		}
		e.surround(s, n.downed)
	}
	e.need = need{}
	return nil
}

func (e *engine) recordedNumbers() []uint32 {
	return slices.Sorted(maps.Keys(e.records.Targets))
}

// readAll reads everything, between two transactions of anybody if they let us.
func (e *engine) readAll() error {
	for attempt := 1; ; attempt++ {
		before, err := e.kernel.generation()
		if err != nil {
			return fmt.Errorf("read the generation of the ruleset: %w", err)
		}
		c, err := e.kernel.read(e.recordedNumbers())
		if err != nil {
			return fmt.Errorf("read the data plane: %w", err)
		}
		after, err := e.kernel.generation()
		if err != nil {
			return fmt.Errorf("read the generation of the ruleset: %w", err)
		}
		if before == after || attempt == 3 {
			e.setActual(c, before)
			return nil
		}
	}
}

func (e *engine) setActual(c *content, generation uint32) {
	if c.slots == nil {
		c.slots = map[uint32]*slotContent{}
	}
	if c.streams == nil {
		c.streams = map[string]*streamContent{}
	}
	if c.vips == nil {
		c.vips = map[vip.VIP]string{}
	}
	e.actual, e.generation, e.own = c, generation, 0
	for _, m := range e.streams {
		m.stale = true
	}
}

// foreignTransaction tells whether somebody else changed the ruleset since it was
// read.
func (e *engine) foreignTransaction() bool {
	if e.actual == nil {
		return true
	}
	g, err := e.kernel.generation()
	return err != nil || g != e.generation+e.own
}

// readWays reads rules and routes of all targets.
func (e *engine) readWays() error {
	ways, err := e.kernel.readWays(e.recordedNumbers())
	if err != nil {
		return fmt.Errorf("read rules and routes: %w", err)
	}
	base, err := e.kernel.readBase()
	if err != nil {
		return fmt.Errorf("read what no target owns: %w", err)
	}
	if base != e.actual.base {
		e.actual.base = base
		for _, m := range e.streams {
			m.stale = true
		}
	}
	for number, t := range e.records.Targets {
		now := ways[number]
		if now == nil {
			now = &slotContent{number: number}
		}
		s := e.actual.slots[number]
		if s == nil && sameWays(*now, slotContent{}) || s != nil && sameWays(*now, *s) {
			continue
		}
		e.setWays(number, *now)
		e.memory(t.Stream).stale = true
	}
	return nil
}

func (e *engine) setWays(number uint32, w slotContent) {
	s := slotContent{number: number}
	if old := e.actual.slots[number]; old != nil {
		s = *old
	}
	s.rules, s.hops, s.blackhole = w.rules, w.hops, w.blackhole
	e.actual.slots[number] = &s
}

// setElements takes what nftables has of a target; nil: nothing.
func (e *engine) setElements(number uint32, n *slotContent) {
	s := slotContent{number: number}
	if n != nil {
		s = *n
	}
	if old := e.actual.slots[number]; old != nil {
		s.rules, s.hops, s.blackhole = old.rules, old.hops, old.blackhole
	}
	if n == nil && sameWays(s, slotContent{}) {
		delete(e.actual.slots, number)
		return
	}
	e.actual.slots[number] = &s
}

// surround takes what is around: which targets can be reached, and whose routes the
// kernel removed when a link went down, rather than somebody.
func (e *engine) surround(s *surroundings, downed []int) {
	old := e.around
	e.around = s
	for number, t := range e.records.Targets {
		m := e.memory(t.Stream)
		via := e.via[number]
		missing, byLink := false, false
		slot := e.actual.slots[number]
		for _, f := range vip.Families {
			hop := addressOf(t.IPs, f)
			if !hop.IsValid() {
				continue
			}
			l, ok := s.leadsTo(hop)
			if slot == nil || !slot.hops[f].IsValid() {
				missing = true
				// At the start nobody saw a link go: a route alone is missing after that,
				// where a hand that clears a table or a target takes more with it.
				alone := old == nil && slot != nil && slot.rules[f] && slot.blackhole[f]
				byLink = byLink || alone || !ok || !l.up || slices.Contains(downed, l.index) || via[f] != 0 && (via[f] != l.index || slices.Contains(downed, via[f]))
			}
			if ok {
				via[f] = l.index
			}
			if old == nil || (old.reason(hop) == "") != (s.reason(hop) == "") {
				m.dirty, m.stale = true, true
				if old != nil {
					e.logReach(t, hop)
				}
			}
		}
		e.via[number] = via
		lost := missing && (byLink || e.lost[number])
		if lost != e.lost[number] {
			m.stale = true
			if lost {
				e.log.Warn("the kernel removed routes with a link; they come back with it", "stream", t.Stream, "target", t.Name, "number", number)
			}
		}
		if lost {
			e.lost[number] = true
			m.dirty = true
		} else {
			delete(e.lost, number)
		}
	}
	if old != nil {
		// Those that wait for their network have no record, or a pending one.
		for name, m := range e.streams {
			if w := m.wanted; w != nil && !m.dirty {
				e.streams[name].dirty = slices.ContainsFunc(w.Targets, func(t Target) bool {
					return slices.ContainsFunc(t.IPs, func(a netip.Addr) bool { return (old.reason(a) == "") != (s.reason(a) == "") })
				})
			}
		}
	}
}

func (e *engine) logReach(t record.Target, hop netip.Addr) {
	if why := e.around.reason(hop); why != "" {
		e.log.Warn("a target cannot be reached and leaves its table", "stream", t.Stream, "target", t.Name, "number", t.Number, "address", hop, "reason", why)
		return
	}
	e.log.Info("a target can be reached again", "stream", t.Stream, "target", t.Name, "number", t.Number, "address", hop)
}

// lostAndFound tells of a target whose routes went with a link that is there again.
func (e *engine) lostAndFound(number uint32) bool {
	if !e.lost[number] {
		return false
	}
	t, slot := e.records.Targets[number], e.actual.slots[number]
	for _, f := range vip.Families {
		hop := addressOf(t.IPs, f)
		if !hop.IsValid() || slot != nil && slot.hops[f].IsValid() {
			continue
		}
		if l, ok := e.around.leadsTo(hop); ok && l.up {
			return true
		}
	}
	return false
}

// compare compares records and kernel of the streams of which either changed.
func (e *engine) compare() {
	for name, m := range e.streams {
		if !m.stale {
			continue
		}
		m.stale = false
		before, brokenBefore := m.drift, m.fault
		e.compareStream(name, m)
		if brokenBefore.broken != m.fault.broken || brokenBefore.bare != m.fault.bare || len(without(before, m.drift))+len(without(m.drift, before)) > 0 {
			m.dirty = true
		}
	}
	e.noteDrift()
}

func (e *engine) compareStream(name string, m *streamMemory) {
	m.drift, m.fault, m.state = nil, streamFault{}, nil
	s, recorded := e.records.Streams[name]
	if recorded && s.Stage != record.Removing {
		var tables [len(vip.Families)][]uint32
		for _, f := range vip.Families {
			if hasFamily(s.VIPs, f) {
				tables[f] = m.tables[f].of(s.Tables[f], m.targets, s.Size, s.Seed)
			}
		}
		m.fault = streamDrift(s, tables, e.actual.streams[name], e.actual.vips)
		if s.Stage == record.Applied {
			m.drift = m.fault.drift
		}
		m.state = e.streamState(s, m)
	}
	for _, t := range sortedTargets(m.targets) {
		if t.Stage == record.Applied {
			m.drift = append(m.drift, slotDrift(t, e.actual.slots[t.Number], e.lost[t.Number])...)
		}
	}
}

// streamState tells what of a stream is known to be in the kernel.
func (e *engine) streamState(s record.Stream, m *streamMemory) *StreamState {
	x := &StreamState{Problem: m.fault.problems}
	a := e.actual.streams[s.Name]
	for _, f := range vip.Families {
		x.Serving[f] = map[string]struct{}{}
		if !hasFamily(s.VIPs, f) {
			continue
		}
		if !e.actual.base {
			d := baseDrift()
			x.Problem[f] = cmp.Or(x.Problem[f], d.Object+": "+d.Detail)
		}
		if a == nil || a.tables[f] == nil {
			continue
		}
		for _, name := range s.Tables[f] {
			t := m.targets[name]
			if slotStands(t, e.actual.slots[t.Number], f) && e.around.reason(addressOf(t.IPs, f)) == "" {
				x.Serving[f][name] = struct{}{}
			}
		}
		if len(s.Tables[f]) > 0 && len(x.Serving[f]) == 0 {
			x.Problem[f] = cmp.Or(x.Problem[f], "none of the targets in map "+maglevMap(f, s.Name)+" can be reached as it is")
		}
	}
	return x
}

// noteDrift remembers since when what differs, and says so once.
func (e *engine) noteDrift() {
	all := e.drift()
	now := e.now()
	is := make(map[driftKey]bool, len(all))
	for _, d := range all {
		is[d.key()] = true
		if _, known := e.since[d.key()]; !known {
			e.since[d.key()] = now
			e.log.Warn("somebody else changed the data plane; it stays so until it is reconciled, or something else is wanted there",
				"object", d.Object, "detail", d.Detail, "stream", d.Stream, "target", d.Target)
		}
	}
	for k := range e.since {
		if !is[k] {
			delete(e.since, k)
			e.log.Info("the data plane is there again as it was recorded", "object", k.object, "stream", k.stream, "target", k.target)
		}
	}
}

// drift lists what differs from the records, sorted.
func (e *engine) drift() []Drift {
	var all []Drift
	if !e.actual.base && slices.ContainsFunc(slices.Collect(maps.Values(e.records.Streams)), func(s record.Stream) bool { return s.Stage == record.Applied }) {
		all = append(all, baseDrift())
	}
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		all = append(all, e.streams[name].drift...)
	}
	for i, d := range all {
		all[i].Since = e.since[d.key()]
	}
	return all
}
