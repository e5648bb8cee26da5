package gate

import "github.com/vipgate/vipgate/pkg/vip"

// Advertisement is how a VIP is advertised to the gateways.
type Advertisement uint8

// The advertisements, ordered by how much traffic they attract.
const (
	Withdrawn   Advertisement = iota // not advertised
	Depreferred                      // advertised with GRACEFUL_SHUTDOWN (RFC 8326): gateways prefer other paths
	Announced                        // advertised
)

// String returns the advertisement in lower case, for logs and metric labels.
func (advertisement Advertisement) String() string {
	return [...]string{"withdrawn", "depreferred", "announced"}[advertisement]
}

// Reason is the row of the decision table that applied.
type Reason uint8

// The reasons, in the order of the table: the first that applies wins.
const (
	NotConfigured   Reason = iota // the VIP is not in the attractor
	LBNeverSeen                   // no synced data of a load balancer was received
	LBNotReady                    // the load balancer reports that the VIP is not ready
	NoSourceRouting               // the VIP's source routing is not installed in the kernel
	NoGateway                     // no gateway of the VIP's family is up
	NotAccepted                   // the routing daemon accepts no VIPs, and no static gateway is up
	LBLost                        // the lease and the grace period expired
	Stopping                      // the frontend is stopping
	Drained                       // an operator drained the VIP
	LBDraining                    // the load balancer is stopping or drains the VIP
	LBStale                       // the lease expired, the grace period has not
	LastResort                    // too few targets are ready, and the load balancer forwards all the same
	Flapping                      // the VIP became ready too often and waits
	Suspected                     // probes beyond the gateways find the VIP dead through this pod
	NotExported                   // the routing daemon exports the VIP to no gateway
	Ready                         // no other reason applies
)

// String returns the reason in lower case, for logs and metric labels.
func (reason Reason) String() string {
	return [...]string{
		"not_configured", "lb_never_seen", "lb_not_ready", "no_source_routing", "no_gateway", "not_accepted",
		"lb_lost", "stopping", "drained", "lb_draining", "lb_stale", "last_resort", "flapping", "probes",
		"not_exported", "ready",
	}[reason]
}

// Decision is the advertisement of one VIP and its reason.
type Decision struct {
	Advertisement Advertisement
	Reason        Reason
	// Weight is the number of ready targets of an advertised VIP, if weights are in use.
	Weight uint32
}

// Advertised reports whether gateways receive the VIP.
func (decision Decision) Advertised() bool {
	return decision.Advertisement != Withdrawn && decision.Reason != NotExported
}

// Change is one VIP whose decision changed.
type Change struct {
	VIP      vip.VIP
	From, To Decision
}

// IsWeight reports whether nothing but the weight changed.
func (change Change) IsWeight() bool {
	change.From.Weight = change.To.Weight
	return change.From == change.To
}
