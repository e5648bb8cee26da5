package readiness

import (
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Limits of the protocol.
const (
	MaxVIPsPerMessage = 2000        // larger snapshots, deltas and reports are split
	MaxVIPs           = 200_000     // per peer
	MaxDetailBytes    = 256         // of VIPReadiness.Detail
	DefaultLease      = time.Second // default of TableOptions.Lease
	MaxLease          = time.Minute // a Watcher rejects longer leases
	minLease          = time.Millisecond
	maxStaleGrace     = 24 * time.Hour
	maxNameBytes      = 128

	// MaxMessageBytes is the receive limit of both sides. 2 000 VIPs with the longest details take
	// about 700 KiB.
	MaxMessageBytes = 1 << 20
	// flowWindow is the HTTP/2 window of a stream. A fixed window disables gRPC's BDP estimator, which
	// pings the peer for each message after a pause and doubles the cost of a heartbeat (grpc 1.85).
	flowWindow = 256 << 10
)

// VIPReadiness is the readiness of one VIP.
type VIPReadiness struct {
	VIP    vip.VIP
	State  vip.State
	Reason readinessv1.VipReason
	// Detail explains the reason to an operator in one line of at most MaxDetailBytes.
	Detail string
	// ReadyTargets and TotalTargets count the targets of the VIP's family in all its streams.
	ReadyTargets, TotalTargets uint32
	// WarmingTenths is by how many tenths of a target ReadyTargets count less in weights.
	WarmingTenths uint32
	// Since is the time when the VIP entered its state, on the load balancer's wall clock.
	// Table.Commit sets it if it is zero.
	Since time.Time
	// DrainEnd is the end of forwarding in state Draining, on the local clock. The wire has the rest.
	DrainEnd time.Time
}

// equal reports whether all fields are equal that a Server sends.
func (r *VIPReadiness) equal(o *VIPReadiness) bool {
	return r.VIP == o.VIP && r.State == o.State && r.Reason == o.Reason && r.Detail == o.Detail &&
		r.ReadyTargets == o.ReadyTargets && r.TotalTargets == o.TotalTargets &&
		r.WarmingTenths == o.WarmingTenths && r.Since.Equal(o.Since) && r.DrainEnd.Equal(o.DrainEnd)
}

// Position identifies a state in the total order of the states of a load balancer instance. The
// zero Position precedes all states.
type Position struct {
	InstanceID string // random for each start of the load balancer
	Revision   uint64 // counts the decisions of the instance, from 1
}

// VIPReport is the frontend's report of one VIP.
type VIPReport struct {
	Advertisement readinessv1.Advertisement
	Reason        readinessv1.AdvertisementReason
	// Unconfirmed reports whether a gateway session did not confirm the withdrawal in time, or a
	// static gateway still sends traffic to the VIP because other VIPs are advertised.
	Unconfirmed bool
}

// ReportedVIP is a VIP with the frontend's report of it.
type ReportedVIP struct {
	VIP vip.VIP
	VIPReport
}

// Role is the authorization of a peer on the readiness socket.
type Role uint8

// The roles of a peer.
const (
	RoleNone     Role = iota // permits nothing
	RoleReader               // permits WatchReadiness and GetReadiness
	RoleFrontend             // permits also ReportAdvertisement
)

// RolesOf returns a function from SPIFFE IDs to roles. An ID in both lists is a frontend.
func RolesOf(frontends, readers []spiffeid.ID) func(spiffeid.ID) Role {
	roles := make(map[spiffeid.ID]Role, len(frontends)+len(readers))
	for _, id := range readers {
		roles[id] = RoleReader
	}
	for _, id := range frontends {
		roles[id] = RoleFrontend
	}
	return func(id spiffeid.ID) Role { return roles[id] }
}
