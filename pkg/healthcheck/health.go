package healthcheck

import (
	"cmp"
	"net/netip"
	"time"
)

// Key names one address of one target in one stream. Each stream checks it by its own check.
type Key struct {
	Stream, Name string
	Addr         netip.Addr
}

// Compare orders keys by stream, name and address.
func (k Key) Compare(l Key) int {
	return cmp.Or(cmp.Compare(k.Stream, l.Stream), cmp.Compare(k.Name, l.Name), k.Addr.Compare(l.Addr))
}

// State is the state of a target. Only Ready allows traffic to it.
type State uint8

// The states of a target. A [Checker] reports the first four.
const (
	Starting State = iota // no verdict yet: rise successes in a row lead to Ready, fall failures to NotReady
	Ready                 // fewer than fall checks in a row failed since
	NotReady              // fewer than rise checks in a row succeeded since
	Overdue               // no recent verdict: the last check is older than interval + timeout + 1 s
	Draining              // no new flows; existing flows continue until the drain ends
	Drained               // drained by an operator, and the drain is over
	Left                  // no longer a target; sent once, as the last state
)

// String returns the state in lower case, such as "not ready".
func (s State) String() string {
	return [...]string{"starting", "ready", "not ready", "overdue", "draining", "drained", "gone"}[s]
}

// Health is the state of a target at one moment.
type Health struct {
	Key
	State State
	// Since is when the state began.
	Since time.Time
	// LastCheck is when the last check with a verdict ended; zero before the first.
	LastCheck time.Time
	// Took is the duration of that check.
	Took time.Duration
	// LastError is the reason why the last check failed, or could not run; "" when it succeeded.
	LastError string
	// Deferred reports whether a target without a verdict waits for the source address of its checks.
	Deferred bool
}

// Evaluation lists the changes since the previous Evaluate.
type Evaluation struct {
	// Changed lists new targets, and targets whose state or Deferred changed.
	Changed []Health
	// Removed lists the targets that were reported before and are no longer configured.
	Removed []Key
	// Synced reports whether all targets of the first configuration had a verdict. It stays true.
	Synced bool
	// Stalled is how much later than a Heartbeat after the previous one this call was; 0 for at most
	// 50 ms, or without a Heartbeat.
	Stalled time.Duration
}
