package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

var (
	own, other = vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")
	explicit   = vip.Require("20.0.0.9/32") // with LOCAL_PREF in each state
)

// decode returns the communities in attributes.
func decode(t *testing.T, attributes announce.Attributes) (texts []string) {
	t.Helper()
	for rest := []byte(attributes); len(rest) > 0; {
		attribute, err := bgp.GetPathAttribute(rest)
		harness.Must(t, err)
		harness.Must(t, attribute.DecodeFromBytes(rest))
		rest = rest[attribute.Len():]
		texts = append(texts, attribute.String())
	}
	return texts
}

func TestRouteByState(t *testing.T) {
	policies, err := New([]trench.Policy{
		{
			VIPs: []vip.VIP{own},
			Ready: trench.Attributes{
				Communities: []string{"64512:100", "64512:1:2"}, MED: 50, Prepend: 2, LocalPreference: 300,
			},
			Draining: &trench.Attributes{Communities: []string{"64512:666"}},
			Backup:   &trench.Attributes{},
		},
		{
			VIPs: []vip.VIP{explicit}, Ready: trench.Attributes{LocalPreference: 300},
			Draining: &trench.Attributes{LocalPreference: 7}, Unknown: &trench.Attributes{LocalPreference: 200},
		},
		{Ready: trench.Attributes{MED: 7, LocalPreference: 300}},
	}, Carried)
	harness.Must(t, err)
	const shutdown = "planned-shut" // GRACEFUL_SHUTDOWN in the library
	// Without LOCAL_PREF.
	worst := []string{"{Communities: " + shutdown + "}", "{LargeCommunity: [ 4200000000:1:7]}"}
	ready := []string{
		"{Communities: 64512:100}", "{LargeCommunity: [ 64512:1:2, 4200000000:1:50, 4200000000:2:2, 4200000000:3:300]}",
	}
	for _, tt := range []struct {
		v        vip.VIP
		decision gate.Decision
		want     []string
	}{
		{own, gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}, ready},
		{own, gate.Decision{Advertisement: gate.Announced, Reason: gate.NotExported}, ready},
		{own, gate.Decision{Advertisement: gate.Announced, Reason: gate.LBStale}, ready}, // no unknown: as ready
		{own, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.LBStale}, []string{
			"{Communities: " + shutdown + ", 64512:100}",
			"{LargeCommunity: [ 64512:1:2, 4200000000:1:50, 4200000000:2:2]}",
		}},
		{own, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Drained}, []string{
			"{Communities: " + shutdown + ", 64512:666}",
		}},
		{own, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.LastResort}, []string{
			"{Communities: " + shutdown + "}",
		}},
		{own, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Suspected}, []string{
			"{Communities: " + shutdown + "}",
		}},
		{own, gate.Decision{Advertisement: gate.Withdrawn, Reason: gate.LBNotReady}, nil},
		{other, gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}, []string{
			"{LargeCommunity: [ 4200000000:1:7, 4200000000:3:300]}",
		}},
		{other, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Drained}, worst},
		{other, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.LastResort}, worst},
		{explicit, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Stopping}, []string{
			"{Communities: " + shutdown + "}", "{LargeCommunity: [ 4200000000:3:7]}",
		}},
		{explicit, gate.Decision{Advertisement: gate.Announced, Reason: gate.LBStale}, []string{
			"{LargeCommunity: [ 4200000000:3:200]}",
		}},
		{explicit, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.LBStale}, []string{
			"{Communities: " + shutdown + "}",
		}},
	} {
		route := policies.Route(tt.v, tt.decision)
		if route.Advertisement != tt.decision.Advertisement {
			t.Errorf("%s, %+v: %v", tt.v, tt.decision, route.Advertisement)
		}
		if d := cmp.Diff(tt.want, decode(t, route.Attributes)); d != "" {
			t.Errorf("%s, %+v: %s", tt.v, tt.decision, d)
		}
	}
}

