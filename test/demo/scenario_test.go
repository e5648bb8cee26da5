package main

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/test/lab"
)

var (
	vipA = netip.MustParsePrefix("20.0.0.1/32")
	vipB = netip.MustParsePrefix("2000::2/128")
)

// route returns a plain route, or one with communities.
func route(p netip.Prefix, communities ...string) lab.Route {
	return lab.Route{Prefix: p, NextHop: lab.PodExternal4, ASPath: []string{"8103"}, Communities: communities}
}

// snapshot returns a table at a number of milliseconds after the start.
func snapshot(start time.Time, ms int, routes ...lab.Route) lab.Snapshot {
	s := lab.Snapshot{At: start.Add(time.Duration(ms) * time.Millisecond), Routes: map[netip.Prefix]lab.Route{}}
	for _, r := range routes {
		s.Routes[r.Prefix] = r
	}
	return s
}

func TestTableMarks(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		name        string
		before, now lab.Snapshot
		want        []string
	}{
		{"empty", snapshot(now, 0), snapshot(now, 1), []string{"  the gateway's table is empty"}},
		{"new", snapshot(now, 0), snapshot(now, 1, route(vipA)), []string{
			"  prefix         via             AS path               community",
			"+ 20.0.0.1/32    169.254.100.1   8103                  -",
		}},
		{"gone", snapshot(now, 0, route(vipA), route(vipB)), snapshot(now, 1, route(vipB)), []string{
			"  prefix         via             AS path               community",
			"- 20.0.0.1/32    gone",
			"  2000::2/128    169.254.100.1   8103                  -",
		}},
		{"changed", snapshot(now, 0, route(vipA)), snapshot(now, 1, route(vipA, "(65535,0)")), []string{
			"  prefix         via             AS path               community",
			"~ 20.0.0.1/32    169.254.100.1   8103                  65535:0 (graceful shutdown)",
		}},
		{
			"all gone", snapshot(now, 0, route(vipA)), snapshot(now, 1),
			[]string{"  the gateway's table is empty", "- 20.0.0.1/32    gone"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, table(c.before, c.now)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestVerifySnapshots(t *testing.T) {
	now := time.Now()
	both := snapshot(now, -1, route(vipA), route(vipB))
	for _, c := range []struct {
		name    string
		want    []netip.Prefix
		history []lab.Snapshot
		problem string // empty: none
	}{
		{"one goes", []netip.Prefix{vipB}, []lab.Snapshot{both, snapshot(now, 1, route(vipB))}, ""},
		{"one comes", []netip.Prefix{vipA, vipB}, []lab.Snapshot{snapshot(now, 0, route(vipB)), both}, ""},
		{
			"both come one after the other",
			[]netip.Prefix{vipA, vipB},
			[]lab.Snapshot{snapshot(now, 0), snapshot(now, 1, route(vipB)), both},
			"",
		},
		{
			"the other one goes for a moment",
			[]netip.Prefix{vipB},
			[]lab.Snapshot{both, snapshot(now, 1), snapshot(now, 2, route(vipB))},
			"lost or changed",
		},
		{
			"the other one changes",
			[]netip.Prefix{vipB},
			[]lab.Snapshot{both, snapshot(now, 1, route(vipB, "(65535,0)"))},
			"lost or changed",
		},
		{
			"it goes, comes and goes",
			[]netip.Prefix{vipB},
			[]lab.Snapshot{both, snapshot(now, 1, route(vipB)), both, snapshot(now, 2, route(vipB))},
			"changed again",
		},
		{
			"a stranger for a moment",
			[]netip.Prefix{vipB},
			[]lab.Snapshot{snapshot(now, 0, route(vipB)), both, snapshot(now, 1, route(vipB))},
			"at no moment",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := verifySnapshots(&change{from: now, before: c.history[0], want: c.want}, c.history)
			wantProblem(t, err, c.problem)
		})
	}
}

func TestInOrder(t *testing.T) {
	now := time.Now()
	warned := snapshot(now, 1, route(vipA, "(65535,0)"))
	up, gone := snapshot(now, 0, route(vipA)), snapshot(now, 10)
	for _, c := range []struct {
		name    string
		history []lab.Snapshot
		lbEnd   int
		problem string // empty: none
	}{
		{"in order", []lab.Snapshot{up, warned, gone}, 20, ""},
		{"no warning", []lab.Snapshot{up, gone}, 20, "never held"},
		{"never gone", []lab.Snapshot{up, warned}, 20, "not withdrawn"},
		{"back again", []lab.Snapshot{up, warned, gone, warned}, 20, "came back"},
		{"the warning is taken back", []lab.Snapshot{up, warned, up, gone}, 20, "lost its 65535:0"},
		{"the lb goes too early", []lab.Snapshot{up, warned, gone}, 9, "expected to forward"},
	} {
		t.Run(c.name, func(t *testing.T) {
			wantProblem(t, inOrder(c.history, []netip.Prefix{vipA}, now.Add(time.Duration(c.lbEnd)*time.Millisecond)),
				c.problem)
		})
	}
}

func wantProblem(t *testing.T, err error, problem string) {
	t.Helper()
	switch {
	case problem == "" && err != nil:
		t.Errorf("refused: %v", err)
	case problem != "" && (err == nil || !strings.Contains(err.Error(), problem)):
		t.Errorf("error %v, want one about %q", err, problem)
	}
}

func TestQuote(t *testing.T) {
	for _, path := range []string{"/usr/bin/lb", "/a folder/lb", "/it's/lb", `/"x" $HOME;ls/lb`, ""} {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf %s "+quote(path)).Output()
		if err != nil || string(out) != path {
			t.Errorf("the shell makes %q of %q (%v)", out, path, err)
		}
	}
}
