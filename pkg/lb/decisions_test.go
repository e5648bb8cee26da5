package lb

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// decisionsFixture records what decisions cause.
type decisionsFixture struct {
	*decisions
	t      *testing.T
	log    strings.Builder
	last   uint64         // number of the last event
	counts map[string]int // transitions by state, reason
}

func decisionsOf(t *testing.T, level slog.Level) *decisionsFixture {
	f := &decisionsFixture{t: t, counts: map[string]int{}}
	log := slog.New(slog.NewJSONHandler(&f.log, &slog.HandlerOptions{Level: level}))
	f.decisions = newDecisions(log, "this-one", func(x metrics.Transition, n int) {
		if x.Changed {
			f.counts[x.To+" "+x.Reason] += n
		}
	})
	return f
}

// events returns the events since the last call.
func (f *decisionsFixture) events() []*adminv1.Event {
	f.t.Helper()
	r, err := f.journal.ListEvents(f.t.Context(), &adminv1.ListEventsRequest{After: f.last})
	if err != nil {
		f.t.Fatal(err)
	}
	if n := len(r.GetEvents()); n > 0 {
		f.last = r.GetEvents()[n-1].GetSequence()
	}
	return r.GetEvents()
}

func numbered(i int) vip.VIP { return vip.Require(fmt.Sprintf("20.0.%d.%d/32", i>>8, i&255)) }

// decide applies a decision in which the VIPs numbered [from, to) are ready, or not, and removed
// are removed.
func (f *decisionsFixture) decide(revision uint64, from, to int, ready bool, removed ...vip.VIP) {
	d := readiness.Decision{Removed: removed}
	for i := from; i < to; i++ {
		r := readiness.VIPReadiness{
			VIP: numbered(i), Reason: readinessv1.VipReason_VIP_REASON_TOO_FEW_READY, Detail: fmt.Sprint("target ", i),
			TotalTargets: 7,
		}
		if ready {
			r.State, r.Reason, r.Detail = vip.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, ""
		}
		d.Changed = append(d.Changed, r)
	}
	f.log.Reset()
	f.decided(d, revision)
	f.drain()
}

// lines returns the log, by level and message.
func (f *decisionsFixture) lines() (count map[string]int, last map[string]any) {
	count = map[string]int{}
	for line := range strings.Lines(f.log.String()) {
		last = nil
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			f.t.Fatal(err)
		}
		count[fmt.Sprint(last["level"], " ", last["msg"])]++
	}
	return count, last
}

func (f *decisionsFixture) want(want map[string]int) map[string]any {
	f.t.Helper()
	got, last := f.lines()
	if !maps.Equal(got, want) {
		f.t.Errorf("logged %v, want %v", got, want)
	}
	return last
}

func TestMixedDecision(t *testing.T) {
	f := decisionsOf(t, slog.LevelDebug)
	f.decide(1, 0, 100, true)
	f.want(map[string]int{"INFO VIPs changed": 1, "DEBUG VIP changed": 100})
	if e := f.events(); len(e) != 1 || e[0].GetTransitions()[0].GetFrom() != "unknown" || len(f.counts) != 0 {
		t.Errorf("first states are events %v, counted %v", e, f.counts)
	}
	f.decide(2, 0, 30, false, slices.Collect(func(yield func(vip.VIP) bool) {
		for i := 50; i < 90 && yield(numbered(i)); i++ {
		}
	})...)
	f.want(map[string]int{"INFO VIPs changed": 1, "DEBUG VIP changed": 30, "DEBUG VIP removed": 40})
	e := f.events()
	if len(e) != 1 || e[0].GetObject() != "70 VIPs" || e[0].GetTo() != "changed" || len(e[0].GetTransitions()) != 2 {
		t.Fatalf("events %v", e)
	}
	removed, fallen := e[0].GetTransitions()[0], e[0].GetTransitions()[1]
	if removed.GetCount() != 40 || removed.GetFrom() != "ready" || removed.GetTo() != "removed" ||
		fallen.GetCount() != 30 || fallen.GetTo() != "not ready" || fallen.GetFamily() != "ipv4" ||
		fallen.GetDetail() != "target 0" || fallen.GetReason() != "too_few_ready" {
		t.Errorf("transitions %v", e[0].GetTransitions())
	}
	if want := map[string]int{"not ready too_few_ready": 30}; !maps.Equal(f.counts, want) {
		t.Errorf("counted %v, want %v", f.counts, want)
	}
	for i, want := range map[int]string{0: "false true", 40: "true true", 60: "false false"} {
		if ready, known := f.serves(numbered(i)); fmt.Sprint(ready, " ", known) != want {
			t.Errorf("%s: %t, %t, want %s", numbered(i), ready, known, want)
		}
	}
	if n := len(f.states()); n != 60 {
		t.Errorf("%d VIPs have metrics, want 60", n)
	}
	f.decide(3, 0, 1, true)
	line := f.want(map[string]int{"INFO VIP changed": 1})
	if fmt.Sprint(line["revision"], line["total_targets"]) != "3 7" {
		t.Errorf("line %v", line)
	}
	if e := f.events(); len(e) != 1 || e[0].GetFrom() != "not ready" || e[0].GetReason() != "targets_ready" {
		t.Errorf("events %v", e)
	}
	f.decide(4, 0, 1, true) // nothing changes
	if e := f.events(); len(e) != 0 {
		t.Errorf("events %v", e)
	}
}

