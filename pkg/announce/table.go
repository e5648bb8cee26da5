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

// Route is how a VIP is advertised. Routes are comparable.
type Route struct {
	Advertisement Advertisement
	Prepend       uint8      // further AS numbers in the path; none in iBGP
	Attributes    Attributes // none of a withdrawn VIP
}

// Change is the new route of one VIP.
type Change struct {
	VIP vip.VIP
	Route
}

// Batch is one decision of the gate.
type Batch struct {
	// Changes holds every VIP whose route changes, no VIP twice, in any order; absent VIPs
	// are unchanged. The zero VIP is ignored.
	Changes []Change
	// Revision is the number of the decision. [State].Written returns it once everything up to it
	// was sent, also when there was nothing to send.
	Revision uint64
	// Cause is the receipt of the input that led to the decision; zero if there is none.
	Cause time.Time
}

// table holds the posted and the sent route of each VIP.
type table struct {
	// adverts keeps withdrawn VIPs, so that a VIP that comes and goes allocates nothing.
	adverts map[vip.VIP]*advert
	// last is the advert that was found last.
	last *advert
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

type advert struct {
	vip    vip.VIP
	to     Route // posted last
	sent   Route // sent to the peer in this session
	queued bool  // in table.queue
	// next followed in an earlier batch. Batches have one order, so most adverts need no map lookup.
	next *advert
}

const minWithdrawn = 1024

func newTable() table { return table{adverts: make(map[vip.VIP]*advert), limit: minWithdrawn} }

// post stores a batch and, if queue is set, queues its changes for the session.
func (table *table) post(batch Batch, queue bool) {
	for _, change := range batch.Changes {
		to := change.Route
		if to.Advertisement == Withdrawn || to.Advertisement > Announced {
			to = Route{}
		}
		held := table.find(change.VIP)
		switch {
		case held == nil && (to == Route{} || change.VIP.IsZero()):
			continue
		case held == nil:
			held = &advert{vip: change.VIP}
			table.adverts[change.VIP] = held
			table.follow(held)
			table.withdrawn++
		}
		if (to == Route{}) != (held.to == Route{}) {
			if (to == Route{}) {
				table.withdrawn++
			} else {
				table.withdrawn--
			}
		}
		// An advert is queued once: the session writes the newest value when it takes it.
		held.to = to
		if queue && !held.queued {
			held.queued = true
			table.queue = append(table.queue, held)
		}
	}
	table.revision = batch.Revision
	if queue {
		table.posted = true
		if !batch.Cause.IsZero() && (table.cause.IsZero() || batch.Cause.Before(table.cause)) {
			table.cause = batch.Cause
		}
	}
	// Withdrawn adverts stay for a while, so that flapping VIPs allocate nothing, up to the limit.
	table.limit = max(table.limit, 2*(len(table.adverts)-table.withdrawn))
	if table.withdrawn > table.limit {
		table.removeWithdrawn(queue)
	}
}

// find returns the advert of a VIP; nil if there is none.
func (table *table) find(v vip.VIP) *advert {
	if last := table.last; last != nil && last.next != nil && last.next.vip == v && !v.IsZero() {
		table.last = last.next
		return table.last
	}
	found := table.adverts[v]
	if found != nil {
		table.follow(found)
	}
	return found
}

// follow records that found follows the previous advert of the batch.
func (table *table) follow(found *advert) {
	if table.last != nil {
		table.last.next = found
	}
	table.last = found
}

// removeWithdrawn removes the withdrawn VIPs, except those that the peer of a current session
// still holds. It replaces the map, since a map never shrinks.
func (table *table) removeWithdrawn(session bool) {
	adverts := make(map[vip.VIP]*advert, len(table.adverts)-table.withdrawn)
	table.withdrawn = 0
	for v, advert := range table.adverts {
		switch {
		case advert.to != Route{}:
			adverts[v] = advert
		case session && (advert.queued || advert.sent != Route{}):
			adverts[v] = advert
			table.withdrawn++
		default:
			advert.vip, advert.next = vip.VIP{}, nil // another advert may still precede it
		}
	}
	table.adverts = adverts
	table.limit = max(minWithdrawn, 2*len(adverts))
}

// takeChanges moves the queued changes to c and marks them as sent. It skips VIPs whose posted
// route equals the sent one.
func (table *table) takeChanges(changes *changes) {
	for _, advert := range table.queue {
		advert.queued = false
		if advert.to != advert.sent {
			table.count(advert.vip, advert.sent, advert.to)
			advert.sent = advert.to
			changes.add(advert.vip, advert.to)
		}
	}
	table.discardQueue()
}

// takeAll adds every advertised VIP to c and marks it as sent: a new peer has no routes yet.
func (table *table) takeAll(changes *changes) {
	table.sent = [len(vip.Families)]int{}
	for _, advert := range table.adverts {
		advert.sent, advert.queued = advert.to, false
		table.count(advert.vip, Route{}, advert.to)
		if (advert.to != Route{}) {
			changes.add(advert.vip, advert.to)
		}
	}
	table.discardQueue()
}

// repeat adds the sent advertisements of a family to c.
func (table *table) repeat(family vip.Family, changes *changes) {
	for _, advert := range table.adverts {
		if (advert.sent != Route{}) && advert.vip.Family() == family {
			changes.add(advert.vip, advert.sent)
		}
	}
}

// endSession discards the changes that are queued for the session.
func (table *table) endSession() {
	for _, advert := range table.queue {
		advert.queued = false
	}
	table.discardQueue()
}

func (table *table) discardQueue() {
	clear(table.queue) // keeps no removed advert in memory
	table.queue, table.posted, table.cause = table.queue[:0], false, time.Time{}
}

func (table *table) count(v vip.VIP, from, to Route) {
	if (from != Route{}) {
		table.sent[v.Family()]--
	}
	if (to != Route{}) {
		table.sent[v.Family()]++
	}
}
