package lb

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

func TestEventsOfTheDataPlane(t *testing.T) {
	rule := plan.Drift{Object: "rule", Stream: "s", Target: "a", Detail: "is missing"}
	route := plan.Drift{Object: "route", Stream: "s", Target: "a", Detail: "is missing"}
	held := map[string]time.Time{"s": {}}
	for _, c := range []struct {
		name    string
		was, is plan.State
		want    []string
	}{
		{"nothing", plan.State{Drift: []plan.Drift{rule}}, plan.State{Drift: []plan.Drift{rule}}, nil},
		{
			"drift of a held stream",
			plan.State{Held: held, Drift: []plan.Drift{rule}},
			plan.State{Held: held, Drift: []plan.Drift{rule, route}},
			[]string{"drift route s/a: is missing"},
		},
		{"drift that is about to be repaired", plan.State{}, plan.State{Drift: []plan.Drift{rule}}, nil},
		{"held", plan.State{}, plan.State{Held: held}, []string{"held stream s s/: until lb resume"}},
		{"resumed", plan.State{Held: held}, plan.State{}, []string{"resumed stream s s/: by an operator"}},
		{
			"expired",
			plan.State{Held: map[string]time.Time{"": time.Unix(1, 0)}},
			plan.State{},
			[]string{"resumed all streams /: the hold expired"},
		},
		{
			"blocked",
			plan.State{},
			plan.State{Err: errors.New("disk full")},
			[]string{"blocked data plane /: disk full"},
		},
		{
			"still blocked",
			plan.State{Err: errors.New("disk full")},
			plan.State{Err: errors.New("disk full, again")},
			nil,
		},
		{
			"no longer blocked",
			plan.State{Err: errors.New("disk full")},
			plan.State{},
			[]string{"solved data plane /: disk full"},
		},
		{
			"problems",
			plan.State{Problems: []plan.Problem{{Object: "VIP", Detail: "local"}}},
			plan.State{Problems: []plan.Problem{{Object: "VIP", Detail: "twice"}}},
			[]string{"problem VIP /: twice", "solved VIP /: local"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, e := range dataPlaneEvents(c.was, c.is) {
				got = append(got, fmt.Sprintf("%s %s %s/%s: %s", e.To, e.Object, e.Stream, e.Target, e.Detail))
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

func TestDataPlaneEventsKeepOthers(t *testing.T) {
	s := plan.State{Held: map[string]time.Time{"": {}}}
	for i := range 1500 {
		s.Drift = append(s.Drift, plan.Drift{Object: fmt.Sprint("rule ", i)})
	}
	got := dataPlaneEvents(plan.State{Held: s.Held}, s)
	if n := len(got); n != maxEventsAtOnce || got[n-2].Object != "rule 98" || got[n-1].To != "drift" ||
		got[n-1].Detail != "and 1401 more at once: lb status lists what there is" {
		t.Errorf("%d events, the last two %+v", n, got[n-2:])
	}
	s.Drift = s.Drift[:maxEventsAtOnce]
	if got := dataPlaneEvents(plan.State{Held: s.Held}, s); len(got) != maxEventsAtOnce ||
		got[maxEventsAtOnce-1].Object != "rule 99" {
		t.Errorf("%d events", len(got))
	}
}
