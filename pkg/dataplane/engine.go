package dataplane

import (
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
)

// kernelConn is the engine's connection to the kernel: a [fwstate.Conn], or a model in tests.
type kernelConn interface {
	Generation() (uint32, error)
	Read(numbers []uint32) (*plan.KernelState, error)
	ReadBase() (base bool, problem string, err error)
	ReadStream(name string) (*plan.KernelStream, error)
	ReadTables(w plan.StreamWrite) (*plan.KernelStream, error)
	ReadTargets(numbers []uint32) (map[uint32]*plan.KernelTarget, error)
	ReadVIPs() (map[vip.VIP]string, error)
	ReadRoutes(numbers []uint32) (map[uint32]*plan.KernelTarget, error)
	ReadUnmatched(streams []string) (map[string]uint64, error)
	Write(c plan.Change) error
	// Transactions counts the transactions of Write and RemoveAll.
	Transactions() uint32
	AddCommonRules() fwstate.RouteErrors
	AddRoutes(slots []plan.KernelTarget, withCommon bool) fwstate.RouteErrors
	ResolveNextHop(number uint32, family vip.Family) (netip.Addr, error)
	RemoveRoutes(numbers []uint32) error
	RemoveOldRules() error
	UsedByOthers(numbers []uint32) (map[uint32]string, error)
	FlushConntrack(numbers []uint32) error
	OwnedTables() ([]uint32, error)
	RemoveAll() error
	ReadNetwork() (*plan.Network, error)
}

// streamRecord is the state of one stream in the engine.
type streamRecord struct {
	// desired is the input of the last plan.
	desired *Stream
	// installed is nil for a stream that is not installed. targets and requests are keyed by name.
	installed *plan.InstalledStream
	targets   map[string]plan.InstalledTarget
	requests  map[string]plan.Request
	// dirty: the next pass plans the stream. stale: drift and state are older than the
	// observed or installed state. repair: the plan also reverts changes by other processes.
	// failed: the last change failed and is retried.
	dirty, stale, repair, failed bool

	tables   plan.TableCaches
	fault    plan.StreamFault
	drift    []Drift
	state    *StreamState
	problems []Problem
	// unreachable maps unreachable addresses to the reason, computed for the network reachedIn.
	// reachedIn is nil after a change of the targets.
	unreachable map[netip.Addr]string
	reachedIn   *plan.Network
}

// parts are parts of the kernel state.
type parts uint8

const (
	nftables parts = 1 << iota
	routes         // and policy rules
	network        // links, addresses and neighbors

	everything = nftables | routes | network
)

// engine reconciles the kernel with the desired state. The kernel is the only persistent record:
// at the start the engine recovers the installed objects from names, comments and protocol
// numbers. It is not safe for concurrent use.
type engine struct {
	o      Options
	log    *slog.Logger
	kernel kernelConn
	now    func() time.Time
	pulse  task.Pulse

	// targets holds the installed targets by fwmark; nil until they are recovered from the
	// kernel. adopted: they are matched with the desired state.
	targets map[uint32]plan.InstalledTarget
	adopted bool
	streams map[string]*streamRecord
	// draining holds the ends of drains of targets that are no longer desired, by fwmark.
	draining map[uint32]time.Time
	// nextFWMark is the first candidate for the next new target.
	nextFWMark uint32
	// refused maps fwmarks that another process uses to a description of the use.
	refused map[uint32]string

	// observed is the kernel state last read, at that ruleset generation, after ownTransactions
	// transactions of the connection.
	observed        *plan.KernelState
	generation      uint32
	ownTransactions uint32
	network         *plan.Network
	// lost holds the fwmarks whose routes the kernel removed with a link.
	lost map[uint32]bool
	// stale holds the parts to read before the next plan, linksDown the links that went down since
	// the last read.
	stale     parts
	linksDown []int
	// readErr is the last failure to read or change the kernel. It suspends all changes.
	readErr error
	// lastRead is the time of the last read, lastFullRead of the last full read. readTime is the
	// duration of the last read.
	lastRead, lastFullRead time.Time
	readTime               time.Duration

	desired *Desired
	// vipOwners is computed from assignedVIPs, the VIPs of each stream, in the network assignedIn.
	vipOwners    plan.VIPOwners
	assignedVIPs map[string][]vip.VIP
	assignedIn   *plan.Network
	since        map[[3]string]time.Time
	// holds maps the streams whose drift is not repaired to the end of the hold. The key
	// allStreams holds every stream; the zero time is an unlimited hold.
	holds map[string]time.Time
	// repairs holds the back-off of each repaired object; repaired counts repairs.
	repairs  map[[3]string]*repair
	repaired uint64
	// oldRulesRemoved: the rules of an earlier process with different options are removed.
	oldRulesRemoved bool
	// probed maps the fwmarks checked in this pass to their use by another process, or "".
	// probing is the size of the next batch of checks.
	probed  map[uint32]string
	probing int
}

