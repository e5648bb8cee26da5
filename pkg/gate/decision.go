package gate

import "github.com/vipgate/vipgate/pkg/vip"

// Advertisement is how a VIP is advertised to the gateways.
type Advertisement uint8

// The advertisements, ordered by how much traffic they attract.
const (
	// Withdrawn means not advertised.
	Withdrawn Advertisement = iota
	// Depreferred means advertised with GRACEFUL_SHUTDOWN (RFC 8326): gateways prefer other paths.
	Depreferred
	// Announced means advertised.
	Announced
)

// String returns the advertisement in lower case, for logs and metric labels.
func (a Advertisement) String() string {
	switch a {
	case Withdrawn:
		return "withdrawn"
	case Depreferred:
		return "depreferred"
	case Announced:
		return "announced"
	}
	return "invalid"
}

// Reason is the row of the decision table that applied.
type Reason uint8

// The reasons, in the order of the table: the first that applies wins.
const (
	// NotConfigured: the VIP is not in the attractor.
	NotConfigured Reason = iota
	// LBNeverSeen: no synced data of a load balancer was received.
	LBNeverSeen
	// LBNotReady: the load balancer reports that the VIP is not ready.
	LBNotReady
	// NoSourceRouting: the VIP's source routing is not installed in the kernel.
	NoSourceRouting
	// NoGateway: no gateway of the VIP's family is up.
	NoGateway
	// LBLost: the lease and the grace period expired.
	LBLost
	// Stopping: the frontend is stopping.
	Stopping
	// Drained: an operator drained the VIP.
	Drained
	// LBDraining: the load balancer is stopping or drains the VIP.
	LBDraining
	// LBStale: the lease expired, the grace period has not.
	LBStale
	// Flapping: the VIP became ready too often and waits.
	Flapping
	// Ready: no other reason applies.
	Ready
)

// Reasons lists every reason.
var Reasons = [...]Reason{
	NotConfigured, LBNeverSeen, LBNotReady, NoSourceRouting, NoGateway, LBLost, Stopping,
	Drained, LBDraining, LBStale, Flapping, Ready,
}

var reasonNames = [...]string{
	"not_configured", "lb_never_seen", "lb_not_ready", "no_source_routing", "no_gateway", "lb_lost",
	"stopping", "drained", "lb_draining", "lb_stale", "flapping", "ready",
}

// String returns the reason in lower case, for logs and metric labels.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return "invalid"
}

// Decision is the advertisement of one VIP and its reason.
type Decision struct {
	Advertisement Advertisement
	Reason        Reason
}

// Change is one VIP whose decision changed.
type Change struct {
	VIP      vip.VIP
	From, To Decision
}
