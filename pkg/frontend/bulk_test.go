package frontend

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/vip"
)

func numbered(i int) vip.VIP {
	return vip.Require(fmt.Sprintf("20.%d.%d.%d/32", 1+i>>16, i>>8&255, i&255))
}

// bulkFixture is an observer whose log is kept.
type bulkFixture struct {
	*observer
	t      *testing.T
	client frontendv1.FrontendServiceClient
	out    strings.Builder
	counts countTransitions
}

func newBulkFixture(t *testing.T, level slog.Level) *bulkFixture {
	f := &bulkFixture{t: t, counts: countTransitions{}}
	f.observer, f.client = serveEvents(t)
	f.log = slog.New(slog.NewJSONHandler(&f.out, &slog.HandlerOptions{Level: level}))
	f.count = f.counts.count
	f.causes.reason = func(r gate.Reason, family vip.Family) string { return fmt.Sprint("because of ", r, " ", family) }
	return f
}

// changes returns n equal changes of consecutive VIPs.
func changes(first, n int, from, to gate.Advertisement, reason gate.Reason) (list []gate.Change) {
	for i := first; i < first+n; i++ {
		list = append(list, change(numbered(i), from, to, reason))
	}
	return list
}

// decide applies a decision. It returns the first log line, and the number of lines by level and
// message.
func (f *bulkFixture) decide(list ...gate.Change) (count map[string]int, first map[string]any) {
	f.out.Reset()
	f.decided(decisions{
		At: time.Unix(100, 0), Changes: list, Position: readiness.Position{InstanceID: "lb-1", Revision: 7},
	})
	f.drain()
	count = map[string]int{}
	for line := range strings.Lines(f.out.String()) {
		var x map[string]any
		if err := json.Unmarshal([]byte(line), &x); err != nil {
			f.t.Fatal(err)
		}
		if first == nil {
			first = x
		}
		count[fmt.Sprint(x["level"], " ", x["msg"])]++
	}
	return count, first
}

func (f *bulkFixture) list(v string) []*frontendv1.Event {
	f.t.Helper()
	r, err := f.client.ListEvents(f.t.Context(), &frontendv1.ListEventsRequest{Vip: v})
	if err != nil {
		f.t.Fatal(err)
	}
	return r.GetEvents()
}

func TestManyVIPsAreOneLineAndOneEvent(t *testing.T) {
	for _, n := range []int{1, status.MaxSingle, status.MaxSingle + 1, 1200} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			f := newBulkFixture(t, slog.LevelInfo)
			lines, line := f.decide(changes(0, n, gate.Announced, gate.Withdrawn, gate.NoGateway)...)
			events := f.list("")
			if f.counts["withdrawn no_gateway"] != n || len(f.counts) != 1 {
				t.Errorf("counted %v", f.counts)
			}
			if n <= status.MaxSingle {
				if want := map[string]int{"INFO VIP changed": n}; !maps.Equal(lines, want) {
					t.Errorf("logged %v, want %v", lines, want)
				}
				if len(events) != n || events[0].GetVip() != "20.1.0.0/32" || events[0].GetVipCount() != 0 {
					t.Errorf("%d events, %v", len(events), events[0])
				}
				return
			}
			if want := map[string]int{"INFO VIPs changed": 1}; !maps.Equal(lines, want) {
				t.Errorf("logged %v, want %v", lines, want)
			}
			if fmt.Sprint(line["count"]) != fmt.Sprint(n) || line["instance_id"] != "lb-1" ||
				fmt.Sprint(line["revision"]) != "7" || line["transitions"] != fmt.Sprintf(
				"%d ipv4 announced to withdrawn, no_gateway (because of no_gateway ipv4)", n) ||
				fmt.Sprint(line["vips"]) != "[20.1.0.0/32 20.1.0.1/32 20.1.0.2/32 20.1.0.3/32 20.1.0.4/32]" {
				t.Errorf("line %v", line)
			}
			e := events[0]
			if len(events) != 1 || e.GetVip() != "" || int(e.GetVipCount()) != n || len(e.GetFirstVips()) != 5 ||
				e.GetFrom() != readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED ||
				e.GetTo() != readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN ||
				e.GetReason() != readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY ||
				e.GetPosition().GetRevision() != 7 || !strings.Contains(e.GetDetail(), "20.1.0.0/32, ") {
				t.Errorf("events %v", events)
			}
		})
	}
}

