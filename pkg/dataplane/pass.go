package dataplane

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// kernelSide is the kernel as the engine sees it: a fabric, or a model of one in
// tests.
type kernelSide interface {
	generation() (uint32, error)
	read(numbers []uint32) (*content, error)
	readBase() (base bool, problem string, err error)
	readStream(name string) (*streamContent, error)
	readSlots(numbers []uint32) (map[uint32]*slotContent, error)
	readVIPs() (map[vip.VIP]string, error)
	readWays(numbers []uint32) (map[uint32]*slotContent, error)
	write(c change) error
	// transactions counts those that write and removeAll did.
	transactions() uint32
	addCommonRules() wayErrors
	addWays(slots []slotContent) wayErrors
	way(number uint32, family vip.Family) (netip.Addr, error)
	removeWays(numbers []uint32) error
	takenAmong(numbers []uint32) (map[uint32]string, error)
	forget(numbers []uint32) error
	owned() ([]uint32, error)
	removeAll() error
	surroundings() (*surroundings, error)
	close() error
}

// manyStreams is from how many streams on one look at everything is cheaper than a
// look at each.
const manyStreams = 8

// streamMemory is what the engine knows of one stream.
type streamMemory struct {
	// wanted is what the last plan was made for.
	wanted *Stream
	// targets are the installed ones, by name.
	targets map[string]installedTarget
	asked   map[string]asked
	// dirty: the next pass plans for it. stale: what is known of its drift and state
	// is older than what is known of the kernel. repair: the plan also restores what
	// another process changed.
	dirty, stale, repair bool
	tables               [len(vip.Families)]tableCache
	fault                streamFault
	drift                []Drift
	state                *StreamState
	problems             []Problem
	failure              error
}

// engine brings the kernel to what is wanted. The kernel is the record: at the start the
// engine finds by our marks what an earlier process installed. It belongs to one
// goroutine.
type engine struct {
	o      Options
	log    *slog.Logger
	kernel kernelSide
	now    func() time.Time

	// installed is nil until it was read from the kernel; adopted is set once it was
	// matched with what is wanted.
	installed *installed
	adopted   bool
	streams   map[string]*streamMemory
	numbers   numbering
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
	// holds are the streams whose drift is not repaired, with the end of the hold;
	// allStreams is every stream, and the zero time is no end.
	holds map[string]time.Time
	// repairs are the back-offs of what was repaired, repaired counts repairs.
	repairs  map[driftKey]*repair
	repaired uint64
	// lookErr keeps everything as it is.
	lookErr error
	// lookTime is how long the last look took.
	lookTime time.Duration
	// probed are numbers with who else uses them, as asked in this pass; probing is how
	// many are asked about next.
	probed  map[uint32]string
	probing int
}

// need says what has to be looked at before anything else.
type need struct {
	// all is what is in nftables, ways are rules and routes, around are links,
	// addresses and neighbours.
	all, ways, around bool
	// downed are links that were down in between.
	downed []int
}

func newEngine(o Options, k kernelSide) *engine {
	return &engine{
		o: o, log: o.Log, kernel: k, now: time.Now,
		streams: map[string]*streamMemory{}, refused: map[uint32]string{},
		via: map[uint32][len(vip.Families)]int{}, lost: map[uint32]bool{}, since: map[driftKey]time.Time{},
		holds: map[string]time.Time{}, repairs: map[driftKey]*repair{},
		need: need{all: true, ways: true, around: true},
	}
}

