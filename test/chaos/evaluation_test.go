package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// noon is when every window of a test begins.
var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// at returns the time this many seconds after noon.
func at(seconds float64) time.Time { return noon.Add(time.Duration(seconds * float64(time.Second))) }

// The VIPs of tests: of stream-a (one of two targets is enough), of stream-b
// (both are needed), and shared by stream-c and stream-d.
const vipA, vipB, vipShared = 0, 2, 10

// received returns an event at gateway A.
func received(seconds float64, vip int, withdrawn bool) event {
	return event{at: at(seconds), vip: vip, gateway: gatewayA, withdrawn: withdrawn}
}

func is(seconds float64, subject string, s state) change { return change{at(seconds), subject, s} }

// streamIs returns the changes of both targets of a stream.
func streamIs(seconds float64, stream int, s state) []change {
	var all []change
	for t := stream * targetsPerStream; t < (stream+1)*targetsPerStream; t++ {
		all = append(all, is(seconds, targetSubject(t, ipv4), s))
	}
	return all
}

// inTime reports no delay: a machine that is never late.
func inTime(time.Time, time.Time) time.Duration { return 0 }

// wideFault explains everything.
var wideFault = []injection{{fault: fault{Kind: simple("anything", 1, once, wide, everything)}, from: noon}}

func TestEvaluateHeldTooLong(t *testing.T) {
	for _, c := range []struct {
		name    string
		changes []change
		events  []event
		want    string // "": nothing wrong
	}{
		{"targets gone, withdrawn in time", streamIs(1, 0, down), []event{received(1.5, vipA, true)}, ""},
		{
			"targets gone, withdrawn late", streamIs(1, 0,
				down), []event{received(3, vipA, true)}, "no target accepts connections",
		},
		{"targets gone, never withdrawn", streamIs(1, 0, down), nil, "no target accepts connections"},
		{"targets gone only for a moment", append(streamIs(1, 0, down), streamIs(1.2, 0, healthy)...), nil, ""},
		{"one of two targets gone", []change{is(1, targetSubject(0, ipv4), down)}, nil, ""},
		{"one of two targets gone, both needed", []change{is(1, targetSubject(2, ipv4), down)}, nil, "20.0.0.2/32"},
		{"a target that takes no packets", []change{is(1, targetSubject(2, ipv4)+"/silent", down)}, nil, "20.0.0.2/32"},
		{"one of two streams of a VIP gone", streamIs(1, 2, down), []event{received(1.5, 4, true)}, ""},
		{
			"both streams of a VIP gone", append(streamIs(1, 2, down), streamIs(1, 3, down)...),
			[]event{received(1.5, 4, true), received(1.5, 6, true)},
			"20.0.0.6/32",
		},
		{"lb dead, withdrawn", []change{is(1, "lb", down)}, allGone(1.1), ""},
		{"lb dead, not withdrawn", []change{is(1, "lb", down)}, nil, "the lb is dead"},
		{"lb stopped, withdrawn with its lease", []change{is(1, "lb", stopped)}, allGone(2.1), ""},
		{
			"lb stopped, withdrawn long after its lease",
			[]change{is(1, "lb", stopped)},
			allGone(2.5),
			"the lb is stopped",
		},
		{"lb stopped for half a lease", []change{is(1, "lb", stopped), is(1.5, "lb", healthy)}, nil, ""},
		{
			"lb stopped and continued, which is observed after the update",
			[]change{is(1, "lb", stopped), is(4.01, "lb", healthy)},
			append(allGone(2), allBack(4)...), "",
		},
		{
			"lb stopped, back long before it is continued",
			[]change{is(1, "lb", stopped), is(4, "lb", healthy)},
			append(allGone(2), allBack(3.5)...), "the lb is stopped",
		},
		{"readiness socket silent", []change{is(1, "stream", stopped)}, nil, "the readiness socket is silent"},
		{"SVID expired", []change{is(1, "svid", down)}, nil, "an SVID expired"},
		{"frontend dead", []change{is(1, "frontend", down)}, nil, "the frontend is dead"},
		{
			"frontend stopped for less than a hold time",
			[]change{is(1, "frontend", stopped), is(4, "frontend", healthy)},
			nil, "",
		},
		{"frontend stopped for longer", []change{is(1, "frontend", stopped)}, nil, "the frontend is stopped"},
		{
			"VIP removed, withdrawn after its drain",
			[]change{is(1, vipSubject(vipA), down)},
			[]event{received(1.5, vipA, true)},
			"",
		},
		{"VIP removed, still held", []change{is(1, vipSubject(vipA), down)}, nil, "it was removed"},
		{"BIRD dead", []change{is(1, "speaker", down)}, nil, "BIRD is dead"},
		{
			"packets dropped, the hold time ends it",
			[]change{is(1, familySubject(gatewayA, ipv4, "blackhole"), stopped)},
			family4Gone(4.2), "",
		},
		{
			"packets dropped, held for ever",
			[]change{is(1, familySubject(gatewayA, ipv4, "blackhole"), stopped)},
			nil,
			"packets are dropped",
		},
		{
			"gateway stopped", append(streamIs(1, 0, down), is(0.5, gatewaySubject(gatewayA), stopped)), nil, "",
		},
		{
			"gateway stopped and continued: it has had its time",
			append(streamIs(1, 0, down), is(0.5, gatewaySubject(gatewayA), stopped),
				is(4, gatewaySubject(gatewayA), healthy)), nil, "no target accepts connections",
		},
		{
			"lb stopped before a target went: its own rule counts",
			append(streamIs(1, 0, down), is(0.9, "lb", stopped)), allGone(2.1), "",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			slices.SortStableFunc(c.changes, func(a, b change) int { return a.At.Compare(b.At) })
			w := &window{from: noon, to: at(20), events: c.events, changes: c.changes, faults: wideFault, late: inTime}
			ev := evaluate(w)
			// Gateway B is not part of these tests.
			violations := slices.DeleteFunc(ev.violations, func(v violation) bool { return v.gateway == gatewayB })
			wantViolations(t, violations, c.want)
		})
	}
}

