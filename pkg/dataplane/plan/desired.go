package plan

import (
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Role says what a target is to do for one family.
type Role uint8

// The roles.
const (
	// Unknown leaves it as it is in the kernel; a target that is not there gets no
	// flows. It is for targets that were not checked yet.
	Unknown Role = iota
	// Down gets no flows: those that it had are spread over the others.
	Down
	// Draining keeps the flows that it has and gets no new ones.
	Draining
	// Serving gets new flows.
	Serving
)

// Target is one target of a stream.
type Target struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs []netip.Addr
	// Roles are by family; that of a family without an address is Down.
	Roles [len(vip.Families)]Role
}

// Stream is what the data plane is to do for one stream. It is never changed once
// made.
type Stream struct {
	Name string
	// VIPs are those whose packets are for this stream. Of two streams with the same
	// VIP the one whose name sorts first serves it.
	VIPs []vip.VIP
	// Size is the prime number of entries of a table, Seed the hash's, never 0.
	Size, Seed uint32
	// DrainTime is how long a target that serves keeps its flows when it is left out.
	DrainTime time.Duration
	// Targets have distinct names.
	Targets []Target
}

// Drift is one object in the kernel that another process removed or changed.
type Drift struct {
	// Object is what people look for, such as "rule fwmark 5003 (IPv4)".
	Object string
	// Stream and Target say whose it is; Target is "" when it is the stream's.
	Stream, Target string
	// Detail says what is different.
	Detail string
	Since  time.Time
}

// Problem is one thing that stands in the way.
type Problem struct {
	// Object is what it is about: a VIP, a stream, a target, a name in the kernel.
	Object string
	// Detail says what is wrong, and Remedy what to do about it.
	Detail, Remedy string
	// VIPs are those that are not served because of it.
	VIPs []vip.VIP
}
