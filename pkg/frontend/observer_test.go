package frontend

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

type countTransitions map[string]int

func (c countTransitions) count(t journal.Transition, vips int) {
	if t.Changed() {
		c[t.To+" "+t.Reason] += vips
	}
}

func testObserver() (*observer, countTransitions) {
	counts := countTransitions{}
	return newObserver(slog.New(slog.DiscardHandler), "this-one", counts.count, func(vip.VIP) bool { return true }), counts
}

// eventsOf returns all events of an observer.
func eventsOf(t *testing.T, o *observer) []*adminv1.Event {
	t.Helper()
	r, err := o.journal.ListEvents(t.Context(), &adminv1.ListEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetEvents()
}

func changeOf(v vip.VIP, from, to gate.Advertisement, reason gate.Reason) gate.Change {
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
	o.decided(decisions{At: t0, Revision: 1, Changes: []gate.Change{changeOf(vipA, gate.Withdrawn, gate.Announced,
		gate.Ready)}})
	o.decided(decisions{
		At: t0.Add(time.Second), Revision: 2,
		Changes: []gate.Change{changeOf(vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)},
	})
	o.decided(decisions{
		At: t0.Add(2 * time.Second), Revision: 3,
		Changes: []gate.Change{changeOf(vipA, gate.Withdrawn, gate.Withdrawn, gate.NoGateway)},
	})
	if o.queue.Idle() {
		t.Error("idle though decisions wait")
	}
	o.drain()
	st := o.state.vips.Get(vipA)
	if st.Decision.Reason != gate.NoGateway || !st.Since.Equal(t0.Add(time.Second)) ||
		st.Readiness.Detail != "1 of 2 targets" {
		t.Errorf("state %+v", st)
	}
	if o.state.advertised() != 0 || !o.queue.Idle() {
		t.Error("something is advertised, or waits")
	}
	events := eventsOf(t, o)
	if len(events) != 2 || events[0].GetTo() != "announced" || events[1].GetDetail() != "1 of 2 targets" {
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
		if o.queue.Idle() {
			t.Error("idle before the reporter has the withdrawal")
		}
	}
	o.decided(decisions{Changes: []gate.Change{changeOf(vipA, gate.Announced, gate.Withdrawn, gate.Stopping)}})
	o.drain()
	if handedOn != 1 || !o.queue.Idle() {
		t.Errorf("handed on %d times, idle %t", handedOn, o.queue.Idle())
	}
}

func TestAppliedPositionFollowsDecisions(t *testing.T) {
	o, _ := testObserver()
	var order []string
	o.onDecisions = func(d decisions) { order = append(order, fmt.Sprint("decision ", d.Revision)) }
	o.onApplied = func(p readiness.Position) { order = append(order, fmt.Sprint("applied ", p.Revision)) }
	o.decided(decisions{Revision: 1, Changes: []gate.Change{changeOf(vipA, gate.Withdrawn, gate.Announced, gate.Ready)}})
	o.positionApplied(readiness.Position{InstanceID: "a", Revision: 7})
	o.decided(decisions{Revision: 2, Changes: []gate.Change{changeOf(vipA, gate.Announced, gate.Depreferred,
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
	o.decided(decisions{Changes: []gate.Change{changeOf(vipA, gate.Withdrawn, gate.Announced, gate.Ready)}})
	o.decided(decisions{Changes: []gate.Change{changeOf(vipA, gate.Announced, gate.Withdrawn, gate.NotConfigured)}})
	o.drain()
	if o.state.vips.Len() != 0 {
		t.Errorf("kept %v", *o.state.vips.Get(vipA))
	}
}

// The queue of unread readiness keeps the newest report of each VIP, and the removals of VIPs.
func TestQueuedReadinessIsMerged(t *testing.T) {
	o, _ := testObserver()
	kept := numbered(5000)
	o.updated(readiness.Update{Changed: []readiness.VIPReadiness{{VIP: numbered(6000)}}})
	o.drain()
	o.updated(readiness.Update{Changed: []readiness.VIPReadiness{{VIP: numbered(6001)}}})
	o.updated(readiness.Update{Complete: true, Changed: []readiness.VIPReadiness{{VIP: vipA}, {VIP: vipB}}})
	o.updated(readiness.Update{Removed: []vip.VIP{vipA}})
	for i := range 500 {
		u := readiness.Update{Changed: []readiness.VIPReadiness{{VIP: kept, ReadyTargets: uint32(i)}}}
		for j := range 999 {
			u.Changed = append(u.Changed, readiness.VIPReadiness{VIP: numbered(j)})
		}
		o.updated(u)
	}
	o.drain()
	if st := o.state.vips.Get(kept); st == nil || st.Readiness.ReadyTargets != 499 {
		t.Errorf("state %+v", st)
	}
	if o.state.has(vipA) || !o.state.has(vipB) || o.state.vips.Len() != 1001 {
		t.Errorf("%d VIPs, want 1001", o.state.vips.Len())
	}
	o.updated(readiness.Update{Changed: []readiness.VIPReadiness{{VIP: vipA}}})
	o.updated(readiness.Update{Complete: true, Changed: []readiness.VIPReadiness{{VIP: vipB}}})
	o.drain()
	if !o.state.has(vipB) || o.state.vips.Len() != 1 {
		t.Errorf("%d VIPs after a complete update, want 1", o.state.vips.Len())
	}
	if len(eventsOf(t, o)) != 0 {
		t.Errorf("merged reports are lost changes: %v", eventsOf(t, o))
	}
}

// Each value of the gate maps to the API value of the same name. Apart from UNSPECIFIED, the API
// has no additional values.
func TestEnumsMatchProto(t *testing.T) {
	sameEnum(t, gate.NotConfigured, gate.Ready, reasons[:], readinessv1.AdvertisementReason_name, "ADVERTISEMENT_REASON_")
	sameEnum(t, gate.Withdrawn, gate.Announced, advertisements[:], readinessv1.Advertisement_name, "ADVERTISEMENT_")
	sameEnum(t, gate.Lost, gate.Live, freshnesses[:], frontendv1.Freshness_name, "FRESHNESS_")
}

func sameEnum[G interface {
	~uint8
	fmt.Stringer
}, P interface {
	~int32
	fmt.Stringer
}](t *testing.T, first, last G, values []P, names map[int32]string, prefix string) {
	t.Helper()
	found := map[int32]string{0: prefix + "UNSPECIFIED"}
	for g := first; g <= last; g++ {
		p := values[g]
		if want := prefix + strings.ToUpper(g.String()); p.String() != want {
			t.Errorf("%s is %s on the wire, want %s", g, p, want)
		}
		found[int32(p)] = p.String()
	}
	if !maps.Equal(found, names) {
		t.Errorf("the gate has %v, the API %v", found, names)
	}
}

// An event names the attributes of a policy that a decision changes, even by a new reason.
func TestEventsNameAttributes(t *testing.T) {
	policies, err := policy.New([]trench.Policy{{
		VIPs: []vip.VIP{vipA}, Ready: trench.Attributes{MED: 5}, Unknown: &trench.Attributes{MED: 6},
	}}, policy.Carried)
	if err != nil {
		t.Fatal(err)
	}
	o, _ := testObserver()
	o.policies.Store(&policies)
	stale := changeOf(vipA, gate.Announced, gate.Announced, gate.LBStale)
	stale.From.Reason = gate.Ready
	for _, changes := range [][]gate.Change{
		{
			changeOf(vipA, gate.Withdrawn, gate.Announced, gate.Ready),
			changeOf(vipB, gate.Withdrawn, gate.Announced, gate.Ready),
		},
		{stale},
	} {
		o.decided(decisions{At: time.Unix(1, 0), Changes: changes})
		o.drain()
	}
	var got []string
	for _, event := range eventsOf(t, o) {
		got = append(got, fmt.Sprint(event.GetObject(), " ", event.GetTo(), " ", event.GetReason(), " ", event.GetDetail()))
	}
	want := []string{
		vipA.String() + " announced ready policy 0, ready: MED 5", vipB.String() + " announced ready ",
		vipA.String() + " announced lb_stale policy 0, unknown: MED 6",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, one := range o.metrics() {
		if want := map[bool]string{true: "unknown"}[one.VIP == vipA]; one.PolicyState != want {
			t.Errorf("metrics %+v", one)
		}
	}
}
