package change_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

// trenchWith returns a configuration with an IPv6 VIP and the VIPs 20.0.0.1/32 and so on, a gateway
// of each family, and a stream with a target for each of the first IPv4 VIPs. edits replace texts.
func trenchWith(t *testing.T, vips, streams int, edits ...string) *trench.Config {
	t.Helper()
	var text strings.Builder
	text.WriteString("trench: red\nattractor:\n  name: a\n  vips: [\"2000::1/128\"")
	for nth := 1; nth <= vips; nth++ {
		fmt.Fprintf(&text, ", 20.0.0.%d/32", nth)
	}
	text.WriteString("]\n  gateways:\n" + gatewayFour + gatewaySix)
	text.WriteString("streams:\n  - {name: s0, vips: [\"2000::1/128\"]}\n")
	for nth := 1; nth <= streams; nth++ {
		fmt.Fprintf(&text, "  - {name: s%[1]d, vips: [20.0.0.%[1]d/32], check: {tcp: {port: 80}}, "+
			"targets: [{name: t%[1]d, ips: [10.0.0.%[1]d]}]}\n", nth)
	}
	edited := text.String()
	for nth := 0; nth < len(edits); nth += 2 {
		if !strings.Contains(edited, edits[nth]) {
			t.Fatalf("%q is not in\n%s", edits[nth], edited)
		}
		edited = strings.ReplaceAll(edited, edits[nth], edits[nth+1])
	}
	config, err := file.Parse("trench.yaml", []byte(edited), trench.DefaultDefaults())
	if err != nil {
		t.Fatalf("%v in\n%s", err, edited)
	}
	return config
}

const (
	gatewayFour = "    - {name: four, address: 172.16.0.254}\n"
	gatewaySix  = "    - {name: six, address: \"fd00::254\"}\n"
	firstVIP    = "\"2000::1/128\", "
)

func all(string, string) bool { return true }

func TestHoldVIPs(t *testing.T) {
	// One more VIP is IPv6 in every configuration.
	for _, tt := range []struct {
		before, after, percent int
		held                   bool
	}{
		{2, 0, 50, false}, // 2 of 3
		{3, 0, 50, true},  // 3 of 4
		{5, 2, 50, false}, // 3 of 6
		{4, 1, 50, true},  // 3 of 5
		{5, 1, 50, true},  // 4 of 6
		{9, 4, 50, false}, // 5 of 10
		{9, 3, 50, true},  // 6 of 10
		{9, 7, 20, false}, // 2 of 10
		{9, 6, 30, false}, // 3 of 10
		{9, 6, 29, true},
		{9, 0, 89, true}, // 9 of 10
		{9, 0, 90, false},
		{9, 0, 100, false},
	} {
		old := trenchWith(t, tt.before, min(2, tt.after))
		limit := fmt.Sprintf("maxRemoval: %d\ntrench: red", tt.percent)
		next := trenchWith(t, tt.after, min(2, tt.after), "trench: red", limit)
		effective, held := change.Hold(old, next, trench.Held{}, "", all)
		count := fmt.Sprintf("%d of %d with %d%%", tt.before-tt.after, tt.before+1, tt.percent)
		switch {
		case !tt.held && (effective != next || held.ID != ""):
			t.Errorf("%s: held %+v", count, held)
		case tt.held && (len(effective.Attractor.VIPs) != tt.before+1 || len(held.VIPs) != tt.before-tt.after ||
			len(held.Base) != tt.before+1 || held.Whole || held.Count() != len(held.VIPs)):
			t.Errorf("%s: %v in force, held %+v", count, effective.Attractor.VIPs, held)
		}
		// The identifier confirms the removal, in the file and of an operator, also among others.
		if !tt.held {
			continue
		}
		if _, again := change.Hold(old, next, held, "t00000000,"+held.ID, all); again.ID != "" {
			t.Errorf("%s: held after the confirmation of an operator: %v", count, again)
		}
		next.Confirm = held.ID
		if confirmed, again := change.Hold(effective, next, held, "", all); again.ID != "" || confirmed != next {
			t.Errorf("%s: held after the confirmation in the file: %v", count, again)
		}
	}
}