// The link bandwidth depends on the weight of the decision, by state. A change of the weight alone
// is a new route only under a policy with it.
func TestRouteByWeight(t *testing.T) {
	policies, err := New([]trench.Policy{
		{VIPs: []vip.VIP{own}, Ready: trench.Attributes{MED: 7, TargetBandwidth: 10}, Draining: &trench.Attributes{MED: 7}},
		{Ready: trench.Attributes{MED: 7}},
	}, Carried)
	harness.Must(t, err)
	if !policies.Weigh() {
		t.Error("weights are not used")
	}
	announced := func(weight uint32) gate.Decision {
		return gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready, Weight: weight}
	}
	const med = "{LargeCommunity: [ 4200000000:1:7]}"
	for _, tt := range []struct {
		v        vip.VIP
		decision gate.Decision
		want     string
	}{
		{own, announced(0), med},
		{own, announced(10), "{LargeCommunity: [ 4200000000:1:7, 4200000000:4:1234736768]}"}, // 1 250 000 bytes/s
		{own, announced(30), "{LargeCommunity: [ 4200000000:1:7, 4200000000:4:1248125376]}"}, // 3 750 000 bytes/s
		{own, announced(21), "{LargeCommunity: [ 4200000000:1:7, 4200000000:4:1243625376]}"}, // 2 625 000 bytes/s
		{own, announced(10), "{LargeCommunity: [ 4200000000:1:7, 4200000000:4:1234736768]}"},
		{own, gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Drained, Weight: 30}, med},
		{other, announced(3), med},
	} {
		got := decode(t, policies.Route(tt.v, tt.decision).Attributes)
		if got := got[len(got)-1]; got != tt.want {
			t.Errorf("%s, %+v: %s, want %s", tt.v, tt.decision, got, tt.want)
		}
	}
	got := policies.Changes(nil, []gate.Change{
		{VIP: own, From: announced(1), To: announced(2)}, {VIP: other, From: announced(1), To: announced(2)},
	})
	if len(got) != 1 || got[0].VIP != own {
		t.Errorf("changes %+v", got)
	}
}

// Without policies a route is the advertisement alone, and only its change is a change.
func TestNoPolicies(t *testing.T) {
	none, err := New(nil, Carried)
	harness.Must(t, err)
	drained := gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Drained}
	stopping := gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Stopping}
	for _, policies := range []Policies{{}, none} {
		if got := policies.Route(own, drained); got != (announce.Route{Advertisement: gate.Depreferred}) {
			t.Errorf("%+v", got)
		}
		if got := policies.Changes(nil, []gate.Change{{VIP: own, From: drained, To: stopping}}); got != nil {
			t.Errorf("a reason alone: %+v", got)
		}
	}
}

// An edit announces the VIPs whose attributes differ again, and no other.
func TestReplacedPolicies(t *testing.T) {
	before, err := New([]trench.Policy{{Ready: trench.Attributes{MED: 7}}}, Carried)
	harness.Must(t, err)
	after, err := New([]trench.Policy{
		{VIPs: []vip.VIP{own}, Ready: trench.Attributes{MED: 8}}, {Ready: trench.Attributes{MED: 7}},
	}, Carried)
	harness.Must(t, err)
	ready := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}
	announced := func(vip.VIP) gate.Decision { return ready }
	got := before.Replaced(nil, after, []vip.VIP{own, other}, announced)
	if d := cmp.Diff([]announce.Change{{VIP: own, Route: after.Route(own, ready)}}, got,
		cmp.Comparer(func(a, b vip.VIP) bool { return a == b })); d != "" {
		t.Error(d)
	}
}