func newEngine(o Options, k kernelConn) *engine {
	return &engine{
		o: o, log: o.Log, kernel: k, now: time.Now,
		streams: map[string]*streamRecord{}, refused: map[uint32]string{},
		lost: map[uint32]bool{}, draining: map[uint32]time.Time{}, since: map[[3]string]time.Time{},
		holds: map[string]time.Time{}, repairs: map[[3]string]*repair{}, stale: everything,
	}
}

func (e *engine) record(stream string) *streamRecord {
	m := e.streams[stream]
	if m == nil {
		m = &streamRecord{
			targets: map[string]plan.InstalledTarget{}, requests: map[string]plan.Request{}, dirty: true, stale: true,
		}
		e.streams[stream] = m
	}
	return m
}

func (e *engine) keepTarget(t plan.InstalledTarget) {
	e.targets[t.FWMark] = t
	if delete(e.draining, t.FWMark); !t.DrainEnd.IsZero() {
		e.draining[t.FWMark] = t.DrainEnd
	}
	m := e.record(t.Stream)
	m.targets[t.Name], m.stale, m.reachedIn = t, true, nil
}

func (e *engine) keepStream(s plan.InstalledStream) {
	m := e.record(s.Name)
	m.installed, m.stale = &s, true
}

func (e *engine) dropTarget(t plan.InstalledTarget) {
	delete(e.targets, t.FWMark)
	delete(e.draining, t.FWMark)
	delete(e.lost, t.FWMark)
	m := e.record(t.Stream)
	if m.targets[t.Name].FWMark == t.FWMark {
		delete(m.targets, t.Name)
	}
	m.stale, m.reachedIn = true, nil
}

// any reports whether a condition holds for at least one stream.
func (e *engine) any(is func(*streamRecord) bool) bool {
	for _, m := range e.streams {
		if is(m) {
			return true
		}
	}
	return false
}

// failing reports whether a stream failed and is retried.
func (e *engine) failing() bool { return e.any(func(m *streamRecord) bool { return m.failed }) }

// staleStreams marks all streams for comparison.
func (e *engine) staleStreams() {
	for _, m := range e.streams {
		m.stale = true
	}
}

// converge applies the difference between desired and observed state, after observe.
// Urgent repairs ignore their back-off.
func (e *engine) converge(w *Desired, urgent bool) {
	if w != nil {
		e.desired = w
	}
	// Change nothing before the first Configure or while the kernel cannot be read.
	if e.readErr != nil || w == nil {
		return
	}
	e.assignVIPs()
	now := e.now()
	if !e.adopted {
		e.adopt(now)
		e.adopted = true
		e.diff()
	}
	// Keep the drift before the repair: noteRepairs compares it with the result.
	drift := e.drift()
	repairBase := e.decideRepairs(now, urgent)
	e.markDirty(now)
	if changes := e.planDirty(now); len(changes) > 0 || repairBase {
		e.readErr = e.apply(changes, repairBase)
	}
	maps.DeleteFunc(e.streams, func(name string, m *streamRecord) bool {
		return m.installed == nil && w.Streams[name] == nil && len(m.targets) == 0
	})
	e.diff()
	e.noteRepairs(drift, repairBase)
}

// markDirty marks the streams to plan: streams with a changed desired state, a failed change, a
// due repair, or an expired drain.
func (e *engine) markDirty(now time.Time) {
	for name, m := range e.streams {
		m.dirty = m.dirty || e.desired.Streams[name] == nil || m.desired != e.desired.Streams[name] || m.failed || m.repair
	}
	for fwmark, end := range e.draining {
		t := e.targets[fwmark]
		if m := e.streams[t.Stream]; !now.Before(end) && m.targets[t.Name].FWMark == fwmark {
			m.dirty = true
		}
	}
}

// planDirty plans the dirty streams and returns the plans that change the kernel.
func (e *engine) planDirty(now time.Time) (changes []*streamChange) {
	e.probed, e.probing = map[uint32]string{}, 1
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		m := e.streams[name]
		if !m.dirty {
			continue
		}
		m.failed, m.problems = false, nil
		in := e.input(name, now)
		if in.Desired != nil && in.Installed == nil && e.observed.Streams[name] != nil {
			m.problems = []Problem{{
				Object: "chain inet " + TableName + " " + plan.StreamChain(name),
				Detail: "another process created it: stream " + name + " is not served",
				Remedy: "inspect it with: nft list table inet " + TableName + "; then remove it, or rename the stream",
				VIPs:   in.VIPs,
			}}
			m.desired, m.dirty, m.reachedIn = in.Desired, false, nil
			continue
		}
		p := plan.ForStream(in)
		m.problems, m.failed = p.Problems, len(p.Problems) > 0
		if p.Idle(in) {
			e.markPlanned(&p)
			continue
		}
		changes = append(changes, &streamChange{StreamPlan: p, input: in, record: m, failedTargets: map[string]bool{}})
	}
	return changes
}

