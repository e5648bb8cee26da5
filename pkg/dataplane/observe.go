package dataplane

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// parts are parts of the kernel state.
type parts uint8

const (
	nftables parts = 1 << iota
	routes         // and policy rules
	network        // links, addresses and neighbors

	everything = nftables | routes | network
)

// observation is the kernel state as it was last read, and its difference from the installed
// objects.
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
	// driftSince holds the start of each difference.
	driftSince map[[3]string]time.Time
}

// observe reads the stale parts of the kernel, if read is set, and compares them with the
// installed state.
func (o *observation) observe(read bool) {
	o.readErr = nil
	if o.network == nil || read && o.stale != 0 {
		o.lastRead = time.Now()
		o.readErr = o.readKernel()
		o.readTime = time.Since(o.lastRead)
	}
	if o.readErr == nil {
		o.diff()
	}
}

// readKernel reads the stale parts of the kernel state.
func (o *observation) readKernel() error {
	switch {
	case o.observed == nil || o.stale&nftables != 0:
		if err := o.readAll(); err != nil {
			return err
		}
	case o.stale&routes != 0:
		if err := o.readRoutes(); err != nil {
			return err
		}
	}
	network, err := o.kernel.ReadNetwork()
	if err != nil {
		return fmt.Errorf("read links, addresses and neighbors: %w", err)
	}
	if o.stale&nftables != 0 {
		o.lastFullRead = o.lastRead
	}
	o.updateNetwork(network)
	o.stale, o.linksDown = 0, nil
	return nil
}

// readAll reads everything. It retries up to twice to obtain a dump without a concurrent
// transaction.
func (o *observation) readAll() error {
	for attempt := 1; ; attempt++ {
		before, err := o.kernel.Generation()
		if err != nil {
			return err
		}
		state, err := o.kernel.Read(o.installedFWMarks())
		if err != nil {
			return fmt.Errorf("read the data plane: %w", err)
		}
		after, err := o.kernel.Generation()
		if err != nil {
			return err
		}
		if before == after || attempt == 3 {
			// With the older generation a transaction during the dump causes another read.
			o.observed, o.generation, o.ownTransactions = state, before, o.kernel.Transactions()
			o.staleStreams()
			return nil
		}
	}
}

// foreignTransaction reports whether another process changed the ruleset since the last read. It
// excludes the generation's increments by transactions of this connection.
func (o *observation) foreignTransaction() bool {
	if o.observed == nil {
		return true
	}
	generation, err := o.kernel.Generation()
	return err != nil || generation != o.generation+o.kernel.Transactions()-o.ownTransactions
}

// readBase reads the common objects.
func (o *observation) readBase() error {
	base, problem, err := o.kernel.ReadBase()
	if err != nil {
		return fmt.Errorf("read table inet %s: %w", plan.TableName, err)
	}
	if base != o.observed.Base || problem != o.observed.Problem {
		o.observed.Base, o.observed.Problem = base, problem
		o.staleStreams()
	}
	return nil
}

