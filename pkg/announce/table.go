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

// table holds the posted advertisements and those that the peer was sent.
type table struct {
	// adverts keeps withdrawn VIPs, so that a VIP that comes and goes allocates nothing.
	adverts map[vip.VIP]*advert
	// withdrawn is the number of adverts with a posted withdrawal. Beyond limit they are removed: VIPs
	// that have left the configuration are among them.
	withdrawn, limit int
	revision         uint64 // of the newest batch
	// sent is the number of VIPs that the peer was sent, without withdrawn ones.
	sent [len(vip.Families)]int

	// Since the last write of changes:
	queue  []*advert // posted, each once
	posted bool
	cause  time.Time // the oldest
}

// advert is the advertisement of one VIP.
type advert struct {
	vip    vip.VIP
	to     Advertisement // the newest that was posted
	sent   Advertisement // that the peer was sent in this session
	queued bool          // in table.queue
}

// minWithdrawn is the least limit of withdrawn adverts.
const minWithdrawn = 1024

func newTable() table { return table{adverts: make(map[vip.VIP]*advert), limit: minWithdrawn} }

// post stores a batch, and queues its changes for a session that takes them.
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

// removeWithdrawn removes the withdrawn VIPs that the peer of a session, if there is one, does not
// hold. The map is replaced, since it never shrinks.
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

// takeChanges adds what was queued and differs from what the peer was sent, which it is from now
// on.
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

// takeAll adds every VIP, for a peer that was sent none.
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

// repeat adds what the peer was sent of a family.
func (t *table) repeat(f vip.Family, c *changes) {
	for _, a := range t.adverts {
		if a.sent != Withdrawn && a.vip.Family() == f {
			c.add(a.vip, a.sent)
		}
	}
}

// endSession forgets what was queued for a session.
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
