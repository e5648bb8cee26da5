package dataplane

import (
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
	// transactions counts those that write and removeAll did.
	transactions() uint32
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
	// generation then, after so many own transactions.
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
