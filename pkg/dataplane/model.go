package dataplane

import (
	"log/slog"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The model that planner, reconciler and kernel connection share.
type (
	// Role is what a target is to do for one family.
	Role = plan.Role
	// Target is one target of a stream.
	Target = plan.Target
	// Stream is the desired state of one stream.
	Stream = plan.Stream
	// Drift is one object in the kernel that another process removed or changed.
	Drift = plan.Drift
	// Problem is one thing that the data plane cannot do.
	Problem = plan.Problem
)

// The roles.
const (
	Unknown  = plan.Unknown
	Down     = plan.Down
	Draining = plan.Draining
	Serving  = plan.Serving
)

// TableName is the nftables table of the data plane, of the family inet.
const TableName = plan.TableName

// Defaults of [Options].
const (
	DefaultFirst    = fwstate.DefaultFirst
	DefaultMask     = fwstate.DefaultMask
	DefaultPriority = fwstate.DefaultPriority
)

// Options are the fwmarks, tables and rule priorities of the data plane in its network
// namespace, and its behavior. Zero fields have the defaults above, except where noted.
type Options struct {
	// First is the lowest fwmark, and routing table, of a target.
	First uint32
	// Mask has the bits of packet and connection marks that the data plane sets; the
	// others stay as they are.
	Mask uint32
	// Priority is that of the first policy rule; the next two belong to the data plane as
	// well.
	Priority int
	// Stateless switches connection tracking off: a flow moves whenever its entry in the
	// Maglev map does.
	Stateless bool
	// StateDir keeps holds over restarts; without it they are in memory only.
	StateDir string
	// OnRepair is called with the repaired objects. It must not block.
	OnRepair func([]Repaired)
	// CheckInterval is the time between two reads of the whole kernel state without
	// notifications; a minute by default.
	CheckInterval time.Duration
	Log           *slog.Logger
}

// Desired is the desired state of the data plane. It is immutable.
type Desired struct {
	// Revision is returned in [State].
	Revision uint64
	// Streams are by name. One that did not change is the same pointer as before.
	Streams map[string]*plan.Stream
}

// State is the confirmed state of the data plane in the kernel. It is immutable.
type State struct {
	// Revision is that of the newest [Desired] that was applied, with or without problems.
	Revision uint64
	// Streams are by name.
	Streams map[string]*StreamState
	// VIPs maps the VIPs that the kernel sends to a stream to its name.
	VIPs map[vip.VIP]string
	// Unreachable maps addresses of targets with a FAILED neighbor entry, or without a
	// connected network, to the reason.
	Unreachable map[netip.Addr]string
	// Drift has the objects that another process removed or changed and that are not
	// repaired: held, or in back-off.
	Drift []plan.Drift
	// Held are the streams whose drift is not repaired, "" for all of them, with the end
	// of each hold; the zero time is no end.
	Held map[string]time.Time
	// Repairs counts what was repaired since the start.
	Repairs uint64
	// Problems are the parts of the desired state that failed; the rest is applied.
	Problems []plan.Problem
	// Withheld names by family the kernel parameter that drops the packets of every VIP,
	// with the command that corrects it; "" for none.
	Withheld [len(vip.Families)]string
	// Err is why the kernel cannot be read or changed at the moment, nil if it can.
	// Failures counts the attempts since.
	Err      error
	Failures int
	At       time.Time
}

// StreamState is the confirmed state of one stream.
type StreamState struct {
	// Serving has the names of the targets that get new flows, by family: they are in the
	// Maglev map, and their rules and routes lead to them.
	Serving [len(vip.Families)]map[string]struct{}
	// Problem is by family why the stream does not forward although it has serving
	// targets; "" if it does.
	Problem [len(vip.Families)]string
}

// TargetView describes one target in the kernel for operators.
type TargetView struct {
	Stream, Target string
	FWMark         uint32
	IPs            []netip.Addr
	// State is one of serving, draining, down, pending, removing, drifted.
	State string
	// Entries counts its entries in the Maglev maps, by family.
	Entries [len(vip.Families)]int
	// Packets and Bytes were sent to it since its chain was created.
	Packets, Bytes uint64
	DrainEnd       time.Time
}