// A filter for one VIP finds the transition of this VIP in a bulk event.
func TestFilteredEventsOfManyVIPs(t *testing.T) {
	f := newBulkFixture(t, slog.LevelDebug)
	v6 := vip.Require("2000::1/128")
	f.updated(readiness.Update{Changed: []readiness.VIPReadiness{
		{VIP: numbered(70), Detail: "0 of 1 targets"},
		{VIP: numbered(71), Detail: "0 of 1 targets"},
		{VIP: numbered(75), Detail: "0 of 2 targets"},
	}})
	list := slices.Concat(
		[]gate.Change{change(v6, gate.Announced, gate.Withdrawn, gate.NoGateway)},
		changes(70, 10, gate.Announced, gate.Withdrawn, gate.LBNotReady),
		changes(0, 70, gate.Withdrawn, gate.Announced, gate.Ready),
		changes(80, 5, gate.Withdrawn, gate.Withdrawn, gate.NoGateway), // no event
	)
	lines, line := f.decide(list...)
	if want := map[string]int{
		"INFO VIPs changed": 1, "DEBUG VIP changed": 81, "DEBUG VIP reason changed": 5,
	}; !maps.Equal(lines, want) {
		t.Errorf("logged %v, want %v", lines, want)
	}
	if want := "70 ipv4 withdrawn to announced, ready (because of ready ipv4); " +
		"10 ipv4 announced to withdrawn, lb_not_ready (0 of 1 targets); " +
		"1 ipv6 announced to withdrawn, no_gateway (because of no_gateway ipv6)"; line["transitions"] != want {
		t.Errorf("line %v", line)
	}
	all := f.list("")
	if len(all) != 1 || all[0].GetVipCount() != 81 || len(all[0].GetTransitions()) != 3 || all[0].GetFrom() != 0 ||
		all[0].GetTo() != 0 || all[0].GetReason() != 0 || all[0].GetTransitions()[0].GetCount() != 70 ||
		all[0].GetTransitions()[2].GetFamily() != readinessv1.IpFamily_IP_FAMILY_IPV6 {
		t.Errorf("events %v", all)
	}
	for v, want := range map[vip.VIP]string{
		numbered(3): "ANNOUNCED READY because of ready ipv4", numbered(71): "WITHDRAWN LB_NOT_READY 0 of 1 targets",
		numbered(75): "WITHDRAWN LB_NOT_READY 0 of 2 targets",
		numbered(76): "WITHDRAWN LB_NOT_READY because of lb_not_ready ipv4",
		v6:           "WITHDRAWN NO_GATEWAY because of no_gateway ipv6", numbered(82): "", numbered(200): "",
	} {
		got := ""
		for _, e := range f.list(v.String()) {
			got += strings.TrimPrefix(e.GetTo().String(), "ADVERTISEMENT_") + " " +
				strings.TrimPrefix(e.GetReason().String(), "ADVERTISEMENT_REASON_") + " " + e.GetDetail()
			if e.GetVip() != v.String() || e.GetVipCount() != 81 || len(e.GetTransitions()) != 0 {
				t.Errorf("event of %s: %v", v, e)
			}
		}
		if got != want {
			t.Errorf("%s: %q, want %q", v, got, want)
		}
	}
	s := watchEvents(t, f.client, &frontendv1.WatchEventsRequest{Vip: v6.String()})
	if !slices.Equal(s.first, []uint64{1}) {
		t.Errorf("watched %v", s.first)
	}
}

