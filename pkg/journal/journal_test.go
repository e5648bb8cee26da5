package journal

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// fixture is a journal whose log and counts are kept.
type fixture struct {
	*Journal
	t      *testing.T
	out    strings.Builder
	counts map[string]int // of changed VIPs, by state and reason
}

func newFixture(t *testing.T, level slog.Level) *fixture {
	f := &fixture{t: t, counts: map[string]int{}}
	f.Journal = New(Options{
		Log:      slog.New(slog.NewJSONHandler(&f.out, &slog.HandlerOptions{Level: level})),
		Instance: "this-one",
		Known:    func(v vip.VIP) bool { return v == numbered(1) },
		Count: func(transition Transition, vips int) {
			if transition.Changed() {
				f.counts[transition.To+" "+transition.Reason] += vips
			}
		},
	})
	return f
}

func numbered(i int) vip.VIP {
	return vip.Require(fmt.Sprintf("20.%d.%d.%d/32", 1+i>>16, i>>8&255, i&255))
}

// vips is a number of consecutive VIPs with the same transition.
type vips struct {
	first, count     int
	from, to, reason string
	detail           string
}

// record records a decision. It returns the first log line, and the number of lines by level and
// message.
func (f *fixture) record(all ...vips) (lines map[string]int, first map[string]any) {
	f.out.Reset()
	changes := f.Begin(0)
	for _, v := range all {
		for i := v.first; i < v.first+v.count; i++ {
			changes.Add(numbered(i), Transition{From: v.from, To: v.to, Reason: v.reason, New: v.from == v.to}, v.detail)
		}
	}
	f.Record(time.Unix(100, 0), readiness.Position{InstanceID: "lb-1", Revision: 7}, changes)
	lines = map[string]int{}
	for text := range strings.Lines(f.out.String()) {
		var line map[string]any
		harness.Must(f.t, json.Unmarshal([]byte(text), &line))
		if first == nil {
			first = line
		}
		lines[fmt.Sprint(line["level"], " ", line["msg"])]++
	}
	return lines, first
}

// list returns the events of a VIP, or all events.
func (f *fixture) list(v string) []*adminv1.Event {
	f.t.Helper()
	r, err := f.ListEvents(f.t.Context(), &adminv1.ListEventsRequest{Vip: v})
	harness.Must(f.t, err)
	return r.GetEvents()
}

func TestManyVIPsAreOneLineAndOneEvent(t *testing.T) {
	for _, n := range []int{1, MaxSingle, MaxSingle + 1, 1200} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			f := newFixture(t, slog.LevelInfo)
			lines, line := f.record(vips{0, n, "announced", "withdrawn", "no_gateway", "all are down"})
			events := f.list("")
			if f.counts["withdrawn no_gateway"] != n || len(f.counts) != 1 {
				t.Errorf("counted %v", f.counts)
			}
			if n <= MaxSingle {
				if want := map[string]int{"INFO VIP changed": n}; !maps.Equal(lines, want) {
					t.Errorf("logged %v, want %v", lines, want)
				}
				if line["vip"] != "20.1.0.0/32" || line["from"] != "announced" || line["to"] != "withdrawn" ||
					line["reason"] != "no_gateway" || line["detail"] != "all are down" || line["instance_id"] != "lb-1" {
					t.Errorf("line %v", line)
				}
				if e := events[0]; len(events) != n || e.GetObject() != "20.1.0.0/32" || e.GetFrom() != "announced" ||
					e.GetTo() != "withdrawn" || e.GetReason() != "no_gateway" || e.GetDetail() != "all are down" ||
					e.GetPosition().GetRevision() != 7 || e.GetVipCount() != 0 || e.GetTime().GetSeconds() != 100 {
					t.Errorf("%d events, %v", len(events), e)
				}
				return
			}
			if want := map[string]int{"INFO VIPs changed": 1}; !maps.Equal(lines, want) {
				t.Errorf("logged %v, want %v", lines, want)
			}
			if fmt.Sprint(line["count"]) != fmt.Sprint(n) || line["instance_id"] != "lb-1" || line["to"] != "withdrawn" ||
				fmt.Sprint(line["revision"]) != "7" || line["transitions"] != fmt.Sprintf(
				"%d ipv4 announced to withdrawn, no_gateway (all are down)", n) ||
				fmt.Sprint(line["vips"]) != "[20.1.0.0/32 20.1.0.1/32 20.1.0.2/32 20.1.0.3/32 20.1.0.4/32]" {
				t.Errorf("line %v", line)
			}
			e := events[0]
			if len(events) != 1 || e.GetObject() != fmt.Sprint(n, " VIPs") || int(e.GetVipCount()) != n ||
				len(e.GetFirstVips()) != 5 || e.GetFrom() != "announced" || e.GetTo() != "withdrawn" ||
				e.GetReason() != "no_gateway" || e.GetPosition().GetRevision() != 7 ||
				!strings.HasPrefix(e.GetDetail(), "20.1.0.0/32, ") ||
				!strings.Contains(e.GetDetail(), fmt.Sprintf("and %d more: %d ipv4 announced to", n-5, n)) {
				t.Errorf("events %v", events)
			}
		})
	}
}

