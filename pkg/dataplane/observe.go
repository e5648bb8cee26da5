package dataplane

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

type parts uint8

const (
	nftables parts = 1 << iota
	routes         // and policy rules
	network        // links, addresses and neighbors

	everything = nftables | routes | network
)

// observation is the kernel state as last read, and its difference from the installed objects.
type observation struct {
	records
	kernel kernelConn
	log    *slog.Logger
	now    func() time.Time
	holds  holds
	// priority is the priority of the first policy rule.
	priority int

	// observed is the kernel state last read, at that ruleset generation, after ownTransactions
	// transactions of the connection.
	observed        *plan.KernelState
	generation      uint32
	ownTransactions uint32
	network         *plan.Network
	// stale holds the parts to read before the next plan, linksDown the links that went down since.
	stale     parts
	linksDown []int
	// rulesetRead: nftables was read, as after a change by another process; linksChanged: link-layer
	// addresses changed. Both since the tables of package midstream were written.
	rulesetRead, linksChanged bool
	// readErr is the last failure to read or change the kernel. It suspends all changes.
	readErr error
	// lastRead is the time of the last read, lastFullRead of the last full read. readTime is the
	// duration of the last read.
	lastRead, lastFullRead time.Time
	readTime               time.Duration
	// driftSince holds the start of each difference.
	driftSince map[[3]string]time.Time
}

// observe reads the kernel's stale parts, if read is set, and compares with the installed state.
func (observed *observation) observe(read bool) {
	observed.readErr = nil
	if observed.network == nil || read && observed.stale != 0 {
		observed.lastRead = time.Now()
		observed.readErr = observed.readKernel()
		observed.readTime = time.Since(observed.lastRead)
	}
	if observed.readErr == nil {
		observed.diff()
	}
}

// readKernel reads the stale parts of the kernel state.
func (observed *observation) readKernel() error {
	switch {
	case observed.observed == nil || observed.stale&nftables != 0:
		if err := observed.readAll(); err != nil {
			return err
		}
	case observed.stale&routes != 0:
		if err := observed.readRoutes(); err != nil {
			return err
		}
	}
	network, err := observed.kernel.ReadNetwork()
	if err != nil {
		return fmt.Errorf("read links, addresses and neighbors: %w", err)
	}
	if observed.stale&nftables != 0 {
		observed.lastFullRead = observed.lastRead
	}
	observed.updateNetwork(network)
	observed.stale, observed.linksDown = 0, nil
	return nil
}

// readAll reads everything. With the generation from before the read a transaction of another
// process during it causes the next one.
func (observed *observation) readAll() error {
	generation, err := observed.kernel.Generation()
	if err != nil {
		return err
	}
	state, err := observed.kernel.Read(observed.installedFWMarks())
	if err != nil {
		return fmt.Errorf("read the data plane: %w", err)
	}
	observed.observed, observed.generation, observed.ownTransactions = state, generation, observed.kernel.Transactions()
	observed.staleStreams()
	observed.rulesetRead = true
	return nil
}

// foreignTransaction reports whether another process changed the ruleset since the last read. It
// excludes the generation's increments by transactions of this connection.
func (observed *observation) foreignTransaction() bool {
	if observed.observed == nil {
		return true
	}
	generation, err := observed.kernel.Generation()
	return err != nil || generation != observed.generation+observed.kernel.Transactions()-observed.ownTransactions
}

func (observed *observation) readBase() error {
	base, checks, problem, err := observed.kernel.ReadBase()
	if err != nil {
		return fmt.Errorf("read table inet %s: %w", plan.TableName, err)
	}
	observed.observed.Checks = checks
	if base != observed.observed.Base || problem != observed.observed.Problem {
		observed.observed.Base, observed.observed.Problem = base, problem
		observed.staleStreams()
	}
	return nil
}

// readRoutes reads the rules and routes of all targets, and the common policy rules.
func (observed *observation) readRoutes() error {
	read, err := observed.kernel.ReadRoutes(observed.installedFWMarks())
	if err != nil {
		return fmt.Errorf("read rules and routes: %w", err)
	}
	if err := observed.readBase(); err != nil {
		return err
	}
	for fwmark, target := range observed.targets {
		if now := orNone(read[fwmark]); !plan.SameRoutes(now, observed.target(fwmark)) {
			observed.setRoutes(fwmark, now)
			observed.record(target.Stream).stale = true
		}
	}
	return nil
}

// orNone returns an empty target for nil.
func orNone(target *plan.KernelTarget) plan.KernelTarget {
	if target == nil {
		return plan.KernelTarget{}
	}
	return *target
}

func (observed *observation) target(fwmark uint32) plan.KernelTarget {
	return orNone(observed.observed.Targets[fwmark])
}

func (observed *observation) setRoutes(fwmark uint32, routed plan.KernelTarget) {
	observed.setTarget(fwmark, observed.target(fwmark), routed)
}

