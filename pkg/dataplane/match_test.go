package dataplane

import (
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A change of a stream's ports modifies only its set, if the stream already had a match.
func TestMatchChangesInPlace(t *testing.T) {
	x := newSite(t)
	p := x.start()
	configure := func(match ...plan.Port) {
		t.Helper()
		s := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving), siteTarget(2, plan.Serving, plan.Serving))
		s.Match = match
		if state := p.configure(s); len(state.Drift)+len(state.Problems) > 0 || len(state.VIPs) != 2 {
			t.Fatal(describeState(state))
		}
	}
	chain := func() string { return x.sh("nft -a -s list chain inet vipgate-lb stream/a") }
	others := func() string {
		return x.sh("nft -a list map inet vipgate-lb maglev4/a; nft -a list map inet vipgate-lb vip4; ip rule; " +
			"nft -a -s list chain inet vipgate-lb target/5000; ip route show table 5000")
	}
	configure(siteMatch...)
	rules, rest := chain(), others()
	for _, match := range [][]plan.Port{siteMatch[:1], siteMatch[1:]} {
		configure(match...)
		if got := chain(); got != rules {
			t.Errorf("match %v: the rules\n%s\nbecame\n%s", match, rules, got)
		}
	}
	x.has(t, "tcp . 443", "udp . 53")
	x.lacks(t, "tcp . 80")
	configure()
	x.lacks(t, "match/a", "that do not match")
	configure(siteMatch...)
	x.has(t, "tcp . 80", "ports that do not match", "protocols that do not match")
	if got := others(); got != rest {
		t.Errorf("before\n%s\nafter\n%s", rest, got)
	}
	dropped, err := p.Unmatched(t.Context())
	if n, ok := dropped["a"]; err != nil || !ok || n != 0 || len(dropped) != 1 {
		t.Errorf("dropped are %v, %v", dropped, err)
	}
}

// Missing ports make a VIP not ready; additional ports do not.
func TestMatchDrift(t *testing.T) {
	has := &plan.KernelStream{Name: "a", ChainIntact: true, Size: 103, Seed: 1, Match: siteMatch}
	ssh := []plan.Port{{Protocol: plan.TCP, Number: 22}}
	for name, tt := range map[string]struct {
		kernel []plan.Port
		want   string
		able   bool
	}{
		"a port less":   {siteMatch[1:], "1 of 3 ports are missing", false},
		"another port":  {slices.Concat(ssh, siteMatch[1:]), "1 of 3 ports are missing", false},
		"a port more":   {slices.Concat(ssh, siteMatch), "it has 1 ports more", true},
		"no set":        {nil, "it is missing", false},
		"an empty set":  {[]plan.Port{}, "3 of 3 ports are missing", false},
		"all the ports": {slices.Clone(siteMatch), "", true},
	} {
		kernel, wanted := *has, *has
		kernel.Match = tt.kernel
		kernel.Tables[vip.IPv4] = []uint32{5000}
		wanted.Tables = kernel.Tables
		x := plan.StreamDrift(plan.InstalledStream{Name: "a", Size: 103, Seed: 1}, &wanted, &kernel, nil)
		got := x.Problems[vip.IPv4]
		if (got == "") != tt.able || x.Broken == tt.able || !tt.able && !strings.Contains(got, tt.want) {
			t.Errorf("%s: problem %q, broken %v", name, got, x.Broken)
		}
		if got := len(x.Drift); tt.want == "" && got != 0 || tt.want != "" && (got != 1 || x.Drift[0].Detail != tt.want) {
			t.Errorf("%s: drift %+v", name, x.Drift)
		}
	}
}

func TestMatchIsRecovered(t *testing.T) {
	w := newModelFixture()
	desired := streamA(testTarget("x1", plan.Serving))
	desired.Streams["a"].Match = siteMatch
	w.settle(desired, false)
	w.restart()
	if s := w.e.streams["a"].installed; s.Stage != plan.StageApplied || !plan.SameMatch(s.Match, siteMatch) {
		t.Errorf("recovered is %+v", s)
	}
}