// Each VIP has the detail of its stream, up to the maximum number of details.
func TestDetailsOfManyVIPsAreBounded(t *testing.T) {
	f := newBulkFixture(t, slog.LevelInfo)
	const n = 10 * maxEventDetails
	u := readiness.Update{}
	for i := range n {
		u.Changed = append(u.Changed, readiness.VIPReadiness{VIP: numbered(i), Detail: fmt.Sprint("stream ", i/2)})
	}
	f.updated(u)
	f.decide(changes(0, n, gate.Announced, gate.Withdrawn, gate.LBNotReady)...)
	all := f.list("")
	if len(all) != 1 || len(all[0].GetTransitions()) != 1 || all[0].GetTransitions()[0].GetCount() != n ||
		all[0].GetTransitions()[0].GetDetail() != "stream 0" {
		t.Errorf("events %v", all)
	}
	if groups := f.state.events.list[0].Bulk.groups; len(groups) != maxEventDetails+1 {
		t.Errorf("%d groups", len(groups))
	}
	for i, want := range map[int]string{
		1: "stream 0", 2*maxEventDetails - 1: fmt.Sprint("stream ", maxEventDetails-1), 2 * maxEventDetails: "", n - 1: "",
	} {
		if e := f.list(numbered(i).String()); len(e) != 1 || e[0].GetDetail() != want {
			t.Errorf("VIP %d: %v, want the detail %q", i, e, want)
		}
	}
}

// New VIPs are events, but no change of an advertisement.
func TestManyNewVIPs(t *testing.T) {
	f := newBulkFixture(t, slog.LevelInfo)
	list := changes(0, 100, gate.Withdrawn, gate.Withdrawn, gate.LBNeverSeen)
	for i := range list {
		list[i].From.Reason = gate.NotConfigured
	}
	list = append(list, changes(100, 3, gate.Withdrawn, gate.Announced, gate.Ready)...)
	lines, _ := f.decide(list...)
	if want := map[string]int{"INFO VIP changed": 3}; !maps.Equal(lines, want) {
		t.Errorf("logged %v, want %v", lines, want)
	}
	if e := f.list(""); len(e) != 1 || e[0].GetVipCount() != 103 {
		t.Errorf("events %v", e)
	}
	if len(f.counts) != 1 || f.counts["announced ready"] != 3 {
		t.Errorf("counted %v", f.counts)
	}
	list = append(list[:10], changes(10, 60, gate.Withdrawn, gate.Announced, gate.Ready)...)
	if _, line := f.decide(list...); fmt.Sprint(line["count"]) != "60" ||
		!strings.HasPrefix(fmt.Sprint(line["vips"]), "["+numbered(10).String()) {
		t.Errorf("a line about new and changed VIPs: %v", line)
	}
}

func TestEventsOfManyVIPsAreBounded(t *testing.T) {
	f := newBulkFixture(t, slog.LevelInfo)
	const n = maxEventVIPs / 4
	all := changes(0, n, gate.Announced, gate.Withdrawn, gate.NoGateway)
	for range 20 { // the same VIPs again and again
		f.decide(all...)
	}
	e := &f.state.events
	if e.vips != n || len(e.list) != 20 {
		t.Errorf("%d VIPs in %d events, want %d in 20", e.vips, len(e.list), n)
	}
	for i := range 6 { // different VIPs each time
		f.decide(all[i+1:]...)
	}
	if e.vips > maxEventVIPs || len(e.list) != 4 {
		t.Errorf("%d VIPs in %d events, want at most %d in 4", e.vips, len(e.list), maxEventVIPs)
	}
	sum := 0
	for _, x := range e.list {
		sum += len(x.Bulk.list)
	}
	if sum != e.vips {
		t.Errorf("%d VIPs are counted, want %d", e.vips, sum)
	}
	f.decide(changes(0, maxEventVIPs+1, gate.Announced, gate.Withdrawn, gate.NoGateway)...)
	if len(f.list(numbered(maxEventVIPs).String())) != 1 || len(e.list) != 1 {
		t.Errorf("%d events after a decision beyond the bound", len(e.list))
	}
	for range maxEvents {
		f.note("x")
	}
	if e.vips != 0 || len(e.list) != maxEvents || e.newest != nil {
		t.Errorf("%d VIPs in %d events after as many others", e.vips, len(e.list))
	}
}
