package frontend

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

func numbered(i int) vip.VIP {
	return vip.Require(fmt.Sprintf("20.%d.%d.%d/32", 1+i>>16, i>>8&255, i&255))
}

// changes returns n equal changes of consecutive VIPs.
func changes(first, n int, from, to gate.Advertisement, reason gate.Reason) (list []gate.Change) {
	for i := first; i < first+n; i++ {
		list = append(list, changeOf(numbered(i), from, to, reason))
	}
	return list
}

// The events of one decision have the advertisements, and the load balancer's detail of each VIP.
func TestEventsOfManyVIPs(t *testing.T) {
	o, counts := testObserver()
	o.causes.reason = func(r gate.Reason, family vip.Family) string { return fmt.Sprint("because of ", r, " ", family) }
	v6 := vip.Require("2000::1/128")
	o.updated(readiness.Update{Changed: []readiness.VIPReadiness{
		{VIP: numbered(70), Detail: "0 of 1 targets"},
		{VIP: numbered(71), Detail: "0 of 1 targets"},
		{VIP: numbered(75), Detail: "0 of 2 targets"},
	}})
	list := slices.Concat(
		[]gate.Change{changeOf(v6, gate.Announced, gate.Withdrawn, gate.NoGateway)},
		changes(70, 10, gate.Announced, gate.Withdrawn, gate.LBNotReady),
		changes(0, 70, gate.Withdrawn, gate.Announced, gate.Ready),
		changes(80, 5, gate.Withdrawn, gate.Withdrawn, gate.NoGateway), // no event
	)
	fresh := changes(90, 3, gate.Withdrawn, gate.Withdrawn, gate.LBNeverSeen)
	for i := range fresh {
		fresh[i].From.Reason = gate.NotConfigured
	}
	o.decided(decisions{
		At: time.Unix(100, 0), Changes: slices.Concat(list, fresh),
		Position: readiness.Position{InstanceID: "lb-1", Revision: 7},
	})
	o.drain()
	all := eventsOf(t, o)
	if len(all) != 1 || all[0].GetVipCount() != 84 || len(all[0].GetTransitions()) != 4 ||
		all[0].GetPosition().GetRevision() != 7 || all[0].GetTime().GetSeconds() != 100 {
		t.Errorf("events %v", all)
	}
	for v, want := range map[vip.VIP]string{
		numbered(3): "announced ready because of ready ipv4", numbered(71): "withdrawn lb_not_ready 0 of 1 targets",
		numbered(75): "withdrawn lb_not_ready 0 of 2 targets",
		numbered(76): "withdrawn lb_not_ready because of lb_not_ready ipv4",
		v6:           "withdrawn no_gateway because of no_gateway ipv6", numbered(82): "", numbered(200): "",
		numbered(91): "withdrawn lb_never_seen because of lb_never_seen ipv4",
	} {
		r, err := o.journal.ListEvents(t.Context(), &adminv1.ListEventsRequest{Vip: v.String()})
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, e := range r.GetEvents() {
			got += e.GetTo() + " " + e.GetReason() + " " + e.GetDetail()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", v, got, want)
		}
	}
	if want := (countTransitions{
		"announced ready": 70, "withdrawn lb_not_ready": 10, "withdrawn no_gateway": 1,
	}); !maps.Equal(counts, want) {
		t.Errorf("counted %v, want %v", counts, want)
	}
}

// The revisions of one large decision of the load balancer have one event. A later decision about
// the same VIPs has another one.
func TestRevisionsOfOneDecisionHaveOneEvent(t *testing.T) {
	o, _ := testObserver()
	revision := uint64(0)
	decide := func(first, count int, from, to gate.Advertisement, reason gate.Reason) {
		revision++
		position := readiness.Position{InstanceID: "lb-1", Revision: revision}
		update := readiness.Update{Position: position}
		for i := range count {
			update.Changed = append(update.Changed, readiness.VIPReadiness{VIP: numbered(first + i)})
		}
		o.updated(update)
		o.decided(decisions{
			At: time.Unix(100, 0), Revision: revision, Position: position, Changes: changes(first, count, from, to, reason),
		})
		o.positionApplied(position)
	}
	var applied readiness.Position
	reported := 0
	o.onApplied = func(position readiness.Position) { applied = position }
	o.onDecisions = func(d decisions) { reported += len(d.Changes) }
	for _, to := range []gate.Advertisement{gate.Announced, gate.Withdrawn} {
		from, reason := gate.Withdrawn, gate.Ready
		if to == gate.Withdrawn {
			from, reason = gate.Announced, gate.LBNotReady
		}
		decide(0, 200, from, to, reason)
		decide(200, 400, from, to, reason)
		decide(600, 7, from, to, reason)
	}
	decide(0, 1, gate.Withdrawn, gate.Announced, gate.Ready) // of its own
	o.drain()
	all := eventsOf(t, o)
	if len(all) != 3 || all[0].GetVipCount() != 607 || all[1].GetVipCount() != 607 ||
		all[0].GetPosition().GetRevision() != 3 || all[2].GetObject() != numbered(0).String() {
		t.Errorf("%d events: %v", len(all), all)
	}
	if applied.Revision != revision || reported != 2*607+1 {
		t.Errorf("%d VIPs are reported, up to %+v", reported, applied)
	}
}