func TestMergedDecisions(t *testing.T) {
	f := decisionsOf(t, slog.LevelInfo)
	f.decided(readiness.Decision{Changed: []readiness.VIPReadiness{{VIP: numbered(5000)}, {VIP: numbered(5001)}}}, 0)
	f.drain()
	f.decided(readiness.Decision{Removed: []vip.VIP{numbered(5000)}}, 0)
	all := make([]readiness.VIPReadiness, 1000)
	for i := range all {
		all[i] = readiness.VIPReadiness{VIP: numbered(i), Reason: readinessv1.VipReason_VIP_REASON_NOT_CHECKED}
	}
	for i := range 500 {
		f.decided(readiness.Decision{Changed: all}, uint64(i+1))
	}
	f.decided(readiness.Decision{Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready}}}, 1000)
	f.drain()
	if count, _ := f.lines(); count["WARN decisions merged: rate exceeds logging"] != 1 {
		t.Errorf("logged %v", count)
	}
	if ready, _ := f.serves(vipA); !ready {
		t.Error("the newest decision was lost")
	}
	if _, known := f.serves(numbered(5000)); known {
		t.Error("a removal was lost")
	}
	if n := len(f.states()); n != len(all)+1 {
		t.Errorf("%d VIPs, want %d", n, len(all)+1)
	}
	if f.drain() {
		t.Error("something is queued")
	}
}

// TestDecisionsMatchModel compares random decisions with a map: events, counts and states are exact.
func TestDecisionsMatchModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		f := decisionsOf(t, slog.LevelInfo)
		model, wantCounts := map[vip.VIP]vip.State{}, map[string]int{}
		for range rapid.IntRange(1, 8).Draw(r, "decisions") {
			first, end := rapid.IntRange(0, 120).Draw(r, "first"), rapid.IntRange(0, 240).Draw(r, "end")
			some := rapid.SliceOfN(rapid.IntRange(0, 4), 7, 7).Draw(r, "states") // of VIP i: i modulo their number
			var d readiness.Decision
			notable := 0
			for i := first; i < end; i++ {
				v, state := numbered(i), vip.State(some[i%len(some)])
				was, known := model[v]
				switch {
				case state <= vip.Draining:
					reason := readinessv1.VipReason(1 + i%3)
					d.Changed = append(d.Changed, readiness.VIPReadiness{VIP: v, State: state, Reason: reason})
					if model[v] = state; !known || was != state {
						notable++
					}
					if known && was != state {
						wantCounts[state.String()+" "+reasonWord(reason)]++
					}
				case known && state == vip.Draining+1:
					d.Removed = append(d.Removed, v)
					delete(model, v)
					notable++
				}
			}
			f.decided(d, 1)
			f.drain()
			events := f.events()
			got := len(events)
			if notable > journal.MaxSingle && got == 1 {
				e := events[0]
				if got = int(e.GetVipCount()); got != notable {
					r.Errorf("the event is about %d VIPs", got)
				}
				for _, x := range e.GetTransitions() {
					got -= int(x.GetCount())
				}
				got += notable
			}
			if got != notable {
				r.Fatalf("%d VIPs in %d events, want %d", got, len(events), notable)
			}
		}
		states := map[vip.VIP]vip.State{}
		for v, st := range f.vips.All() {
			states[v] = st.state
		}
		if !maps.Equal(states, model) || !maps.Equal(f.counts, wantCounts) {
			r.Fatalf("states %v, want %v; counted %v, want %v", states, model, f.counts, wantCounts)
		}
	})
}

func TestLastDecisionsAreLogged(t *testing.T) {
	f := decisionsOf(t, slog.LevelInfo)
	late := errors.New("late")
	if err := f.runTasks(func() error {
		f.decided(readiness.Decision{Changed: []readiness.VIPReadiness{{VIP: vipA}}}, 9)
		return late
	}); !errors.Is(err, late) {
		t.Errorf("error %v", err)
	}
	if line := f.want(map[string]int{"INFO VIP changed": 1}); fmt.Sprint(line["revision"]) != "9" {
		t.Errorf("line %v", line)
	}
}

// The events of lb and frontend are merged by time: recording one later must not change its place.
func TestEventsHaveTheTimeOfTheDecision(t *testing.T) {
	f := decisionsOf(t, slog.LevelInfo)
	at := time.Now().Add(-time.Second)
	f.decided(readiness.Decision{At: at, Changed: []readiness.VIPReadiness{{VIP: vipA}}}, 1)
	f.drain()
	all, err := f.journal.ListEvents(t.Context(), &adminv1.ListEventsRequest{})
	harness.Must(t, err)
	if len(all.GetEvents()) != 1 || !all.GetEvents()[0].GetTime().AsTime().Equal(at) {
		t.Errorf("events %v, want one at %v", all.GetEvents(), at)
	}
}

// BenchmarkAfterDecision measures the work after a decision is in the table, for one that sets the
// VIPs to ready and one that sets them to not ready.
func BenchmarkAfterDecision(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			log := slog.New(slog.NewTextHandler(io.Discard, nil))
			p := &process{metrics: metrics.NewLB("1"), health: health.New(log, func(string, bool, bool) {})}
			p.Log, p.table = log, readiness.NewTable(readiness.TableOptions{})
			newObserver(p)
			flip := func(revision uint64, state vip.State, reason readinessv1.VipReason) {
				d := readiness.Decision{Changed: make([]readiness.VIPReadiness, n)}
				for i := range d.Changed {
					d.Changed[i] = readiness.VIPReadiness{
						VIP: numbered(i), State: state, Reason: reason, Detail: "0 of 1 targets ready", TotalTargets: 1,
					}
				}
				b.StartTimer()
				p.decisions.decided(d, revision)
				if p.decisions.drain() {
					p.health.VIPsChanged()
				}
				b.StopTimer()
			}
			b.ReportAllocs()
			b.StopTimer()
			for i := range b.N {
				flip(uint64(2*i), vip.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY)
				flip(uint64(2*i+1), vip.NotReady, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY)
			}
		})
	}
}