// A filter for one VIP finds the transition of this VIP in an event about many.
func TestFilteredEventsOfManyVIPs(t *testing.T) {
	f := newFixture(t, slog.LevelDebug)
	lines, line := f.record(
		vips{80, 5, "withdrawn", "withdrawn", "no_gateway", ""},
		vips{70, 10, "announced", "withdrawn", "lb_not_ready", "0 of 1 targets"},
		vips{0, 70, "unknown", "announced", "ready", ""},
		vips{90, 1, "ready", Removed, "", ""},
	)
	if want := map[string]int{
		"INFO VIPs changed": 1, "DEBUG VIP changed": 80, "DEBUG VIP removed": 1,
	}; !maps.Equal(lines, want) {
		t.Errorf("logged %v, want %v", lines, want)
	}
	if want := "70 ipv4 unknown to announced, ready; 10 ipv4 announced to withdrawn, lb_not_ready (0 of 1 targets); " +
		"1 ipv4 ready to removed"; line["transitions"] != want || line["to"] != nil {
		t.Errorf("line %v", line)
	}
	all := f.list("")
	if len(all) != 1 || all[0].GetVipCount() != 86 || len(all[0].GetTransitions()) != 4 || all[0].GetFrom() != "" ||
		all[0].GetTo() != "changed" || all[0].GetReason() != "" || all[0].GetTransitions()[0].GetCount() != 70 ||
		all[0].GetTransitions()[3].GetTo() != Removed {
		t.Errorf("events %v", all)
	}
	for i, want := range map[int]string{
		3: "announced ready ", 71: "withdrawn lb_not_ready 0 of 1 targets", 82: "withdrawn no_gateway ", 90: "removed  ",
	} {
		e := f.list(numbered(i).String())
		if len(e) != 1 || fmt.Sprint(e[0].GetTo(), " ", e[0].GetReason(), " ", e[0].GetDetail()) != want ||
			e[0].GetObject() != numbered(i).String() || e[0].GetVipCount() != 86 || len(e[0].GetTransitions()) != 0 ||
			e[0].GetSequence() != 1 || e[0].GetPosition().GetRevision() != 7 {
			t.Errorf("events of VIP %d: %v, want %q", i, e, want)
		}
	}
	if e := f.list(numbered(1).String()); len(e) != 1 {
		t.Errorf("events %v", e)
	}
}

// Changed reasons are no events; new VIPs are events without a log line.
func TestSilentChanges(t *testing.T) {
	f := newFixture(t, slog.LevelDebug)
	changes := f.Begin(0)
	changes.Add(numbered(1), Transition{From: "ready", To: "ready", Reason: "targets_ready"}, "1 of 2")
	f.Record(time.Now(), readiness.Position{}, changes)
	if len(f.list("")) != 0 || strings.Count(f.out.String(), "VIP reason changed") != 1 {
		t.Errorf("events %v, log %s", f.list(""), f.out.String())
	}
	lines, _ := f.record(vips{0, 100, "withdrawn", "withdrawn", "lb_never_seen", ""},
		vips{100, 3, "withdrawn", "announced", "ready", ""})
	if want := map[string]int{"INFO VIP changed": 3}; !maps.Equal(lines, want) {
		t.Errorf("logged %v, want %v", lines, want)
	}
	if e := f.list(""); len(e) != 1 || e[0].GetVipCount() != 103 {
		t.Errorf("events %v", e)
	}
	if len(f.counts) != 1 || f.counts["announced ready"] != 3 {
		t.Errorf("counted %v", f.counts)
	}
	_, line := f.record(vips{0, 10, "withdrawn", "withdrawn", "lb_never_seen", ""},
		vips{10, 60, "withdrawn", "announced", "ready", ""})
	if fmt.Sprint(line["count"]) != "60" || !strings.HasPrefix(fmt.Sprint(line["vips"]), "["+numbered(10).String()) {
		t.Errorf("a line about new and changed VIPs: %v", line)
	}
}

