package readiness

import (
	"fmt"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Limits of the protocol (design, section 4).
const (
	// MaxVIPsPerMessage is how many VIPs one message may hold; larger snapshots,
	// deltas and reports travel in parts.
	MaxVIPsPerMessage = 2000
	// vipsPerPart is how many VIPs our own parts hold: such a message fits the
	// 32 KiB buffers of grpc's pool, and the next larger ones take 1 MiB each
	// (grpc 1.85; 8 MiB of a frontend with 10 000 VIPs were such buffers).
	vipsPerPart = 200
	// MaxVIPs is how many VIPs one peer may speak of before it counts as hostile.
	MaxVIPs = 200_000
	// MaxMessageBytes is the receive limit of both sides. 2 000 VIPs with the
	// longest details take about 700 KiB.
	MaxMessageBytes = 1 << 20
	// MaxDetailBytes is the longest VIPReadiness.Detail that is sent.
	MaxDetailBytes = 256
	// DefaultLease is the lease of a Table that was given none.
	DefaultLease = time.Second
	// MaxLease is the longest lease that a Watcher believes.
	MaxLease = time.Minute

	// flowWindow is how many bytes of a stream may be on their way. It is fixed:
	// grpc's estimate of a better one pings the peer for each message that comes
	// after a pause, which doubles the work of a heartbeat (grpc 1.85).
	flowWindow = 256 << 10

	minLease      = time.Millisecond
	maxStaleGrace = 24 * time.Hour
	maxNameBytes  = 128
)

// State is what the load balancer says about a VIP. The zero State is NotReady.
type State uint8

// The states of a VIP.
const (
	// NotReady: traffic to the VIP would be lost.
	NotReady State = iota
	// Ready: traffic to the VIP can be forwarded to a target.
	Ready
	// Draining: traffic is still forwarded, but only until VIPReadiness.DrainEnd.
	Draining
)

// String returns "not ready", "ready" or "draining".
func (s State) String() string {
	switch s {
	case NotReady:
		return "not ready"
	case Ready:
		return "ready"
	case Draining:
		return "draining"
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// VIPReadiness is the readiness of one VIP.
type VIPReadiness struct {
	VIP    vip.VIP
	State  State
	Reason readinessv1.VipReason
	// Detail is the reason for people, at most MaxDetailBytes of one line.
	Detail string
	// ReadyTargets and TotalTargets count the targets of the VIP's family over
	// all streams that serve it.
	ReadyTargets, TotalTargets uint32
	// Since is when the VIP got its state, by the wall clock of the load
	// balancer, for people. Table.Commit fills it in when it is zero.
	Since time.Time
	// DrainEnd says with Draining until when traffic is forwarded, on the clock
	// of the process that holds the value. The wire carries the time left.
	DrainEnd time.Time
}

// equal tells whether nothing that is told to readers differs.
func (r VIPReadiness) equal(o VIPReadiness) bool {
	return r.VIP == o.VIP && r.State == o.State && r.Reason == o.Reason && r.Detail == o.Detail &&
		r.ReadyTargets == o.ReadyTargets && r.TotalTargets == o.TotalTargets &&
		r.Since.Equal(o.Since) && r.DrainEnd.Equal(o.DrainEnd)
}

// Position places a state in the total order of one load balancer instance.
// The zero Position stands for "nothing yet".
type Position struct {
	// InstanceID is chosen at random by each start of the load balancer.
	InstanceID string
	// Revision counts the decisions of the instance, from 1.
	Revision uint64
}

// VIPReport is what the frontend says that it does with a VIP.
type VIPReport struct {
	Advertisement readinessv1.Advertisement
	Reason        readinessv1.AdvertisementReason
	// Unconfirmed says with WITHDRAWN that the gateways' sessions did not show
	// the withdrawal in time.
	Unconfirmed bool
}

// advertised tells whether gateways are still told to use the VIP.
func (r VIPReport) advertised() bool {
	return r.Advertisement != readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
}

// Role is what a peer may do on the readiness socket.
type Role uint8

// The roles of a peer.
const (
	// RoleNone may do nothing.
	RoleNone Role = iota
	// RoleReader may watch and get.
	RoleReader
	// RoleFrontend may also report.
	RoleFrontend
)

// RolesOf returns a function that gives the role of a peer by its exact SPIFFE
// ID. An ID in both lists is a frontend.
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
