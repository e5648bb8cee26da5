// Package plan is the pure part of the data plane: the model of streams and targets, from
// the desired state to the objects in the kernel, and the functions that compute Maglev
// tables, owners of VIPs, drift, and the changes of a stream. It has no I/O.
package plan

import (
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

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
}

// Equal reports whether both streams are the same; nil is equal to nil only.
func (s *Stream) Equal(t *Stream) bool {
	if s == nil || t == nil || s == t {
		return s == t
	}
	return s.Name == t.Name && s.Size == t.Size && s.Seed == t.Seed && s.DrainTime == t.DrainTime &&
		slices.Equal(s.VIPs, t.VIPs) && slices.EqualFunc(s.Targets, t.Targets, func(a, b Target) bool {
		return a.Name == b.Name && a.Roles == b.Roles && slices.Equal(a.IPs, b.IPs)
	})
}

// Problem is one condition that keeps the data plane from its desired state.
type Problem struct {
	// Object is a VIP, a stream, a target, or the name of an object in the kernel.
	Object string
	// Detail is what is wrong, Remedy what an operator can do.
	Detail, Remedy string
	// VIPs are not served because of the problem.
	VIPs []vip.VIP
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
