package plan

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Desired is the desired state of the data plane. It is immutable.
type Desired struct {
	// Revision identifies the desired state in [State].
	Revision uint64
	// Streams is keyed by name. An unchanged stream keeps its pointer.
	Streams map[string]*Stream
	// RoutesOnly installs only the rules and routes of targets, before the first complete desired
	// state. Its revision is 0.
	RoutesOnly bool
}

// Role is the desired role of a target for one family.
type Role uint8

const (
	// Unknown keeps the role that is installed in the kernel, or Down without one. It applies
	// to targets without a health check result.
	Unknown Role = iota
	// Down receives no flows; its flows move to other targets.
	Down
	// Draining keeps established flows and receives no new ones.
	Draining
	// Serving receives new flows.
	Serving
)

// Target is the desired state of one target of a stream.
type Target struct {
	Name string
	// IPs holds one or two addresses, at most one per family.
	IPs []netip.Addr
	// Roles maps each family to its role. A family without an address is Down.
	Roles [len(vip.Families)]Role
}

// Stream is the desired state of one stream. It is immutable.
type Stream struct {
	Name string
	// VIPs lists the VIPs of the stream. If two streams list the same VIP, the stream whose name
	// sorts first serves it.
	VIPs []vip.VIP
	// Size is the prime number of Maglev table entries. Seed is the seed of the hash, never 0.
	Size, Seed uint32
	// DrainTime is how long a serving target keeps its flows after its removal.
	DrainTime time.Duration
	// Targets have unique names.
	Targets []Target
	// Match lists the forwarded ports, sorted and unique. Packets to any other port are dropped,
	// except ICMP. An empty list forwards all packets.
	Match []Port
	// Prepare installs the Maglev map of a family although the stream has no VIP of it yet: another
	// stream serves the VIPs until the kernel is confirmed to have the map.
	Prepare [len(vip.Families)]bool
	// Earlier holds the sets of targets by family whose flows may be open, from the trench file.
	Earlier [][len(vip.Families)][]string
	// RouteAll installs a rule and routes also for targets that never served, so that health
	// checks can use their fwmarks.
	RouteAll bool
}

// Equal reports whether both streams are equal; nil equals nil only.
func (s *Stream) Equal(t *Stream) bool {
	if s == nil || t == nil || s == t {
		return s == t
	}
	return s.Name == t.Name && s.Size == t.Size && s.Seed == t.Seed && s.DrainTime == t.DrainTime &&
		s.RouteAll == t.RouteAll && s.Prepare == t.Prepare &&
		s.SameEarlier(t) && slices.Equal(s.VIPs, t.VIPs) && slices.Equal(s.Match, t.Match) &&
		slices.EqualFunc(s.Targets, t.Targets, func(a, b Target) bool {
			return a.Name == b.Name && a.Roles == b.Roles && slices.Equal(a.IPs, b.IPs)
		})
}

// SameEarlier reports whether two streams have the same earlier sets of targets; nil has none.
func (s *Stream) SameEarlier(t *Stream) bool {
	if s == nil || t == nil {
		return s == t
	}
	return slices.EqualFunc(s.Earlier, t.Earlier, sameTables)
}

// State is the confirmed state of the data plane in the kernel. It is immutable.
type State struct {
	// Revision identifies the newest [Desired] that was applied, with or without problems.
	Revision uint64
	// Streams is keyed by name.
	Streams map[string]*StreamState
	// VIPs maps each VIP with an element in the kernel to its stream.
	VIPs map[vip.VIP]string
	// Unreachable maps addresses of targets with a FAILED neighbor entry, or without a
	// connected network, to the reason.
	Unreachable map[netip.Addr]string
	// Drift lists the objects that another process removed or changed and whose repair is
	// held or in back-off.
	Drift []Drift
	// Held maps streams whose drift is not repaired, or "" for all streams, to the end of the
	// hold. The zero time is an unlimited hold.
	Held map[string]time.Time
	// Repairs counts the objects repaired since the start.
	Repairs uint64
	// Problems lists the parts of the desired state that failed; all other parts are applied.
	Problems []Problem
	// Withheld names by family the kernel parameter that drops the packets of every VIP,
	// with the command that corrects it; "" for none.
	Withheld [len(vip.Families)]string
	// Err is the reason why the kernel state cannot be read or changed, nil if it can.
	// Failures counts consecutive failed attempts, TotalFailures all failures since the start.
	Err           error
	Failures      int
	TotalFailures uint64
	At            time.Time
}

// StreamState is the confirmed state of one stream.
type StreamState struct {
	// Serving holds, by family, the names of the targets that receive new flows: they have
	// entries in the Maglev map, and their rules and routes are installed.
	Serving [len(vip.Families)]map[string]struct{}
	// Problem is why, by family, a stream with serving targets does not forward; "" if it does.
	Problem [len(vip.Families)]string
	// FWMarks maps addresses of targets to fwmarks whose rules and routes are installed. It is
	// set only for streams with RouteAll, and before the first desired state.
	FWMarks map[netip.Addr]uint32
}

// Serves reports whether a target of a stream receives new flows.
func (s *State) Serves(stream string, family vip.Family, target string) bool {
	st := s.Streams[stream]
	if st == nil {
		return false
	}
	_, ok := st.Serving[family][target]
	return ok
}

// Equal reports whether both states forward identically, ignoring FWMarks.
func (s *StreamState) Equal(t *StreamState) bool {
	if s == nil || t == nil || s == t {
		return s == t
	}
	return s.Problem == t.Problem && slices.EqualFunc(s.Serving[:], t.Serving[:], maps.Equal)
}

// Problem is one condition that prevents the desired state.
type Problem struct {
	// Object names a VIP, a stream, a target, or a kernel object.
	Object string
	// Detail describes the fault, Remedy the operator's action.
	Detail, Remedy string
	// VIPs lists the VIPs that are not served because of the problem.
	VIPs []vip.VIP
	// Local: packets to these VIPs are delivered to this host.
	Local bool
}

// Key identifies the problem.
func (problem Problem) Key() [2]string { return [2]string{problem.Object, problem.Detail} }

// Without returns the entries of list whose keys are not in other.
func Without[T any, K comparable](list, other []T, key func(T) K) []T {
	keys := make(map[K]bool, len(other))
	for _, x := range other {
		keys[key(x)] = true
	}
	return slices.DeleteFunc(slices.Clone(list), func(x T) bool { return keys[key(x)] })
}
