package dataplane

import (
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
	Read(fwmarks []uint32) (*plan.KernelState, error)
	ReadBase() (base bool, problem string, err error)
	ReadStream(name string) (*plan.KernelStream, error)
	ReadTables(write plan.StreamWrite) (*plan.KernelStream, error)
	ReadTargets(fwmarks []uint32) (map[uint32]*plan.KernelTarget, error)
	ReadVIPs() (map[vip.VIP]string, error)
	ReadRoutes(fwmarks []uint32) (map[uint32]*plan.KernelTarget, error)
	ReadUnmatched(streams []string) (map[string]uint64, error)
	Write(change plan.Change) error
	// Transactions counts the transactions of Write and RemoveAll.
	Transactions() uint32
	AddCommonRules() fwstate.RouteErrors
	AddRoutes(slots []plan.KernelTarget, withCommon bool) fwstate.RouteErrors
	ResolveNextHop(fwmark uint32, family vip.Family) (netip.Addr, error)
	RemoveRoutes(fwmarks []uint32) error
	RemoveOldRules() error
	UsedByOthers(fwmarks []uint32) (map[uint32]string, error)
	FlushConntrack(fwmarks []uint32) error
	OwnedTables() ([]uint32, error)
	RemoveAll() error
	ReadNetwork() (*plan.Network, error)
}

// engine reconciles the kernel with the desired state. The kernel is the only persistent record:
// at the start the engine recovers the installed objects from names, comments and protocol
// numbers. It is not safe for concurrent use.
type engine struct {
	observation
	options Options
	pulse   task.Pulse
	fwmarks fwmarks
	repairs repairs

	desired *plan.Desired
	// adopted: the recovered targets are matched with the desired state.
	adopted bool
	// vipOwners is computed from assignedVIPs, the VIPs of each stream, in the network assignedIn.
	vipOwners    plan.VIPOwners
	assignedVIPs map[string][]vip.VIP
	assignedIn   *plan.Network
	// oldRulesRemoved: the rules of an earlier process with different options are removed.
	oldRulesRemoved bool
}

func newEngine(o Options, kernel kernelConn) *engine {
	return &engine{
		observation: observation{
			records: newRecords(), kernel: kernel, log: o.Log, now: time.Now, holds: newHolds(o), priority: o.Priority,
			stale: everything, driftSince: map[[3]string]time.Time{},
		},
		options: o,
		fwmarks: fwmarks{first: o.First, mask: o.Mask, log: o.Log, refused: map[uint32]string{}},
		repairs: repairs{byObject: map[[3]string]*repair{}, report: o.OnRepair, log: o.Log},
	}
}

// converge applies the difference between desired and observed state, after observe.
// Urgent repairs ignore their back-off.
func (e *engine) converge(desired *plan.Desired, urgent bool) {
	if desired != nil {
		e.desired = desired
	}
	// Change nothing before the first Configure or while the kernel cannot be read.
	if e.readErr != nil || desired == nil {
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
		e.readErr = (&application{engine: e, changes: changes, repairBase: repairBase}).run()
	}
	maps.DeleteFunc(e.streams, func(name string, record *streamRecord) bool {
		return record.installed == nil && desired.Streams[name] == nil && len(record.targets) == 0
	})
	e.diff()
	e.noteRepairs(drift, repairBase)
}

// markDirty marks the streams to plan: streams with a changed desired state, a failed change, a
// due repair, or an expired drain.
func (e *engine) markDirty(now time.Time) {
	for name, record := range e.streams {
		desired := e.desired.Streams[name]
		record.dirty = record.dirty || desired == nil || record.desired != desired || record.failed || record.repair
	}
	for fwmark, end := range e.draining {
		target := e.targets[fwmark]
		record := e.streams[target.Stream]
		if !now.Before(end) && record.targets[target.Name].FWMark == fwmark {
			record.dirty = true
		}
	}
}

// planDirty plans the dirty streams and returns the plans that change the kernel.
func (e *engine) planDirty(now time.Time) (changes []*streamChange) {
	e.fwmarks.begin()
	// Sorted, so that equal changes get equal fwmarks in every run.
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		record := e.streams[name]
		if !record.dirty {
			continue
		}
		record.failed, record.problems = false, nil
		input := e.input(name, now)
		// Never write into a chain that the data plane did not create.
		if input.Desired != nil && input.Installed == nil && e.observed.Streams[name] != nil {
			record.problems = []Problem{{
				Object: "chain inet " + plan.TableName + " " + plan.StreamChain(name),
				Detail: "another process created it: stream " + name + " is not served",
				Remedy: "inspect it with: nft list table inet " + plan.TableName + "; then remove it, or rename the stream",
				VIPs:   input.VIPs,
			}}
			record.desired, record.dirty, record.reachedIn = input.Desired, false, nil
			continue
		}
		next := plan.ForStream(input)
		record.problems, record.failed = next.Problems, len(next.Problems) > 0
		if next.Idle(input) {
			e.markPlanned(&next)
			continue
		}
		changes = append(changes, &streamChange{
			StreamPlan: next, input: input, record: record, failedTargets: map[string]bool{},
		})
	}
	return changes
}

// markPlanned records the desired state and the requests of a plan, and clears dirty.
func (e *engine) markPlanned(planned *plan.StreamPlan) {
	record, desired := e.streams[planned.Name], e.desired.Streams[planned.Name]
	if desired != nil && (record.desired == nil || record.desired.RouteAll != desired.RouteAll) {
		record.stale = true // the state of a stream with RouteAll contains its fwmarks
	}
	record.desired, record.requests, record.dirty, record.reachedIn = desired, planned.Requests, false, nil
}

// assignVIPs assigns VIPs to streams and marks streams whose VIPs changed as dirty.
func (e *engine) assignVIPs() {
	for name := range e.desired.Streams {
		e.record(name)
	}
	if e.vipsAssigned() {
		return
	}
	owners := plan.AssignVIPs(e.desired.Streams, e.network.LocalAddrs, e.network.LocalRoutes)
	owners.Limit(e.observed.VIPs)
	e.assignedVIPs, e.assignedIn = make(map[string][]vip.VIP, len(e.desired.Streams)), e.network
	for name, stream := range e.desired.Streams {
		e.assignedVIPs[name] = stream.VIPs
	}
	for name, record := range e.streams {
		record.dirty = record.dirty || !slices.Equal(owners.Owned[name], e.vipOwners.Owned[name])
	}
	e.vipOwners = owners
}

// vipsAssigned reports whether the current assignment of VIPs is up to date. It avoids the
// computation for most changes, which concern targets only.
func (e *engine) vipsAssigned() bool {
	same := func(vips []vip.VIP, stream *plan.Stream) bool { return slices.Equal(vips, stream.VIPs) }
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
	record := e.streams[name]
	return plan.StreamInput{
		Name: name, Desired: e.desired.Streams[name], VIPs: e.vipOwners.Owned[name],
		Installed: record.installed, Targets: maps.Clone(record.targets), Requests: record.requests,
		Observed: e.observed.Targets, Network: e.network, Fault: record.fault,
		LinkRestored: e.linkRestored, Repair: record.repair, Now: now, AllocateFWMark: e.allocateFWMark,
	}
}

func (e *engine) allocateFWMark() (uint32, error) { return e.fwmarks.allocate(&e.observation) }