// load finds in the kernel what an earlier process installed.
func (e *engine) load() error {
	found, err := gather(e.kernel, e.o, e.now())
	if err != nil {
		return err
	}
	e.installed = &installed{Targets: map[uint32]installedTarget{}, Streams: map[string]installedStream{}}
	for _, s := range found.Streams {
		e.keepStream(s)
	}
	top := e.o.First
	for _, t := range found.Targets {
		e.keepTarget(t)
		top = max(top, t.Number+1)
	}
	e.numbers = numbering{first: e.o.First, mask: e.o.Mask, next: top}
	for name, m := range e.streams {
		var s *installedStream
		if r, ok := e.installed.Streams[name]; ok {
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
		m = &streamMemory{targets: map[string]installedTarget{}, asked: map[string]asked{}, dirty: true, stale: true}
		e.streams[stream] = m
	}
	return m
}

func (e *engine) keepTarget(t installedTarget) {
	e.installed.Targets[t.Number] = t
	m := e.memory(t.Stream)
	m.targets[t.Name], m.stale = t, true
}

func (e *engine) keepStream(s installedStream) {
	e.installed.Streams[s.Name] = s
	e.memory(s.Name).stale = true
}

func (e *engine) dropTarget(t installedTarget) {
	delete(e.installed.Targets, t.Number)
	delete(e.lost, t.Number)
	delete(e.via, t.Number)
	m := e.memory(t.Stream)
	if m.targets[t.Name].Number == t.Number {
		delete(m.targets, t.Name)
	}
	m.stale = true
}

// observe reads what changed in the kernel and compares it with what is installed.
func (e *engine) observe() {
	began := time.Now()
	e.lookErr = e.look()
	e.lookTime = time.Since(began)
	if e.lookErr == nil {
		e.compare()
	}
}

// converge changes the kernel after an observation.
func (e *engine) converge(w *Wanted, urgent bool) {
	if w != nil {
		e.wanted = w
	}
	if e.lookErr != nil || w == nil {
		return
	}
	e.reshare()
	now := e.now()
	if !e.adopted {
		e.adopt(now)
		e.adopted = true
		e.compare()
	}
	repairBase := e.due(e.baseDrift(), now, urgent) && !e.held("")
	for name, s := range w.Streams {
		m := e.memory(name)
		m.dirty = m.dirty || m.wanted != s || m.failure != nil
	}
	for name, m := range e.streams {
		m.repair = !e.held(name) && e.due(m.drift, now, urgent)
		m.dirty = m.dirty || w.Streams[name] == nil || m.repair
		for _, t := range m.targets {
			m.dirty = m.dirty || !t.DrainEnd.IsZero() && !now.Before(t.DrainEnd)
		}
	}
	e.probed, e.probing = map[uint32]string{}, 1
	var plans []*planned
	before := e.drift()
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		m := e.streams[name]
		if !m.dirty {
			continue
		}
		m.failure, m.problems = nil, nil
		v := e.view(name, now)
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
	if len(plans) > 0 || repairBase {
		if err := e.apply(plans, repairBase); err != nil {
			e.lookErr = err
		}
	}
	for name, m := range e.streams {
		if _, ok := e.installed.Streams[name]; !ok && w.Streams[name] == nil && len(m.targets) == 0 {
			delete(e.streams, name)
		}
	}
	e.compare()
	e.noteRepairs(before, repairBase)
}

// settle remembers that a plan is carried out.
func (e *engine) settle(name string, p *streamPlan) {
	m := e.streams[name]
	m.wanted, m.asked, m.dirty = e.wanted.Streams[name], p.asked, false
}

// reshare gives the VIPs to the streams.
func (e *engine) reshare() {
	s := shareOut(e.wanted.Streams, e.around.local)
	s.bound(e.actual.vips)
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

func (e *engine) view(name string, now time.Time) view {
	m := e.streams[name]
	v := view{
		name: name, wanted: e.wanted.Streams[name], owned: e.share.owned[name], targets: maps.Clone(m.targets), before: m.asked, slots: e.actual.slots,
		broken: m.fault.broken, bare: m.fault.bare, repair: m.repair, now: now,
		dead: func(a netip.Addr) bool { return e.around.reason(a) != "" },
		lost: e.lostAndFound,
		number: func(string) (uint32, error) {
			return e.number()
		},
	}
	if s, ok := e.installed.Streams[name]; ok {
		v.installed = &s
	}
	return v
}

// foreignStream reports a chain of the stream's name that lacks the rules and maps of the data plane.
func (e *engine) foreignStream(v view) (Problem, bool) {
	if v.wanted == nil || v.installed != nil || e.actual.streams[v.name] == nil {
		return Problem{}, false
	}
	return Problem{
		Object: "chain inet " + TableName + " " + streamChain(v.name),
		Detail: "another process created it: stream " + v.name + " is not served",
		Remedy: "look at it with: nft list table inet " + TableName + "; and remove it, or rename the stream",
		VIPs:   v.owned,
	}, true
}
