package main

import (
	"net/netip"
	"testing"
	"time"
)

var (
	testVIP = netip.MustParseAddr("20.0.0.1")
	start   = time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
)

func at(milliseconds int) time.Time { return start.Add(time.Duration(milliseconds) * time.Millisecond) }

// steady is a second in which both gateways hold the VIP from both pods, and every request is
// answered except those that fails selects.
func steady(fails func(o outcome) bool) *record {
	r := &record{begin: at(0), end: at(1000), interval: 20 * time.Millisecond}
	for g := range gateways {
		for _, session := range []string{"trench0", "trench2"} {
			r.updates = append(r.updates, update{at: at(-500), gateway: g, session: session, vip: testVIP})
		}
	}
	for t := -200; t < 1000; t += 20 {
		for from := range gateways {
			o := outcome{sent: at(t), vip: testVIP, from: from}
			o.failed = fails(o)
			r.requests = append(r.requests, o)
			o.failed = false
			r.direct = append(r.direct, o)
		}
	}
	return r
}

func within(from, to int) func(outcome) bool {
	return func(o outcome) bool { return !o.sent.Before(at(from)) && o.sent.Before(at(to)) }
}

func withdraw(milliseconds, gateway int, session string) update {
	return update{at: at(milliseconds), gateway: gateway, session: session, vip: testVIP, withdrawn: true}
}

func announce(milliseconds, gateway int, session string) update {
	return update{at: at(milliseconds), gateway: gateway, session: session, vip: testVIP}
}

func TestMeasure(t *testing.T) {
	allLost := []update{
		withdraw(300, 0, "trench0"), withdraw(300, 0, "trench2"), withdraw(350, 1, "trench0"), withdraw(400, 1, "trench2"),
		announce(900, 1, "trench2"),
	}
	for _, test := range []struct {
		name    string
		fails   func(outcome) bool
		updates []update
		change  func(*record)
		want    numbers
	}{
		{name: "nothing happens", fails: within(0, 0)},
		{name: "all requests fail", fails: within(200, 500), want: numbers{BlackHole: 300 * time.Millisecond}},
		{
			name: "every fourth request fails", want: numbers{BlackHole: 340 * time.Millisecond},
			fails: func(o outcome) bool { return within(200, 600)(o) && o.sent.Sub(start).Milliseconds()%80 == 40 },
		},
		{name: "failures before the incident", fails: within(-200, 0)},
		{
			name: "failures while the gateway holds no route", fails: within(400, 900), updates: allLost,
			want: numbers{Dark: 500 * time.Millisecond},
		},
		{
			name: "failures before the withdrawal", fails: within(200, 900), updates: allLost,
			want: numbers{BlackHole: 200 * time.Millisecond, Dark: 500 * time.Millisecond},
		},
		{
			name: "one gateway withdrawn", fails: within(400, 900), want: numbers{},
			updates: []update{withdraw(300, 0, "trench0"), withdraw(300, 0, "trench2")},
			change:  func(r *record) { r.requests = sorted(r.requests, testVIP, 0) },
		},
		{
			name: "one session withdrawn", fails: within(200, 500), updates: []update{withdraw(100, 0, "trench0")},
			want: numbers{BlackHole: 300 * time.Millisecond},
		},
		{
			name: "nothing serves while withdrawn", fails: within(0, 0), updates: allLost,
			want: numbers{Dark: 100 * time.Millisecond},
			change: func(r *record) {
				for i, o := range r.direct {
					r.direct[i].failed = !o.sent.Before(at(500))
				}
			},
		},
		{
			name: "a gateway lost with its routes", fails: within(0, 0), want: numbers{Dark: 250 * time.Millisecond},
			updates: []update{
				withdraw(100, 1, "trench0"), withdraw(100, 1, "trench2"), {at: at(250), gateway: 0, withdrawn: true},
				announce(500, 0, "trench0"),
			},
		},
		{
			name: "no route in the kernel yet", updates: allLost, want: numbers{Dark: 500 * time.Millisecond},
			fails:  within(900, 910),
			change: func(r *record) { setNoRoute(r) },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := steady(test.fails)
			r.updates = append(r.updates, test.updates...)
			if test.change != nil {
				test.change(r)
			}
			if got := r.measure(testVIP, gateways); got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func setNoRoute(r *record) {
	for i := range r.requests {
		r.requests[i].noRoute = r.requests[i].failed
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
		{"error", result{Err: "failed"}, unplanned, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.result.within(test.budget); got != test.want {
				t.Errorf("got %t, want %t", got, test.want)
			}
		})
	}
}
