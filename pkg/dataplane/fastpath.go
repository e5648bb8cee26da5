package dataplane

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/fastpath"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// FastPath selects whether a tcx program forwards packets in front of nftables.
type FastPath uint8

const (
	// FastPathOff forwards by nftables only.
	FastPathOff FastPath = iota
	// FastPathAuto attaches the program if the kernel and the capabilities of the process allow it.
	FastPathAuto
	// FastPathRequired is the same, and [Preflight] refuses to start without it.
	FastPathRequired
)

// FastPathState is the state of the fast path for operators.
type FastPathState struct {
	// Reason is why the program is detached from all interfaces; "" if it is not.
	Reason     string
	Interfaces []fastpath.Interface
}

// errTracked is why the fast path is off.
var errTracked = errors.New("connection tracking is not off: the fast path remembers no flows")

// accelerator attaches the fast path while the kernel state is confirmed.
type accelerator struct {
	program *fastpath.Program // nil without a fast path
	state   latest.Value[FastPathState]
	log     *slog.Logger
	// passes counts the changes of nftables. applied identifies the state that was applied last.
	passes  uint64
	applied confirmation
	// verified is the time of the full read after which the maps were verified.
	verified time.Time
}

// confirmation identifies a confirmed state of the kernel.
type confirmation struct {
	desired  *plan.Desired
	passes   uint64
	read     time.Time
	withheld [len(vip.Families)]bool
}

// FastPath returns the state of the fast path.
func (plane *Plane) FastPath() FastPathState { return plane.e.fast.state.Load() }

func (fast *accelerator) open(options Options) {
	fast.log = options.Log
	switch {
	case options.FastPath == FastPathOff:
	case options.Conntrack != ConntrackOff:
		fast.state.Set(FastPathState{Reason: errTracked.Error()})
	default:
		fast.program = fastpath.New()
		fast.state.Set(FastPathState{Reason: kernelUnconfirmed})
	}
}

// suspend makes the packets of streams continue to nftables before it changes: a target that leaves
// gets no more packets from the fast path, and a new one none before nftables has it.
func (fast *accelerator) suspend(changes []*streamChange) {
	fast.passes++
	if fast.program == nil {
		return
	}
	for _, change := range changes {
		if err := fast.program.Suspend(change.Name); err != nil {
			fast.report(FastPathState{Reason: err.Error()})
		}
	}
}

// forget lets the counters of removed targets start at 0.
func (fast *accelerator) forget(fwmarks []uint32) {
	if fast.program == nil {
		return
	}
	if err := fast.program.Forget(fwmarks); err != nil {
		fast.log.Warn("failed to reset counters of removed targets", "error", err)
	}
}

// detach detaches the program for a reason.
func (fast *accelerator) detach(reason string) {
	if fast.program == nil {
		return
	}
	if err := fast.program.Detach(); err != nil {
		fast.log.Warn("failed to close the fast path", "error", err)
	}
	fast.applied = confirmation{}
	fast.report(FastPathState{Reason: reason})
}

// report sets the state and logs transitions.
func (fast *accelerator) report(state FastPathState) {
	if old := fast.state.Load(); old.Reason != state.Reason {
		if state.Reason != "" {
			fast.log.Info("fast path detached, nftables forwards all packets", "reason", state.Reason)
		} else {
			fast.log.Info("fast path attached", "interfaces", len(state.Interfaces))
		}
	}
	fast.state.Set(state)
}

// kernelUnconfirmed is why the fast path is detached before the first configuration.
const kernelUnconfirmed = "nftables does not have the configuration yet"

// doubt returns why nftables may not have the desired state; "" if it has.
func (engine *engine) doubt() string {
	switch drift := slices.DeleteFunc(engine.drift(), func(d plan.Drift) bool { return d.Stream == "" }); {
	case engine.readErr != nil:
		return fmt.Sprintf("nftables could not be read or changed: %s", engine.readErr)
	case engine.desired == nil || engine.observed == nil || !engine.observed.Base:
		return kernelUnconfirmed
	case len(engine.holds.until) > 0:
		return "the data plane is held"
	case len(drift) > 0: // without that of chain checks
		return fmt.Sprintf("another process changed %s", drift[0].Object)
	}
	return ""
}

// accelerate applies the confirmed state of nftables to the fast path, or detaches it. The families
// in withheld are not forwarded.
func (engine *engine) accelerate(withheld [len(vip.Families)]bool) {
	fast := &engine.fast
	if fast.program == nil {
		return
	}
	if reason := engine.doubt(); reason != "" {
		fast.detach(reason)
		return
	}
	next := confirmation{engine.desired, fast.passes, engine.lastRead, withheld}
	if next == fast.applied {
		return
	}
	fast.applied = next
	if fast.verified != engine.lastFullRead {
		fast.verified = engine.lastFullRead
		// The maps have no notifications.
		if err := fast.program.Verify(); err != nil {
			fast.log.Warn("fast path changed by another process, rebuilding it", "error", err)
		}
	}
	interfaces, err := fast.program.Apply(engine.confirmed(withheld), engine.network.Links)
	state := FastPathState{Interfaces: interfaces}
	switch {
	case err != nil:
		state.Reason = err.Error()
	case !fast.program.Attached():
		state.Reason = "it could be attached to no interface"
	}
	fast.report(state)
}

// confirmed returns the streams whose chains, maps and elements were read back from the kernel.
func (engine *engine) confirmed(withheld [len(vip.Families)]bool) fastpath.Content {
	content := fastpath.Content{Hops: map[fastpath.Target]fastpath.Hop{}}
	for name, record := range engine.streams {
		kernel := engine.observed.Streams[name]
		if kernel == nil || !kernel.ChainIntact || record.installed == nil || record.state == nil ||
			record.installed.Stage != plan.StageApplied || record.failed || record.dirty {
			continue
		}
		stream := fastpath.Stream{KernelStream: kernel, Asks: engine.moved.Asks(name)}
		for _, v := range record.installed.VIPs {
			if engine.observed.VIPs[v] == name && !withheld[v.Family()] {
				stream.VIPs = append(stream.VIPs, v)
			}
		}
		content.Streams = append(content.Streams, stream)
		for family, names := range record.state.Serving {
			for target := range names {
				installed := record.targets[target]
				// The program writes an Ethernet header. The stack forwards over other links.
				if link, ok := engine.network.LinkTo(installed.IPs[family]); ok && link.Ethernet {
					content.Hops[fastpath.Target{FWMark: installed.FWMark, Family: vip.Family(family)}] = fastpath.Hop{
						Address: installed.IPs[family], Link: link.Index, MTU: link.MTU,
					}
				}
			}
		}
	}
	return content
}

// counters returns the packets that the fast path forwarded, by fwmark.
func (fast *accelerator) counters() (map[uint32]fastpath.Counter, error) {
	if fast.program == nil {
		return nil, nil
	}
	return fast.program.Counters()
}