// FRR neither sleeps for a second as BIRD before 2.14 does, nor withdraws within milliseconds.
func TestBoundsOfFRR(t *testing.T) {
	dead := []change{is(1, "frontend", down)}
	cut := []change{is(1, "announcer", stopped)}
	for _, c := range []struct {
		name    string
		changes []change
		events  []event
		want    string
	}{
		{"frontend dead, withdrawn", dead, allGone(1.3), ""},
		{"frontend dead, withdrawn late", dead, allGone(1.6), "the frontend is dead"},
		{"lb dead, withdrawn late", []change{is(1, "lb", down)}, allGone(1.5), "the lb is dead"},
		{"announcer cut, withdrawn after the hold time", cut, allGone(4.2), ""},
		{"announcer cut, held for ever", cut, nil, "the announcer's packets are dropped"},
		{"announcer cut before the lb died", append(cut, is(1.5, "lb", down)), allGone(4.2), ""},
		{"FRR dead, held for ever", []change{is(1, "speaker", down)}, nil, "FRR is dead"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &window{
				from: noon, to: at(20), events: c.events, changes: c.changes, faults: wideFault, late: inTime, external: true,
			}
			violations := slices.DeleteFunc(evaluate(w).violations, func(v violation) bool { return v.gateway == gatewayB })
			wantViolations(t, violations, c.want)
		})
	}
}

// allGone returns the withdrawal of every VIP at gateway A.
func allGone(seconds float64) []event {
	var all []event
	for v := range vips {
		all = append(all, received(seconds, v, true))
	}
	return all
}

// allBack returns the announcement of every VIP at gateway A.
func allBack(seconds float64) []event {
	all := allGone(seconds)
	for i := range all {
		all[i].withdrawn = false
	}
	return all
}

