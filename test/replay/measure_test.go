package main

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/machine"
)

var (
	testVIP = netip.MustParseAddr("20.0.0.1")
	start   = time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
)

func at(milliseconds int) time.Time { return start.Add(time.Duration(milliseconds) * time.Millisecond) }

// steady is a second in which both gateways hold the VIP from both pods, and every request is
// answered except those that fails selects.
func steady(fails func(milliseconds, gateway int) bool) *record {
	r := &record{begin: at(0), end: at(1000), interval: 20 * time.Millisecond}
	for g := range gateways {
		r.updates = append(r.updates, announce(-500, g, "trench0"), announce(-500, g, "trench2"))
		for t := -200; t < 1000; t += 20 {
			o := outcome{sent: at(t), vip: testVIP, gateway: g}
			if fails(t, g) {
				o.err = errors.New("failed")
			}
			r.requests = append(r.requests, o)
		}
	}
	return r
}

func between(from, to int) func(int, int) bool {
	return func(t, _ int) bool { return from <= t && t < to }
}

func withdraw(milliseconds, gateway int, session string) update {
	return update{at: at(milliseconds), gateway: gateway, session: session, vip: testVIP, withdrawn: true}
}

func announce(milliseconds, gateway int, session string) update {
	return update{at: at(milliseconds), gateway: gateway, session: session, vip: testVIP}
}

func TestMeasure(t *testing.T) {
	const ms = time.Millisecond
	everywhere := []update{
		withdraw(300, 0, "trench0"), withdraw(300, 0, "trench2"), withdraw(350, 1, "trench0"), withdraw(400, 1, "trench2"),
		announce(900, 1, "trench2"),
	}
	for _, test := range []struct {
		name    string
		fails   func(int, int) bool
		updates []update
		want    numbers
	}{
		{"nothing happens", between(0, 0), nil, numbers{}},
		{"all requests fail", between(200, 500), nil, numbers{BlackHole: 300 * ms}},
		{
			"every fourth request fails", func(t, _ int) bool { return between(200, 600)(t, 0) && t%80 == 40 }, nil,
			numbers{BlackHole: 340 * ms},
		},
		{"failures before the incident", between(-200, 0), nil, numbers{}},
		{"failures without a route", between(400, 900), everywhere, numbers{Dark: 500 * ms}},
		{"failures before the withdrawal", between(200, 900), everywhere, numbers{BlackHole: 200 * ms, Dark: 500 * ms}},
		{
			"failures at the gateway without a route", func(t, g int) bool { return g == 0 && between(400, 900)(t, g) },
			[]update{withdraw(300, 0, "trench0"), withdraw(300, 0, "trench2")},
			numbers{},
		},
		{"one session withdrawn", between(200, 500), everywhere[:1], numbers{BlackHole: 300 * ms}},
		{
			"a gateway lost with its routes", between(0, 0), []update{
				withdraw(100, 1, "trench0"), withdraw(100, 1, "trench2"),
				{at: at(250), gateway: 0, withdrawn: true},
				announce(500, 0, "trench0"),
			}, numbers{Dark: 250 * ms},
		},
		{"replaced route", between(0, 0), []update{announce(500, 0, "trench0"), announce(500, 1, "trench0")}, numbers{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := steady(test.fails)
			r.updates = append(r.updates, test.updates...)
			if got := r.measure(testVIP, true); got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
			test.want.Dark = 0
			if got := r.measure(testVIP, false); got != test.want {
				t.Errorf("nothing serves: got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestWithdrawers(t *testing.T) {
	r := steady(between(0, 0))
	r.updates = append(r.updates, withdraw(-300, 0, "trench0"), withdraw(300, 1, "trench2"), withdraw(400, 0, "trench3"))
	if got := r.withdrawers(); got != 1 {
		t.Errorf("%d pods withdrew, want 1", got)
	}
}

// The gateway's kernel has a route some time after its BIRD.
func TestRouteNotInstalled(t *testing.T) {
	r := steady(between(900, 910))
	for i := range r.requests {
		r.requests[i].noRoute = r.requests[i].err != nil
	}
	for g := range gateways {
		r.updates = append(r.updates, withdraw(300, g, "trench0"), withdraw(300, g, "trench2"), announce(820, g, "trench0"))
	}
	if got := r.measure(testVIP, false); got != (numbers{}) {
		t.Errorf("got %+v, want nothing", got)
	}
}

func TestWithin(t *testing.T) {
	second := numbers{BlackHole: time.Second, Dark: time.Second}
	for _, test := range []struct {
		name   string
		result result
		budget budget
		want   bool
	}{
		{"at the limit", result{Worst: second}, unplanned, true},
		{"black hole", result{Worst: numbers{BlackHole: time.Second + step}}, unplanned, false},
		{"dark", result{Worst: numbers{Dark: step}}, planned, false},
		{"both pods withdrew", result{Pods: 2}, unplanned, true},
		{"both pods withdrew after a wrong edit", result{Pods: 2}, wrong, false},
		{"error", result{Err: "failed"}, unplanned, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.result.within(test.budget); got != test.want {
				t.Errorf("got %t, want %t", got, test.want)
			}
		})
	}
}

func TestTable(t *testing.T) {
	all := scenarios()
	got := report{Machine: machine.Machine{Commit: "0123456789ab"}, Rows: []row{
		{scenario: all[0], Met: true},
		{scenario: all[1], Vipgate: result{Worst: numbers{Dark: 20 * time.Millisecond}}},
	}}.table()
	if !strings.Contains(got, "| 0/0 | 1 met |") || !strings.Contains(got, "| 0/0.02 | 0 **missed** |") ||
		!strings.Contains(got, "commit 0123456789ab") {
		t.Errorf("the table has not each row, or no commit:\n%s", got)
	}
}
