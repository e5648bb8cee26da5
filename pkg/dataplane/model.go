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
	// Desired is the desired state of the data plane.
	Desired = plan.Desired
	// State is the confirmed state of the data plane in the kernel.
	State = plan.State
	// StreamState is the confirmed state of one stream.
	StreamState = plan.StreamState
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