// A held VIP keeps its policy, also over further edits.
func TestHoldPolicies(t *testing.T) {
	const ready = ", ready: {med: 500}}\n"
	own, rest := "    - {vips: [20.0.0.1/32, 20.0.0.3/32]"+ready, "    - {ready: {med: 7}}\n"
	for name, tt := range map[string]struct {
		before, after string
		want          map[int]int64 // MED by VIP
		added         int
	}{
		"none":                      {"", "", map[int]int64{}, 0},
		"own":                       {own, "", map[int]int64{3: 500}, 1},
		"own, and a new rest":       {own, rest, map[int]int64{1: 7, 2: 0, 3: 500, 4: 0}, 2},
		"rest":                      {rest, "", map[int]int64{2: 7, 3: 7, 4: 7}, 1},
		"same rest":                 {rest, rest, map[int]int64{2: 7, 3: 7, 4: 7}, 1},
		"other rest":                {rest, "    - {ready: {med: 8}}\n", map[int]int64{1: 8, 2: 7}, 1},
		"own with a VIP that stays": {own, "    - {vips: [20.0.0.1/32]" + ready, map[int]int64{1: 500, 3: 500}, 1},
	} {
		with := func(vips int, policies string) *trench.Config {
			if policies != "" {
				policies = "  policies:\n" + policies
			}
			return trenchWith(t, vips, 1, "streams:\n", policies+"streams:\n")
		}
		effective, held := change.Hold(with(4, tt.before), with(1, tt.after), trench.Held{}, "", nil)
		for range 2 {
			policies := effective.Attractor.Policies
			if held.ID == "" || held.Whole || len(policies) != len(with(1, tt.after).Attractor.Policies)+tt.added {
				t.Errorf("%s: held %+v with %+v", name, held, policies)
			}
			for nth, want := range tt.want {
				is := vip.Require(fmt.Sprintf("20.0.0.%d/32", nth))
				has := func(policy trench.Policy) bool { return slices.Contains(policy.VIPs, is) }
				at := slices.IndexFunc(policies, has)
				if at < 0 {
					at = slices.IndexFunc(policies, func(policy trench.Policy) bool { return len(policy.VIPs) == 0 })
				}
				if at < 0 || policies[at].Ready.MED != want {
					t.Errorf("%s: %s has policy %d of %+v, want MED %d", name, is, at, policies, want)
				}
			}
			effective, held = change.Hold(effective, with(1, tt.after), held, "", nil)
		}
		if back, none := change.Hold(effective, with(4, tt.before), held, "", nil); none.ID != "" ||
			!reflect.DeepEqual(back.Attractor.Policies, with(4, tt.before).Attractor.Policies) {
			t.Errorf("%s: %+v after the VIPs returned", name, back.Attractor.Policies)
		}
	}
}

// A hold ends with the VIPs' return or a confirmation, not by VIPs that are added.
func TestHoldIsSticky(t *testing.T) {
	old, next := trenchWith(t, 4, 2), trenchWith(t, 1, 1)
	effective, held := change.Hold(old, next, trench.Held{}, "", nil)
	more := trenchWith(t, 1, 1, firstVIP, firstVIP+"30.0.0.1/32, 30.0.0.2/32, 30.0.0.3/32, 30.0.0.4/32, ")
	effective, again := change.Hold(effective, more, held, "", nil)
	if again.ID != held.ID || len(again.Base) != 5 || len(effective.Attractor.VIPs) != 9 {
		t.Errorf("held %+v with %v in force, before %+v", again, effective.Attractor.VIPs, held)
	}
	// A held VIP keeps its stream.
	if got := effective.Streams[len(effective.Streams)-1]; got.Name != "s2" || len(got.Targets) != 1 {
		t.Errorf("the last stream is %+v", got)
	}
	if back, none := change.Hold(effective, old, again, "", nil); none.ID != "" || back != old {
		t.Errorf("held %+v after the VIPs returned", none)
	}
	// Of fewer VIPs than the limit the removal passes.
	if _, none := change.Hold(effective, trenchWith(t, 2, 1), again, "", nil); none.ID != "" {
		t.Errorf("held %+v after one VIP returned", none)
	}
}

func TestHoldGateways(t *testing.T) {
	old := trenchWith(t, 1, 1)
	for _, tt := range []struct {
		name  string
		edits []string
		held  string
	}{
		{"unchanged", nil, ""},
		{"last of a family", []string{gatewaySix, ""}, "six"},
		{"replaced", []string{gatewaySix, "    - {name: other, address: \"fd00::253\"}\n"}, ""},
		{"name of the other family", []string{gatewaySix, "    - {name: six, address: 172.16.0.253}\n"}, "six"},
		{
			"with the VIPs of the family",
			[]string{gatewaySix, "", firstVIP, "", "  - {name: s0, vips: [\"2000::1/128\"]}\n", ""},
			"",
		},
		{"every gateway", []string{gatewaySix, "", gatewayFour, "", "  gateways:\n", ""}, "four six"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			next := trenchWith(t, 1, 1, tt.edits...)
			effective, held := change.Hold(old, next, trench.Held{}, "", nil)
			if got := strings.Join(held.Gateways, " "); got != tt.held {
				t.Fatalf("held %q, want %q", got, tt.held)
			}
			// Two gateways with one name cannot be in force together.
			if wantWhole := tt.name == "name of the other family"; held.Whole != wantWhole || wantWhole && effective != old {
				t.Errorf("held %+v", held)
			}
			if problems := trench.Validate(effective); len(problems) > 0 {
				t.Error(problems)
			}
		})
	}
}

