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

// Options says which numbers of the network namespace are ours. Zero fields have
// the defaults above, except where said otherwise.
type Options struct {
	// First is the first number that a target may have as its mark and its table.
	First uint32
	// Mask holds the bits of packet marks and connection marks that are ours; the
	// others stay as they are.
	Mask uint32
	// Priority is that of the first of our rules; the next two numbers are ours as
	// well.
	Priority int
	// Stateless switches connection tracking off: a flow moves whenever its entry in
	// the table does.
	Stateless bool
	// StateDir is where holds are kept over restarts; "" keeps them in memory.
	StateDir string
	// OnRepair is called with what was restored. It must not block.
	OnRepair func([]Repaired)
	// CheckInterval is the time between two looks at the whole kernel state when
	// nothing is reported; a minute by default.
	CheckInterval time.Duration
	Log           *slog.Logger
}

// Desired is what the data plane is to do. It is never changed once made.
type Desired struct {
	// Revision is handed back in [State].
	Revision uint64
	// Streams are by name. One that did not change is the same pointer as before.
	Streams map[string]*plan.Stream
}

// State is what is known to be in the kernel. It is never changed once made.
type State struct {
	// Revision is that of the newest Wanted that was dealt with, well or badly.
	Revision uint64
	// Streams are by name.
	Streams map[string]*StreamState
	// VIPs are those whose packets are known to go to a stream, with its name.
	VIPs map[vip.VIP]string
	// Unreachable are addresses of targets whose neighbour state is FAILED, or to
	// which no link leads, with the reason for people.
	Unreachable map[netip.Addr]string
	// Drift is what another process removed or changed and what is not repaired: of held
	// streams, or for now.
	Drift []plan.Drift
	// Held are the streams whose drift is not repaired, "" for all of them, with the end
	// of each hold; the zero time is no end.
	Held map[string]time.Time
	// Repairs counts what was repaired since the start.
	Repairs uint64
	// Problems are what could not be done, each about one thing; the rest is done.
	Problems []plan.Problem
	// Withheld says by family which kernel parameter drops the packets of every VIP,
	// with the command that corrects it; "" for none.
	Withheld [len(vip.Families)]string
	// Err says why nothing can be changed at the moment; nil when all is well. Failures
	// counts the attempts since.
	Err      error
	Failures int
	At       time.Time
}

// StreamState is what is known to be in the kernel of one stream.
type StreamState struct {
	// Serving are the names of the targets, by family, that get new flows: they are
	// in the table, and their rules and routes lead to them.
	Serving [len(vip.Families)]map[string]struct{}
	// Problem says by family why the stream does not forward although it has
	// targets that serve; "" when it does.
	Problem [len(vip.Families)]string
}

// TargetView is one target in the kernel for people.
type TargetView struct {
	Stream, Target string
	FWMark         uint32
	IPs            []netip.Addr
	// State is one of serving, draining, down, pending, removing, drifted.
	State string
	// Entries are how many entries of its stream's tables are its, by family.
	Entries [len(vip.Families)]int
	// Packets and Bytes were sent to it since its chain was made.
	Packets, Bytes uint64
	DrainEnd       time.Time
}
