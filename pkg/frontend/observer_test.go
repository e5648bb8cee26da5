package frontend

import (
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

type countTransitions map[string]int

func (c countTransitions) count(t transition, vips int) {
	if t.changed() {
		c[shown(t.to).String()+" "+t.to.Reason.String()] += vips
	}
}

func testObserver() (*observer, countTransitions) {
	counts := countTransitions{}
	return newObserver(slog.New(slog.DiscardHandler), counts.count), counts
}

func change(v vip.VIP, from, to gate.Advertisement, reason gate.Reason) gate.Change {
	return gate.Change{
		VIP: v, From: gate.Decision{Advertisement: from, Reason: gate.LBNotReady},
		To: gate.Decision{Advertisement: to, Reason: reason},
	}
}

func TestObserverKeepsStateSinceAndEvents(t *testing.T) {
	o, counts := testObserver()
	t0 := time.Unix(100, 0)
	o.updated(readiness.Update{Complete: true, Changed: []readiness.VIPReadiness{{
		VIP:    vipA,
		Detail: "1 of 2 targets",
	}}})
	o.decided(decisions{At: t0, Revision: 1, Changes: []gate.Change{change(vipA, gate.Withdrawn, gate.Announced,
		gate.Ready)}})
	o.decided(decisions{
		At: t0.Add(time.Second), Revision: 2,
		Changes: []gate.Change{change(vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)},
	})
	o.decided(decisions{
		At: t0.Add(2 * time.Second), Revision: 3,
		Changes: []gate.Change{change(vipA, gate.Withdrawn, gate.Withdrawn, gate.NoGateway)},
	})
	if o.idle() {
		t.Error("idle though decisions wait")
	}
	o.drain()
	st := o.state.vips.Get(vipA)
	if st.Decision.Reason != gate.NoGateway || !st.Since.Equal(t0.Add(time.Second)) ||
		st.Readiness.Detail != "1 of 2 targets" {
		t.Errorf("state %+v", st)
	}
	if o.state.advertised() != 0 || !o.idle() {
		t.Error("something is advertised, or waits")
	}
	events := eventsAfter(&o.state.events, 0)
	if len(events) != 2 || events[0].To.Advertisement != gate.Announced || events[1].Detail != "1 of 2 targets" {
		t.Errorf("events %+v", events)
	}
	if counts["announced ready"] != 1 || counts["withdrawn lb_not_ready"] != 1 || len(counts) != 2 {
		t.Errorf("transitions %v", counts)
	}
}

func TestObserverIdleAfterDecisions(t *testing.T) {
	o, _ := testObserver()
	handedOn := 0
	o.onDecisions = func(decisions) {
		handedOn++
		if o.idle() {
			t.Error("idle before the reporter has the withdrawal")
		}
	}
	o.decided(decisions{Changes: []gate.Change{change(vipA, gate.Announced, gate.Withdrawn, gate.Stopping)}})
	o.drain()
	if handedOn != 1 || !o.idle() {
		t.Errorf("handed on %d times, idle %t", handedOn, o.idle())
	}
}

func TestAppliedPositionFollowsDecisions(t *testing.T) {
	o, _ := testObserver()
	var order []string
	o.onDecisions = func(d decisions) { order = append(order, fmt.Sprint("decision ", d.Revision)) }
	o.onApplied = func(p readiness.Position) { order = append(order, fmt.Sprint("applied ", p.Revision)) }
	o.decided(decisions{Revision: 1, Changes: []gate.Change{change(vipA, gate.Withdrawn, gate.Announced, gate.Ready)}})
	o.positionApplied(readiness.Position{InstanceID: "a", Revision: 7})
	o.decided(decisions{Revision: 2, Changes: []gate.Change{change(vipA, gate.Announced, gate.Depreferred,
		gate.LBDraining)}})
	o.positionApplied(readiness.Position{InstanceID: "a", Revision: 8})
	o.drain()
	o.positionApplied(readiness.Position{InstanceID: "a", Revision: 9}) // changed nothing
	o.drain()
	o.drain()
	if got, want := strings.Join(order, ", "), "decision 1, decision 2, applied 8, applied 9"; got != want {
		t.Errorf("order %q, want %q", got, want)
	}
}

func TestObserverForgetsRemovedVIPs(t *testing.T) {
	o, _ := testObserver()
	o.decided(decisions{Changes: []gate.Change{change(vipA, gate.Withdrawn, gate.Announced, gate.Ready)}})
	o.decided(decisions{Changes: []gate.Change{change(vipA, gate.Announced, gate.Withdrawn, gate.NotConfigured)}})
	o.drain()
	if o.state.vips.Len() != 0 {
		t.Errorf("kept %v", *o.state.vips.Get(vipA))
	}
}

func TestObserverQueueIsBounded(t *testing.T) {
	o, _ := testObserver()
	for i := range 3 * maxQueued / 100 {
		d := decisions{Revision: uint64(i)}
		for range 100 {
			d.Changes = append(d.Changes, change(vipB, gate.Announced, gate.Withdrawn, gate.LBNotReady))
		}
		o.decided(d)
		if o.queued > maxQueued+200 {
			t.Fatalf("%d changes are queued", o.queued)
		}
	}
	o.compact()
	// The reporter confirms a withdrawal once its revision is written. An older revision would
	// confirm it too early.
	newest := o.queue[len(o.queue)-1]
	if len(o.queue) != 1 || newest.Revision != 3*maxQueued/100-1 || len(newest.Changes) != 1 {
		t.Errorf("%d batches, the last with revision %d and %d changes", len(o.queue), newest.Revision, len(newest.Changes))
	}
	o.decided(decisions{Changes: []gate.Change{change(vipA, gate.Withdrawn, gate.Announced, gate.Ready)}})
	o.drain()
	if o.state.vips.Get(vipA).Decision.Advertisement != gate.Announced {
		t.Error("the newest decision was lost")
	}
}

// The queue of unread readiness keeps the newest report of each VIP, and the removals of VIPs.
func TestQueuedReadinessIsBounded(t *testing.T) {
	o, _ := testObserver()
	kept := numbered(5000)
	o.updated(readiness.Update{Changed: []readiness.VIPReadiness{{VIP: numbered(6000)}}})
	o.drain()
	o.updated(readiness.Update{Changed: []readiness.VIPReadiness{{VIP: numbered(6001)}}})
	o.updated(readiness.Update{Complete: true, Changed: []readiness.VIPReadiness{{VIP: vipA}, {VIP: vipB}}})
	o.updated(readiness.Update{Removed: []vip.VIP{vipA}})
	for i := range 2*maxQueued/1000 + 1 {
		u := readiness.Update{Changed: []readiness.VIPReadiness{{VIP: kept, ReadyTargets: uint32(i)}}}
		for j := range 999 {
			u.Changed = append(u.Changed, readiness.VIPReadiness{VIP: numbered(j)})
		}
		o.updated(u)
		if o.reports > maxQueued {
			t.Fatalf("%d reports are queued", o.reports)
		}
	}
	o.drain()
	if st := o.state.vips.Get(kept); st == nil || st.Readiness.ReadyTargets != 2*maxQueued/1000 {
		t.Errorf("state %+v", st)
	}
	if o.state.vips.Get(vipA) != nil || o.state.vips.Get(vipB) == nil || o.state.vips.Len() != 1001 {
		t.Errorf("%d VIPs, want 1001", o.state.vips.Len())
	}
	o.updated(readiness.Update{Changed: []readiness.VIPReadiness{{VIP: vipA}}})
	o.updated(readiness.Update{Complete: true, Changed: []readiness.VIPReadiness{{VIP: vipB}}})
	o.drain()
	if o.state.vips.Get(vipB) == nil || o.state.vips.Len() != 1 {
		t.Errorf("%d VIPs after a complete update, want 1", o.state.vips.Len())
	}
}

func TestEventsKeepTheNewest(t *testing.T) {
	var e events
	for i := range maxEvents + 10 {
		e.add(event{Position: readiness.Position{Revision: uint64(i + 1)}})
	}
	all := eventsAfter(&e, 0)
	if len(all) != maxEvents || all[0].Sequence != 11 || all[len(all)-1].Sequence != maxEvents+10 {
		t.Fatalf("%d events from %d to %d", len(all), all[0].Sequence, all[len(all)-1].Sequence)
	}
	if after := eventsAfter(&e, maxEvents+8); len(after) != 2 {
		t.Fatalf("%d events after the last but two", len(after))
	}
}

// Each value of the gate maps to the API value of the same name. Apart from UNSPECIFIED, the API
// has no additional values.
func TestEnumsMatchProto(t *testing.T) {
	sameEnum(t, gate.NotConfigured, gate.Ready, reasonProto, readinessv1.AdvertisementReason_name, "ADVERTISEMENT_REASON_")
	sameEnum(t, gate.Withdrawn, gate.Announced, advertisementProto, readinessv1.Advertisement_name, "ADVERTISEMENT_")
	sameEnum(t, gate.Lost, gate.Live, freshnessProto, frontendv1.Freshness_name, "FRESHNESS_")
	sameEnum(t, vip.IPv4, vip.IPv6, familyProto, readinessv1.IpFamily_name, "IP_FAMILY_")
}

func sameEnum[G interface {
	~uint8
	fmt.Stringer
}, P interface {
	~int32
	fmt.Stringer
}](t *testing.T, first, last G, convert func(G) P, names map[int32]string, prefix string) {
	t.Helper()
	found := map[int32]string{0: prefix + "UNSPECIFIED"}
	for g := first; g <= last; g++ {
		p := convert(g)
		if want := prefix + strings.ToUpper(g.String()); p.String() != want {
			t.Errorf("%s is %s on the wire, want %s", g, p, want)
		}
		found[int32(p)] = p.String()
	}
	if !maps.Equal(found, names) {
		t.Errorf("the gate has %v, the API %v", found, names)
	}
}
