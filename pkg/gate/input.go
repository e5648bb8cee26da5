package gate

import (
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Said is what the load balancer said of a VIP in synced data.
type Said uint8

// What the load balancer can have said.
const (
	// SaidNever means that no synced data was ever heard.
	SaidNever Said = iota
	// SaidNotReady means not ready, or absent from a synced snapshot.
	SaidNotReady
	// SaidReady means ready.
	SaidReady
	// SaidDraining means that it forwards for a limited time.
	SaidDraining
)

// Freshness is how much the load balancer's word is worth.
type Freshness uint8

// The degrees of freshness.
const (
	// Lost means that the grace is over, or that nothing was ever heard.
	Lost Freshness = iota
	// Stale means that the lease ended and the grace runs.
	Stale
	// Live means that the lease holds.
	Live
)

// String returns the freshness in lower case.
func (f Freshness) String() string {
	switch f {
	case Live:
		return "live"
	case Stale:
		return "stale"
	default:
		return "lost"
	}
}

// Word is what the load balancer says of one VIP.
type Word struct {
	VIP vip.VIP
	// Said is never SaidNever.
	Said Said
	// DrainEnd is when forwarding ends; only with SaidDraining.
	DrainEnd time.Time
}

// Heard is what came from the load balancer since the last Heard. All times are
// on the monotonic clock of this process.
type Heard struct {
	// Instance names the load balancer's process that the words are from; empty
	// while nothing synced was ever heard.
	Instance string
	// Revision is the position of the words.
	Revision uint64
	// Live tells that an open stream of that instance, synced, stands behind
	// the words.
	Live bool
	// LeaseEnd is the receipt of its newest message plus the lease.
	LeaseEnd time.Time
	// EndedAt is when that stream ended, if not Live.
	EndedAt time.Time
	// Grace is how long the data plane outlives the load balancer's process.
	Grace time.Duration
	// GoingAway tells that the load balancer stops at DrainEnd.
	GoingAway bool
	DrainEnd  time.Time
	// Complete tells that Words are the whole synced state: a VIP that is
	// absent is not ready.
	Complete bool
	// Words are from synced data only.
	Words []Word
	// Removed are VIPs that the load balancer no longer knows.
	Removed []vip.VIP
}

// Gateways is the state of the gateway sessions.
type Gateways struct {
	// At is when the state was confirmed. After [MaxSessionAge] it counts for nothing.
	At time.Time
	// Up tells, by family, whether a session is up.
	Up [len(vip.Families)]bool
}

// MaxSessionAge is how old the state of the gateway sessions may be (design
// section 4): three missed polls of one second.
const MaxSessionAge = 3 * time.Second

// lateAfter is how much later than its deadline a look at a lease must come to
// mean that this process was starved: the renewal may wait to be read, so the
// lease gets lateAfter more, once, in which nothing is raised.
const lateAfter = 50 * time.Millisecond

// LossPolicy is what to do with VIPs when the load balancer is lost.
type LossPolicy uint8

// The policies.
const (
	// WithdrawOnLoss withdraws them when the grace is over.
	WithdrawOnLoss LossPolicy = iota
	// KeepOnLoss leaves them as they are, without limit.
	KeepOnLoss
)

// Options configure a Gate.
type Options struct {
	// Ungated ignores the load balancer altogether.
	Ungated bool
	// OnLoss is what happens when the load balancer is lost.
	OnLoss LossPolicy
	// NoFlapBackoff lets flapping VIPs rise at once.
	NoFlapBackoff bool
	// DrainTime is how long VIPs are de-preferred before they are withdrawn
	// when the frontend stops or an operator drains them.
	DrainTime time.Duration
}