// markPlanned records the desired state and the requests of a plan, and clears dirty.
func (e *engine) markPlanned(p *plan.StreamPlan) {
	m, is := e.streams[p.Name], e.desired.Streams[p.Name]
	m.stale = m.stale || is != nil && (m.desired == nil || m.desired.RouteAll != is.RouteAll)
	m.desired, m.requests, m.dirty, m.reachedIn = is, p.Requests, false, nil
}

// assignVIPs assigns VIPs to streams and marks streams whose VIPs changed as dirty.
func (e *engine) assignVIPs() {
	for name := range e.desired.Streams {
		e.record(name)
	}
	if e.vipsAssigned() {
		return
	}
	s := plan.AssignVIPs(e.desired.Streams, e.network.LocalAddrs, e.network.LocalRoutes)
	s.Limit(e.observed.VIPs)
	e.assignedVIPs, e.assignedIn = make(map[string][]vip.VIP, len(e.desired.Streams)), e.network
	for name, x := range e.desired.Streams {
		e.assignedVIPs[name] = x.VIPs
	}
	for name, m := range e.streams {
		m.dirty = m.dirty || !slices.Equal(s.Owned[name], e.vipOwners.Owned[name])
	}
	e.vipOwners = s
}

// vipsAssigned reports whether the current assignment of VIPs is up to date. It avoids the
// computation for most changes, which concern targets only.
func (e *engine) vipsAssigned() bool {
	same := func(vips []vip.VIP, s *Stream) bool { return slices.Equal(vips, s.VIPs) }
	return e.assignedIn == e.network && maps.EqualFunc(e.assignedVIPs, e.desired.Streams, same)
}

// removeOldRules removes the policy rules of an earlier process with different options, once the
// kernel has the desired state.
func (e *engine) removeOldRules() {
	if e.oldRulesRemoved || e.readErr != nil || e.failing() || len(e.drift()) > 0 {
		return
	}
	err := e.kernel.RemoveOldRules()
	if err != nil {
		e.log.Warn("failed to remove policy rules that were installed with other options", "error", err)
	}
	e.oldRulesRemoved = err == nil
}

func (e *engine) input(name string, now time.Time) plan.StreamInput {
	m := e.streams[name]
	return plan.StreamInput{
		Name: name, Desired: e.desired.Streams[name], VIPs: e.vipOwners.Owned[name],
		Installed: m.installed, Targets: maps.Clone(m.targets), Requests: m.requests,
		Observed: e.observed.Targets, Network: e.network, Fault: m.fault,
		LinkRestored: e.linkRestored, Repair: m.repair, Now: now, AllocateFWMark: e.allocateFWMark,
	}
}

const (
	// fwmarkRange is the number of fwmarks reserved for targets.
	fwmarkRange = 1 << 16
	// maxProbed limits the batch size of fwmark checks.
	maxProbed = 1024
)

// allocateFWMark returns an unused fwmark for a new target, the least recently used first.
func (e *engine) allocateFWMark() (uint32, error) {
	end := min(uint64(e.o.First)+fwmarkRange, uint64(e.o.Mask)+1)
	for range end - uint64(e.o.First) {
		n := e.nextFWMark
		if uint64(n) >= end || n < e.o.First {
			n = e.o.First
		}
		e.nextFWMark = n + 1
		// Tables 253 to 255 are default, main and local.
		if e.targets[n].FWMark == n || e.refused[n] != "" || n >= 253 && n <= 255 {
			continue
		}
		by, err := e.fwmarkUser(n)
		if err != nil || by == "" {
			return n, err
		}
		e.refused[n] = by
		e.log.Warn("fwmark used by another process, skipping it", "fwmark", n, "by", by)
	}
	return 0, fmt.Errorf("all fwmarks from %d to %d are used", e.o.First, end-1)
}

// fwmarkUser returns how another process uses a fwmark, or "". It also checks successors of the
// fwmark, in batches that grow during a pass.
func (e *engine) fwmarkUser(first uint32) (string, error) {
	if e.observed.Targets[first] != nil {
		return "chain inet " + TableName + " " + plan.TargetChain(first) + ", or an element for it, exists already", nil
	}
	if by, ok := e.probed[first]; ok {
		return by, nil
	}
	var numbers []uint32
	for n := uint64(first); n <= uint64(e.o.Mask) && len(numbers) < e.probing; n++ {
		numbers = append(numbers, uint32(n))
	}
	e.probing = min(4*e.probing, maxProbed)
	by, err := e.kernel.UsedByOthers(numbers)
	if err != nil {
		return "", fmt.Errorf("check for other users of fwmarks %d to %d: %w", first, numbers[len(numbers)-1], err)
	}
	for _, n := range numbers {
		e.probed[n] = by[n]
	}
	return by[first], nil
}
