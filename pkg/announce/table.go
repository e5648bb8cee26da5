package announce

import (
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Advertisement is how a VIP is advertised. Any unknown value means Withdrawn.
type Advertisement = gate.Advertisement

// The advertisements, ordered by how much traffic they attract.
const (
	Withdrawn   = gate.Withdrawn
	Depreferred = gate.Depreferred // with GRACEFUL_SHUTDOWN (65535:0, RFC 8326)
	Announced   = gate.Announced   // without a community
)

// Change is the new advertisement of one VIP.
type Change struct {
	VIP           vip.VIP
	Advertisement Advertisement
}

// Batch is one decision of the gate.
type Batch struct {
	// Changes holds every VIP whose advertisement changes, no VIP twice, in any order; absent VIPs
	// are unchanged. The zero VIP is ignored.
	Changes []Change
	// Revision is the number of the decision. [State].Written returns it once everything up to it
	// was sent, also when there was nothing to send.
	Revision uint64
	// Cause is the receipt of the input that led to the decision; zero if there is none.
	Cause time.Time
}

// pending holds posted batches that are not written yet, merged per VIP (newest wins). A new one
// gets a new map: clearing a large map would slow down later changes of one VIP.
type pending struct {
	changes  map[vip.VIP]Advertisement
	revision uint64
	cause    time.Time // the oldest
	posted   bool
}

func (p *pending) merge(b Batch) {
	if p.changes == nil {
		p.changes = make(map[vip.VIP]Advertisement, len(b.Changes))
	}
	for _, c := range b.Changes {
		if c.Advertisement > Announced {
			c.Advertisement = Withdrawn
		}
		if !c.VIP.IsZero() {
			p.changes[c.VIP] = c.Advertisement
		}
	}
	if !b.Cause.IsZero() && (p.cause.IsZero() || b.Cause.Before(p.cause)) {
		p.cause = b.Cause
	}
	p.revision, p.posted = b.Revision, true
}

// table holds the announced VIPs.
type table struct {
	adverts  map[vip.VIP]Advertisement // never Withdrawn
	count    [len(vip.Families)]int
	revision uint64 // of the newest batch applied
}

func newTable() table { return table{adverts: make(map[vip.VIP]Advertisement)} }

// apply applies p to the table and returns the differences.
func (t *table) apply(p pending) *changes {
	var c changes
	if p.posted {
		t.revision = p.revision
	}
	for v, a := range p.changes {
		before := t.adverts[v] // Withdrawn if absent
		if a == before {
			continue
		}
		if a == Withdrawn {
			delete(t.adverts, v)
		} else {
			t.adverts[v] = a
		}
		if before == Withdrawn {
			t.count[v.Family()]++
		} else if a == Withdrawn {
			t.count[v.Family()]--
		}
		c.add(v, a)
	}
	return &c
}