func TestHoldTargets(t *testing.T) {
	none := func(nth int) []string {
		return []string{fmt.Sprintf("targets: [{name: t%[1]d, ips: [10.0.0.%[1]d]}]", nth), "targets: []"}
	}
	both := append(none(1), none(2)...)
	old := trenchWith(t, 3, 3)
	for _, tt := range []struct {
		name  string
		next  *trench.Config
		alive change.Alive
		held  string
	}{
		{"one stream", trenchWith(t, 3, 3, none(1)...), all, ""},
		{"two streams", trenchWith(t, 3, 3, both...), all, "s1 s2"},
		{"streams removed, VIPs stay", trenchWith(t, 3, 1), all, "s2 s3"},
		{"streams removed with their VIPs", trenchWith(t, 1, 1), all, ""},
		{"targets unknown", trenchWith(t, 3, 3, both...), nil, ""},
		{
			"one of two fails its checks", trenchWith(t, 3, 3, both...),
			func(stream, target string) bool { return stream == "s1" && target == "t1" }, "",
		},
		{"terminating", trenchWith(t, 3, 3, "[10.0.0.1]", "[10.0.0.1], terminating: true", "[10.0.0.2]",
			"[10.0.0.2], terminating: true"), all, ""},
		{"replaced", trenchWith(t, 3, 3, "10.0.0.1", "10.0.1.1", "10.0.0.2", "10.0.1.2"), all, ""},
		{"streams renamed", trenchWith(t, 3, 3, "name: s1", "name: web", "name: s2", "name: dns"), all, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			effective, held := change.Hold(old, tt.next, trench.Held{}, "", tt.alive)
			if got := strings.Join(held.Streams, " "); got != tt.held {
				t.Fatalf("held %q, want %q", got, tt.held)
			}
			if problems := trench.Validate(effective); len(problems) > 0 {
				t.Error(problems)
			}
			if tt.held == "" {
				if effective != tt.next {
					t.Error("another configuration is in force")
				}
				return
			}
			targets := 0
			for _, stream := range effective.Streams {
				targets += len(stream.Targets)
			}
			if targets != 3 {
				t.Errorf("%d targets are in force: %+v", targets, effective.Streams)
			}
			// The failure of one held stream does not release the other.
			one := func(stream, _ string) bool { return stream == held.Streams[0] }
			if _, again := change.Hold(effective, tt.next, held, "", one); len(again.Streams) != 1 {
				t.Errorf("held %+v after the failure of one stream", again)
			}
			if _, again := change.Hold(effective, tt.next, held, held.ID, all); again.ID != "" {
				t.Errorf("held %+v after the confirmation", again)
			}
		})
	}
	t.Run("with VIPs", func(t *testing.T) {
		effective, held := change.Hold(trenchWith(t, 6, 6), trenchWith(t, 2, 2, both...), trench.Held{}, "", all)
		ids := strings.Split(held.ID, ",")
		if len(held.VIPs) != 4 || len(held.Streams) != 2 || len(ids) != 2 {
			t.Fatalf("held %+v", held)
		}
		// The frontend has no verdicts, and computes the same identifier of the VIPs.
		_, frontend := change.Hold(trenchWith(t, 6, 6), trenchWith(t, 2, 2, both...), trench.Held{}, "", nil)
		if frontend.ID != ids[0] {
			t.Errorf("the frontend holds %+v", frontend)
		}
		for _, stream := range effective.Streams[1:] {
			if len(stream.Targets) != 1 || len(stream.VIPs) != 1 {
				t.Errorf("in force is %+v", stream)
			}
		}
		// One identifier confirms its part only.
		if _, rest := change.Hold(effective, trenchWith(t, 2, 2, both...), held, ids[0], all); rest.ID != ids[1] {
			t.Errorf("held %s %+v of %q", rest.ID, rest, held.ID)
		}
	})
}