// Texts name the policy, the state and the attributes, and an edit counts the VIPs of each change.
func TestTexts(t *testing.T) {
	configured := []trench.Policy{
		{
			VIPs:   []vip.VIP{own},
			Ready:  trench.Attributes{Communities: []string{"64512:2", "64512:1:2"}, MED: 50},
			Backup: &trench.Attributes{},
		},
		{Ready: trench.Attributes{Prepend: 2, LocalPreference: 300}},
	}
	policies, err := New(configured, Carried)
	harness.Must(t, err)
	if d := cmp.Diff([]string{
		"policy 0 of VIP 20.0.0.1/32", "  ready: communities 64512:2 64512:1:2, MED 50", "  backup: no attributes",
		"policy 1 of all VIPs that no other policy has", "  ready: prepend 2, LOCAL_PREF 300",
	}, Describe(configured)); d != "" {
		t.Error(d)
	}
	announced := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}
	lost := gate.Decision{Advertisement: gate.Announced, Reason: gate.LBStale}
	drained := gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Drained}
	last := gate.Decision{Advertisement: gate.Depreferred, Reason: gate.LastResort}
	withdrawn := gate.Decision{Reason: gate.LBNotReady}
	for _, tt := range []struct {
		from, to    gate.Decision
		cause, used string
	}{
		{withdrawn, announced, "policy 0, ready: communities 64512:2 64512:1:2, MED 50", "ready"},
		{announced, lost, "", "unknown"}, // as ready
		{announced, last, "policy 0, backup: no attributes", "backup"},
		{drained, last, "policy 0, backup: no attributes", "backup"},
		{last, withdrawn, "", ""},
	} {
		if cause := policies.Lookup().Cause(gate.Change{VIP: own, From: tt.from, To: tt.to}); cause != tt.cause {
			t.Errorf("%+v to %+v: %q", tt.from, tt.to, cause)
		}
		if _, state := policies.Use(own, tt.to); state != tt.used {
			t.Errorf("%+v uses %q", tt.to, state)
		}
	}
	change := gate.Change{VIP: other, From: announced, To: drained}
	if cause := policies.Lookup().Cause(change); cause != "policy 1, draining: prepend 2" {
		t.Errorf("a state that is left out: %q", cause)
	}
	if index, state := policies.Use(other, announced); index != 1 || state != "ready" {
		t.Errorf("of all others: %d %q", index, state)
	}
	for _, none := range []*Lookup{nil, (Policies{}).Lookup()} {
		if none.Cause(gate.Change{VIP: own, From: withdrawn, To: announced}) != "" {
			t.Error("a cause without a policy")
		}
	}
	// In any order each VIP has its policy.
	lookup := policies.Lookup()
	for _, v := range []vip.VIP{other, own, own, other, own} {
		cause := lookup.Cause(gate.Change{VIP: v, From: withdrawn, To: announced})
		if want := map[bool]string{true: "policy 0,", false: "policy 1,"}[v == own]; !strings.HasPrefix(cause, want) {
			t.Errorf("%s: %s", v, cause)
		}
	}

	next, err := New([]trench.Policy{{Ready: trench.Attributes{Communities: []string{"64512:3"}}}}, Carried)
	harness.Must(t, err)
	vips := []vip.VIP{own, other}
	for i := range 9 {
		vips = append(vips, vip.Require(fmt.Sprintf("20.0.1.%d/32", i)))
	}
	decision := func(vip.VIP) gate.Decision { return announced }
	want := "routing policy changed: 10 VIPs (2000::1/128, 20.0.1.0/32, 20.0.1.1/32, …) from prepend 2, LOCAL_PREF 300 " +
		"to communities 64512:3; VIP 20.0.0.1/32 from communities 64512:2 64512:1:2, MED 50 to communities 64512:3"
	if got := policies.Edit(next, policies.Replaced(nil, next, vips, decision), decision); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// A speaker of another program gets attributes, not the communities that stand for them.
func TestDirectAttributes(t *testing.T) {
	configured := []trench.Policy{{Ready: trench.Attributes{
		Communities: []string{"64512:100"}, MED: 50, Prepend: 2, LocalPreference: 300, TargetBandwidth: 8,
	}}}
	decision := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready, Weight: 3}
	for _, tt := range []struct {
		encoding Encoding
		want     []string
	}{
		{Direct(8103, 8103), []string{"{LocalPref: 300}", "{Med: 50}", "{Communities: 64512:100}"}},
		{Direct(8103, 65000), []string{"{Med: 50}", "{Communities: 64512:100}"}},
	} {
		policies, err := New(configured, tt.encoding)
		harness.Must(t, err)
		route := policies.Route(own, decision)
		got := decode(t, route.Attributes)
		if bandwidth := len(got) - 1; route.Prepend != 2 || !slices.Equal(got[:bandwidth], tt.want) ||
			!strings.Contains(got[bandwidth], "8103") {
			t.Errorf("prepends %d, attributes %q, want %q and a link bandwidth of AS 8103", route.Prepend, got, tt.want)
		}
		// The announcer adds LOCAL_PREF 0.
		drained := gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Drained}
		if got := decode(t, policies.Route(own, drained).Attributes); strings.Contains(fmt.Sprint(got), "LocalPref") {
			t.Errorf("attributes %q of a drain", got)
		}
	}
}