// Each VIP has the detail of its stream, up to the maximum number of details.
func TestDetailsAreBounded(t *testing.T) {
	f := newFixture(t, slog.LevelInfo)
	const n = 10 * maxDetails
	var all []vips
	for i := range n / 2 {
		all = append(all, vips{2 * i, 2, "announced", "withdrawn", "lb_not_ready", fmt.Sprint("stream ", i)})
	}
	f.record(all...)
	e := f.list("")
	if len(e) != 1 || len(e[0].GetTransitions()) != 1 || e[0].GetTransitions()[0].GetCount() != n ||
		e[0].GetTransitions()[0].GetDetail() != "stream 0" {
		t.Errorf("events %v", e)
	}
	if groups := f.events.list[0].many.groups; len(groups) != maxDetails+1 {
		t.Errorf("%d groups", len(groups))
	}
	for i, want := range map[int]string{
		1: "stream 0", 2*maxDetails - 1: fmt.Sprint("stream ", maxDetails-1), 2 * maxDetails: "", n - 1: "",
	} {
		if e := f.list(numbered(i).String()); len(e) != 1 || e[0].GetDetail() != want {
			t.Errorf("VIP %d: %v, want the detail %q", i, e, want)
		}
	}
}

func TestFewTransitionsAreDescribed(t *testing.T) {
	f := newFixture(t, slog.LevelInfo)
	var all []vips
	for i := range 7 {
		all = append(all, vips{20 * i, 20, "a", fmt.Sprint("b", i), "", ""})
	}
	_, line := f.record(all...)
	want := "20 ipv4 a to b0; 20 ipv4 a to b1; 20 ipv4 a to b2; 20 ipv4 a to b3; 20 ipv4 a to b4; 40 others"
	if line["transitions"] != want || line["from"] != "a" {
		t.Errorf("line %v", line)
	}
}

func TestEventsOfManyVIPsAreBounded(t *testing.T) {
	f := newFixture(t, slog.LevelInfo)
	const n = maxEventVIPs / 4
	for range 20 { // the same VIPs again and again
		f.record(vips{0, n, "announced", "withdrawn", "no_gateway", ""})
	}
	e := &f.events
	if e.vips != n || len(e.list) != 20 {
		t.Errorf("%d VIPs in %d events, want %d in 20", e.vips, len(e.list), n)
	}
	for i := range 6 { // different VIPs each time
		f.record(vips{i + 1, n, "announced", "withdrawn", "no_gateway", ""})
	}
	if e.vips > maxEventVIPs || len(e.list) != 4 {
		t.Errorf("%d VIPs in %d events, want at most %d in 4", e.vips, len(e.list), maxEventVIPs)
	}
	sum := 0
	for _, x := range e.list {
		sum += len(x.many.list)
	}
	if sum != e.vips {
		t.Errorf("%d VIPs are counted, want %d", e.vips, sum)
	}
	f.record(vips{0, maxEventVIPs + 1, "announced", "withdrawn", "no_gateway", ""})
	if len(f.list(numbered(maxEventVIPs).String())) != 1 || len(e.list) != 1 {
		t.Errorf("%d events after a decision beyond the bound", len(e.list))
	}
	for range maxEvents {
		f.Note("x")
	}
	if e.vips != 0 || len(e.list) != maxEvents || e.newest != nil {
		t.Errorf("%d VIPs in %d events after as many others", e.vips, len(e.list))
	}
}

// TestEventsMatchModel compares the events of random decisions with a map: each VIP has the events
// of its transitions, and no other.
func TestEventsMatchModel(t *testing.T) {
	states := []string{"withdrawn", "depreferred", "announced"}
	rapid.Check(t, func(r *rapid.T) {
		f := newFixture(t, slog.LevelInfo)
		want := map[vip.VIP][]string{}
		state := map[vip.VIP]string{}
		for range rapid.IntRange(1, 8).Draw(r, "decisions") {
			first, end := rapid.IntRange(0, 120).Draw(r, "first"), rapid.IntRange(0, 240).Draw(r, "end")
			pattern := rapid.SliceOfN(rapid.SampledFrom(states), 5, 5).Draw(r, "states")
			changes := f.Begin(0)
			for i := max(first, end) - 1; i >= first; i-- {
				v, to := numbered(i), pattern[i%len(pattern)]
				transition := Transition{From: state[v], To: to, Reason: "r", New: state[v] == ""}
				if state[v] = to; transition.Notable() {
					want[v] = append(want[v], to)
				}
				changes.Add(v, transition, fmt.Sprint("detail ", i%3))
			}
			f.Record(time.Now(), readiness.Position{}, changes)
		}
		for i := range 240 {
			v := numbered(i)
			found, _, _ := f.events.page(0, maxEvents, v)
			var got []string
			for _, e := range found {
				got = append(got, e.GetTo())
				if e.GetDetail() != fmt.Sprint("detail ", i%3) {
					r.Fatalf("VIP %d: detail %q", i, e.GetDetail())
				}
			}
			if !slices.Equal(got, want[v]) {
				r.Fatalf("VIP %d: events %v, want %v", i, got, want[v])
			}
		}
	})
}
