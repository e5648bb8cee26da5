package dataplane

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// streamRecord is the state of one stream in the engine.
type streamRecord struct {
	// desired is the input of the last plan.
	desired *plan.Stream
	// installed is nil for a stream that is not installed. targets and requests are keyed by name.
	installed *plan.InstalledStream
	targets   map[string]plan.InstalledTarget
	requests  map[string]plan.Request
	// dirty: the next pass plans the stream. stale: drift and state are older than the
	// observed or installed state. repair: the plan also reverts changes by other processes.
	// failed: the last change failed and is retried.
	dirty, stale, repair, failed bool

	// slotsStale: targets or tables changed since package midstream noted them.
	slotsStale bool

	tables   plan.TableCaches
	fault    plan.StreamFault
	drift    []plan.Drift
	state    *plan.StreamState
	problems []Problem
	// unreachable maps unreachable addresses to the reason, computed for the network reachedIn.
	// reachedIn is nil after a change of the targets.
	unreachable map[netip.Addr]string
	reachedIn   *plan.Network
}

// records holds the installed objects. The kernel is their only persistent copy.
type records struct {
	// targets holds the installed targets by fwmark; nil until they are recovered from the kernel.
	targets map[uint32]plan.InstalledTarget
	streams map[string]*streamRecord
	// draining holds the ends of drains of targets that are no longer desired, by fwmark.
	draining map[uint32]time.Time
	// lost holds the fwmarks whose routes the kernel removed with a link.
	lost map[uint32]bool
}

func newRecords() records {
	return records{streams: map[string]*streamRecord{}, draining: map[uint32]time.Time{}, lost: map[uint32]bool{}}
}

// record returns the record of a stream, and creates it on first use.
func (r *records) record(stream string) *streamRecord {
	record := r.streams[stream]
	if record == nil {
		record = &streamRecord{
			targets: map[string]plan.InstalledTarget{}, requests: map[string]plan.Request{}, dirty: true, stale: true,
		}
		r.streams[stream] = record
	}
	return record
}

func (r *records) keepTarget(target plan.InstalledTarget) {
	r.targets[target.FWMark] = target
	if delete(r.draining, target.FWMark); !target.DrainEnd.IsZero() {
		r.draining[target.FWMark] = target.DrainEnd
	}
	record := r.record(target.Stream)
	record.targets[target.Name], record.stale, record.reachedIn = target, true, nil
	record.slotsStale = true
}

func (r *records) keepStream(stream plan.InstalledStream) {
	record := r.record(stream.Name)
	record.installed, record.stale, record.slotsStale = &stream, true, true
}

func (r *records) dropTarget(target plan.InstalledTarget) {
	delete(r.targets, target.FWMark)
	delete(r.draining, target.FWMark)
	delete(r.lost, target.FWMark)
	record := r.record(target.Stream)
	// A new target may already have taken the name.
	if record.targets[target.Name].FWMark == target.FWMark {
		delete(record.targets, target.Name)
	}
	record.stale, record.reachedIn, record.slotsStale = true, nil, true
}

// any reports whether a condition holds for at least one stream.
func (r *records) any(is func(*streamRecord) bool) bool {
	for _, record := range r.streams {
		if is(record) {
			return true
		}
	}
	return false
}

// failing reports whether a stream failed and is retried.
func (r *records) failing() bool {
	return r.any(func(record *streamRecord) bool { return record.failed })
}

// staleStreams marks all streams for comparison.
func (r *records) staleStreams() {
	for _, record := range r.streams {
		record.stale = true
	}
}

func (r *records) installedFWMarks() []uint32 { return slices.Sorted(maps.Keys(r.targets)) }

// addresses yields the addresses of installed and desired targets.
func (record *streamRecord) addresses(yield func(netip.Addr) bool) {
	for _, target := range record.targets {
		for _, address := range target.IPs {
			if address.IsValid() && !yield(address) {
				return
			}
		}
	}
	if record.desired == nil {
		return
	}
	for _, target := range record.desired.Targets {
		for _, address := range target.IPs {
			if !yield(address) {
				return
			}
		}
	}
}

// unreachableIn returns the unreachable addresses in a network, with reasons. The result is cached
// until the network or the targets change: for a thousand targets the lookup took as long as the
// rest of the state.
func (record *streamRecord) unreachableIn(network *plan.Network) map[netip.Addr]string {
	if record.reachedIn == network {
		return record.unreachable
	}
	record.unreachable, record.reachedIn = nil, network
	for address := range record.addresses {
		if why := network.UnreachableReason(address); why != "" {
			if record.unreachable == nil {
				record.unreachable = map[netip.Addr]string{}
			}
			record.unreachable[address] = why
		}
	}
	return record.unreachable
}

func (r *records) targetAddresses(yield func(netip.Addr) bool) {
	for _, record := range r.streams {
		for address := range record.addresses {
			if !yield(address) {
				return
			}
		}
	}
}