// readRoutes reads the rules and routes of all targets, and the common policy rules.
func (o *observation) readRoutes() error {
	read, err := o.kernel.ReadRoutes(o.installedFWMarks())
	if err != nil {
		return fmt.Errorf("read rules and routes: %w", err)
	}
	if err := o.readBase(); err != nil {
		return err
	}
	for fwmark, target := range o.targets {
		if now := orNone(read[fwmark]); !plan.SameRoutes(now, o.target(fwmark)) {
			o.setRoutes(fwmark, now)
			o.record(target.Stream).stale = true
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

// target returns the observed state of a target.
func (o *observation) target(fwmark uint32) plan.KernelTarget {
	return orNone(o.observed.Targets[fwmark])
}

// setRoutes sets the observed rules and routes of a target.
func (o *observation) setRoutes(fwmark uint32, routed plan.KernelTarget) {
	o.setTarget(fwmark, o.target(fwmark), routed)
}

// setTarget sets the observed state of a target: its nftables objects from target, its rules and
// routes from routed.
func (o *observation) setTarget(fwmark uint32, target, routed plan.KernelTarget) {
	target.FWMark, target.Rules, target.NextHops, target.Blackhole = fwmark, routed.Rules, routed.NextHops,
		routed.Blackhole
	if plan.SameRoutes(target, plan.KernelTarget{}) && plan.SameNFTables(target, plan.KernelTarget{}) {
		delete(o.observed.Targets, fwmark)
	} else {
		o.observed.Targets[fwmark] = &target
	}
}

// updateNetwork sets the observed network. It derives the reachability of targets, and separates
// routes that the kernel removed with a link from routes that another process removed.
func (o *observation) updateNetwork(network *plan.Network) {
	first, old := o.network == nil, cmp.Or(o.network, &plan.Network{})
	o.network = network
	changed := func(address netip.Addr) bool {
		return (old.UnreachableReason(address) == "") != (network.UnreachableReason(address) == "")
	}
	for fwmark, target := range o.targets {
		record := o.record(target.Stream)
		for _, hop := range target.Addresses() {
			reached := changed(hop)
			if first || reached {
				record.dirty, record.stale = true, true
			}
			if reached && !first {
				o.logReach(target, hop)
			}
		}
		lost := o.lostRoutes(target, old, first)
		if lost && !o.lost[fwmark] {
			o.log.Warn("routes removed with their link; restoring them when it is up",
				"stream", target.Stream, "target", target.Name, "fwmark", fwmark)
		}
		record.stale = record.stale || lost != o.lost[fwmark]
		record.dirty = record.dirty || lost
		delete(o.lost, fwmark)
		if lost {
			o.lost[fwmark] = true
		}
	}
	if first {
		return
	}
	// Also check desired targets that are not installed for lack of a connected network.
	for _, record := range o.streams {
		for address := range record.addresses {
			record.dirty = record.dirty || changed(address)
		}
	}
}

// lostRoutes reports whether routes of a target are missing because the kernel removed them with
// their link. old is the network before, first is set at the first read.
func (o *observation) lostRoutes(target plan.InstalledTarget, old *plan.Network, first bool) bool {
	missing, byLink := false, o.lost[target.FWMark]
	kernel := o.target(target.FWMark)
	for f, hop := range target.IPs {
		if !hop.IsValid() || kernel.NextHops[f].IsValid() {
			continue
		}
		missing = true
		link, ok := o.network.LinkTo(hop)
		previous, known := old.LinkTo(hop)
		// No link notification exists at the start. If only the route is missing,
		// the kernel removed it with a link; an operator removes more objects.
		alone := first && !o.holds.held(target.Stream) && kernel.Rules[f] && kernel.Blackhole[f]
		moved := known && previous.Index != link.Index
		byLink = byLink || alone || moved || !ok || !link.Up || slices.Contains(o.linksDown, link.Index)
	}
	return missing && byLink
}

func (o *observation) logReach(target plan.InstalledTarget, hop netip.Addr) {
	log := o.log.With("stream", target.Stream, "target", target.Name, "fwmark", target.FWMark, "address", hop)
	if why := o.network.UnreachableReason(hop); why != "" {
		log.Warn("target unreachable, removing it from its table", "reason", why)
		return
	}
	log.Info("target reachable again")
}

// linkRestored reports whether the kernel removed routes of a target with a link that is up again.
func (o *observation) linkRestored(fwmark uint32) bool {
	if !o.lost[fwmark] {
		return false
	}
	kernel := o.target(fwmark)
	for f, hop := range o.targets[fwmark].IPs {
		if hop.IsValid() && !kernel.NextHops[f].IsValid() {
			if link, ok := o.network.LinkTo(hop); ok && link.Up {
				return true
			}
		}
	}
	return false
}

// hasFailedNeighbors reports whether the network has failed neighbors, which may recover.
func (o *observation) hasFailedNeighbors() bool {
	return o.network != nil && len(o.network.FailedNeighbors) > 0
}

// verifyRoute verifies with a route lookup that packets for a target reach it.
func (o *observation) verifyRoute(fwmark uint32, f vip.Family, hop netip.Addr) error {
	got, err := o.kernel.ResolveNextHop(fwmark, f)
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
