package healthcheck

import (
	"cmp"
	"net/netip"
	"strconv"
	"time"
)

// Key names one address of one target in one stream. The same address in two
// streams is checked twice, by the check of each.
type Key struct {
	Stream, Name string
	Addr         netip.Addr
}

// Compare orders keys by stream, name and address.
func (k Key) Compare(l Key) int {
	return cmp.Or(cmp.Compare(k.Stream, l.Stream), cmp.Compare(k.Name, l.Name), k.Addr.Compare(l.Addr))
}

// State is what is known of a target. Only Ready allows traffic to it.
type State uint8

// The states of a target.
const (
	// Starting: no verdict yet. Rise successful checks in a row make it Ready, fall
	// failed ones NotReady.
	Starting State = iota
	// Ready: not since fall checks in a row failed.
	Ready
	// NotReady: not since rise checks in a row succeeded.
	NotReady
	// Overdue: the last check is older than interval + timeout + 1 s, so nothing
	// is known. It ends with the next check that ends.
	Overdue
	// Draining: no new flows, those it has go on until its drain end. A
	// [Checker] never says so.
	Draining
	// Drained: drained by an operator, and its drain end is over.
	Drained
	// Left: no target any longer. Only a last word has it.
	Left
)

// String returns the state in lower case, such as "not ready".
func (s State) String() string {
	switch s {
	case Starting:
		return "starting"
	case Ready:
		return "ready"
	case NotReady:
		return "not ready"
	case Overdue:
		return "overdue"
	case Draining:
		return "draining"
	case Drained:
		return "drained"
	case Left:
		return "gone"
	}
	return "State(" + strconv.Itoa(int(s)) + ")"
}

// Health is the state of a target at one moment.
type Health struct {
	Key
	State State
	// Since is when the state began.
	Since time.Time
	// LastCheck is when the last check ended that had a result for the target;
	// zero before the first.
	LastCheck time.Time
	// LastError is why the last check failed, or could not run; "" when it
	// succeeded.
	LastError string
	// Silent says that the last check failed because nothing answered at all: a
	// time-out, or no way to the target. A refused connection or a wrong answer is
	// not silent: the network is there.
	Silent bool
}

// Evaluation is what changed since the Evaluate before.
type Evaluation struct {
	// Changed holds the targets whose state is another one than at the last
	// Evaluate, those that are not ready and became silent or no longer are, and
	// every target that is new since.
	Changed []Health
	// Removed holds the targets that were in an Evaluation before and are no
	// longer configured.
	Removed []Key
	// Synced is true once the first configuration was applied and each of its
	// targets had a verdict. It stays true.
	Synced bool
}