// family4Gone returns the withdrawal of every IPv4 VIP at gateway A.
func family4Gone(seconds float64) []event {
	return slices.DeleteFunc(allGone(seconds), func(e event) bool { return vips[e.vip].family != ipv4 })
}

func wantViolations(t *testing.T, got []violation, want string) {
	t.Helper()
	switch {
	case want == "" && len(got) > 0:
		t.Errorf("violation %q, want none", got[0].what)
	case want != "" && !slices.ContainsFunc(got, func(v violation) bool { return strings.Contains(v.what, want) }):
		t.Errorf("violations %v, want one of %q", got, want)
	}
}

func TestEvaluateRaisedWithoutTarget(t *testing.T) {
	noTargets := streamIs(1, 0, down)
	for _, c := range []struct {
		name    string
		changes []change
		want    string
	}{
		{
			"a frontend that starts", append(noTargets, is(4, "frontend", down), is(5, "frontend", healthy)),
			"although no target accepted connections",
		},
		{
			"an lb that starts", append(noTargets, is(4, "lb", down), is(5, "lb", healthy)),
			"although no target accepted connections",
		},
		{
			"an lb that was stopped and does not know yet", append(noTargets, is(4, "lb", stopped), is(6, "lb", healthy)),
			"",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			events := []event{received(1.5, vipA, true), received(6.2, vipA, false), received(6.4, vipA, true)}
			ev := evaluate(&window{
				from: noon, to: at(20), events: events, changes: c.changes, faults: wideFault,
				late: inTime,
			})
			wantViolations(t, slices.DeleteFunc(ev.violations,
				func(v violation) bool { return v.gateway == gatewayB || strings.Contains(v.what, "held") }), c.want)
		})
	}
}

func TestEvaluateUnexplainedUpdate(t *testing.T) {
	ofA := injection{fault: fault{Kind: simple("target down", 1, once, ofTargets, ofStream(0))}, from: at(1)}
	for _, c := range []struct {
		name  string
		event event
		late  time.Duration
		want  string
	}{
		{"of the VIP that a fault touches", received(1.5, vipA, true), 0, ""},
		{"before the fault", received(0.5, vipA, true), 0, "untouched"},
		{"of another VIP", received(1.5, vipB, true), 0, "untouched"},
		{"an announcement that changes nothing", received(1.5, vipB, false), 0, "untouched"},
		{"of another VIP on a starved machine", received(1.5, vipB, true), time.Second, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &window{
				from: noon, to: at(1.6), events: []event{c.event}, faults: []injection{ofA},
				late: func(time.Time, time.Time) time.Duration { return c.late },
			}
			ev := evaluate(w)
			wantViolations(t, ev.violations, c.want)
			if excused := c.late > 0; excused != (ev.excused == 1) {
				t.Errorf("%d excused", ev.excused)
			}
		})
	}
}

func TestEvaluateDark(t *testing.T) {
	turns := simple("edit", 1, once, ofEdits, everything)
	turns.TakesTurns = true
	other := simple("target down", 1, once, ofTargets, ofStream(0))
	atB := func(seconds float64, withdrawn bool) event {
		return event{at: at(seconds), vip: vipA, gateway: gatewayB, withdrawn: withdrawn}
	}
	oneAfterAnother := []event{
		received(1, vipA, true), received(2, vipA, false), atB(2.5, true), atB(3, false),
	}
	atOnce := []event{received(1, vipA, true), atB(1.5, true), received(2, vipA, false), atB(3, false)}
	for name, c := range map[string]struct {
		events []event
		kinds  []*kind
		want   string
	}{
		"one gateway after another":           {oneAfterAnother, []*kind{turns}, ""},
		"both at once":                        {atOnce, []*kind{turns}, "no gateway held 20.0.0.1/32"},
		"another fault may have withdrawn it": {atOnce, []*kind{turns, other}, ""},
	} {
		w := &window{from: noon, to: at(20), events: c.events, late: inTime}
		for _, k := range c.kinds {
			w.faults = append(w.faults, injection{fault: fault{Kind: k}, from: noon})
		}
		t.Run(name, func(t *testing.T) { wantViolations(t, evaluate(w).violations, c.want) })
	}
}

