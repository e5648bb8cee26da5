package gate

import (
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Freshness is how current the load balancer's state is.
type Freshness uint8

// The degrees of freshness.
const (
	Lost  Freshness = iota // the grace period expired, or no synced data was received
	Stale                  // the lease expired and the grace period has not
	Live                   // the lease is valid
)

// String returns the freshness in lower case.
func (freshness Freshness) String() string { return [...]string{"lost", "stale", "live"}[freshness] }

// VIPState is the load balancer's state of one VIP.
type VIPState struct {
	VIP   vip.VIP
	State vip.State
	// DrainEnd is when forwarding ends; only with vip.Draining.
	DrainEnd time.Time
	// Reconfigured reports whether a new configuration caused the state, which is not a flap.
	Reconfigured bool
	// LastResort reports whether a VIP that is not ready is to stay advertised, with the worst
	// preference, if it was ready before.
	LastResort bool
	// Suspected reports whether probes beyond the gateways find a VIP dead that is ready.
	Suspected bool
	// Weight is the number of ready targets in tenths; 0 if the load balancer does not count them.
	Weight uint32
}

// LBUpdate holds the changes of the load balancer's state since the last one. All times are on
// the monotonic clock of this process.
type LBUpdate struct {
	// Instance is the instance ID of the load balancer; empty before the first synced data.
	Instance string
	// Revision is the revision of the state.
	Revision uint64
	// Live reports whether a synced stream of that instance is open.
	Live bool
	// LeaseEnd is the receipt of its newest message plus the lease.
	LeaseEnd time.Time
	// EndedAt is when that stream ended, if not Live.
	EndedAt time.Time
	// Grace is how long the data plane outlives the load balancer's process.
	Grace time.Duration
	// GoingAway reports whether the load balancer stops at DrainEnd.
	GoingAway bool
	DrainEnd  time.Time
	// Complete reports whether VIPs is the whole state: an absent VIP is not ready.
	Complete bool
	// Shared reports whether all VIPs have one state: its changes are not flaps of a VIP, and
	// damping would delay all of them together.
	Shared bool
	// VIPs holds states from synced data only.
	VIPs []VIPState
	// Removed holds VIPs that left the load balancer's state.
	Removed []vip.VIP
}

// Gateways is the state of the gateway sessions.
type Gateways struct {
	// At is when the state was read, or the speaker answered another request. It is valid for
	// Options.Silence and maxPollInterval.
	At time.Time
	// Up reports, by family, whether a session is up.
	Up [len(vip.Families)]bool
	// Static reports, by family, whether a static gateway is up. It forwards without announced routes.
	Static [len(vip.Families)]bool
	// Exported holds, by family, the VIPs that a gateway receives, while every gateway that is up
	// lacks some for longer than an export takes; nil otherwise. It must not be modified afterwards.
	Exported [len(vip.Families)]vip.Set
}

// Announcer is the state of the announcer's session with the routing daemon. While it is down,
// the daemon has no VIP and no gateway receives one.
type Announcer struct {
	Up    bool
	Since time.Time // when Up last changed; zero before the first session
}

// Accepted reports whether VIPs count as accepted by the routing daemon at now.
func (announcer Announcer) Accepted(now time.Time) bool {
	return announcer.Up || now.Before(announcer.reconnectEnd())
}

// reconnectEnd returns when VIPs count as withdrawn; zero if the session is up or never was.
func (announcer Announcer) reconnectEnd() time.Time {
	if announcer.Up || announcer.Since.IsZero() {
		return time.Time{}
	}
	return announcer.Since.Add(reconnectTime)
}

// reconnectTime is how long the announcer's session may be down before VIPs count as withdrawn:
// the duration of one reconnect. BIRD refuses connections for 1 s after a failed session (error
// wait time), and the announcer retries at intervals of at most 250 ms, with a timeout of 100 ms.
const reconnectTime = 1500 * time.Millisecond

// The state of the gateway sessions is valid until the answer to the next poll is overdue. It comes
// 9/8 s after the one before.
const (
	maxPollInterval = 1200 * time.Millisecond
	usualSilence    = 2 * time.Second
)

// lateAfter is the maximum delay of a timely lease check after the end of the lease. A later
// check indicates that this process was starved and that a renewal may wait in a socket buffer, or
// in a load balancer that was starved, too. The lease is then extended once by the delay, at most
// by maxExtension, and no VIP is raised in that time.
const (
	lateAfter    = 50 * time.Millisecond
	maxExtension = 200 * time.Millisecond
)

// LossPolicy is the action on the loss of the load balancer.
type LossPolicy uint8

// The policies.
const (
	WithdrawOnLoss LossPolicy = iota // when the grace period expires
	KeepOnLoss                       // keep the advertisements without limit
)

// Options configure a Gate.
type Options struct {
	// Ungated ignores the load balancer.
	Ungated bool
	// OnLoss is the action on the loss of the load balancer.
	OnLoss LossPolicy
	// NoFlapBackoff turns flap damping off.
	NoFlapBackoff bool
	// DrainTime is how long VIPs are de-preferred before they are withdrawn when the frontend stops
	// or an operator drains them.
	DrainTime time.Duration
	// Silence is how long the speaker may leave requests unanswered. Default: 2 s.
	Silence time.Duration
}
