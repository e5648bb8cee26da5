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
	// Revision is returned in [State].
	Revision uint64
	// Streams are by name. One that did not change is the same pointer as before.
	Streams map[string]*Stream
	// RoutesOnly: before the first desired state, the targets get rules and routes, and nothing else
	// changes. Its revision is 0.
	RoutesOnly bool
}

// Role is the desired role of a target for one family.
type Role uint8

const (
	// Unknown keeps the role that the target has in the kernel, Down without one. It is
	// for targets without a health check result.
	Unknown Role = iota
	// Down gets no flows; its flows move to other targets.
	Down
	// Draining keeps the flows that it has and gets no new ones.
	Draining
	// Serving gets new flows.
	Serving
)

// Target is the desired state of one target of a stream.
type Target struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs []netip.Addr
	// Roles are by family; that of a family without an address is Down.
	Roles [len(vip.Families)]Role
}

// Stream is the desired state of one stream. It is immutable.
type Stream struct {
	Name string
	// VIPs are those that the stream serves. Of two streams with the same VIP the one
	// whose name sorts first serves it.
	VIPs []vip.VIP
	// Size is the number of entries of the Maglev table, a prime; Seed is the seed of
	// the hash, never 0.
	Size, Seed uint32
	// DrainTime is how long a serving target keeps its flows after its removal.
	DrainTime time.Duration
	// Targets have unique names.
	Targets []Target
	// Match has the ports whose packets are forwarded, sorted and unique; others are dropped,
	// except ICMP. Without ports all packets are forwarded.
	Match []Port
	// RouteAll: also targets that never served have a rule and routes, so that they can be
	// checked with their fwmark.
	RouteAll bool
}

// Equal reports whether both streams are the same; nil is equal to nil only.
func (s *Stream) Equal(t *Stream) bool {
	if s == nil || t == nil || s == t {
		return s == t
	}
	return s.Name == t.Name && s.Size == t.Size && s.Seed == t.Seed && s.DrainTime == t.DrainTime &&
		s.RouteAll == t.RouteAll && slices.Equal(s.VIPs, t.VIPs) && slices.Equal(s.Match, t.Match) &&
		slices.EqualFunc(s.Targets, t.Targets, func(a, b Target) bool {
			return a.Name == b.Name && a.Roles == b.Roles && slices.Equal(a.IPs, b.IPs)
		})
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
	Drift []Drift
	// Held are the streams whose drift is not repaired, "" for all of them, with the end
	// of each hold; the zero time is no end.
	Held map[string]time.Time
	// Repairs counts what was repaired since the start.
	Repairs uint64
	// Problems are the parts of the desired state that failed; the rest is applied.
	Problems []Problem
	// Withheld names by family the kernel parameter that drops the packets of every VIP,
	// with the command that corrects it; "" for none.
	Withheld [len(vip.Families)]string
	// Err is why the kernel cannot be read or changed at the moment, nil if it can.
	// Failures counts the attempts since, TotalFailures those since the start.
	Err           error
	Failures      int
	TotalFailures uint64
	At            time.Time
}

// StreamState is the confirmed state of one stream.
type StreamState struct {
	// Serving has the names of the targets that get new flows, by family: they are in the
	// Maglev map, and their rules and routes lead to them.
	Serving [len(vip.Families)]map[string]struct{}
	// Problem is by family why the stream does not forward although it has serving
	// targets; "" if it does.
	Problem [len(vip.Families)]string
	// FWMarks are the fwmarks whose rules and routes lead to the addresses of targets. Only of
	// streams with RouteAll, and before the first desired state.
	FWMarks map[netip.Addr]uint32
}

// Serves reports whether a target of a stream gets new flows.
func (s *State) Serves(stream string, f vip.Family, target string) bool {
	st := s.Streams[stream]
	if st == nil {
		return false
	}
	_, ok := st.Serving[f][target]
	return ok
}

// Equal reports whether both states forward the same. FWMarks do not matter for that.
func (s *StreamState) Equal(t *StreamState) bool {
	if s == nil || t == nil || s == t {
		return s == t
	}
	return s.Problem == t.Problem && slices.EqualFunc(s.Serving[:], t.Serving[:], maps.Equal)
}

// Problem is one condition that keeps the data plane from its desired state.
type Problem struct {
	// Object is a VIP, a stream, a target, or the name of an object in the kernel.
	Object string
	// Detail is what is wrong, Remedy what an operator can do.
	Detail, Remedy string
	// VIPs are not served because of the problem.
	VIPs []vip.VIP
	// Local: packets to these VIPs are delivered to this host.
	Local bool
}

// Key identifies the problem.
func (p Problem) Key() [2]string { return [2]string{p.Object, p.Detail} }

// Without returns the entries of a list whose keys another list lacks.
func Without[T any, K comparable](list, other []T, key func(T) K) []T {
	keys := make(map[K]bool, len(other))
	for _, x := range other {
		keys[key(x)] = true
	}
	return slices.DeleteFunc(slices.Clone(list), func(x T) bool { return keys[key(x)] })
}
