package gate

import "github.com/vipgate/vipgate/pkg/vip"

// Advertisement is what is done with a VIP toward the gateways.
type Advertisement uint8

// The advertisements, ordered by how much traffic they attract.
const (
	// Withdrawn means not advertised.
	Withdrawn Advertisement = iota
	// Depreferred means advertised with GRACEFUL_SHUTDOWN (RFC 8326): gateways
	// that have another path take it.
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

// Reason is the row of the gate's table that decided.
type Reason uint8

// The reasons, in the order of the table: the first that holds wins.
const (
	// NotConfigured: the VIP is not in the attractor.
	NotConfigured Reason = iota
	// LBNeverSeen: no load balancer ever said anything in synced data.
	LBNeverSeen
	// LBNotReady: the load balancer's last word is that the VIP is not ready.
	LBNotReady
	// NoSourceRouting: the VIP's source routing is not confirmed in the kernel.
	NoSourceRouting
	// NoGateway: no gateway of the VIP's family is up.
	NoGateway
	// LBLost: the lease ended and the grace is over.
	LBLost
	// Stopping: the frontend stops.
	Stopping
	// Drained: an operator drained the VIP.
	Drained
	// LBDraining: the load balancer goes away, or drains the VIP.
	LBDraining
	// LBStale: the lease ended, the grace runs.
	LBStale
	// Flapping: the VIP rose too often and waits.
	Flapping
	// Ready: nothing speaks against it.
	Ready
)

// Reasons lists every reason.
var Reasons = [...]Reason{NotConfigured, LBNeverSeen, LBNotReady, NoSourceRouting, NoGateway, LBLost, Stopping, Drained, LBDraining, LBStale, Flapping, Ready}

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

// Decision is what is done with one VIP, and why.
type Decision struct {
	Advertisement Advertisement
	Reason        Reason
}

// Change is one VIP whose decision changed.
type Change struct {
	VIP      vip.VIP
	From, To Decision
}
