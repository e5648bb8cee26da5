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
}

// Equal reports whether both states are the same.
func (s *StreamState) Equal(t *StreamState) bool {
	if s == nil || t == nil || s == t {
		return s == t
	}
	return s.Problem == t.Problem && slices.EqualFunc(s.Serving[:], t.Serving[:], maps.Equal)
}
