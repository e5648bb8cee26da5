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

// table holds the posted and the sent advertisement of each VIP.
type table struct {
	// adverts keeps withdrawn VIPs, so that a VIP that comes and goes allocates nothing.
	adverts map[vip.VIP]*advert
	// withdrawn is the number of adverts with a posted withdrawal. Beyond limit they are removed, so
	// that VIPs that left the configuration do not accumulate.
	withdrawn, limit int
	revision         uint64 // of the newest batch
	// sent is the number of VIPs that are advertised to the peer, by family.
	sent [len(vip.Families)]int

	// Since the last write of changes:
	queue  []*advert // posted, each once
	posted bool
	cause  time.Time // the oldest
}

// advert is the advertisement of one VIP.
type advert struct {
	vip    vip.VIP
	to     Advertisement // posted last
	sent   Advertisement // sent to the peer in this session
	queued bool          // in table.queue
}

// minWithdrawn is the minimum of table.limit.
const minWithdrawn = 1024

func newTable() table { return table{adverts: make(map[vip.VIP]*advert), limit: minWithdrawn} }

// post stores a batch and, if queue is set, queues its changes for the session.
func (t *table) post(b Batch, queue bool) {
	for _, c := range b.Changes {
		to := c.Advertisement
		if to > Announced {
			to = Withdrawn
		}
		a := t.adverts[c.VIP]
		switch {
		case a == nil && (to == Withdrawn || c.VIP.IsZero()):
			continue
		case a == nil:
			a = &advert{vip: c.VIP}
			t.adverts[c.VIP] = a
			t.withdrawn++
		}
		if (to == Withdrawn) != (a.to == Withdrawn) {
			if to == Withdrawn {
				t.withdrawn++
			} else {
				t.withdrawn--
			}
		}
		a.to = to
		if queue && !a.queued {
			a.queued = true
			t.queue = append(t.queue, a)
		}
	}
	t.revision = b.Revision
	if queue {
		t.posted = true
		if !b.Cause.IsZero() && (t.cause.IsZero() || b.Cause.Before(t.cause)) {
			t.cause = b.Cause
		}
	}
	t.limit = max(t.limit, 2*(len(t.adverts)-t.withdrawn))
	if t.withdrawn > t.limit {
		t.removeWithdrawn(queue)
	}
}

// removeWithdrawn removes the withdrawn VIPs, except those that the peer of a current session
// still holds. It replaces the map, since a map never shrinks.
func (t *table) removeWithdrawn(session bool) {
	adverts := make(map[vip.VIP]*advert, len(t.adverts)-t.withdrawn)
	t.withdrawn = 0
	for v, a := range t.adverts {
		switch {
		case a.to != Withdrawn:
			adverts[v] = a
		case session && (a.queued || a.sent != Withdrawn):
			adverts[v] = a
			t.withdrawn++
		}
	}
	t.adverts = adverts
	t.limit = max(minWithdrawn, 2*len(adverts))
}

// takeChanges moves the queued changes to c and marks them as sent. It skips VIPs whose posted
// advertisement equals the sent one.
func (t *table) takeChanges(c *changes) {
	for _, a := range t.queue {
		a.queued = false
		if a.to != a.sent {
			t.count(a.vip, a.sent, a.to)
			a.sent = a.to
			c.add(a.vip, a.to)
		}
	}
	t.discardQueue()
}

// takeAll adds every advertised VIP to c and marks it as sent: a new peer has no routes yet.
func (t *table) takeAll(c *changes) {
	t.sent = [len(vip.Families)]int{}
	for _, a := range t.adverts {
		a.sent, a.queued = a.to, false
		t.count(a.vip, Withdrawn, a.to)
		if a.to != Withdrawn {
			c.add(a.vip, a.to)
		}
	}
	t.discardQueue()
}

// repeat adds the sent advertisements of a family to c.
func (t *table) repeat(f vip.Family, c *changes) {
	for _, a := range t.adverts {
		if a.sent != Withdrawn && a.vip.Family() == f {
			c.add(a.vip, a.sent)
		}
	}
}

// endSession discards the changes that are queued for the session.
func (t *table) endSession() {
	for _, a := range t.queue {
		a.queued = false
	}
	t.discardQueue()
}

func (t *table) discardQueue() {
	clear(t.queue) // keeps no removed advert in memory
	t.queue, t.posted, t.cause = t.queue[:0], false, time.Time{}
}

func (t *table) count(v vip.VIP, from, to Advertisement) {
	if from != Withdrawn {
		t.sent[v.Family()]--
	}
	if to != Withdrawn {
		t.sent[v.Family()]++
	}
}
