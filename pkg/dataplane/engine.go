package dataplane

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/midstream"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
)

// kernelConn is the engine's connection to the kernel: a [fwstate.Conn], or a model in tests.
type kernelConn interface {
	Generation() (uint32, error)
	Read(fwmarks []uint32) (*plan.KernelState, error)
	ReadBase() (base, checks bool, problem string, err error)
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
	fast    accelerator

	desired *plan.Desired
	// adopted: the recovered targets are matched with the desired state.
	adopted bool
	// vipOwners is computed from assignedVIPs, the VIPs of each stream, in the network assignedIn.
	vipOwners    plan.VIPOwners
	assignedVIPs map[string][]vip.VIP
	assignedIn   *plan.Network
	// guests drain, and transfers holds the old and new streams of VIPs that move in this pass.
	guests    guests
	transfers map[[2]string]bool
	moved     midstream.Keeper
	// oldRulesRemoved: the rules of an earlier process with different options are removed.
	oldRulesRemoved bool
}

func newEngine(options Options, kernel kernelConn) *engine {
	created := &engine{
		observation: observation{
			records: newRecords(), kernel: kernel, log: options.Log, now: time.Now, holds: newHolds(options),
			priority: options.Priority, stale: everything, driftSince: map[[3]string]time.Time{},
		},
		options: options, moved: midstream.NewKeeper(),
		guests: guests{}, transfers: map[[2]string]bool{},
		fwmarks: fwmarks{first: options.First, mask: options.FWMarkMask(), log: options.Log, refused: map[uint32]string{}},
		repairs: repairs{byObject: map[[3]string]*repair{}, report: options.OnRepair, log: options.Log},
	}
	created.fast.open(options)
	return created
}

// converge applies the difference between desired and observed state, after observe.
// Urgent repairs ignore their back-off.
func (engine *engine) converge(desired *plan.Desired, urgent bool) {
	if desired != nil {
		engine.desired = desired
	}
	// Change nothing before the first Configure or while the kernel cannot be read.
	if engine.readErr != nil || desired == nil {
		return
	}
	engine.assignVIPs()
	now := engine.now()
	if !engine.adopted {
		engine.adopt(now)
		engine.adopted = true
		// Adopted targets change the drift, from which repairs are decided.
		engine.diff()
	}
	engine.followAddresses(now)
	engine.addGuests(now)
	// Keep the drift before the repair: noteRepairs compares it with the result.
	drift := engine.drift()
	repairBase := engine.decideRepairs(now, urgent)
	engine.markDirty(now)
	guests := engine.guestChange(now)
	if changes := engine.planDirty(now); len(changes) > 0 || repairBase || !guests.Empty() {
		engine.readErr = (&application{engine: engine, changes: changes, repairBase: repairBase}).run()
	}
	// A stream whose removal failed keeps its record, so that the removal is retried.
	maps.DeleteFunc(engine.streams, func(name string, record *streamRecord) bool {
		return record.installed == nil && desired.Streams[name] == nil && len(record.targets) == 0
	})
	engine.diff()
	engine.noteRepairs(drift, repairBase)
}

// markDirty marks the streams to plan: streams with a changed desired state, a failed change, a
// due repair, or an expired drain.
func (engine *engine) markDirty(now time.Time) {
	for name, record := range engine.streams {
		desired := engine.desired.Streams[name]
		record.dirty = record.dirty || desired == nil || record.desired != desired || record.failed || record.repair
	}
	for fwmark, end := range engine.draining {
		target := engine.targets[fwmark]
		record := engine.streams[target.Stream]
		if !now.Before(end) && record.targets[target.Name].FWMark == fwmark {
			record.dirty = true
		}
	}
}