// setTarget sets the observed state of a target: its nftables objects from target, its rules and
// routes from routed.
func (observed *observation) setTarget(fwmark uint32, target, routed plan.KernelTarget) {
	target.FWMark, target.Rules, target.NextHops, target.Blackhole = fwmark, routed.Rules, routed.NextHops,
		routed.Blackhole
	if plan.SameRoutes(target, plan.KernelTarget{}) && plan.SameNFTables(target, plan.KernelTarget{}) {
		delete(observed.observed.Targets, fwmark)
	} else {
		observed.observed.Targets[fwmark] = &target
	}
}

// updateNetwork sets the observed network. It derives the reachability of targets, and separates
// routes that the kernel removed with a link from routes that another process removed.
func (observed *observation) updateNetwork(network *plan.Network) {
	first, old := observed.network == nil, cmp.Or(observed.network, &plan.Network{})
	observed.network = network
	observed.linksChanged = observed.linksChanged ||
		!maps.Equal(old.LinkAddresses, network.LinkAddresses)
	changed := func(address netip.Addr) bool {
		return (old.UnreachableReason(address) == "") != (network.UnreachableReason(address) == "")
	}
	for fwmark, target := range observed.targets {
		record := observed.record(target.Stream)
		for _, hop := range target.Addresses() {
			reached := changed(hop)
			// The plan takes unreachable targets out of their tables.
			if first || reached {
				record.dirty, record.stale = true, true
			}
			if reached && !first {
				observed.logReach(target, hop)
			}
		}
		lost := observed.lostRoutes(target, old, first)
		if lost && !observed.lost[fwmark] {
			observed.log.Warn("routes removed with their link; restoring them when it is up",
				"stream", target.Stream, "target", target.Name, "fwmark", fwmark)
		}
		// Drift excludes lost routes, so compare again when a route becomes lost.
		record.stale = record.stale || lost != observed.lost[fwmark]
		record.dirty = record.dirty || lost
		delete(observed.lost, fwmark)
		if lost {
			observed.lost[fwmark] = true
		}
	}
	if first {
		return
	}
	// Also check desired targets that are not installed for lack of a connected network.
	for _, record := range observed.streams {
		for address := range record.addresses {
			record.dirty = record.dirty || changed(address)
		}
	}
}

// lostRoutes reports whether routes of a target are missing because the kernel removed them with
// their link. old is the network before, first is set at the first read.
func (observed *observation) lostRoutes(target plan.InstalledTarget, old *plan.Network, first bool) bool {
	missing, byLink := false, observed.lost[target.FWMark]
	kernel := observed.target(target.FWMark)
	for f, hop := range target.IPs {
		if !hop.IsValid() || kernel.NextHops[f].IsValid() {
			continue
		}
		missing = true
		link, ok := observed.network.LinkTo(hop)
		previous, known := old.LinkTo(hop)
		// No link notification exists at the start. If only the route is missing,
		// the kernel removed it with a link; an operator removes more objects.
		alone := first && !observed.holds.held(target.Stream) && kernel.Rules[f] && kernel.Blackhole[f]
		moved := known && previous.Index != link.Index
		byLink = byLink || alone || moved || !ok || !link.Up || slices.Contains(observed.linksDown, link.Index)
	}
	return missing && byLink
}

func (observed *observation) logReach(target plan.InstalledTarget, hop netip.Addr) {
	log := observed.log.With("stream", target.Stream, "target", target.Name, "fwmark", target.FWMark, "address", hop)
	if why := observed.network.UnreachableReason(hop); why != "" {
		log.Warn("target unreachable, removing it from its table", "reason", why)
		return
	}
	log.Info("target reachable again")
}

// linkRestored reports whether the kernel removed routes of a target with a link that is up again.
func (observed *observation) linkRestored(fwmark uint32) bool {
	if !observed.lost[fwmark] {
		return false
	}
	kernel := observed.target(fwmark)
	for f, hop := range observed.targets[fwmark].IPs {
		if hop.IsValid() && !kernel.NextHops[f].IsValid() {
			if link, ok := observed.network.LinkTo(hop); ok && link.Up {
				return true
			}
		}
	}
	return false
}

// hasFailedNeighbors reports whether the network has failed neighbors, which may recover.
func (observed *observation) hasFailedNeighbors() bool {
	return observed.network != nil && len(observed.network.FailedNeighbors) > 0
}

// verifyRoute verifies with a route lookup that packets for a target reach it.
func (observed *observation) verifyRoute(fwmark uint32, f vip.Family, hop netip.Addr) error {
	got, err := observed.kernel.ResolveNextHop(fwmark, f)
	switch {
	case err != nil:
		return err
	case !got.IsValid():
		return fmt.Errorf("packets with fwmark %d are dropped instead of going to %s", fwmark, hop)
	case got != hop:
		return fmt.Errorf("packets with fwmark %d go to %s instead of %s", fwmark, got, hop)
	}
	return nil
}