func TestBusyMachineSlack(t *testing.T) {
	late := func(time.Time, time.Time) time.Duration { return 500 * time.Millisecond }
	w := &window{
		from: noon, to: at(20), events: []event{received(3, vipA, true)}, changes: streamIs(1, 0, down),
		faults: wideFault, late: late,
	}
	wantViolations(
		t, slices.DeleteFunc(evaluate(w).violations, func(v violation) bool { return v.gateway == gatewayB }), "",
	)
}

func TestIntervals(t *testing.T) {
	i := func(from, to float64) interval { return interval{at(from), at(to)} }
	for _, c := range []struct {
		name      string
		got, want []interval
	}{
		{"merged", merge([]interval{i(3, 4), i(1, 2), i(1.5, 3)}), []interval{i(1, 4)}},
		{"apart", merge([]interval{i(3, 4), i(1, 2)}), []interval{i(1, 2), i(3, 4)}},
		{"in both", intersect([]interval{i(1, 4)}, []interval{i(0, 2), i(3, 5)}), []interval{i(1, 2), i(3, 4)}},
		{"without the middle", without([]interval{i(1, 4)}, []interval{i(2, 3)}), []interval{i(1, 2), i(3, 4)}},
		{"without the ends", without([]interval{i(1, 4)}, []interval{i(0, 2), i(3, 5)}), []interval{i(2, 3)}},
		{"without everything", without([]interval{i(1, 4)}, []interval{i(0, 5)}), nil},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, c.got, c.want)
		}
	}
}

func TestHoldMeasures(t *testing.T) {
	w := &window{
		from: noon, to: at(20), events: allGone(1.004), changes: []change{is(1, "lb",
			down)}, faults: wideFault, late: inTime,
	}
	got := summarize(evaluate(w).measures, false)
	at := slices.IndexFunc(got, func(h Hold) bool { return h.Cause == "the lb is dead" })
	const held = 4 * time.Millisecond
	if h := got[at]; h.Times != len(vips) || h.Median != held || h.P99 != held || h.Longest != held || h.Exceeded != 0 {
		t.Errorf("measured %+v", h)
	}
}

func TestDownBetweenPolls(t *testing.T) {
	t0 := time.Now()
	line := newTimeline()
	line.setAt(t0.Add(time.Second), "trench", down)
	line.setAt(t0.Add(2*time.Second), "trench", healthy)
	for since, want := range map[time.Duration]bool{
		0: true, 1500 * time.Millisecond: true,
		2500 * time.Millisecond: false,
	} {
		if got := line.wasDown("trench", t0.Add(since)); got != want {
			t.Errorf("gone at any moment from %v on: %v, want %v", since, got, want)
		}
	}
	line.setAt(t0.Add(3*time.Second), "trench", down)
	if !line.wasDown("trench", t0.Add(time.Hour)) {
		t.Error("what is down now counts as healthy")
	}
	if line.wasDown("disk", t0) {
		t.Error("what never was gone counts as gone")
	}
}

// A stream that needs both of its targets, of which one falls while the rise of
// the other is being detected: each has its own detection time.
func TestTargetClocksAreIndependent(t *testing.T) {
	const both = 1 // stream-b
	first, second := targetSubject(both*targetsPerStream, ipv4), targetSubject(both*targetsPerStream+1, ipv4)
	h := newHistory(
		[]change{is(1, first, down), is(2, second, down), is(2.1, first, healthy), is(4, second, healthy)}, at(10),
	)
	got, want := h.streamDown(both, ipv4), []interval{{at(1), at(2.1)}, {at(2), at(4)}}
	if !slices.Equal(got, want) {
		t.Fatalf("%v, want %v", got, want)
	}
}
