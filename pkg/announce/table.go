package announce

import (
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Advertisement is how a VIP is to be advertised.
type Advertisement uint8

// The advertisements, ordered by how much traffic they attract. Any other value
// is taken for Withdrawn.
const (
	Withdrawn   Advertisement = iota
	Depreferred               // announced with GRACEFUL_SHUTDOWN (65535:0, RFC 8326)
	Announced                 // announced without a community
)

// String returns the advertisement in lower case.
func (a Advertisement) String() string {
	switch a {
	case Announced:
		return "announced"
	case Depreferred:
		return "depreferred"
	default:
		return "withdrawn"
	}
}

// Batch is one decision of the gate.
type Batch struct {
	// Changes holds every VIP whose advertisement the decision changes; VIPs
	// that are absent stay as they are. The zero VIP is ignored.
	Changes map[vip.VIP]Advertisement
	// Revision numbers the decision. It comes back in [State].Written once the
	// session has been sent everything up to it, also when that was nothing.
	Revision uint64
	// Cause is when the input arrived that led to the decision; zero if there is none.
	Cause time.Time
}

// pending is what was posted and not yet written: batches merged, newest wins.
// Its map is handed over whole, never cleared for reuse: clearing a map costs
// what it once held, and the next flip must not pay for an earlier flood.
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
	for v, a := range b.Changes {
		if v.IsZero() {
			continue
		}
		if a > Announced {
			a = Withdrawn
		}
		p.changes[v] = a
	}
	if !b.Cause.IsZero() && (p.cause.IsZero() || b.Cause.Before(p.cause)) {
		p.cause = b.Cause
	}
	p.revision = b.Revision
	p.posted = true
}

// table is what the peer is to advertise, and, while a session is synchronised,
// what it was told.
type table struct {
	adverts  map[vip.VIP]Advertisement // never Withdrawn
	count    [len(vip.Families)]int
	revision uint64 // of the newest batch applied
}

func newTable() table { return table{adverts: make(map[vip.VIP]Advertisement)} }

// apply brings the table up to p and calls changed for what differs from before.
func (t *table) apply(p pending, changed func(vip.VIP, Advertisement)) {
	if !p.posted {
		return
	}
	t.revision = p.revision
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
		changed(v, a)
	}
}