// planDirty plans the dirty streams and returns the plans that change the kernel.
func (engine *engine) planDirty(now time.Time) (changes []*streamChange) {
	engine.fwmarks.begin()
	// Sorted, so that equal changes get equal fwmarks in every run.
	for _, name := range slices.Sorted(maps.Keys(engine.streams)) {
		record := engine.streams[name]
		if !record.dirty {
			continue
		}
		record.failed, record.problems = false, nil
		input := engine.input(name, now)
		// Never write into a chain that the data plane did not create.
		if input.Desired != nil && input.Installed == nil && engine.observed.Streams[name] != nil {
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
			engine.markPlanned(&next)
			continue
		}
		changes = append(changes, &streamChange{
			StreamPlan: next, input: input, record: record, failedTargets: map[string]bool{},
		})
	}
	return changes
}

// markPlanned records the desired state and the requests of a plan, and clears dirty.
func (engine *engine) markPlanned(planned *plan.StreamPlan) {
	record, desired := engine.streams[planned.Name], engine.desired.Streams[planned.Name]
	if desired != nil && (record.desired == nil || record.desired.RouteAll != desired.RouteAll) {
		record.stale = true // the state of a stream with RouteAll contains its fwmarks
	}
	record.slotsStale = record.slotsStale || !record.desired.SameEarlier(desired)
	record.desired, record.requests, record.dirty, record.reachedIn = desired, planned.Requests, false, nil
}

// assignVIPs assigns VIPs to streams and marks streams whose VIPs changed as dirty.
func (engine *engine) assignVIPs() {
	for name := range engine.desired.Streams {
		engine.record(name)
	}
	if engine.vipsAssigned() {
		return
	}
	owners := plan.AssignVIPs(engine.desired.Streams, engine.network.LocalAddrs, engine.network.LocalRoutes)
	owners.Limit(engine.observed.VIPs)
	engine.assignedVIPs, engine.assignedIn = make(map[string][]vip.VIP, len(engine.desired.Streams)), engine.network
	for name, stream := range engine.desired.Streams {
		engine.assignedVIPs[name] = stream.VIPs
	}
	for name, record := range engine.streams {
		record.dirty = record.dirty || !slices.Equal(owners.Owned[name], engine.vipOwners.Owned[name])
	}
	engine.vipOwners = owners
	for v, from := range engine.observed.VIPs {
		if to := owners.Owner[v]; to != "" && to != from {
			engine.transfers[[2]string{from, to}] = true
		}
	}
}

// vipsAssigned reports whether the current assignment of VIPs is up to date. It avoids the
// computation for most changes, which concern targets only.
func (engine *engine) vipsAssigned() bool {
	same := func(vips []vip.VIP, stream *plan.Stream) bool { return slices.Equal(vips, stream.VIPs) }
	in, now := engine.assignedIn, engine.network
	return in != nil && maps.Equal(in.LocalAddrs, now.LocalAddrs) && slices.Equal(in.LocalRoutes, now.LocalRoutes) &&
		maps.EqualFunc(engine.assignedVIPs, engine.desired.Streams, same)
}

// removeOldRules removes the policy rules of an earlier process with different options, once the
// kernel has the desired state.
func (engine *engine) removeOldRules() {
	if engine.oldRulesRemoved || engine.readErr != nil || engine.failing() || len(engine.drift()) > 0 {
		return
	}
	err := engine.kernel.RemoveOldRules()
	if err != nil {
		engine.log.Warn("failed to remove policy rules that were installed with other options", "error", err)
	}
	engine.oldRulesRemoved = err == nil
}

func (engine *engine) input(name string, now time.Time) plan.StreamInput {
	record := engine.streams[name]
	return plan.StreamInput{
		Name: name, Desired: engine.desired.Streams[name], VIPs: engine.vipOwners.Owned[name],
		Installed: record.installed, Targets: maps.Clone(record.targets), Requests: record.requests,
		Observed: engine.observed.Targets, Network: engine.network, Fault: record.fault,
		LinkRestored: engine.linkRestored, Repair: record.repair, Now: now, AllocateFWMark: engine.allocateFWMark,
	}
}

func (engine *engine) allocateFWMark() (uint32, error) {
	return engine.fwmarks.allocate(&engine.observation)
}
