package record

import (
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Stage says how far the kernel is known to be as a record says.
type Stage uint8

// The stages, in their order.
const (
	// Pending: written down, and perhaps not or only partly in the kernel.
	Pending Stage = iota + 1
	// Applied: read back from the kernel.
	Applied
	// Removing: perhaps no longer or only partly in the kernel.
	Removing
)

// Target is one target of one stream, as it is in the kernel.
type Target struct {
	// Number is its firewall mark and its routing table. No two records share one.
	Number uint32
	// Stream and Name say which target it is. No two records share both.
	Stream, Name string
	// IPs are the next hops of its routing table, one or two, at most one of a family.
	IPs []netip.Addr
	// Flows says for which families the flows that it has, and those that a table
	// sends to it, reach it.
	Flows [len(vip.Families)]bool
	// DrainEnd is when its flows end although nobody asks for it any more, by the
	// wall clock; zero when it does not drain for that reason.
	DrainEnd time.Time
	Stage    Stage
}

// Stream is one stream, as it is in the kernel.
type Stream struct {
	Name string
	// VIPs are those whose packets go to the stream, in the order of vip.Compare.
	VIPs []vip.VIP
	// Size is the prime number of entries of each table, Seed the hash's, never 0.
	Size, Seed uint32
	// DrainTime is how long targets keep their flows that leave without a word.
	DrainTime time.Duration
	// Tables are the names of the targets, sorted, among which the table of each
	// family is divided; nil when there is no table for the family.
	Tables [len(vip.Families)][]string
	Stage  Stage
}

// Records is everything that is written down.
type Records struct {
	Targets map[uint32]Target
	Streams map[string]Stream
}

// Change is what one transaction writes: all of it or, after a crash, nothing.
type Change struct {
	Targets       []Target
	Streams       []Stream
	RemoveTargets []uint32
	RemoveStreams []string
}
